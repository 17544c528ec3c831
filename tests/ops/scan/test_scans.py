"""The scans beyond the laws: dtypes, layouts, threads, SIMD levels, special values, registered ops, errors."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import maskwise as mw
from maskwise.errors import DeviceError, DtypeError, OutOfRangeError, ShapeError
from maskwise.ops.backends import FLOATING, INTEGRAL, status
from maskwise.plan.dispatch import force
from tests.ops.arrays import masked_inputs
from tests.ops.scan.scans import EXTREMES, IDENTITY, NAMES, TOTALS, assert_scans, call, first, identity
from tests.simd import SIMD_LEVELS

ALL = [*FLOATING, *INTEGRAL, torch.bool]
CASES = [(name, dtype) for name in NAMES for dtype in (FLOATING if name == "logcumsumexp" else ALL)]


def inputs(shape, dtype=torch.float32, density=0.4, seed=0):
    """Values of both signs, near 1 in size so that products stay in range, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x.sign() * (1 + x.abs() / 8) if dtype.is_floating_point else x * 3
    return x.to(dtype), torch.rand(shape, generator=generator) < density


@pytest.mark.kernel
@pytest.mark.parametrize("route", ["plain", "kernel"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_dtype_agrees_with_a_wide_reference_and_keeps_torchs_result_dtype(name, dtype, dim, route):
    x, mask = inputs((67, 131), dtype)
    with force(route):
        out = call(name, x, mask, dim)
    assert out.dtype == first(getattr(torch, name)(x, dim)).dtype
    assert_scans(name, out, x, mask, dim)


@pytest.mark.kernel
@pytest.mark.parametrize("name", NAMES)
@given(masked_inputs(), st.integers(0, 3))
def test_any_shape_stride_and_dim_agrees_with_the_reference(name, case, dim):
    x, mask, _, _ = case
    dim %= x.dim()
    x = x / 4 if name == "cumprod" else x
    with force("kernel"):
        out = call(name, x, mask, dim)
    assert_scans(name, out, x, mask, dim)


@pytest.mark.kernel
@pytest.mark.parametrize("name", NAMES)
@given(masked_inputs(dtype=torch.float64), st.integers(0, 3))
def test_the_gradient_of_any_layout_is_that_of_the_reference(name, case, dim):
    x, mask, _, _ = case
    dim %= x.dim()
    x = x / 4 if name == "cumprod" else x
    above = torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape)
    gradients = []
    for route in ("plain", "kernel"):
        leaf = x.detach().requires_grad_()
        with force(route):
            out = call(name, leaf, mask, dim)
            gradients.append(torch.autograd.grad(torch.where(out.isfinite(), out, 0.0), leaf, above)[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-9)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_expanded_or_transposed_is_read_by_its_strides(name, dim):
    x, mask = inputs((37, 29), torch.float64)
    above = [torch.tensor(0.5, dtype=x.dtype).expand(37, 29), torch.rand(29, 37, dtype=x.dtype).T]
    for grad in above:
        gradients = []
        for route, given_grad in (("plain", grad.contiguous()), ("kernel", grad)):
            leaf = x.clone().requires_grad_()
            with force(route):
                out = call(name, leaf, mask, dim)
                gradients.append(torch.autograd.grad(out.masked_fill(out.isinf(), 0.0), leaf, given_grad)[0])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-12)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_every_dtype_are_near_those_of_float64(name, dtype, dim):
    x, mask = inputs((33, 41), dtype)
    above = torch.rand(33, 41, generator=torch.Generator().manual_seed(2)).to(dtype)
    gradients = []
    for values, route in ((x.double(), "plain"), (x, "kernel")):
        leaf = values.clone().requires_grad_()
        with force(route):
            out = call(name, leaf, mask, dim)
            out = out.masked_fill(out.isinf(), 0.0)
            gradients.append(torch.autograd.grad(out, leaf, above.to(values.dtype))[0])
    # The saved result is rounded to the dtype, and up to 41 of them are in one gradient; that of logcumsumexp has them
    # in an exponent, which is itself up to 5.
    eps = torch.finfo(dtype).eps
    size = gradients[0].abs().amax()
    torch.testing.assert_close(gradients[1].double(), gradients[0], rtol=16 * eps, atol=float(32 * eps * size))


@pytest.mark.kernel
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(3, 100_001), (100_001, 3), (1, 300_003), (300, 1100)])
def test_the_bits_do_not_depend_on_the_number_of_threads(name, shape, dim):
    x, mask = inputs(shape)
    x = x.sign() * (1 + (x.abs() - 1) / 4096)
    threads = torch.get_num_threads()
    try:
        outs = []
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            outs.append(call(name, x, mask, dim))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.kernel
@pytest.mark.skipif(not status().loaded, reason="there are no SIMD levels without the extension")
@pytest.mark.parametrize("level", SIMD_LEVELS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_simd_level_that_this_cpu_has_gives_the_scan_and_its_gradient(name, dtype, dim, level):
    x, mask = inputs((45, 523), dtype)
    x = x.requires_grad_(dtype.is_floating_point)
    before = torch.ops.maskwise.simd_level(-1)
    with force("kernel"):
        try:
            torch.ops.maskwise.simd_level(level)
            out = call(name, x, mask, dim)
            gradient = torch.autograd.grad(out, x, torch.ones_like(out))[0] if x.requires_grad else None
        finally:
            torch.ops.maskwise.simd_level(before)
        assert_scans(name, out.detach(), x.detach(), mask, dim)
        if gradient is not None:
            (expected,) = torch.autograd.grad(call(name, x, mask, dim), x, torch.ones_like(out))
            # The same sums in the same order; only exp and log may be fused differently.
            tolerance = 64 * torch.finfo(dtype).eps
            # A product that half precision cannot hold is inf, and its gradient NaN, at every level.
            torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", NAMES)
def test_a_dropped_position_repeats_the_running_value_to_the_bit(name, dtype, dim):
    x, mask = inputs((50, 70), dtype, density=0.3)
    out = call(name, x, mask, dim).movedim(dim, -1)
    dropped = ~mask.movedim(dim, -1)[:, 1:]
    assert torch.equal(out[:, 1:][dropped], out[:, :-1][dropped])


@pytest.mark.kernel
def test_a_running_sum_of_positive_values_never_falls():
    x, mask = torch.rand(64, 5000), torch.rand(64, 5000) < 0.5
    assert (mw.cumsum(x, mask, -1).diff(dim=-1) >= 0).all()
    assert torch.equal(mw.cumsum(x, mask, -1), x.masked_fill(~mask, 0).cumsum(-1))


def test_a_long_float32_sum_does_not_drift():
    # A million additions of 0.1 in one float32 accumulator end at 100958.
    x = torch.full((1_000_000,), 0.1)
    out = mw.cumsum(x, torch.ones_like(x, dtype=torch.bool), 0)
    torch.testing.assert_close(out[-1], x.double().sum().float(), rtol=1e-6, atol=0)


# -- special values ----------------------------------------------------------------------------------------------------
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -2.0]


