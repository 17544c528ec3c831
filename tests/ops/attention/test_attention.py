import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import maskwise as mw
from maskwise import Mask
from maskwise.ops.attention import blocks, reference
from maskwise.ops.attention.arguments import Scores, Sizes
from maskwise.plan import dispatch
from tests.ops.attention import masks, truth

#: float32 adds up to 40 products of size 1 in another order than the float64 loop does.
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
ROUTES = ("whole", "blocks", "plain")


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    """Every route with a gradient serves the same calls: blocks of few queries, so that small inputs have several."""
    monkeypatch.setattr(blocks, "_BLOCK", 3)
    monkeypatch.setattr(blocks, "_RUN", 2)
    with dispatch.force(request.param):
        yield request.param


@pytest.fixture(params=(*ROUTES, "bare"))
def any_route(request, monkeypatch):
    """Every route there is."""
    monkeypatch.setattr(blocks, "_BLOCK", 3)
    monkeypatch.setattr(blocks, "_RUN", 2)
    with dispatch.force(request.param):
        yield request.param


def inputs(batch, heads, queries, keys, kv_heads=None, size=4, **options):
    kv_heads = heads if kv_heads is None else kv_heads
    return (
        truth.tokens(batch, heads, queries, size, seed=1, **options),
        truth.tokens(batch, kv_heads, keys, size, seed=2, **options),
        truth.tokens(batch, kv_heads, keys, size, seed=3, **options),
    )


def agree(ours, theirs):
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), want.double(), **CLOSE)


@pytest.mark.parametrize("kind", masks.KINDS)
def test_it_is_a_softmax_over_what_is_kept_with_its_gradients(route, kind):
    @settings(max_examples=12)
    @given(masks.sizes, st.booleans(), st.sampled_from([None, 0.7]), st.integers(0, 99))
    def holds(sizes, is_causal, scale, seed):
        batch, (heads, kv_heads), queries, keys = sizes
        found = masks.kinds(batch, heads, queries, keys, seed)
        if kind not in found:
            return
        mask = found[kind]
        q, k, v = inputs(batch, heads, queries, keys, kv_heads, grad=True)
        out = mw.attention(q, k, v, mask, is_causal=is_causal, scale=scale)
        kept = masks.bits(mask, batch, heads, queries, keys)
        expected = truth.attention(q, k, v, kept, is_causal=is_causal, scale=scale)
        agree([out], [expected])
        above = truth.tokens(*out.shape, seed=4)
        # Where nothing at all is kept the loop's result does not depend on the inputs.
        connected = expected + sum(0 * x.sum() for x in (q, k, v))
        theirs = torch.autograd.grad(connected, (q, k, v), above.double())
        agree(torch.autograd.grad(out, (q, k, v), above), theirs)

    holds()


