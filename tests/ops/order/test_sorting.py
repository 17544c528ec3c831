"""mw.sort, mw.argsort and mw.topk beyond the laws: ties, specials, layouts, threads, SIMD levels, the ops, errors."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import maskwise as mw
from maskwise.errors import DtypeError, OutOfRangeError, ShapeError
from maskwise.ops.backends import FLOATING, INTEGRAL, status
from maskwise.plan.dispatch import force
from tests.ops.arrays import masked_inputs
from tests.ops.order.inputs import same_bits, sorted_loop, tricky
from tests.simd import SIMD_LEVELS

DTYPES = [*FLOATING, *INTEGRAL]
ROUTES = ("plain", "kernel")


def worst(dtype, largest):
    if dtype.is_floating_point:
        return -torch.inf if largest else torch.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def assert_sorts(x, mask, dim, descending):
    values, indices = mw.sort(x, mask, dim, descending)
    expected_values, expected_indices = sorted_loop(x, mask, dim, descending)
    assert torch.equal(indices, expected_indices)
    assert same_bits(values, expected_values)
    assert torch.equal(mw.argsort(x, mask, dim, descending), expected_indices)


def assert_topk(x, mask, k, dim, largest):
    values, indices = mw.topk(x, mask, k, dim, largest=largest)
    expected_values, expected_indices = sorted_loop(x, mask, dim, largest, k, worst(x.dtype, largest))
    assert torch.equal(indices, expected_indices)
    assert same_bits(values, expected_values)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_sort_is_stable_with_nan_greatest_and_zeros_equal_for_every_dtype(dtype, dim, descending, route):
    # Sizes on both sides of the change from comparisons to radix passes.
    for shape in [(301, 37), (37, 301), (9, 5)]:
        x, mask = tricky(shape, dtype), torch.rand(shape) < 0.6
        with force(route):
            assert_sorts(x, mask, dim, descending)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_is_the_front_of_a_stable_sort_for_every_dtype(dtype, dim, largest, route):
    shape = (701, 40) if dim == 0 else (40, 701)
    x, mask = tricky(shape, dtype), torch.rand(shape) < 0.6
    mask.movedim(dim, -1)[3, 5:] = False
    with force(route):
        for k in (0, 1, 7, 200, 701):
            assert_topk(x, mask, k, dim, largest)


@pytest.mark.kernel
@given(masked_inputs(), st.booleans(), st.integers(0, 100))
def test_any_shape_stride_and_dim_agrees_with_a_loop(case, flag, percent):
    x, mask, dim, _ = case
    dim = dim if isinstance(dim, int) else -1
    if x.numel() == 0:
        with force("kernel"):
            values, indices = mw.sort(x, mask, dim, flag)
        assert values.shape == indices.shape == x.shape
        return
    with force("kernel"):
        assert_sorts(x, mask, dim, flag)
        assert_topk(x, mask, x.shape[dim] * percent // 100, dim, flag)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_long_slices_are_cut_back_again_and_again(dtype, dim):
    shape = (70_001, 4) if dim == 0 else (4, 70_001)
    x, mask = torch.randn(shape).to(dtype), torch.rand(shape) < 0.7
    # Ascending values renew the list of the largest with every element.
    x.movedim(dim, -1)[0] = torch.arange(70_001.0).to(dtype)
    for k in (1, 100, 3000):
        assert_topk(x, mask, k, dim, True)
    assert_sorts(x, mask, dim, False)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
def test_the_bits_do_not_depend_on_the_number_of_threads(dim):
    x, mask = tricky((700, 701), torch.float32), torch.rand(700, 701) < 0.5
    threads = torch.get_num_threads()
    try:
        outs = []
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            outs.append((*mw.sort(x, mask, dim), *mw.topk(x, mask, 20, dim)))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(a, b) for out in outs for a, b in zip(out, outs[0], strict=True))


@pytest.mark.kernel
@pytest.mark.skipif(not status().loaded, reason="there are no SIMD levels without the extension")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", SIMD_LEVELS)
def test_every_simd_level_that_this_cpu_has_gives_the_same(level, dtype):
    x, mask = tricky((45, 1037), dtype), torch.rand(45, 1037) < 0.5
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        for dim in (0, 1):
            assert_sorts(x, mask, dim, True)
            assert_topk(x, mask, 9, dim, False)
    finally:
        torch.ops.maskwise.simd_level(before)


def test_sort_agrees_with_numpy_ma():
    x, mask = torch.randn(7, 50), torch.rand(7, 50) < 0.5
    for dim in (0, 1):
        theirs = np.ma.sort(np.ma.array(x.numpy(), mask=~mask.numpy()), axis=dim, endwith=True)
        values, indices = mw.sort(x, mask, dim)
        assert np.array_equal((indices < 0).numpy(), np.ma.getmaskarray(theirs))
        assert np.array_equal(values.numpy(), theirs.filled(0.0))


def test_topk_of_more_than_two_to_the_31_elements():
    n = 2**31 + 4096
    x = torch.zeros(n, dtype=torch.int8)
    x[7], x[2**31 + 5], x[-1] = 3, 4, 5
    mask = torch.tensor([True]).expand(n)
    assert mw.topk(x, mask, 3).indices.tolist() == [n - 1, 2**31 + 5, 7]
    rows = mw.topk(x.view(-1, 4096), mask.view(-1, 4096), 1, dim=0)
    assert rows.values.sum() == 12
    assert rows.indices[0, 5] == 2**31 // 4096


def test_x_of_no_dims_is_one_slice():
    for keep, value, index in [(True, 3.0, 0), (False, 0.0, -1)]:
        values, indices = mw.sort(torch.tensor(3.0), torch.tensor(keep))
        assert (values.shape, float(values), int(indices)) == (torch.Size(), value, index)
    assert mw.topk(torch.tensor(3.0), torch.tensor(False), 1).values == -torch.inf


def test_results_have_torchs_field_names():
    result = mw.sort(torch.tensor([2.0, 1.0]), torch.tensor([True, True]))
    assert torch.equal(result.values, torch.tensor([1.0, 2.0]))
    assert torch.equal(result.indices, torch.tensor([1, 0]))


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["sort", "argsort", "topk"])
@pytest.mark.parametrize("route", ["fused", "fused_forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_registered_ops_pass_opcheck(name, route, dtype):
    grad = dtype is torch.float32 and route == "fused" and name != "argsort"
    x = torch.randperm(60).reshape(3, 4, 5).to(dtype).requires_grad_(grad)
    mask = torch.rand(4, 1) < 0.5
    for dim in ([0], [2]):
        rest = (2, True) if name == "topk" else (False,)
        torch.library.opcheck(getattr(torch.ops.maskwise, f"{name}_{route}"), (x, mask, dim, *rest))


@pytest.mark.kernel
def test_the_op_of_the_gradient_passes_opcheck_and_scatters():
    for dim in (0, 1, 2):
        x, mask = torch.randn(4, 5, 6), torch.rand(4, 5, 6) < 0.5
        values, indices = mw.sort(x, mask, dim)
        args = (values, indices, [dim], x.shape[dim])
        torch.library.opcheck(torch.ops.maskwise.order_scatter, args)
        assert torch.equal(torch.ops.maskwise.order_scatter(*args), torch.where(mask, x, 0.0))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradient_of_a_large_x_takes_the_kernel_and_is_that_of_the_reference(dim, dtype):
    # Above the size up to which torch's gather is cheaper; a permutation, so that no two routes could pick apart.
    x = torch.randperm(250 * 250).reshape(250, 250).double().mul(1e-3).to(dtype)
    mask = torch.rand(250, 250) < 0.5
    weights = torch.randn(250, 250).to(dtype)
    for call in (lambda x: mw.sort(x, mask, dim).values, lambda x: mw.topk(x, mask, 50, dim, largest=False).values):
        gradients = []
        for route in ROUTES:
            leaf = x.clone().requires_grad_()
            with force(route):
                out = call(leaf)
            out = torch.where(out.isfinite(), out, 0)
            gradients.append(torch.autograd.grad((out * weights[tuple(map(slice, out.shape))]).sum(), leaf)[0])
        assert torch.equal(*gradients)


@pytest.mark.kernel
@pytest.mark.parametrize("op", ["sort_fused", "topk_fused"])
def test_the_ops_with_autograd_pass_gradcheck_of_both_orders(op):
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(4, 6) < 0.6
    mask[:, :2] = True
    for dim in (0, 1):
        rest = (2, False) if op == "topk_fused" else (True,)
        keeps_two = mask.sum(dim).min() >= 2
        if op == "topk_fused" and not keeps_two:
            continue
        call = lambda x, dim=dim, rest=rest: getattr(torch.ops.maskwise, op)(x, mask, [dim], *rest)[0]
        assert torch.autograd.gradcheck(call, (x,))
        assert torch.autograd.gradgradcheck(call, (x,))


BITS = torch.ones(1, dtype=torch.bool)
ERRORS = [
    (lambda x: mw.sort(x, torch.ones(8, 12, dtype=torch.bool)), ShapeError, r"^sort: .*mask\[\.\.\., None\]"),
    (lambda x: mw.sort(x, BITS, (0, 1)), DtypeError, r"^sort: `dim` must be an int, got \(0, 1\)"),
    (lambda x: mw.sort(x, BITS, None), DtypeError, r"x\.flatten\(\) for all"),
    (lambda x: mw.sort(x, BITS, 3), OutOfRangeError, r"\[-3, 2\] for x of 3 dims, got 3"),
    (lambda x: mw.sort(x.cfloat(), BITS), DtypeError, r"be floating or integer, got torch.complex64. Hint: x\.abs"),
    (lambda x: mw.sort([1.0], BITS), DtypeError, r"torch\.as_tensor\(x\)"),
    (lambda x: mw.argsort(x, None), DtypeError, r"^argsort: .*Mask\.full\(x\.shape\)"),
    (lambda x: mw.argsort([1.0], BITS), DtypeError, r"^argsort: .*torch\.as_tensor\(x\)"),
    (
        lambda x: mw.topk(x, BITS, 65),
        OutOfRangeError,
        r"^topk: `k` must be in \[0, 64\], .* got 65. Hint: k=min\(k, 64",
    ),
    (lambda x: mw.topk(x, BITS, -1), OutOfRangeError, r"got -1"),
    (lambda x: mw.topk(x, BITS, 65, 4), OutOfRangeError, r"^topk: `dim` must be in \[-3, 2\]"),
    (lambda x: mw.topk(x, BITS, 1, 4), OutOfRangeError, r"^topk: `dim` must be in \[-3, 2\]"),
    (lambda x: mw.topk(x, BITS, 1.0), DtypeError, r"^topk: `k` must be an int, got float"),
    (
        lambda x: mw.topk(x > 0, BITS, 1),
        DtypeError,
        r"floating or integer, got torch.bool. Hint: x\.to\(torch\.uint8\)",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_arguments_raise_an_error_with_a_hint(call, error, message):
    x = torch.ones(8, 12, 64)
    for _ in range(2):
        with pytest.raises(error, match=message):
            call(x)