@pytest.mark.kernel
@pytest.mark.parametrize("route", ["plain", "kernel"])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", NAMES)
@given(st.lists(st.tuples(st.sampled_from(SPECIAL), st.booleans()), min_size=1, max_size=12))
def test_kept_nan_and_inf_behave_as_in_torch_on_the_kept_alone(name, dtype, route, pairs):
    x = torch.tensor([value for value, _ in pairs], dtype=dtype)
    mask = torch.tensor([kept for _, kept in pairs])
    # Side by side as columns too, and among rows of other values.
    grid = torch.stack([x, torch.ones_like(x), x, x, -x], dim=1)
    bits = torch.stack([mask, mask, ~mask, mask, mask], dim=1)
    with force(route):
        out = call(name, x, mask, 0)
        by_columns = call(name, grid, bits, 0)
        by_rows = call(name, grid.T.contiguous(), bits.T.contiguous(), 1)
    kept = first(getattr(torch, name)(x[mask], 0))
    torch.testing.assert_close(out[mask], kept, equal_nan=True)
    torch.testing.assert_close(by_columns[:, 0], out, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(by_rows.T, by_columns, equal_nan=True, rtol=0, atol=0)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ["plain", "kernel"])
@pytest.mark.parametrize("name", EXTREMES)
@given(st.lists(st.tuples(st.sampled_from([*SPECIAL, 1.0, 1.0]), st.booleans()), min_size=1, max_size=12))
def test_indices_are_kept_positions_with_ties_and_nan_as_in_torch(name, route, pairs):
    x = torch.tensor([value for value, _ in pairs])
    mask = torch.tensor([kept for _, kept in pairs])
    with force(route):
        found = getattr(mw, name)(x, mask, 0)
        gradient = []
        for values in (x, x.double()):
            leaf = values.clone().requires_grad_()
            gradient.append(torch.autograd.grad(getattr(mw, name)(leaf, mask, 0).values.sum(), leaf)[0].double())
    assert isinstance(found, getattr(torch.return_types, name))
    kept = mask.nonzero().flatten()
    of_kept = getattr(torch, name)(x[mask], 0)
    assert torch.equal(found.indices[mask], kept[of_kept.indices])
    started = mask.cumsum(0) > 0
    assert (found.indices[~started] == -1).all()
    assert (found.values[~started] == IDENTITY[name]).all()
    assert mask[found.indices[started]].all()
    counts = torch.bincount(found.indices[started], minlength=len(pairs)).double()
    assert torch.equal(gradient[0], counts)
    assert torch.equal(gradient[1], counts)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ["plain", "kernel"])
