"""Law 2: True means keep. Every function equals a float64 loop that sees only what is kept."""

import os
from contextlib import contextmanager

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import maskwise as mw
from maskwise.plan.dispatch import force
from tests.laws.odd_bytes import odd
from tests.laws.samples import KWARGS, ROUTES, UNDER_LAW, as_bool, cases, outputs
from tests.laws.slices import expected, law_cases
from tests.laws.subjects import SUBJECTS, trials
from tests.laws.test_nothing_leaks import assert_same_bits, forward_and_gradient
from tests.ops.arrays import interval_masks, masked_inputs
from tests.simd import SIMD_LEVELS


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("function", "sample"), cases())
def test_the_result_is_that_of_a_loop_over_what_is_kept(function, sample, route):
    with force(route):
        out = function.call(sample.x, sample.mask, **sample.kwargs)
    loops = expected(function, sample.x, sample.bits, **sample.kwargs)
    for mine, loop in zip(outputs(out), outputs(loops), strict=True):
        torch.testing.assert_close(mine, loop.to(mine.dtype), equal_nan=True)


@pytest.mark.parametrize(("function", "sample"), cases())
def test_a_mask_object_and_its_bool_tensor_give_the_same_bits(function, sample):
    from_bits = function.call(sample.x, sample.bits, **sample.kwargs)
    from_mask = function.call(sample.x, mw.Mask(sample.bits), **sample.kwargs)
    torch.testing.assert_close(outputs(from_mask), outputs(from_bits), rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize(("function", "sample"), [case for case in cases() if isinstance(case.values[1].mask, mw.Mask)])
def test_intervals_give_the_results_and_gradients_of_their_bool_tensor_by_plain_operations(function, sample):
    with force("plain"):
        plain = forward_and_gradient(function, sample.x, sample.bits, sample.kwargs)
    found = forward_and_gradient(function, sample.x, sample.mask, sample.kwargs)
    # Kernels add in another order than torch does.
    torch.testing.assert_close(found, plain, equal_nan=True, rtol=1e-4, atol=1e-5)


#: Roundings of halves accumulate in other orders.
CLOSE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.mark.kernel
@pytest.mark.parametrize("function", UNDER_LAW, ids=[function.name for function in UNDER_LAW])
@hypothesis.settings(max_examples=12)
@hypothesis.given(
    masked_inputs(max_dims=5),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]),
    st.data(),
)
def test_any_intervals_of_any_dtype_give_what_their_bool_tensor_gives_by_plain_operations(function, case, dtype, data):
    x, _, dim, keepdim = case
    mask = data.draw(interval_masks(tuple(x.shape)))
    if function.name in ("prod", "cumprod"):
        x = x.sign() * (1 + x.abs() / 64)
    if function.name in ("sort", "argsort", "topk", "argmax", "argmin", "cummax", "cummin", "median", "quantile"):
        # Distinct values in every dtype, as the place of one of two equal ones is not torch's.
        x = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0)).reshape(x.shape).float()
        dtype = dtype if x.numel() < 256 else torch.float32
    options = {name: value for name, value in options_of(function)[0].items() if name not in ("dim", "keepdim")}
    if function.kind != "elementwise":
        options["dim"] = dim if function.kind == "reduction" else dim if isinstance(dim, int) else -1
    if function.kind == "reduction":
        options["keepdim"] = keepdim
    if function.name == "topk" and x.shape[options["dim"]] < options["k"]:
        return
    # Integers are for functions that take them, and amax and its like have no value for nothing kept.
    if dtype is torch.int64 and function.name not in (
        "sum",
        "prod",
        "any",
        "all",
        "cumsum",
        "argsort",
        "fill",
        "count",
    ):
        dtype = torch.float32
    gone = 77.0 if dtype is torch.int64 else float("nan")
    x = torch.where(as_bool(mask), x, gone).to(dtype)
    with force("plain"):
        plain = outputs(function.call(x, as_bool(mask), **options))
    with force("kernel"):
        found = outputs(function.call(x, mask, **options))
    close = CLOSE.get(dtype, 1e-4)
    torch.testing.assert_close(found, plain, equal_nan=True, rtol=close, atol=close)


