"""Queries that are dropped: by ``query_mask``, or by a loss that does not read them; and attention under jit.trace."""

import pytest
import torch

import maskwise as mw
from maskwise import Mask
from maskwise.ops.attention import blocks
from maskwise.plan import dispatch
from tests.ops.attention import masks, truth

#: float32 adds up to 40 products of size 1 in another order than the float64 loop does.
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
LENGTHS = Mask.from_lengths([9, 4, 0], max_len=9)


@pytest.fixture(params=["whole", "blocks", "plain", "bare"])
def route(request, monkeypatch):
    """Every route; blocks of few queries, so that small inputs have several."""
    monkeypatch.setattr(blocks, "_BLOCK", 3)
    monkeypatch.setattr(blocks, "_RUN", 2)
    with dispatch.force(request.param):
        yield request.param


def inputs(queries=9, keys=9, shared=2, **options):
    return (
        truth.tokens(3, 4, queries, 4, seed=1, **options),
        truth.tokens(3, shared, keys, 4, seed=2, **options),
        truth.tokens(3, shared, keys, 4, seed=3, **options),
    )


QUERY_MASKS = {
    "lengths": LENGTHS,
    "bits": masks.random_bits(3, 9, seed=5),
    "one for all": masks.random_bits(1, 9, seed=5),
    "positions": masks.random_bits(9, seed=5),
    "heads": masks.random_bits(3, 4, 9, seed=5),
    "heads of all": masks.random_bits(1, 4, 1, seed=5),
    "everything": Mask.full((3, 9)),
    "nothing": Mask.none((3, 9)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "lengths", "keys with gaps", "pairs", "pairs of heads", "window"])
