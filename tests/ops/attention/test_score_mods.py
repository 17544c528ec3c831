"""Scores that are capped, biased by distance or shared with sinks: float64 truth, gradients, routes, memory."""

import math
from itertools import product

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode

import maskwise as mw
from maskwise import Mask
from maskwise.ops.attention import delegated
from maskwise.ops.attention.bias import ScoreMod

B, H, L, D = 3, 4, 40, 16
LENGTHS = [L, 7, 0]
ROUTES = ["scored", "plain"]
CASES = [
    pytest.param(kind, softcap, sinks, learns, id=f"{kind}-softcap={softcap}-sinks={sinks}-learns={learns}")
    for kind, softcap, sinks, learns in product(
        ("none", "alibi", "table", "pairs"), (None, 2.0), (False, True), (False, True)
    )
    if softcap or sinks or kind in {"alibi", "table"}
]


def randn(*shape, seed=0, grad=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def tensors(kv_heads=2, dtype=torch.float64):
    return [randn(B, heads, L, D, seed=seed, dtype=dtype) for seed, heads in enumerate((H, kv_heads, kv_heads))]


def bias_of(kind, learns, dtype=torch.float64):
    """What is passed, the tensor that it is made of, and the same for all pairs."""
    if kind == "none":
        return None, None, None
    if kind == "pairs":
        tensor = randn(1, H, L, L, seed=4, grad=learns, dtype=dtype)
        return tensor, tensor, tensor
    tensor = randn(H if kind == "alibi" else 8, *(() if kind == "alibi" else (H,)), seed=5, grad=learns, dtype=dtype)
    bias = mw.AlibiBias(tensor) if kind == "alibi" else mw.RelativeBias(tensor, max_distance=20)
    return bias, tensor, bias.to_tensor(L, L)


def truth(q, k, v, kept, bias, softcap, sinks):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(D)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~kept, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    some = kept.any(-1, keepdim=True)
    weights = scores.masked_fill(~some, 0.0).softmax(-1)[..., : k.shape[2]]
    return torch.where(some, weights, 0.0) @ v


def gradients(out, leaves):
    weights = torch.linspace(0.5, 2.0, out.numel(), dtype=out.dtype).reshape(out.shape)
    return torch.autograd.grad((out * weights).sum(), leaves)


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        # Sums of float64 in another order.
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def kept_of(is_causal):
    kept = Mask.from_lengths(LENGTHS, max_len=L).to_bool()[:, None, None, :].expand(B, 1, L, L)
    return kept & torch.ones(L, L, dtype=torch.bool).tril() if is_causal else kept


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("kind", "softcap", "with_sinks", "learns"), CASES)
def test_the_result_and_all_gradients_are_those_of_the_formula(kind, softcap, with_sinks, learns, is_causal, route):
    q, k, v = tensors()
    bias, tensor, pairs = bias_of(kind, learns)
    sinks = randn(H, seed=6, grad=learns) if with_sinks else None
    leaves = [x for x in (q, k, v, tensor, sinks) if x is not None and x.requires_grad]
    with mw.force(route):
        out = mw.attention(
            q, k, v, Mask.from_lengths(LENGTHS, max_len=L), bias=bias, softcap=softcap, sinks=sinks, is_causal=is_causal
        )
    wanted = truth(q, k, v, kept_of(is_causal), pairs, softcap, sinks)
    assert_close([out, *gradients(out, leaves)], [wanted, *gradients(wanted, leaves)])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", ["lengths", "holes"])