@pytest.mark.kernel
@pytest.mark.parametrize(("subject", "mask"), trials())
def test_intervals_of_a_call_or_a_layer_give_the_results_and_gradients_of_their_bool_tensor(subject, mask):
    with force("plain"):
        plain = subject.run(subject.tensors(), as_bool(mask))
    torch.testing.assert_close(subject.run(subject.tensors(), mask), plain, equal_nan=True, rtol=1e-4, atol=1e-5)


every_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=str)


@every_subject
def test_a_mask_object_of_a_call_or_a_layer_gives_the_bits_of_its_bool_tensor(subject):
    mask, tensors = subject.bits(), subject.tensors()
    for a, b in zip(subject.run(tensors, mask), subject.run(tensors, mw.Mask(mask)), strict=True):
        assert_same_bits(a, b)


# -- any byte but 0 is True --------------------------------------------------------------------------------------------
def layouts():
    """(x, mask): whole vectors and what is left of them, rows and columns, masks that broadcast, and every stride."""
    generator = torch.Generator().manual_seed(5)

    def values(*shape):
        return torch.randn(*shape, generator=generator)

    def bits(*shape):
        return torch.rand(*shape, generator=generator) < 0.5

    yield "rows", values(3, 301), bits(3, 301)
    yield "columns", values(301, 5), bits(301, 5)
    yield "wide-columns", values(33, 131), bits(33, 131)
    yield "row-mask", values(5, 131), bits(1, 131)
    yield "column-mask", values(131, 5), bits(131, 1)
    yield "transposed-mask", values(70, 67), bits(67, 70).T
    yield "transposed-x", values(67, 70).T, bits(70, 67)
    yield "strided", values(7, 260)[:, ::2], bits(7, 390)[:, ::3]
    yield "three-dims", values(3, 19, 37), bits(19, 1)


LAYOUTS = [pytest.param(x, mask, id=name) for name, x, mask in layouts()]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


#: Whether the kernels are those for GPUs, which an interpreter runs: they have no SIMD levels.
INTERPRETED = os.environ.get("MASKWISE_INTERPRET") == "1"
#: The plain route, and the kernels at every SIMD level; one that this CPU has not runs as the best that it has.
LEVELS = [("plain", -1), *(("kernel", level) for level in ([-1] if INTERPRETED else SIMD_LEVELS))]


@contextmanager
def at(route, level):
    if INTERPRETED:
        with force(route):
            yield
        return
    before = torch.ops.maskwise.simd_level(-1)
    torch.ops.maskwise.simd_level(level)
    try:
        with force(route):
            yield
    finally:
        torch.ops.maskwise.simd_level(before)


def options_of(function):
    return getattr(law_cases(function), "KWARGS", {}).get(function.name, KWARGS[function.kind])


@pytest.mark.kernel
@pytest.mark.parametrize(("route", "level"), LEVELS)
@pytest.mark.parametrize(("x", "mask"), LAYOUTS)
@pytest.mark.parametrize("function", UNDER_LAW, ids=[function.name for function in UNDER_LAW])
def test_any_byte_but_zero_keeps(function, x, mask, route, level):
    """A bool may be any byte, as one that came from an image of 0 and 255 is."""
    with at(route, level):
        for dtype in DTYPES:
            for options in options_of(function):
                plain = forward_and_gradient(function, x.to(dtype), mask, options)
                for given in (odd(mask), mw.Mask(odd(mask))):
                    found = forward_and_gradient(function, x.to(dtype), given, options)
                    for a, b in zip((*plain[0], *plain[1:]), (*found[0], *found[1:]), strict=True):
                        assert_same_bits(a, b)


@pytest.mark.kernel
@every_subject
def test_any_byte_but_zero_keeps_in_a_call_or_a_layer(subject):
    mask, tensors = subject.bits(), subject.tensors()
    plain = subject.run(tensors, mask)
    for given in (odd(mask), mw.Mask(odd(mask))):
        for a, b in zip(plain, subject.run(tensors, given), strict=True):
            assert_same_bits(a, b)


@pytest.mark.kernel
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 70), (2, 1, 70, 70), (2, 3, 70, 70), (70, 1)])
def test_any_byte_but_zero_keeps_in_the_kernel_of_attention(shape, is_causal):
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, 3, 70, 8, generator=generator) for _ in range(3))
    mask = torch.rand(shape, generator=generator) < 0.3
    for route, level in (("bare", 0), ("bare", 1), ("bare", 2), ("blocks", -1), ("whole", -1), ("plain", -1)):
        with at(route, level):
            plain = mw.attention(q, k, v, mask, is_causal=is_causal)
            assert_same_bits(mw.attention(q, k, v, odd(mask), is_causal=is_causal), plain)


