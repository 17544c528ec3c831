"""The kernels of every reduction: dtypes, layouts, gradients, threads, SIMD levels, registered ops."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import maskwise as mw
from maskwise.ops.backends import FLOATING, INTEGRAL, served, status
from tests.ops.arrays import masked_inputs
from tests.ops.reduce.cases import CALLS, GRADIENTS, assert_agrees, exact, gradient, label, run, tolerance
from tests.simd import SIMD_LEVELS

pytestmark = pytest.mark.kernel
every_call = pytest.mark.parametrize(("name", "kwargs"), CALLS, ids=label)
every_gradient = pytest.mark.parametrize(("name", "kwargs"), GRADIENTS, ids=label)


def values(dtype, *shape, around=0.0):
    """Few values that differ by much: ties, zeros, and products that stay in range."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, 5, shape).to(dtype)
    return (torch.randn(shape).mul(4).round().div(4) + around).clamp(-2, 2).to(dtype)


@every_call
@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGRAL, torch.bool], ids=str)
def test_every_dtype_that_a_kernel_serves_agrees_with_the_exact_value(name, kwargs, dtype):
    if dtype not in served(name, "cpu"):
        pytest.skip("the plain route serves it")
    x, mask = values(dtype, 37, 131), torch.rand(37, 131) < 0.4
    x[3], mask[5], mask[:, 7] = 1, False, False
    for dim in (None, 0, 1):
        out = run("kernel", name, x, mask, dim, **kwargs)
        # Sums of a thousand values of size 2 cancel: their error is in proportion to what was added.
        assert_agrees(out, x, mask, exact(name, x, mask, dim, **kwargs), name, magnitude=500)


@every_call
@settings(max_examples=25)
@given(case=masked_inputs())
def test_any_shape_stride_and_dim_agrees_with_the_exact_value(name, kwargs, case):
    x, mask, dim, keepdim = case
    # The exact value of powers below 0 hangs on the smallest magnitudes.
    x = x.sign() * (x.abs() / 4 + 0.25)
    out = run("kernel", name, x, mask, dim, keepdim=keepdim, **kwargs)
    expected = exact(name, x, mask, dim, keepdim=keepdim, **kwargs)
    assert out.shape == expected.shape
    assert_agrees(out, x, mask, expected, name, magnitude=50)


@every_gradient
@settings(max_examples=25)
@given(case=masked_inputs())
def test_the_gradient_for_any_shape_stride_and_dim_is_the_exact_one(name, kwargs, case):
    x, mask, dim, _ = case
    x = x.sign() * (x.abs() / 4 + 0.25)
    if not x.numel():
        return
    # The deviation of two values that are close has the gradient of their rounding in float32.
    x = x.double() if name == "std" else x
    expected = gradient("plain", name, x.double(), mask, dim, **kwargs)
    # A product of many terms has a gradient of its own size.
    scale = max(1.0, float(expected[expected.isfinite()].abs().amax())) if expected.isfinite().any() else 1.0
    torch.testing.assert_close(
        gradient("kernel", name, x, mask, dim, **kwargs).double(),
        expected,
        rtol=1e-5,
        atol=1e-5 * scale,
        equal_nan=True,
    )


@every_gradient
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_gradients_of_every_dtype_agree_with_the_exact_one(name, kwargs, dtype):
    x, mask = values(dtype, 19, 67, around=0.01), torch.rand(19, 67) < 0.5
    mask[4] = False
    for dim in (0, 1):
        if name in ("var", "std") or (name == "norm" and kwargs["ord"] not in (0, 1, 2)):
            x = x + 3
        got = gradient("kernel", name, x, mask, dim, **kwargs)
        assert got.dtype == dtype
        expected = gradient("plain", name, x.double(), mask, dim, **kwargs)
        # The result, of which some gradients are made, is rounded to the dtype too.
        rtol = 4 * tolerance(dtype, 67) + torch.finfo(dtype).eps * 4
        torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=rtol * float(expected.abs().amax()))


@every_call
@pytest.mark.parametrize("shape", [(3, 700_001), (700_001, 3), (300, 5000)], ids=str)
def test_the_bits_do_not_depend_on_the_number_of_threads(name, kwargs, shape):
    if kwargs.get("ord", 2) not in (2, 3):
        pytest.skip("the same walk as the other norms")
    x, mask = torch.randn(shape), torch.rand(shape) < 0.5
    for dim in (None, 0, 1):
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(run("kernel", name, x, mask, dim, **kwargs))
        torch.set_num_threads(2)
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not status().loaded, reason="there are no SIMD levels without the extension")
@pytest.mark.parametrize("level", SIMD_LEVELS)
@every_call
def test_every_simd_level_that_this_cpu_has_agrees_with_the_exact_value(name, kwargs, level):
    x, mask = values(torch.float32, 23, 519), torch.rand(23, 519) < 0.5
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for dim in (0, 1):
                out = run("kernel", name, x.to(dtype), mask, dim, **kwargs)
                assert_agrees(
                    out, x.to(dtype), mask, exact(name, x.to(dtype), mask, dim, **kwargs), name, magnitude=500
                )
                if (name, kwargs) in GRADIENTS:
                    got = gradient("kernel", name, x.to(dtype), mask, dim, **kwargs).double()
                    expected = gradient("plain", name, x.to(dtype).double(), mask, dim, **kwargs)
                    bound = 8 * torch.finfo(dtype).eps + 1e-5
                    scale = float(expected.abs().amax())
                    torch.testing.assert_close(got, expected, rtol=bound, atol=bound * max(scale, 1e-30))
    finally:
        torch.ops.maskwise.simd_level(before)