@pytest.mark.parametrize(("kind", "softcap", "with_sinks", "learns"), [c for c in CASES if c.values[0] != "pairs"])
def test_packed_tokens_give_the_same_by_sequences(kind, softcap, with_sinks, learns, mask, is_causal):
    q, k, v = tensors()
    bias, tensor, pairs = bias_of(kind, learns)
    sinks = randn(H, seed=6, grad=learns) if with_sinks else None
    leaves = [x for x in (q, k, v, tensor, sinks) if x is not None and x.requires_grad]
    bits = Mask.from_lengths(LENGTHS, max_len=L).to_bool()
    if mask == "holes":
        bits = bits & (torch.rand(B, L, generator=torch.Generator().manual_seed(7)) < 0.6)
    kept = bits[:, None, None, :].expand(B, 1, L, L)
    kept = kept & torch.ones(L, L, dtype=torch.bool).tril() if is_causal else kept
    keep = Mask(bits)
    packed = [mw.pack(x.transpose(1, 2), keep) for x in (q, k, v)]
    with mw.explain() as log:
        out = mw.attention(*packed, bias=bias, softcap=softcap, sinks=sinks, is_causal=is_causal)
    assert [call.route for call in log if call.op == "attention"] == ["sequences"]
    out = out.unpack().transpose(1, 2)
    wanted = torch.where(bits[:, None, :, None], truth(q, k, v, kept, pairs, softcap, sinks), 0.0)
    assert_close([out, *gradients(out, leaves)], [wanted, *gradients(wanted, leaves)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", ["alibi", "table"])
def test_lower_precisions_are_near_the_formula(kind, learns, dtype):
    q, k, v = tensors(dtype=dtype)
    bias, _, _ = bias_of(kind, learns, dtype)
    sinks = randn(H, seed=6, dtype=dtype)
    out = mw.attention(q, k, v, Mask.from_lengths(LENGTHS, max_len=L), bias=bias, sinks=sinks)
    assert out.dtype == dtype
    wide = [x.double() for x in (q, k, v)]
    wanted = truth(*wide, kept_of(False), bias.to_tensor(L, L).double(), None, sinks.double())
    tolerance = 5e-6 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("kind", "softcap", "with_sinks", "learns"), CASES)
def test_what_is_dropped_changes_no_bit_of_results_and_gradients(kind, softcap, with_sinks, learns, route, poison):
    bias, tensor, _ = bias_of(kind, learns, torch.float32)
    sinks = randn(H, seed=6, grad=learns, dtype=torch.float32) if with_sinks else None
    mask = Mask.from_lengths(LENGTHS, max_len=L)
    dropped = ~mask.to_bool()[:, None, :, None]

    def run(value):
        q, k, v = (x.detach().masked_fill(dropped, value).requires_grad_() for x in tensors(4, torch.float32))
        with mw.force(route):
            out = mw.attention(q, k, v, mask, bias=bias, softcap=softcap, sinks=sinks)
        leaves = [x for x in (q, k, v, tensor, sinks) if x is not None and x.requires_grad]
        # The loss reads kept tokens, as in training.
        return [out.masked_fill(dropped, 0.0), *gradients(torch.where(dropped, 0.0, out), leaves)]

    for found, wanted in zip(run(poison), run(0.0), strict=True):
        assert torch.equal(found, wanted)


def test_a_query_that_keeps_nothing_gives_zero_and_leaves_sinks_and_tables_alone():
    q, k, v = tensors()
    table, sinks = randn(8, H, seed=5), randn(H, seed=6)
    out = mw.attention(q, k, v, Mask.none((B, L)), bias=mw.RelativeBias(table), sinks=sinks)
    assert not out.any()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v, table, sinks)):
        assert not gradient.any()


def test_sinks_of_minus_infinity_are_no_sinks():
    q, k, v = tensors()
    bias = mw.AlibiBias.of_heads(H)
    without = mw.attention(q, k, v, bias=bias)
    torch.testing.assert_close(mw.attention(q, k, v, bias=bias, sinks=torch.full((H,), -math.inf)), without)


