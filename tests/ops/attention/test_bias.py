"""A bias on the scores: float64 truth, gradients, what is dropped, routes; and torch's spelling of masks."""

import math

import pytest
import torch
import torch.nn.functional as F

import maskwise as mw
from maskwise import Mask

B, H, L, K, D = 2, 4, 6, 7, 8
ROUTES = ["whole", "plain"]
SHAPES = [(B, H, L, K), (H, L, K), (1, H, 1, K), (L, K), (K,), (B, 1, L, 1), ()]


def tensors(dtype=torch.float64, kv_heads=H):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, L, D), (B, kv_heads, K, D), (B, kv_heads, K, 5))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def bias_of(shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def kept_pairs():
    """(B, 1, L, K): some keys for most queries, none for one of them, and a key that nobody keeps."""
    kept = torch.rand(B, 1, L, K, generator=torch.Generator().manual_seed(2)) < 0.6
    kept[0, 0, 2] = False
    kept[1, 0, :, 3] = False
    return kept


def truth(q, k, v, kept, bias, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(D) if scale is None else scale) + bias
    weights = scores.masked_fill(~kept, -math.inf).softmax(-1)
    return torch.where(kept.any(-1, keepdim=True), weights.nan_to_num() @ v, 0.0)


def run(call, leaves):
    out = call()
    weights = torch.linspace(0.5, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_and_all_gradients_are_those_of_the_formula(shape, kv_heads, route):
    q, k, v = tensors(kv_heads=kv_heads)
    bias, kept = bias_of(shape).requires_grad_(), kept_pairs()
    expected = run(lambda: truth(q, k, v, kept, bias), (q, k, v, bias))
    with mw.force(route):
        for mask in (kept, Mask(kept)):
            found = run(lambda mask=mask: mw.attention(q, k, v, mask, bias=bias), (q, k, v, bias))
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("route", ROUTES)
def test_a_bias_goes_with_causal_query_masks_lengths_and_a_scale(route):
    q, k, v = tensors()
    bias = bias_of((H, 1, K)).requires_grad_()
    lengths, queries = Mask.from_lengths([3, 7], max_len=K), torch.rand(B, L) < 0.5
    kept = lengths.to_bool()[:, None, None] & Mask.causal(L, K).to_bool() & queries[:, None, :, None]
    expected = run(lambda: truth(q, k, v, kept, bias, 0.3), (q, k, v, bias))
    with mw.force(route):
        found = run(
            lambda: mw.attention(q, k, v, lengths, query_mask=queries, bias=bias, is_causal=True, scale=0.3),
            (q, k, v, bias),
        )
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            mw.attention(q, k, v, bias=bias), truth(q, k, v, torch.ones(1, 1, L, K, dtype=torch.bool), bias)
        )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("learns", [False, True])
def test_the_bias_of_a_pair_that_is_dropped_changes_no_bit(learns, poison, route):
    kept = kept_pairs()
    q, k, v = tensors(torch.float32)
    found = []
    for value in (0.0, poison):
        bias = torch.where(kept, bias_of((B, H, L, K), torch.float32), value).requires_grad_(learns)
        leaves = (q, k, v, bias) if learns else (q, k, v)
        with mw.force(route):
            found.append(run(lambda bias=bias: mw.attention(q, k, v, kept, bias=bias), leaves))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)
    if learns:
        of_dropped = found[1][-1][~kept.expand(B, H, L, K)]
        assert torch.equal(of_dropped, torch.zeros_like(of_dropped))


@pytest.mark.parametrize("route", ROUTES)
def test_nan_in_dropped_keys_and_queries_changes_no_bit_beside_a_bias(route):
    kept = kept_pairs()
    lost_keys, lost_queries = ~kept.any(-2)[..., None], ~kept.any(-1)[..., None]
    bias = bias_of((H, L, K), torch.float32).requires_grad_()
    found = []
    for value in (0.0, math.nan):
        q, k, v = tensors(torch.float32)
        clean = [
            torch.where(lost, value, x.detach()).requires_grad_()
            for x, lost in zip((q, k, v), (lost_queries, lost_keys, lost_keys), strict=True)
        ]
        with mw.force(route):
            found.append(run(lambda x=clean: mw.attention(*x, kept, bias=bias), (*clean, bias)))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_not_finite_in_a_kept_bias_reaches_its_query_alone(route):
    q, k, v = tensors(torch.float32)
    bias = bias_of((B, H, L, K), torch.float32)
    bias[0, 1, 3, 2] = math.nan
    bias[1, 0, 2] = -math.inf
    with mw.force(route):
        out = mw.attention(q, k, v, bias=bias)
    spoiled = out.isnan().all(-1)
    assert spoiled.nonzero().tolist() == [[0, 1, 3], [1, 0, 2]]
    assert out[~spoiled].isfinite().all()


@pytest.mark.parametrize("route", ROUTES)
def test_large_biases_have_the_gradients_of_the_formula(route):
    q, k, v = tensors(torch.float32)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    # A multiple of 64, which float32 holds exactly beside scores of a few units; the softmax is of what is left.
    bias = torch.where(torch.arange(K) < 3, -1e9, 0.0)
    kept = torch.ones(1, 1, L, K, dtype=torch.bool)
    with mw.force(route):
        found = run(lambda: mw.attention(q, k, v, bias=bias), (q, k, v))
    expected = run(lambda: truth(*wide, kept, bias.double()), wide)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)
    assert all(each.isfinite().all() for each in found)