def sample(name, kwargs, grad):
    x = torch.linspace(-2, 3, 60).reshape(3, 4, 5).requires_grad_(grad)
    rest = [float(v) for v in ({"correction": 1, **kwargs} if name in ("var", "std") else kwargs).values()]
    return x, torch.rand(4, 1) < 0.7, rest


@every_call
@pytest.mark.parametrize("op", ["fused", "fused_forward"])
def test_the_registered_ops_pass_opcheck(name, kwargs, op):
    differentiable = (name, kwargs) in GRADIENTS and op == "fused"
    x, mask, rest = sample(name, kwargs, differentiable)
    for dim, keepdim in [([1], False), ([0, 1, 2], True)]:
        torch.library.opcheck(getattr(torch.ops.maskwise, f"{name}_{op}"), (x, mask, dim, keepdim, *rest))


BACKWARD = {
    "var_backward": lambda g, out, x, mask, dim: (g, x, mask, dim, False, 1.0, True),
    "extremum_backward": lambda g, out, x, mask, dim: (g, out, x, mask, dim, False, True),
    "logsumexp_backward": lambda g, out, x, mask, dim: (g, out, x, mask, dim, False),
    "norm_backward": lambda g, out, x, mask, dim: (g, out, x, mask, dim, False, 3.0),
}
FORWARD = {"var": "std", "extremum": "amax", "logsumexp": "logsumexp", "norm": "norm"}


@pytest.mark.parametrize("op", BACKWARD)
def test_the_backward_ops_pass_opcheck(op):
    x, mask = torch.randn(3, 4, 5).transpose(0, 1), torch.rand(3, 5) < 0.6
    kwargs = {"ord": 3} if op == "norm_backward" else {}
    out = run("kernel", FORWARD[op.removesuffix("_backward")], x, mask, 1, **kwargs)
    args = BACKWARD[op](torch.randn_like(out), out, x, mask, [1])
    torch.library.opcheck(getattr(torch.ops.maskwise, op), args)


@every_gradient
@pytest.mark.parametrize("route", ["plain", "kernel"])
def test_gradients_of_both_orders_are_those_of_finite_differences(name, kwargs, route):
    if kwargs.get("ord") == 0:
        pytest.skip("a step function has no finite differences")
    x = torch.randn(3, 7, dtype=torch.float64).mul(2)
    x = (x.sign() * (x.abs() + 0.3)).requires_grad_()
    mask = torch.rand(3, 7) < 0.7
    mask[:, :3] = True

    def call(x):
        return run(route, name, x, mask, 1, **kwargs)

    assert torch.autograd.gradcheck(call, (x,))
    assert torch.autograd.gradgradcheck(call, (x,))


@given(st.integers(1, 300), st.floats(0, 1))
def test_rows_of_every_length_are_reduced_completely(n, density):
    x, mask = torch.randn(5, n), torch.rand(5, n) < density
    for name in ("mean", "var", "amax", "argmin", "logsumexp"):
        assert_agrees(run("kernel", name, x, mask, 1), x, mask, exact(name, x, mask, 1), name, magnitude=20)