def test_a_large_bias_has_the_gradients_of_the_formula():
    q, k, v = tensors(4, torch.float32)
    table = randn(8, H, seed=5, grad=False, dtype=torch.float32) * 1e5
    out = mw.attention(q, k, v, bias=mw.RelativeBias(table))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    kept = torch.ones(1, 1, L, L, dtype=torch.bool)
    wanted = truth(*wide, kept, mw.RelativeBias(table.double()).to_tensor(L, L), None, None)
    for found, true in zip(gradients(out, (q, k, v)), gradients(wanted, wide), strict=True):
        # Scores of 1e5 are rounded to 8e-3.
        torch.testing.assert_close(found.double(), true, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("max_distance", [20, 128])
def test_buckets_are_those_of_t5(bidirectional, max_distance):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5", reason="transformers is not installed")
    distances = torch.arange(-300, 301)
    bias = mw.RelativeBias(torch.zeros(32, 1), bidirectional=bidirectional, max_distance=max_distance)
    wanted = modeling.T5Attention._relative_position_bucket(distances, bidirectional, 32, max_distance)
    assert torch.equal(bias.buckets_of(distances), wanted)


def test_slopes_are_those_of_the_paper():
    build = pytest.importorskip("transformers.models.mpt.modeling_mpt", reason="transformers is not installed")
    for heads in (1, 2, 4, 6, 8, 12, 16):
        wanted = build.build_mpt_alibi_tensor(heads, 2)[:, 0, 0].neg()
        torch.testing.assert_close(mw.AlibiBias.of_heads(heads).tensor, wanted)


def test_an_offset_places_queries_that_continue_from_a_cache():
    q, k, v = tensors()
    for make in (lambda n: mw.AlibiBias(torch.ones(H).double(), n), lambda n: mw.RelativeBias(randn(8, H), n)):
        whole = mw.attention(q, k, v, bias=make(0), is_causal=True)
        last = mw.attention(q[:, :, -1:], k, v, bias=make(L - 1))
        torch.testing.assert_close(last, whole[:, :, -1:])


@pytest.mark.parametrize(("kind", "softcap", "with_sinks", "learns"), CASES)
def test_flex_attention_is_given_scores_that_mean_the_same(kind, softcap, with_sinks, learns, monkeypatch):
    # It has no backward pass on the CPU, and so compares results.
    q, k, v = (x.detach() for x in tensors(4))
    bias, _, pairs = bias_of(kind, learns=False)
    sinks = randn(H, seed=6, grad=False) if with_sinks else None
    monkeypatch.setattr(delegated, "_flex", lambda: flex.flex_attention)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    out = delegated._flex_scored(q, k, v, ScoreMod(bias, softcap, sinks), {})
    wanted = truth(q, k, v, torch.ones(1, 1, L, L, dtype=torch.bool), pairs, softcap, sinks)
    # flex_attention computes in float32 where it is not compiled.
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "softcap", "with_sinks", "learns"), [c for c in CASES if c.values[3]])
def test_it_compiles_without_a_break_and_with_its_gradients(kind, softcap, with_sinks, learns):
    q, k, v = tensors()
    bias, tensor, _ = bias_of(kind, learns)
    sinks = randn(H, seed=6) if with_sinks else None
    leaves = [x for x in (q, k, v, tensor, sinks) if x is not None]
    mask = Mask.from_lengths(LENGTHS, max_len=L)

    def call(q, k, v):
        return mw.attention(q, k, v, mask, bias=bias, softcap=softcap, sinks=sinks)

    torch.compiler.reset()
    out, plain = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v)
    assert_close([out, *gradients(out, leaves)], [plain, *gradients(plain, leaves)])


def test_transforms_map_and_differentiate():
    q, k, v = tensors()
    table, sinks = randn(8, H, seed=5, grad=False), randn(H, seed=6, grad=False)

    def loss(q, table, sinks):
        bias = mw.RelativeBias(table)
        return mw.attention(q, k.detach(), v.detach(), bias=bias, softcap=2.0, sinks=sinks).square().sum()

    found = torch.func.grad(loss, (0, 1, 2))(q.detach(), table, sinks)
    leaves = [x.detach().requires_grad_() for x in (q, table, sinks)]
    assert_close(found, torch.autograd.grad(loss(*leaves), leaves))


def test_dropout_drops_weights_with_their_probability():
    q, k, v = tensors()
    torch.manual_seed(0)
    ones = torch.ones_like(v)
    out = mw.attention(q, k, ones, bias=mw.AlibiBias.of_heads(H), dropout_p=0.5)
    assert abs(out.mean().item() - 1.0) < 0.1
    assert out.std().item() > 0.05


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", ["alibi", "table"])
def test_no_tensor_of_all_pairs_is_made(kind, learns, is_causal):
    long, heads = 2048, 2
    q, k, v = (randn(1, heads, long, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    tensor = (
        randn(heads, grad=learns, dtype=torch.float32)
        if kind == "alibi"
        else randn(8, heads, grad=learns, dtype=torch.float32)
    )
    bias = mw.AlibiBias(tensor) if kind == "alibi" else mw.RelativeBias(tensor)
    with Largest() as seen:
        out = mw.attention(q, k, v, bias=bias, softcap=5.0 if learns else None, is_causal=is_causal)
        out.sum().backward()
    assert seen.elements <= heads * long * 256


def test_causal_calls_say_how_many_pairs_they_skip():
    q, k, v = (randn(1, 2, 512, 8, seed=seed) for seed in range(3))
    with mw.explain() as log:
        mw.attention(q, k, v, is_causal=True, sinks=torch.zeros(2, dtype=torch.float64))
    (call,) = (each for each in log if each.op == "attention")
    assert call.route == "scored"
    assert call.skipped == 2 * (512 * 512 - sum(128 * 128 * n for n in (1, 2, 3, 4)))
