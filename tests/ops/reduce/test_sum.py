"""mw.sum beyond the laws: dtypes, layouts, threads, SIMD levels, the registered op, errors."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError
from maskwise.ops.backends import FLOATING, INTEGRAL, status
from maskwise.plan.dispatch import force
from tests.ops.arrays import masked_inputs
from tests.simd import SIMD_LEVELS

DTYPES = [*FLOATING, *INTEGRAL, torch.bool, torch.complex64, torch.complex128]


def expected_sum(x, mask, dim=None, keepdim=False):
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else torch.int64)
    return torch.where(mask, wide, 0).sum(dim, keepdim=keepdim)


def assert_sums(out, x, mask, dim=None, keepdim=False):
    """Out is the sum, to 64 roundings of the accumulator and one of the result.

    Rounding errors are in proportion to the sum of magnitudes, not to the sum: terms may cancel.
    """
    exact = expected_sum(x, mask, dim, keepdim)
    if not (x.is_floating_point() or x.is_complex()):
        torch.testing.assert_close(out, exact, rtol=0, atol=0)
        return
    part = x.real.dtype if x.is_complex() else x.dtype
    accumulator = torch.promote_types(part, torch.float32)
    magnitudes = torch.where(mask, x.abs().double(), 0).sum(dim, keepdim=keepdim)
    bound = 64 * torch.finfo(accumulator).eps * magnitudes + torch.finfo(part).eps * exact.abs()
    assert ((out.to(exact.dtype) - exact).abs() <= bound).all()


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_agrees_with_a_wide_reference_and_keeps_torchs_result_dtype(dtype, dim):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(67, 131, generator=generator) * 4).to(dtype)
    mask = torch.rand(67, 131, generator=generator) < 0.4
    out = mw.sum(x, mask, dim)
    assert out.dtype == x.sum(dim).dtype
    assert_sums(out, x, mask, dim)


@pytest.mark.kernel
@given(masked_inputs())
def test_any_shape_stride_and_dim_agrees_with_the_reference(case):
    x, mask, dim, keepdim = case
    with force("kernel"):
        out = mw.sum(x, mask, dim, keepdim=keepdim)
    assert out.shape == expected_sum(x, mask, dim, keepdim).shape
    assert_sums(out, x, mask, dim, keepdim)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("shape", [(3, 700_001), (700_001, 3), (1, 1_000_003), (300, 5000)])
def test_the_bits_do_not_depend_on_the_number_of_threads(shape, dim):
    x, mask = torch.randn(shape), torch.rand(shape) < 0.5
    threads = torch.get_num_threads()
    try:
        outs = []
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            outs.append(mw.sum(x, mask, dim))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(outs[0], out) for out in outs)
    assert_sums(outs[0], x, mask, dim)


@pytest.mark.kernel
@pytest.mark.skipif(not status().loaded, reason="there are no SIMD levels without the extension")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGRAL])
@pytest.mark.parametrize("level", SIMD_LEVELS)
def test_every_simd_level_that_this_cpu_has_gives_the_sum(level, dtype, dim):
    x, mask = (torch.randn(45, 1037) * 5).to(dtype), torch.rand(45, 1037) < 0.5
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        out = mw.sum(x, mask, dim)
    finally:
        torch.ops.maskwise.simd_level(before)
    assert_sums(out, x, mask, dim)


@pytest.mark.kernel
def test_half_precision_specials_survive_every_simd_level():
    values = torch.tensor([float("inf"), -float("inf"), 6e-8, -6e-8, 65504.0, 0.0, -0.0, 1.0], dtype=torch.float16)
    x = values.repeat(16)[:, None].expand(-1, 8).contiguous()
    mask = torch.ones_like(x, dtype=torch.bool)
    before = torch.ops.maskwise.simd_level(-1)
    for level in SIMD_LEVELS:
        torch.ops.maskwise.simd_level(level)
        out = mw.sum(x, mask, 1)
        torch.ops.maskwise.simd_level(before)
        torch.testing.assert_close(out, x.double().sum(1).half(), rtol=0, atol=0)


@pytest.mark.kernel
def test_a_kept_nan_propagates():
    x = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    out = mw.sum(x, torch.ones(2, 2, dtype=torch.bool), 1)
    assert out[0].isnan()
    assert out[1] == 5


def test_a_long_float32_sum_does_not_drift():
    # A million additions of 0.1 in one float32 accumulator end at 100958.
    x = torch.full((1_000_000,), 0.1)
    out = mw.sum(x, torch.ones_like(x, dtype=torch.bool))
    torch.testing.assert_close(out, x.double().sum().float(), rtol=1e-6, atol=0)


def test_more_than_two_to_the_31_elements_are_summed():
    n = 2**31 + 4096
    x = torch.zeros(n, dtype=torch.int8)
    x[0], x[2**31 + 5], x[-1] = 3, 4, 5
    mask = torch.tensor([True]).expand(n)
    assert mw.sum(x, mask) == 12
    assert mw.sum(x.view(-1, 4096), mask.view(-1, 4096)[:1], 0).sum() == 12


@pytest.mark.kernel
def test_lazily_negated_views_are_resolved():
    negated = torch.complex(torch.zeros(5), torch.arange(5.0)).conj().imag
    assert negated.is_neg()
    assert mw.sum(negated, torch.ones(5, dtype=torch.bool)) == -10


def test_dtype_casts_first_as_in_torch():
    x = torch.tensor([200, 100], dtype=torch.uint8)
    out = mw.sum(x, torch.tensor([True, True]), dtype=torch.float64)
    assert out.dtype == torch.float64
    assert out == 300


def test_x_of_no_dims_is_one_slice():
    assert mw.sum(torch.tensor(3.0), torch.tensor(True)) == 3
    assert mw.sum(torch.tensor(3.0), torch.tensor(False), 0) == 0


def test_an_empty_list_of_dims_reduces_all_as_in_torch():
    x, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert mw.sum(x, mask, ()) == torch.sum(x, ()) == 6
    assert torch.equal(mw.sum(x, mask, [0]), torch.full((3,), 2.0))


@pytest.mark.kernel
@pytest.mark.parametrize("op", ["sum_fused", "sum_fused_forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_registered_op_passes_opcheck(op, dtype):
    grad = dtype is torch.float32 and op == "sum_fused"
    x = torch.arange(60).reshape(3, 4, 5).to(dtype).requires_grad_(grad)
    mask = torch.rand(4, 1) < 0.5
    for dim, keepdim in [([0], False), ([1, 2], True), ([0, 1, 2], False)]:
        torch.library.opcheck(getattr(torch.ops.maskwise, op), (x, mask, dim, keepdim))


ERRORS = [
    (lambda x: mw.sum(x, torch.ones(8, 12, dtype=torch.bool)), ShapeError, r"mask\[\.\.\., None\]"),
    (lambda x: mw.sum(x, torch.ones(64, 12, dtype=torch.bool)), ShapeError, r"got \(64, 12\)"),
    (lambda x: mw.sum(x[0], torch.ones(64, 12, dtype=torch.bool)), ShapeError, r"mask\.T"),
    (lambda x: mw.sum(x[:1], torch.ones(8, 12, 64, dtype=torch.bool)), ShapeError, r"x\.expand\(8, 12, 64\)"),
    (lambda x: mw.sum(x, torch.ones(8, 12, 64)), DtypeError, r"Mask\.from_attention_mask\(mask\)"),
    (lambda x: mw.sum(x, None), DtypeError, r"Mask\.full\(x\.shape\)"),
    (lambda x: mw.sum(x, [[True]]), DtypeError, r"torch\.as_tensor\(mask\)"),
    (lambda x: mw.sum([1.0], torch.tensor([True])), DtypeError, r"torch\.as_tensor\(x\)"),
    (lambda x: mw.sum(x.to_sparse(), torch.ones(8, 12, 64, dtype=torch.bool)), ArgumentError, r"Hint: x\.to_dense\(\)"),
    (lambda x: mw.sum(x, torch.ones(8, 12, 64).bool().to_sparse()), ArgumentError, r"Hint: mask\.to_dense\(\)"),
    (lambda x: mw.sum(x, torch.ones(1, dtype=torch.bool), 3), OutOfRangeError, r"\[-3, 2\] for x of 3 dims, got 3"),
    (lambda x: mw.sum(x, torch.ones(1, dtype=torch.bool), (1, -2)), ArgumentError, r"not repeat a dim"),
    (lambda x: mw.sum(x, torch.ones(1, dtype=torch.bool), 1.5), DtypeError, r"got float"),
    (lambda x: mw.sum(x, torch.ones(1, dtype=torch.bool), "a"), DtypeError, r"got str"),
    (
        lambda x: mw.sum(x, torch.ones(1, dtype=torch.bool, device="meta")),
        DeviceError,
        r"x's device cpu, got meta. Hint: mask\.to\(x\.device\)",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_arguments_raise_an_error_with_a_hint(call, error, message):
    x = torch.ones(8, 12, 64)
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            call(x)
        assert str(caught.value).startswith("sum: ")


@given(st.integers(0, 40), st.floats(0, 1))
def test_counts_what_is_kept_when_x_is_one(n, density):
    mask = torch.rand(n) < density
    assert mw.sum(torch.ones(n), mask) == mask.sum()