@pytest.mark.parametrize("kind", masks.KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_masked_out_reaches_a_result_or_a_gradient(route, kind, is_causal):
    """With NaN or garbage in keys that no query keeps and queries that keep no key, all is bit for bit the same."""
    sizes = (3, 4, 9, 9)
    mask = masks.kinds(*sizes)[kind]
    kept = masks.bits(mask, *sizes)
    if is_causal:
        kept = kept & reference.causal(9, 9, torch.device("cpu"))
    keys = ~kept.unflatten(1, (2, 2)).any(2).any(-2)
    rows = ~kept.any(-1)

    def run(value, of_values=None):
        q, k, v = (x.clone() for x in inputs(*sizes, kv_heads=2))
        above = truth.tokens(3, 4, 9, 4, seed=4)
        q[rows], k[keys], v[keys] = value, value, value if of_values is None else of_values
        above[rows] = value
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = mw.attention(*leaves, mask, is_causal=is_causal)
        return out.detach(), *torch.autograd.grad(out, leaves, above)

    clean = run(0.0)
    for values in ((torch.nan,), (torch.inf,), (-torch.inf,), (3e38,), (-torch.inf, 0.0), (0.0, torch.nan)):
        for before, after in zip(clean, run(*values), strict=True):
            assert torch.equal(before, after), values
    assert (clean[0][rows] == 0).all()
    assert (clean[1][rows] == 0).all()
    assert (clean[2][keys] == 0).all()
    assert (clean[3][keys] == 0).all()


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_kept_nan_reaches_the_queries_that_keep_it_and_no_others(route, which, value):
    q, k, v = inputs(2, 2, 8, 8)
    clean = mw.attention(q, k, v, is_causal=True)
    (k if which == "k" else v)[:, :, 5] = value
    q.requires_grad_()
    out = mw.attention(q, k, v, is_causal=True)
    agree([out[:, :, :5]], [clean[:, :, :5]])
    assert not out[:, :, 5:].isfinite().any()
    (gradient,) = torch.autograd.grad(out[:, :, :5].sum(), q)
    assert gradient[:, :, :5].isfinite().all()


def test_keys_of_a_batch_entry_are_a_mask_of_two_dims(any_route):
    q, k, v = inputs(3, 2, 4, 7)
    mask = Mask.from_lengths([0, 7, 3])
    for given_as in (mask, mask.to_bool(), mask[:, None, None, :], mask.to_bool()[:, None, None, :]):
        expected = truth.attention(q, k, v, masks.bits(mask[:, None, None, :], 3, 2, 4, 7))
        agree([mw.attention(q, k, v, given_as)], [expected])


def test_plans_say_what_is_skipped_and_why():
    q, k, v = inputs(2, 2, 400, 400, size=16)
    mask = Mask.from_lengths([30, 400])
    with mw.explain() as log:
        out = mw.attention(q, k, v, mask, is_causal=True)
        by_blocks = mw.attention(q.clone().requires_grad_(), k, v, mask, is_causal=True)
        mw.attention(q[:, :, :3].clone().requires_grad_(), k[:, :, :3], v[:, :, :3], Mask.from_lengths([1, 3]))
        mw.attention(q, k, v)
    assert [call.route for call in log] == ["bare", "blocks", "whole", "whole"]
    assert log.calls[0].shape == (2, 2, 400, 400)
    # Two heads, each with 30 keys and with a triangle; queries are scored with the last one of a block of 24.
    pairs = 2 * sum(min(30, i + 24) + min(400, i + 24) for i in range(400))
    assert log.calls[0].reason == f"the kernel reads only what is kept: {pairs:,} of 640,000 pairs are computed"
    assert log.calls[0].skipped_flops == 4 * 16 * (640_000 - pairs)
    assert "of 640,000 pairs" in log.calls[1].reason
    assert log.calls[3].reason == "nothing is dropped"
    kept = masks.bits(mask[:, None, None, :], 2, 2, 400, 400)
    expected = reference.attention(q.double(), k.double(), v.double(), kept, True)
    agree([out, by_blocks], [expected, expected])


def test_blocks_skip_what_no_query_of_theirs_keeps():
    sizes = Sizes(1, 1, 1024, 1024)

    def pairs(mask, is_causal=False):
        found = blocks.split(mask, is_causal, sizes)
        return sum((p.rows[1] - p.rows[0]) * (p.keys[1] - p.keys[0]) for p in found)

    everything = 1024 * 1024
    # Eight blocks of 128 queries with 1 to 8 blocks of keys.
    assert pairs(None, is_causal=True) == everything * 36 // 64
    assert pairs(Mask.window(1024, 127)[None, None]) <= 1024 * 256
    segments = Mask.from_segments(torch.arange(1024) // 64)[None, None]
    assert pairs(segments) == 1024 * 64
    assert pairs(segments, is_causal=True) == 1024 * 64
    assert pairs(Mask.from_lengths([10], max_len=1024)[:, None, None]) == 10 * 1024
    bits = torch.zeros(1, 1, 1024, 1024, dtype=torch.bool)
    bits[..., :128, 200:300] = True
    assert pairs(bits) == 128 * 100
    assert blocks.split(bits, False, sizes)[0].bits is None


INTERVALS = {
    "lengths": Mask.from_lengths([100, 0, 300])[:, None, None],
    "left lengths": Mask.from_lengths([100, 0, 300], 300, side="left")[:, None, None],
    "causal": Mask.causal(300)[None, None],
    "causal and lengths": Mask.causal(300)[None, None] & Mask.from_lengths([100, 0, 300])[:, None, None],
    "a window of segments": Mask.window(300, 40, 3)[None, None] & Mask.from_segments(torch.arange(300) // 70),
    "queries and keys": Mask.from_lengths([100, 0, 300])[:, None, :, None]
    & Mask.from_lengths([90, 5, 300])[:, None, None],
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", INTERVALS.values(), ids=INTERVALS)
def test_blocks_of_intervals_are_planned_by_bounds_and_give_what_bits_give(mask, is_causal):
    found = blocks.split(mask, is_causal, Sizes(3, 2, 300, 300))
    assert all(block.bits is None for block in found)
    q, k, v = inputs(3, 2, 300, 300, size=16, grad=True)
    kept = masks.bits(mask, 3, 2, 300, 300)
    with mw.force("blocks"):
        out = mw.attention(q, k, v, mask, is_causal=is_causal)
    expected = reference.attention(q, k, v, kept, is_causal)
    # float32 in another order: sums of 300 keys, and in gradients of 300 queries.
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    above = torch.randn_like(out)
    for got, want in zip(*(torch.autograd.grad(each, (q, k, v), above) for each in (out, expected)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_mask_caches_its_blocks():
    q, k, v = inputs(2, 2, 300, 300, size=16)
    mask = Mask.from_lengths([30, 300])
    mw.attention(q, k, v, mask)
    before = dict(mask._cache)
    mw.attention(q, k, v, mask)
    assert {name: id(value) for name, value in mask._cache.items()} == {n: id(value) for n, value in before.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_as_close_as_their_bits_allow(dtype):
    q, k, v = inputs(2, 2, 300, 300, size=16, dtype=dtype, grad=True)
    mask = Mask.from_lengths([100, 300])
    out = mw.attention(q, k, v, mask, is_causal=True)
    assert out.dtype == dtype
    bits = masks.bits(mask[:, None, None], 2, 2, 300, 300)
    expected = reference.attention(q.double(), k.double(), v.double(), bits, True)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    above = torch.ones_like(out)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), above),
        torch.autograd.grad(expected, (q, k, v), above.double()),
        strict=True,
    ):
        # Sums over 300 queries, each rounded to eight bits.
        torch.testing.assert_close(got.double(), want.double(), atol=20 * tolerance, rtol=20 * tolerance)


def test_values_may_have_another_size_than_keys():
    q, k, _ = inputs(2, 4, 5, 6, kv_heads=2)
    v = truth.tokens(2, 2, 6, 7, seed=5)
    mask = Mask.from_lengths([2, 6])
    expected = truth.attention(q, k, v, masks.bits(mask[:, None, None], 2, 4, 5, 6))
    agree([mw.attention(q, k, v, mask)], [expected])


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_sizes_of_zero_give_zeros_or_nothing(sizes):
    q, k, v = inputs(*sizes)
    batch, heads, queries, keys = sizes
    for mask in (None, Mask.full((batch, 1, 1, keys))):
        for is_causal in (False, True):
            out = mw.attention(q, k, v, mask, is_causal=is_causal)
            assert torch.equal(out, torch.zeros(batch, heads, queries, 4))


def test_strides_do_not_matter(any_route):
    q, k, v = inputs(2, 2, 9, 9)
    mask = Mask.window(9, 3)[None, None]
    expected = mw.attention(q, k, v, mask)
    odd = [x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in (q, k, v)]
    out = mw.attention(*odd, mask)
    agree([out], [expected])
    out.backward(torch.ones(1).expand_as(out))
    assert all(x.grad.isfinite().all() for x in odd)


def test_dropout_repeats_with_the_seed_and_keeps_the_mean():
    q, k, _ = inputs(4, 4, 20, 20)
    v = torch.ones_like(k)
    v[0, :, 5:] = torch.nan
    mask = Mask.from_lengths([5, 20, 10, 0])

    def drop(seed):
        torch.manual_seed(seed)
        return mw.attention(q, k, v, mask, dropout_p=0.5)

    assert torch.equal(drop(1), drop(1))
    assert not torch.equal(drop(1), drop(2))
    assert (drop(1)[3] == 0).all()
    # 240 sums of weights, each of deviation below 0.7: their mean is within 0.25 of 1 by five deviations.
    assert abs(drop(3)[:3].mean().item() - 1) < 0.25
    with dispatch.force("kernel"), mw.explain() as log:
        mw.attention(q, k, v, mask, dropout_p=0.5)
    assert log.calls[0].reason == "the CPU kernel has no dropout"


def test_torch_func_sees_through_it():
    q, k, v = inputs(2, 2, 6, 6)
    mask = masks.random_bits(2, 1, 6, 6, seed=3)

    def total(q, k, v):
        return mw.attention(q, k, v, mask).square().sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(total(*leaves), leaves)
    agree(torch.func.grad(total, argnums=(0, 1, 2))(q, k, v), expected)
    batched = torch.vmap(lambda q: mw.attention(q, k, v, mask))(torch.stack([q, 2 * q]))
    agree([batched], [torch.stack([mw.attention(q, k, v, mask), mw.attention(2 * q, k, v, mask)])])


@pytest.mark.parametrize("kind", ["lengths", "pairs", "none"])
def test_it_compiles_without_a_break_and_does_not_leak_there(kind):
    sizes = (2, 4, 9, 9)
    mask = masks.kinds(*sizes)[kind]
    q, k, v = inputs(*sizes, kv_heads=2, grad=True)
    keys = ~masks.bits(mask, *sizes).any(1).any(1)
    with torch.no_grad():
        for x in (k, v):
            x.transpose(1, 2)[keys] = torch.nan
    compiled = torch.compile(
        lambda q, k, v: mw.attention(q, k, v, mask, is_causal=kind == "none"), fullgraph=True, backend="aot_eager"
    )
    out, eager = compiled(q, k, v), mw.attention(q, k, v, mask, is_causal=kind == "none")
    agree([out], [eager])
    agree(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(eager.sum(), (q, k, v)))


def test_autocast_lowers_the_dtype_as_it_does_for_sdpa():
    q, k, v = inputs(2, 2, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        ours = mw.attention(q, k, v, Mask.from_lengths([2, 5]))
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert ours.dtype == theirs.dtype == torch.bfloat16


def test_the_cpu_kernel_says_what_it_does_not_serve():
    scores = Scores(2, 4, 4, is_causal=True, has_dropout=False, is_structured=False, has_pairs=False)
    facts = dispatch.Facts("attention", (1, 2, 3, 3), torch.float32, "cpu", detail=scores)
    assert blocks.serves(facts) is None
    assert blocks.serves(facts._replace(dtype=torch.int32)) == "the CPU kernel does not take torch.int32"
    other_size = facts._replace(detail=scores._replace(value_features=2))
    assert "values of one size, got 4 and 2" in blocks.serves(other_size)


def test_other_devices_go_by_sdpa():
    q, k, v = (x.to("meta").requires_grad_() for x in inputs(2, 4, 8, 8))
    with mw.explain() as log:
        out = mw.attention(q, k, v, torch.ones(2, 1, 1, 8, dtype=torch.bool, device="meta"), is_causal=True)
    assert out.shape == (2, 4, 8, 4)
    assert out.device.type == "meta"
    assert log.calls[0].route == "sdpa"
    assert log.calls[0].reason == "the blocks are for the CPU, not for meta"
