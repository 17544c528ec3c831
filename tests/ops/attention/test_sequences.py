import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskwise.errors import ShapeError
from maskwise.ops.attention import attend
from tests.ops.attention import truth

#: float32 adds up to 20 products of size 1 in another order than the float64 loop does.
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def one_by_one(q, k, v, lengths, key_lengths=None, **options):
    """The truth of each sequence by itself, joined."""
    keys = lengths if key_lengths is None else key_lengths
    parts = zip(q.split(lengths), k.split(keys), v.split(keys), strict=True)
    outs = [
        truth.attention(*(x.transpose(0, 1)[None] for x in part), **options)[0].transpose(0, 1)
        for part in parts
        if part[0].shape[0]
    ]
    return torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], v.shape[2]).double()


def inputs(rows, key_rows=None, heads=4, kv_heads=4, size=8, out_size=8, **options):
    key_rows = rows if key_rows is None else key_rows
    return (
        truth.tokens(rows, heads, size, seed=1, **options),
        truth.tokens(key_rows, kv_heads, size, seed=2, **options),
        truth.tokens(key_rows, kv_heads, out_size, seed=3, **options),
    )


@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 0.3]),
)
def test_each_sequence_attends_to_itself_only(lengths, is_causal, kv_heads, scale):
    q, k, v = inputs(sum(lengths), kv_heads=kv_heads, grad=True)
    options = {"is_causal": is_causal, "scale": scale}
    out = attend(q, k, v, lengths, **options)
    expected = one_by_one(q, k, v, lengths, **options)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    above = truth.tokens(*out.shape, seed=4)
    if not lengths or not sum(lengths):
        return
    ours = torch.autograd.grad(out, (q, k, v), above)
    theirs = torch.autograd.grad(expected, (q, k, v), above.double())
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=5), st.booleans())
def test_queries_and_keys_may_differ_in_number(pairs, is_causal):
    lengths, key_lengths = [a for a, _ in pairs], [b for _, b in pairs]
    q, k, v = inputs(sum(lengths), sum(key_lengths), out_size=5)
    out = attend(q, k, v, lengths, key_lengths=key_lengths, is_causal=is_causal)
    expected = one_by_one(q, k, v, lengths, key_lengths, is_causal=is_causal)
    torch.testing.assert_close(out.double(), expected, **CLOSE)


def test_bfloat16_is_as_close_as_its_eight_bits_allow():
    lengths = [3, 17, 17, 5]
    q, k, v = inputs(sum(lengths), dtype=torch.bfloat16)
    out = attend(q, k, v, lengths)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), one_by_one(q, k, v, lengths), atol=2e-2, rtol=2e-2)


def test_what_is_nan_in_one_sequence_stays_there_in_both_passes():
    lengths = [4, 6, 6]
    q, k, v = inputs(sum(lengths), grad=True)
    clean = torch.autograd.grad(attend(q, k, v, lengths)[4:].sum(), (q, k, v))
    with torch.no_grad():
        k[:4], v[:4], q[:4] = torch.nan, torch.nan, torch.nan
    out = attend(q, k, v, lengths)
    assert not out[4:].isnan().any()
    for before, after in zip(clean, torch.autograd.grad(out[4:].sum(), (q, k, v)), strict=True):
        assert torch.equal(before[4:], after[4:])


def test_the_result_of_equal_lengths_is_the_batched_one_bit_for_bit():
    q, k, v = inputs(24)
    batched = [x.unflatten(0, (3, 8)).transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*batched).transpose(1, 2).flatten(0, 1)
    assert torch.equal(attend(q, k, v, [8, 8, 8]), expected)


def test_dropout_repeats_with_the_seed_and_keeps_the_mean():
    q, k, v = inputs(40)
    v = torch.ones_like(v)

    def drop(seed):
        torch.manual_seed(seed)
        return attend(q, k, v, [20, 20], dropout_p=0.5)

    assert torch.equal(drop(1), drop(1))
    assert not torch.equal(drop(1), drop(2))
    # The mean of 1280 weights sums, each of deviation below 0.5, is within 0.1 of 1 by seven deviations.
    assert abs(drop(3).mean().item() - 1) < 0.1


def test_it_compiles_without_a_break():
    q, k, v = inputs(12, kv_heads=2)
    compiled = torch.compile(lambda *x: attend(*x, [5, 5, 2], is_causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v, [5, 5, 2], is_causal=True))


def test_lengths_that_do_not_add_up_are_refused_with_a_hint():
    q, k, v = inputs(5)
    with pytest.raises(ShapeError, match=r"attend: `lengths` must add up to the 5 rows of q, got 4.*mask.lengths"):
        attend(q, k, v, [1, 3])
    with pytest.raises(ShapeError, match=r"attend: `q` must be packed tokens .* Hint: mw.attention"):
        attend(q[None], k, v, [5])
    with pytest.raises(ShapeError, match=r"attend: `k` must have a number of heads that divides q's 4, got 3"):
        attend(q, k[:, :3], v[:, :3], [5])