def uneven_bits(rows, n):
    """Rows of which 2 % are kept here and 80 % there, with runs of 64, nothing and everything between them."""
    parts = [torch.rand(rows, n) < 0.02, torch.rand(rows, n) < 0.8, torch.rand(rows, -(-n // 64)).lt(0.3)]
    parts[2] = parts[2].repeat_interleave(64, 1)[:, :n]
    parts += [torch.zeros(rows, n, dtype=torch.bool), torch.ones(rows, n, dtype=torch.bool)]
    which = torch.randint(len(parts), (rows, -(-n // 512))).repeat_interleave(512, 1)[:, :n]
    return torch.stack(parts).gather(0, which[None])[0]


@every_call
@pytest.mark.parametrize("level", SIMD_LEVELS if status().loaded else [])
def test_rows_that_are_sparse_here_and_dense_there_keep_what_their_bits_say(name, kwargs, level):
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            # Rows of several chunks and a rest, and more of them than are looked at ahead.
            x, mask = values(dtype, 24, 9001, around=0.01), uneven_bits(24, 9001)
            expected = exact(name, x, mask, 1, **kwargs)
            out = run("kernel", name, x.masked_fill(~mask, torch.nan), mask, 1, **kwargs)
            assert_agrees(out, x, mask, expected, name, magnitude=10_000)
    finally:
        torch.ops.maskwise.simd_level(before)


@every_call
@pytest.mark.parametrize("level", SIMD_LEVELS if status().loaded else [])
def test_columns_of_which_blocks_are_kept_here_and_single_elements_there_keep_what_their_bits_say(name, kwargs, level):
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            # A rest of rows and of columns, and more of both than are looked at together.
            for rows, n in ((67, 1100), (1, 200), (270, 130)):
                x, mask = values(dtype, rows, n, around=0.01), uneven_bits(rows, n)
                expected = exact(name, x, mask, 0, **kwargs)
                out = run("kernel", name, x.masked_fill(~mask, torch.nan), mask, 0, **kwargs)
                assert_agrees(out, x, mask, expected, name, magnitude=10_000)
    finally:
        torch.ops.maskwise.simd_level(before)


@every_call
@pytest.mark.parametrize("level", SIMD_LEVELS if status().loaded else [])
def test_columns_that_keep_an_interval_each_are_reduced_completely(name, kwargs, level):
    generator = torch.Generator().manual_seed(3)
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for rows, n in ((67, 1100), (300, 130), (5, 64)):
                starts = torch.randint(-2, rows, (n,), generator=generator)
                lengths = torch.randint(0, rows, (n,), generator=generator)
                # Blocks of columns of which all keep the same, a part, and nothing.
                starts[:64], lengths[:64], lengths[64:80] = 1, rows - 2, 0
                mask = mw.Mask.from_lengths((starts + lengths).clamp(0, rows), rows) & mw.Mask.from_lengths(
                    (rows - starts).clamp(0, rows), rows, side="left"
                )
                x, keep = values(dtype, rows, n, around=0.01), mask.T.to_bool()
                expected = exact(name, x, keep, 0, **kwargs)
                out = run("kernel", name, x.masked_fill(~keep, torch.nan), mask.T, 0, **kwargs)
                assert_agrees(out, x, keep, expected, name, magnitude=10_000)
    finally:
        torch.ops.maskwise.simd_level(before)


@every_call
def test_the_bits_of_sparse_rows_do_not_depend_on_the_number_of_threads(name, kwargs):
    x, mask = torch.randn(300, 4096), uneven_bits(300, 4096)
    outs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outs.append(run("kernel", name, x, mask, 1, **kwargs))
    torch.set_num_threads(2)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=0, equal_nan=True)


@every_call
@pytest.mark.parametrize("kept", [0.03, 0.3, 0.74, 0.76, 0.97, 1.0])
def test_positions_of_which_few_or_many_are_dropped_give_the_exact_value(name, kwargs, kept):
    if kwargs.get("ord", 2) not in (2, 3):
        pytest.skip("the same loops as the other norms")
    for width in (64, 700):
        x, mask = values(torch.float32, 5, 90, width, around=0.01), torch.rand(5, 90, 1) < kept
        clean, mask[1] = x.clone(), False
        x = x.masked_fill(~mask, torch.nan)
        for dim in (1, (1, 2), (0, 1)):
            if isinstance(dim, tuple) and name in ("argmax", "argmin"):
                continue
            expected = exact(name, clean, mask, dim, **kwargs)
            assert_agrees(run("kernel", name, x, mask, dim, **kwargs), clean, mask, expected, name, magnitude=20_000)


def test_intervals_of_every_kind_of_row_are_reduced_completely():
    """Rows with long and short intervals, none and all of a row, at any start: over the ends of many rows in a line."""
    generator = torch.Generator().manual_seed(3)
    for rows, n in ((700, 130), (90, 5003), (300, 1)):
        x = torch.randn(rows, n + 3)[:, :n]
        starts = torch.randint(-2, n, (rows,), generator=generator)
        lengths = torch.randint(0, n + 3, (rows,), generator=generator) * (torch.rand(rows, generator=generator) < 0.8)
        mask = mw.Mask.from_lengths((starts + lengths).clamp(0, n), n) & mw.Mask.from_lengths(
            (n - starts).clamp(0, n), n, side="left"
        )
        for name in ("sum", "amax", "argmax", "logsumexp", "any"):
            expected = exact(name, x, mask.to_bool(), 1)
            assert_agrees(run("kernel", name, x, mask, 1), x, mask, expected, name, magnitude=100)


def test_more_than_two_to_the_31_elements_are_reduced():
    n = 2**31 + 4096
    x = torch.zeros(n, dtype=torch.int8)
    x[-2] = 5
    mask = torch.tensor([True]).expand(n)
    assert mw.amax(x, mask) == 5
    assert mw.argmax(x, mask) == n - 2
    assert mw.any(x, mask)
    assert mw.argmax(x.view(-1, 4096), mask.view(-1, 4096)[:1], 0).amax() == n // 4096 - 1
    wide = torch.tensor([3.0]).expand(n)
    assert mw.mean(wide, mask) == 3
    assert mw.logsumexp(wide[: 2**30], mask[: 2**30]) == pytest.approx(3 + 30 * 0.6931472)