@pytest.mark.parametrize("name", QUERY_MASKS)
def test_dropped_queries_give_zero_and_all_others_what_they_give_without(route, name, kind, is_causal):
    query_mask, mask = QUERY_MASKS[name], masks.kinds(3, 4, 9, 9)[kind]
    q, k, v = inputs(grad=True)
    rows = query_mask.to_bool() if isinstance(query_mask, Mask) else query_mask
    rows = (rows[:, None] if rows.dim() == 2 else rows).expand(3, 4, 9)
    kept = masks.bits(mask, 3, 4, 9, 9) & rows[..., None]
    out = mw.attention(q, k, v, mask, query_mask=query_mask, is_causal=is_causal)
    expected = truth.attention(q, k, v, kept, is_causal=is_causal)
    assert torch.equal(out[~rows], torch.zeros_like(out[~rows]))
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    above = truth.tokens(*out.shape, seed=4)
    connected = expected + sum(0 * x.sum() for x in (q, k, v))
    theirs = torch.autograd.grad(connected, (q, k, v), above.double())
    ours = torch.autograd.grad(out, (q, k, v), above)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), want.double(), **CLOSE)
    assert torch.equal(ours[0][~rows], torch.zeros_like(ours[0][~rows]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_nothing_of_a_dropped_query_is_read_and_its_gradient_may_be_anything(route, value, dropout_p):
    rows = LENGTHS.to_bool()[:, None, :, None].expand(3, 4, 9, 4)

    def run(poison):
        q, k, v = inputs()
        leaves = [torch.where(rows, q, poison).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
        torch.manual_seed(6)
        out = mw.attention(*leaves, LENGTHS, query_mask=LENGTHS, dropout_p=dropout_p)
        return out.detach(), *torch.autograd.grad(out, leaves, torch.where(rows, 1.0, poison))

    for clean, dirty in zip(run(0.0), run(value), strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("mask", [LENGTHS, LENGTHS.to_bool(), None], ids=["lengths", "bits", "none"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_a_query_whose_result_is_not_read_takes_no_part_in_the_backward_pass(route, mask, value):
    rows = LENGTHS.to_bool()[:, None, :, None]
    above = truth.tokens(3, 4, 9, 4, seed=4) * rows

    def run(poison):
        q, k, v = inputs()
        leaves = [torch.where(rows, q, poison).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
        return torch.autograd.grad(mw.attention(*leaves, mask), leaves, above)

    for clean, dirty in zip(run(0.0), run(value), strict=True):
        assert torch.equal(clean, dirty)


def grouped(size, dtype):
    """q of four heads, k and v of two; as many tokens as ``size``, of which the second entry keeps half."""
    q, k, v = (truth.tokens(2, heads, size, 16, seed=heads + i).to(dtype) for i, heads in enumerate((4, 2, 2)))
    return q, k, v, torch.arange(size) < torch.tensor([[size], [size // 2]])


LARGE = [1e4, 1e6, 1e8, 1e10, 1e15, 1e20, 1e30, 3e38]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [8, 33, 64, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_no_finite_value_of_a_query_that_is_not_read_reaches_a_gradient(route, dtype, size, is_causal, masked):
    q, k, v, kept = grouped(size, dtype)
    rows = kept[:, None, :, None]
    above = truth.tokens(*q.shape, seed=9).to(dtype) * rows
    # Where no query that is read keeps such keys, they are large, too.
    of_keys = masked or is_causal

    def run(value):
        # Each element has its own sign and size, so that scores are sums of large terms that nearly cancel.
        of_q, of_k = (truth.tokens(*x.shape, seed=8).clamp(-1, 1).to(dtype) * value for x in (q, k))
        leaves = [torch.where(rows, q, of_q), torch.where(rows, k, of_k) if of_keys else k.clone(), v.clone()]
        leaves = [x.requires_grad_() for x in leaves]
        out = mw.attention(*leaves, kept if masked else None, is_causal=is_causal)
        return torch.where(rows, out.detach(), 0.0), *torch.autograd.grad(out, leaves, above)

    clean = run(0.0)
    # The sum over keys that some query keeps overflows for the last value, which makes the reference serve the call.
    for value in LARGE if masked or not is_causal or dtype is torch.float64 else LARGE[:-1]:
        for ours, theirs in zip(run(value), clean, strict=True):
            assert torch.equal(ours, theirs), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_padding_of_one_finite_value_in_queries_that_are_not_read_reaches_no_gradient(route, dtype, masked):
    x = truth.tokens(2, 3, 64, 32).to(dtype)
    kept = torch.arange(64) < torch.tensor([[64], [32]])
    rows = kept[:, None, :, None]

    def run(value):
        leaves = [x.requires_grad_() for x in (torch.where(rows, x, value), x.clone())]
        out = mw.attention(leaves[0], leaves[1], leaves[1], kept if masked else None)
        return torch.autograd.grad(out.transpose(1, 2)[kept].square().sum(), leaves)

    clean = run(0.0)
    for value in LARGE:
        for ours, theirs in zip(run(value), clean, strict=True):
            assert torch.equal(ours, theirs), value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_query_of_large_scores_that_is_read_has_the_result_and_the_gradient_of_its_softmax(route, dtype, is_causal):
    q, k, v, kept = grouped(33, dtype)
    large = torch.arange(33) % 5 == 2
    # Powers of two: the scores are exactly those of the query times that, and one key has all the weight.
    q = torch.where(large[:, None], q * 2.0**50, q)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = mw.attention(*leaves, kept, is_causal=is_causal)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    expected = truth.attention(*doubles, kept[:, None, None].expand(2, 4, 33, 33), is_causal=is_causal)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    above = truth.tokens(*out.shape, seed=9).to(dtype)
    ours = torch.autograd.grad(out, leaves, above)
    theirs = torch.autograd.grad(expected, doubles, above.double())
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), want, **CLOSE)


@pytest.mark.parametrize("value", [1e15, 1e30])
def test_the_gradient_of_a_large_query_that_alone_is_read_is_finite_and_within_its_entry(route, value):
    q, k, v, kept = grouped(33, torch.float32)
    q[0, :, 3] = value
    leaves = [x.requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(mw.attention(*leaves, kept)[0, :, 3].sum(), leaves)
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))
    # The weights of each of the four heads add up to 1.
    torch.testing.assert_close(gradients[2].sum((0, 1, 2)), torch.full((16,), 4.0))


def test_padding_of_nan_reaches_no_gradient_of_self_attention(route):
    rows = LENGTHS.to_bool()[:, None, :, None]
    above = truth.tokens(3, 4, 9, 4, seed=4) * rows

    def run(poison):
        x = torch.where(rows, inputs()[0], poison).requires_grad_()
        return torch.autograd.grad(mw.attention(x, x, x, LENGTHS), x, above)[0]

    # Autograd adds up three gradients, in an order that the route decides.
    torch.testing.assert_close(run(torch.nan), run(0.0), atol=1e-6, rtol=1e-6)


def test_a_query_of_nan_that_is_read_makes_the_gradient_of_its_values_nan_and_of_no_others(route):
    q, k, v = inputs()
    with torch.no_grad():
        q[0, :, 2] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = Mask.from_lengths([5, 9, 9])
    gradients = torch.autograd.grad(mw.attention(*leaves, mask).sum(), leaves)
    others = torch.arange(9) != 2
    assert gradients[0][:, :, others].isfinite().all()
    assert gradients[2][0, :, :5].isnan().all()
    for gradient in gradients[1:]:
        assert gradient[1:].isfinite().all()
        assert torch.equal(gradient[0, :, 5:], torch.zeros(2, 4, 4))


def test_dropped_queries_are_not_computed():
    q, k, v = (truth.tokens(2, 2, 400, 16, seed=i) for i in range(3))
    kept = Mask.from_lengths([30, 400])
    with mw.explain() as log:
        mw.attention(q, k, v, kept, query_mask=kept)
        mw.attention(q.clone().requires_grad_(), k, v, kept, query_mask=kept)
    # The kernel packs keys: of the sequence of 30, every query is compared with 30 keys.
    pairs = 2 * (400 * 30 + 400 * 400)
    assert log.calls[0].reason == f"the kernel reads only what is kept: {pairs:,} of 640,000 pairs are computed"
    assert log.calls[1].route == "blocks"
    # Of the sequence of 30, the blocks hold the queries that are kept, and no others.
    assert log.calls[1].skipped_flops == 4 * 16 * (640_000 - 2 * (30 * 30 + 400 * 400))


# A trace is for inputs of one shape, which the tracer says wherever a shape is checked.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["none", "lengths", "pairs", "rows"])
@pytest.mark.parametrize("grad", [False, True])
def test_it_can_be_traced_and_gives_the_same_for_other_inputs(kind, grad):
    mask = masks.kinds(3, 4, 9, 9)[kind]
    tensors = inputs(grad=grad)
    for options in ({"is_causal": True}, {"query_mask": LENGTHS}):
        traced = torch.jit.trace(lambda q, k, v, o=options: mw.attention(q, k, v, mask, **o), tensors)
        others = [2 * x for x in tensors]
        torch.testing.assert_close(traced(*others), mw.attention(*others, mask, **options), **CLOSE)