def test_other_routes_refuse_with_the_reason_and_the_log_says_it():
    q, k, v = (x.detach() for x in tensors(torch.float32))
    kept, bias = kept_pairs(), bias_of((H, L, K), torch.float32)
    plan = mw.plan(mw.attention, q, k, v, kept, bias=bias)
    refused = {each.route: each.reason for each in plan.refused}
    assert plan.route == "whole"
    assert refused["bare"] == refused["blocks"] == "a bias is added to the scores"
    with mw.explain() as log:
        mw.attention(q, k, v, kept, bias=bias)
    assert [(call.op, call.route) for call in log] == [("attention", "whole")]


@pytest.mark.parametrize("with_mask", [False, True])
def test_it_compiles_without_a_break_and_with_its_gradients(with_mask):
    torch._dynamo.reset()
    q, k, v = tensors(torch.float32)
    bias = bias_of((H, L, K), torch.float32).requires_grad_()
    kept = kept_pairs() if with_mask else None

    def call(q, k, v, bias):
        return mw.attention(q, k, v, kept, bias=bias)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = run(lambda: compiled(q, k, v, bias), (q, k, v, bias))
    expected = run(lambda: call(q, k, v, bias), (q, k, v, bias))
    torch.testing.assert_close(found, expected)


def test_transforms_map_and_differentiate_a_bias():
    q, k, v = (x.detach() for x in tensors())
    biases, kept = bias_of((3, H, L, K)), kept_pairs()
    mapped = torch.vmap(lambda bias: mw.attention(q, k, v, kept, bias=bias))(biases)
    looped = torch.stack([mw.attention(q, k, v, kept, bias=bias) for bias in biases])
    torch.testing.assert_close(mapped, looped)
    leaf = biases[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(mw.attention(q, k, v, kept, bias=leaf).square().sum(), leaf)
    found = torch.func.grad(lambda bias: mw.attention(q, k, v, kept, bias=bias).square().sum())(biases[0])
    torch.testing.assert_close(found, expected)


def test_a_bias_of_another_dtype_is_cast_and_autocast_lowers_it():
    q, k, v = (x.detach() for x in tensors(torch.float32))
    bias = bias_of((H, L, K))
    torch.testing.assert_close(mw.attention(q, k, v, bias=bias), mw.attention(q, k, v, bias=bias.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mw.attention(q, k, v, bias=bias.float())
    assert out.dtype is torch.bfloat16
    # Eight bits of mantissa.
    torch.testing.assert_close(out.float(), mw.attention(q, k, v, bias=bias.float()), rtol=0.05, atol=0.05)


def test_alibi_is_a_bias_beside_a_mask_of_lengths():
    x = torch.randn(B, H, L, D, generator=torch.Generator().manual_seed(3))
    slopes = 2.0 ** -torch.arange(1.0, H + 1)
    distance = torch.arange(L)[None, :] - torch.arange(L)[:, None]
    bias = slopes[:, None, None] * distance
    mask = Mask.from_lengths([2, 6], max_len=L)
    expected = truth(x, x, x, mask.to_bool()[:, None, None] & Mask.causal(L).to_bool(), bias)
    torch.testing.assert_close(mw.attention(x, x, x, mask, bias=bias, is_causal=True), expected)


def test_it_drops_weights_with_their_probability():
    q, k, _ = (x.detach() for x in tensors(torch.float32))
    ones = torch.ones(B, H, K, 5)
    torch.manual_seed(0)
    out = mw.attention(q, k, ones, kept_pairs(), bias=bias_of((H, L, K), torch.float32), dropout_p=0.5)
    assert out.unique().numel() > 10
    assert torch.equal(out[0, :, 2], torch.zeros(H, 5))


# -- torch's spelling --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(L, K), (B, 1, L, K), (1, H, L, K), (1, K)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "Mask"])
def test_attn_mask_means_what_it_means_to_torch(kind, shape):
    q, k, v = (x.detach() for x in tensors())
    bits = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.7
    bits[..., 0] = True
    plain = torch.where(bits, bias_of(shape), -math.inf) if kind == "float" else bits
    given = Mask(bits) if kind == "Mask" else plain
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=plain)
    torch.testing.assert_close(mw.attention(q, k, v, attn_mask=given), expected)


def test_two_dims_of_an_attn_mask_are_pairs_also_where_they_could_be_keys():
    q = torch.randn(L, 1, L, D, generator=torch.Generator().manual_seed(5))
    bits = torch.ones(L, L, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=bits)
    torch.testing.assert_close(mw.attention(q, q, q, attn_mask=bits), expected)


def test_a_key_that_the_floats_of_an_attn_mask_drop_may_be_nan():
    q, k, v = (x.detach() for x in tensors(torch.float32))
    added = torch.zeros(K)
    added[2] = -math.inf
    expected = mw.attention(q, k, v, attn_mask=added)
    k[:, :, 2], v[:, :, 2] = math.nan, math.nan
    assert torch.equal(mw.attention(q, k, v, attn_mask=added), expected)


def test_a_learned_attn_mask_has_a_gradient():
    q, k, v = tensors()
    one, other = (bias_of((H, L, K)).requires_grad_() for _ in range(2))
    found = run(lambda: mw.attention(q, k, v, attn_mask=one), (q, k, v, one))
    torch.testing.assert_close(found, run(lambda: mw.attention(q, k, v, bias=other), (q, k, v, other)))


def test_packed_tokens_take_a_mask_by_torchs_name():
    x = torch.randn(2, 5, 1, D)
    rows = mw.pack(x, Mask.from_lengths([3, 5]))
    for mask in (Mask.causal(5), Mask.causal(5).to_bool()):
        found = mw.attention(rows, rows, rows, attn_mask=mask)
        assert torch.equal(found.values, mw.attention(rows, rows, rows, mask).values)