@pytest.mark.parametrize("dtype", [*INTEGRAL, torch.bool])
@pytest.mark.parametrize("name", EXTREMES)
def test_before_the_first_kept_element_an_integer_extremum_is_the_end_of_its_range(name, dtype, route):
    x, mask = torch.zeros(5, 40).to(dtype), torch.zeros(5, 40, dtype=torch.bool)
    mask[:, 30] = True
    with force(route):
        for dim in (0, 1):
            values, places = getattr(mw, name)(x, mask, dim)
            assert (values[places < 0] == identity(name, dtype)).all()
            assert (places < 0).any()
            assert (values[places >= 0] == 0).all()


@pytest.mark.kernel
def test_integers_wrap_around_as_in_torch():
    x = torch.full((3, 70), 3, dtype=torch.int64)
    mask = torch.ones_like(x, dtype=torch.bool)
    for dim, values in ((1, x), (0, x.T.contiguous())):
        assert torch.equal(mw.cumprod(values, mask.reshape(values.shape), dim), values.cumprod(dim))


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_product_is_right_with_zeros_among_the_kept(dtype, dim):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (40, 40), generator=generator).to(dtype)
    mask = torch.rand(40, 40, generator=generator) < 0.5
    above = torch.randint(-3, 4, (40, 40), generator=generator).to(dtype)
    leaf = x.clone().requires_grad_()
    with force("kernel"):
        (gradient,) = torch.autograd.grad(mw.cumprod(leaf, mask, dim), leaf, above)
    # Each product without one factor, multiplied out: all are integers, so all is exact.
    filled = x.masked_fill(~mask, 1).movedim(dim, -1).double()
    exact = torch.zeros_like(filled)
    for k in range(40):
        others = filled.clone()
        others[:, k] = 1
        exact[:, k] = (others.cumprod(-1)[:, k:] * above.movedim(dim, -1)[:, k:].double()).sum(-1)
    exact = torch.where(mask.movedim(dim, -1), exact, 0).movedim(-1, dim)
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.kernel
def test_the_gradient_of_a_product_survives_partial_products_beyond_float32():
    x = torch.tensor([[0.1] * 30 + [10.0] * 60]).requires_grad_()
    mask = torch.ones(1, 90, dtype=torch.bool)
    with force("kernel"):
        (gradient,) = torch.autograd.grad(mw.cumprod(x, mask, 1)[:, -1:], x, torch.ones(1, 1))
    torch.testing.assert_close(gradient, (1e30 / x).detach(), rtol=1e-5, atol=0)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ["plain", "kernel"])
def test_logcumsumexp_is_exact_over_steep_and_huge_values(route):
    rows = torch.tensor(
        [
            [0.0, -20.0, -300.0, 1.0],
            [-1e30, -1e20, -50.0, 700.0],
            [3e38, -3e38, 1e30, 3e38],
            [-1000.0, -900.0, -100.0, 1000.0],
            [-3.4028235e38, -3.4028235e38, -1e38, 5.0],
        ]
    )
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[:, 2] = False
    with force(route):
        out = mw.logcumsumexp(rows, mask, 1)
        columns = mw.logcumsumexp(rows.T.contiguous(), mask.T, 0)
    exact = rows.double().masked_fill(~mask, -math.inf).logcumsumexp(1)
    torch.testing.assert_close(out.double(), exact, rtol=3e-7, atol=1e-12)
    torch.testing.assert_close(columns.T.double(), exact, rtol=3e-7, atol=1e-12)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ["plain", "kernel"])