VALUES = ["sum", "any", "all", "amax", "amin", "cumsum", "cumprod", "cummax", "cummin", "sort", "argsort", "fill"]


@pytest.mark.kernel
@pytest.mark.parametrize(("route", "level"), LEVELS)
@pytest.mark.parametrize(("x", "mask"), LAYOUTS)
@pytest.mark.parametrize("name", VALUES)
def test_any_byte_but_zero_is_true_as_a_value_too(name, x, mask, route, level):
    function = next(function for function in UNDER_LAW if function.name == name)
    values = x > 0
    with at(route, level):
        for options in options_of(function):
            plain = function.call(values, mask, **options)
            found = function.call(odd(values), odd(mask), **options)
            for a, b in zip(outputs(plain), outputs(found), strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


@pytest.mark.kernel
@pytest.mark.parametrize(("route", "level"), LEVELS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["mse_loss", "cross_entropy"])
def test_any_byte_but_zero_counts_in_a_loss(name, reduction, route, level):
    generator = torch.Generator().manual_seed(7)
    x, mask = torch.randn(301, 5, generator=generator), torch.rand(301, generator=generator) < 0.5
    target = torch.randint(5, (301,), generator=generator) if name == "cross_entropy" else torch.zeros(301, 5)
    keep = mask if name == "cross_entropy" else mask[:, None].expand(301, 5).contiguous()
    loss = getattr(torch.nn.functional, name)
    found = []
    for given in (keep, odd(keep), mw.Mask(odd(keep))):
        leaf = x.clone().requires_grad_()
        with at(route, level):
            out = mw.loss(loss, leaf, target, given, reduction=reduction)
            found.append((out.detach(), *torch.autograd.grad(out, leaf)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert_same_bits(a, b)


FACTS = {
    "count": lambda mask: mask.count(),
    "count by rows": lambda mask: mw.count(mask, dim=-1),
    "count of columns": lambda mask: mw.count(mask, dim=0),
    "density": lambda mask: mask.density,
    "lengths": lambda mask: mask.lengths,
    "cu_seqlens": lambda mask: mask.cu_seqlens,
    "indices": lambda mask: mask.to_bool().nonzero(),
    "is_prefix": lambda mask: mask.is_prefix,
    "is_full": lambda mask: mask.is_full,
    "is_empty": lambda mask: mask.is_empty,
    "key padding": lambda mask: mask.to_key_padding(),
    "attention mask": lambda mask: mask.to_attention_mask(),
    "additive": lambda mask: mask.to_additive(),
    "numpy": lambda mask: mask.to_numpy().tolist(),
    "not": lambda mask: (~mask).to_bool(),
    "and": lambda mask: (mask & mask.to_bool().flip(0)).to_bool(),
    "or": lambda mask: (mask | mask.to_bool().flip(0)).to_bool(),
    "xor": lambda mask: (mask ^ mask.to_bool().flip(0)).to_bool(),
    "without": lambda mask: (mask - mask.to_bool().flip(0)).to_bool(),
    "block mask": lambda mask: mask.to_block_mask(16).to_dense(),
    "drawing": repr,
    "from key padding": lambda mask: mw.Mask.from_key_padding(mask.to_bool()).lengths,
    "from numpy": lambda mask: mw.Mask.from_numpy(mask.to_bool().numpy()).lengths,
    "masked array": lambda mask: mask.to_masked_array(torch.ones(mask.shape)).sum(),
    "stack": lambda mask: mw.Mask.stack([mask, mask]).lengths,
    "cat": lambda mask: mw.Mask.cat([mask, ~mask], 1).lengths,
}


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("fact", FACTS)
def test_a_mask_of_any_bytes_knows_the_same(fact, prefix):
    bits = torch.rand(300, 301, generator=torch.Generator().manual_seed(8)) < 0.5
    if prefix:
        bits = mw.Mask.from_lengths(torch.arange(300), max_len=301).to_bool().clone()
    plain, found = FACTS[fact](mw.Mask(bits)), FACTS[fact](mw.Mask(odd(bits)))
    assert torch.equal(plain, found) if isinstance(plain, torch.Tensor) else plain == found
    assert mw.Mask(odd(bits)).equal(mw.Mask(bits))