def test_a_kept_minus_infinity_adds_nothing_and_gets_no_gradient(route):
    x = torch.tensor([-math.inf, -math.inf, 1.0, -math.inf, 2.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([False, True, True, True, True])
    with force(route):
        out = mw.logcumsumexp(x, mask, 0)
        (gradient,) = torch.autograd.grad(out[2:].sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
    assert out[:2].tolist() == [-math.inf, -math.inf]
    weight = math.exp(1) / (math.exp(1) + math.exp(2))
    expected = torch.tensor([0, 0, 2 + weight, 0, 1 - weight], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
    assert second.isfinite().all()


# -- sizes -------------------------------------------------------------------------------------------------------------
@pytest.mark.kernel
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0), (2, 0, 3), (1,), (5, 1), (1, 5)])
def test_no_dims_and_no_elements_are_fine(name, shape):
    x, mask = torch.ones(shape), torch.ones(shape, dtype=torch.bool)
    for dim in range(-max(len(shape), 1), max(len(shape), 1)):
        for route in ("plain", "kernel"):
            with force(route):
                out = getattr(mw, name)(x, mask, dim)
            torch.testing.assert_close(first(out), first(getattr(torch, name)(x, dim)), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["cummax", "cumsum"])
def test_more_than_two_to_the_31_elements_are_scanned(name):
    n = 2**31 + 4096
    # Expanded: one byte of data, and (for a sum) one row of results is all that is kept of them.
    x = torch.ones(1, dtype=torch.int8).expand(n)
    mask = torch.tensor([True]).expand(n)
    if name == "cumsum":
        out = mw.cumsum(x.view(-1, 4096)[:1].expand(2**19 + 1, 4096)[:, :1], mask.view(-1, 4096)[:, :1], 0)
        assert out[-1] == 2**19 + 1
    else:
        values, places = mw.cummax(x.view(4096, -1)[:, -3:], mask.view(4096, -1)[:1, -3:], 0)
        assert (places[-1] == 4095).all()
        assert (values == 1).all()


# -- torch's conventions -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TOTALS)
def test_dtype_casts_first_as_in_torch(name):
    x = torch.tensor([200, 100, 3], dtype=torch.uint8)
    mask = torch.tensor([True, False, True])
    out = getattr(mw, name)(x, mask, 0, dtype=torch.float64)
    assert out.dtype == torch.float64
    assert out.tolist() == ([200, 200, 203] if name == "cumsum" else [200, 200, 600])
    assert getattr(mw, name)(x, mask, 0, dtype=torch.int32).dtype == getattr(torch, name)(x, 0, dtype=torch.int32).dtype


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", TOTALS)
def test_complex_totals_take_the_plain_route(name, dtype):
    x, mask = torch.randn(3, 6, dtype=dtype), torch.rand(3, 6) < 0.5
    expected = getattr(torch, name)(x.masked_fill(~mask, IDENTITY[name]), 1)
    torch.testing.assert_close(getattr(mw, name)(x, mask, 1), expected)


@pytest.mark.parametrize("name", TOTALS)
def test_numpy_masked_arrays_agree(name):
    x, mask = torch.randn(20, 30, dtype=torch.float64), torch.rand(20, 30) < 0.6
    theirs = getattr(np.ma.array(x.numpy(), mask=~mask.numpy()), name)(axis=1)
    np.testing.assert_allclose(getattr(mw, name)(x, mask, 1).numpy()[mask], theirs.data[mask], rtol=1e-12)


@pytest.mark.kernel
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_the_result_has_xs_order_of_dims_when_x_has_no_gaps(name, order):
    x, mask = inputs((4, 5, 6))
    x, mask = x.permute(order), mask.permute(order)
    with force("kernel"):
        out = call(name, x, mask, 1)
        gaps = call(name, x[..., ::2], mask[..., ::2], 1)
    assert out.stride() == x.stride()
    assert gaps.is_contiguous()


# -- the registered ops ------------------------------------------------------------------------------------------------
@pytest.mark.kernel
@pytest.mark.parametrize("op", ["fused", "fused_forward"])
@pytest.mark.parametrize("name", NAMES)
def test_the_registered_ops_pass_opcheck(name, op):
    x, mask = inputs((3, 4, 5))
    x = (x.permute(1, 0, 2) if op == "fused" else x).requires_grad_(op == "fused")
    mask = mask[0, :3, :1] if op == "fused" else mask[0, :4]
    for dim in range(3):
        torch.library.opcheck(getattr(torch.ops.maskwise, f"{name}_{op}"), (x, mask, [dim]))


@pytest.mark.kernel
def test_the_ops_of_the_backward_passes_pass_opcheck():
    ops = torch.ops.maskwise
    x, mask = inputs((3, 4, 5))
    grad = torch.rand(3, 4, 5)
    for dim in range(3):
        torch.library.opcheck(ops.cumsum_backward, (grad, mask, [dim]))
        torch.library.opcheck(ops.cumextreme_backward, (grad, mw.cummax(x, mask, dim).indices, mask, [dim]))
        for name in ("cumprod", "logcumsumexp"):
            out = call(name, x, mask, dim)
            torch.library.opcheck(getattr(ops, f"{name}_backward"), (grad, x, mask, out, [dim]))


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_both_orders_of_gradient_check_with_empty_starts_and_zeros(name, dim):
    x, mask = inputs((5, 7), torch.float64, density=0.6)
    mask[:2], mask[:, :2] = False, False
    if name == "cumprod":
        x[3, 4] = 0.0
        mask[3, 4] = True
    x = x + torch.linspace(0, 0.1, 35, dtype=x.dtype).reshape(5, 7)
    if name == "cumprod":
        x[3, 4] = 0.0
    x.requires_grad_()
    for route in ("plain", "kernel"):
        with force(route):

            def finite(x):
                out = call(name, x, mask, dim)
                return torch.where(out.isfinite(), out, 0.0)

            assert torch.autograd.gradcheck(finite, (x,))
            assert torch.autograd.gradgradcheck(finite, (x,))


# -- errors ------------------------------------------------------------------------------------------------------------
BITS = torch.ones(1, dtype=torch.bool)
ERRORS = [
    (lambda f, x: f(x, torch.ones(8, 12, dtype=torch.bool), 1), ShapeError, r"mask\[\.\.\., None\]"),
    (lambda f, x: f(x, torch.ones(8, 12, 64), 1), DtypeError, r"Mask\.from_attention_mask\(mask\)"),
    (lambda f, x: f(x, None, 1), DtypeError, r"Mask\.full\(x\.shape\)"),
    (lambda f, x: f([1.0], BITS, 0), DtypeError, r"torch\.as_tensor\(x\)"),
    (lambda f, x: f(x, BITS, 3), OutOfRangeError, r"\[-3, 2\] for x of 3 dims, got 3"),
    (lambda f, x: f(x, BITS, None), DtypeError, r"`dim` must be an int, got NoneType. Hint: dim=-1"),
    (lambda f, x: f(x, BITS, (0, 1)), DtypeError, r"`dim` must be an int, got tuple"),
    (lambda f, x: f(x, BITS, True), DtypeError, r"got bool"),
    (lambda f, x: f(x, BITS.to("meta"), 1), DeviceError, r"x's device cpu, got meta. Hint: mask\.to\(x\.device\)"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("bad", "error", "message"), ERRORS)
def test_bad_arguments_raise_an_error_with_a_hint(name, bad, error, message):
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            bad(getattr(mw, name), torch.ones(8, 12, 64))
        assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "dtype", "hint"),
    [
        ("cummax", torch.complex64, r"x\.abs\(\) or x\.real"),
        ("cummin", torch.complex64, r"x\.abs\(\) or x\.real"),
        ("logcumsumexp", torch.int64, r"x\.float\(\)"),
        ("logcumsumexp", torch.complex64, r"x\.abs\(\)"),
    ],
)
def test_an_unsupported_dtype_is_rejected_with_a_hint(name, dtype, hint):
    with pytest.raises(DtypeError, match=f"{name}: `x` must .* got {dtype}. Hint: {hint}"):
        getattr(mw, name)(torch.ones(3).to(dtype), torch.ones(3, dtype=torch.bool), 0)
