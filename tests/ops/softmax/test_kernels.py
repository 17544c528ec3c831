"""Kernels of softmax and normalization and their gradients: dtypes, layouts, threads, SIMD levels, special values."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from maskwise.mask import Mask
from maskwise.ops.backends import FLOATING, status
from maskwise.plan.dispatch import force
from tests.ops.arrays import masked_inputs
from tests.ops.softmax.functions import CALLS, NAMES, PLAIN, assert_exact, with_gradient
from tests.simd import SIMD_LEVELS

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", CALLS)
def test_every_dtype_agrees_with_a_float64_reference(name, dtype, dim):
    x, above = torch.randn(67, 131).mul(3).to(dtype), torch.randn(67, 131).to(dtype)
    mask = torch.rand(67, 131) < 0.4
    with force("kernel"):
        mine = with_gradient(CALLS[name], x, mask, dim, above)
    assert_exact(name, mine, x, mask, dim, above)


@pytest.mark.parametrize("name", CALLS)
@given(case=masked_inputs(torch.float64), dense=st.booleans(), seed=st.integers(0, 99))
def test_any_shape_stride_and_dim_agrees_with_the_reference(name, case, dense, seed):
    x, mask, dim, _ = case
    dim = dim if isinstance(dim, int) else (seed % x.dim())
    above = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    # Gradients come in any layout, too: transposed, or expanded from one number.
    above = above if dense else above.T.contiguous().T if seed % 2 and x.dim() == 2 else above.sum().expand(x.shape)
    with force("kernel"):
        mine = with_gradient(CALLS[name], x, mask, dim, above)
    assert_exact(name, mine, x, mask, dim, above)


@pytest.mark.parametrize("width", [7, 8, 511, 512, 513, 519, 520, 1030])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_columns_of_any_width_agree_with_the_reference(name, width):
    x, above = torch.randn(2, 21, width, dtype=torch.float64)
    mask = torch.rand(21, width) < 0.3
    for bits in (mask, mask[:, :1], mask[:1], mask.T.contiguous().T):
        with force("kernel"):
            mine = with_gradient(CALLS[name], x, bits, 0, above)
        assert_exact(name, mine, x, bits, 0, above)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(2, 300_001), (150_001, 9), (70, 5000)])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_do_not_depend_on_the_number_of_threads(name, shape, dim):
    x, above = torch.randn(2, *shape, dtype=torch.float64)
    mask = torch.rand(shape) < 0.5
    threads = torch.get_num_threads()
    try:
        runs = []
        for n in (1, 7):
            torch.set_num_threads(n)
            with force("kernel"):
                runs.append(with_gradient(CALLS[name], x, mask, dim, above))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert torch.equal(run[0], runs[0][0])
        assert torch.equal(run[1], runs[0][1])
    assert_exact(name, runs[0], x, mask, dim, above)


@pytest.mark.skipif(not status().loaded, reason="there are no SIMD levels without the extension")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("level", SIMD_LEVELS)
@pytest.mark.parametrize("name", NAMES)
def test_every_simd_level_that_this_cpu_has_agrees_with_the_reference(name, level, dtype, dim):
    x, above, mask = torch.randn(37, 203).to(dtype), torch.randn(37, 203).to(dtype), torch.rand(37, 203) < 0.5
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        with force("kernel"):
            mine = with_gradient(CALLS[name], x, mask, dim, above)
    finally:
        torch.ops.maskwise.simd_level(before)
    assert_exact(name, mine, x, mask, dim, above)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CALLS)
def test_a_special_value_among_the_kept_gives_what_torch_gives_for_the_kept_values(name, special, dim):
    x, mask = torch.randn(40, 40), torch.rand(40, 40) < 0.5
    at = mask.nonzero()[::7]
    x[at[:, 0], at[:, 1]] = special
    with force("kernel"):
        mine = CALLS[name](x, mask, dim)
    torch.testing.assert_close(mine, PLAIN[name](x, mask, [dim]), equal_nan=True)


@pytest.mark.parametrize("route", ["plain", "kernel"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_kept_values_that_are_all_minus_inf_give_nan_and_dropped_ones_do_not(name, dim, route):
    x, mask = torch.full((16, 16), -math.inf), torch.eye(16).bool()
    with force(route):
        out = CALLS[name](x, mask, dim)
    assert out[mask].isnan().all()
    assert (out[~mask] == (0.0 if name == "softmax" else -math.inf)).all()


@pytest.mark.parametrize("dtype", FLOATING)
def test_large_values_do_not_overflow(dtype):
    top = torch.finfo(dtype).max / 4
    x = torch.tensor([[top, top, -top, 0.0] * 4], dtype=dtype)
    mask = torch.tensor([[True, True, True, False] * 4])
    with force("kernel"):
        assert torch.equal(CALLS["softmax"](x, mask, 1)[0, :4], torch.tensor([0.125, 0.125, 0, 0], dtype=dtype))


def test_standardize_is_stable_where_the_mean_is_large_and_the_deviation_small():
    x = (torch.randn(8, 4000, dtype=torch.float64) + 10_000).float()
    mask = torch.rand(8, 4000) < 0.5
    above = torch.randn(8, 4000)
    for dim, value, bits in ((1, x, mask), (0, x.T.contiguous(), mask.T.contiguous())):
        above = above.reshape(value.shape)
        with force("kernel"):
            mine = with_gradient(CALLS["standardize"], value, bits, dim, above)
        exact = with_gradient(PLAIN["standardize"], value.double(), bits, [dim], above.double())
        for a, b in zip(mine, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_standardize_gives_exact_zeros_for_values_that_are_all_equal():
    x = torch.full((6, 1001), 0.1)
    mask = torch.rand(6, 1001) < 0.5
    for dim in (0, 1):
        for route in ("plain", "kernel"):
            with force(route):
                assert not CALLS["standardize"](x, mask, dim).any()


def test_the_result_has_the_memory_layout_of_x():
    x = torch.randn(5, 40, 16)
    for view in (x, x.transpose(0, 2), x.permute(1, 2, 0)):
        mask = torch.rand(view.shape) < 0.5
        with force("kernel"):
            out = CALLS["softmax"](view, mask, 1)
        assert out.stride() == view.stride()


def test_more_than_two_to_the_31_elements():
    # bfloat16 and one row in memory: the result is all that has to be there.
    n = 2**21 + 8
    row = torch.randn(1, 1024).bfloat16()
    x, mask = row.expand(n, 1024), torch.zeros(n, 1, dtype=torch.bool)
    mask[0] = mask[-1] = True
    out = CALLS["softmax"](x, mask, 1)
    torch.testing.assert_close(out[-1], row[0].softmax(0))
    assert torch.equal(out[0], out[-1])
    assert not out[-5:-1].any()


# -- masks as intervals ------------------------------------------------------------------------------------------------
LENGTHS = torch.tensor([3, 0, 61, 20, 11, 61])
CAUSAL = Mask.causal(61)
#: Masks that know their intervals, by origin, for x of shape (6, 61, 61): along the last dim, the middle one, or both.
INTERVALS = {
    "lengths": Mask.from_lengths(LENGTHS, 61)[:, None],
    "left": Mask.from_lengths(LENGTHS, 61, side="left")[:, None],
    "rows": Mask.from_lengths(LENGTHS, 61)[..., None],
    "causal": CAUSAL,
    "transposed": CAUSAL.T,
    "window": Mask.window(61, left=3),
    "transposed window": Mask.window(61, left=3).T,
    "segments": Mask.from_segments(torch.arange(61) // 5),
    "intersection": CAUSAL & Mask.from_lengths(LENGTHS, 61)[:, None],
    "outside": Mask.from_lengths(LENGTHS, 61)[:, None, 5:].expand(6, 61, 56)[..., :50],
    "full": Mask.full((6, 61, 61)),
    "none": Mask.none((6, 61, 61)),
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "stepped": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("origin", INTERVALS)
@pytest.mark.parametrize("name", [*NAMES, "normalize--inf"])
def test_intervals_give_what_their_bits_give_and_nothing_of_what_they_drop(name, origin, layout):
    mask = INTERVALS[origin]
    assert mask.operand == "intervals"
    bits = mask.to_bool()
    x, above = torch.randn(2, 6, 61, mask.shape[-1], dtype=torch.float64)
    seen, hidden = (LAYOUTS[layout](torch.where(bits, each, math.nan)) for each in (x, above))
    for dim in range(3):
        with force("kernel"):
            mine = with_gradient(CALLS[name], seen, mask, dim, hidden)
        assert_exact(name, mine, x, bits, dim, above)
        assert not torch.where(bits, 0.0, mine[1]).any()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("name", NAMES)
def test_intervals_of_every_dtype_agree_with_a_float64_reference(name, dtype, dim):
    x, above = torch.randn(131, 131).mul(3).to(dtype), torch.randn(131, 131).to(dtype)
    for mask in (Mask.causal(131), Mask.causal(131).T, Mask.from_lengths(torch.arange(131), 131, side="left")):
        with force("kernel"):
            mine = with_gradient(CALLS[name], x, mask, dim, above)
        assert_exact(name, mine, x, mask.to_bool(), dim, above)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_intervals_of_large_results_agree_with_the_reference_for_any_number_of_threads(name, dim):
    # Large enough to be written past the caches, with rows and intervals that begin within a cache line.
    x, above = torch.randn(2, 1031, 1033)
    lengths = torch.randint(0, 1034, (1031,), generator=torch.Generator().manual_seed(0))
    mask, threads = Mask.from_lengths(lengths, 1033, side="left"), torch.get_num_threads()
    try:
        runs = []
        for n in (1, 3):
            torch.set_num_threads(n)
            with force("kernel"):
                runs.append(with_gradient(CALLS[name], x, mask, dim, above))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    assert_exact(name, runs[0], x, mask.to_bool(), dim, above)


@pytest.mark.parametrize("name", ["normalize", "standardize"])
@pytest.mark.parametrize("dim", [(0, 1), (1, 2), (0, 2), None])
def test_intervals_over_several_dims_agree_with_their_bits(name, dim):
    x = torch.randn(6, 61, 61, dtype=torch.float64)
    for origin in ("lengths", "rows", "causal", "transposed", "none"):
        mask = INTERVALS[origin]
        with force("kernel"):
            torch.testing.assert_close(CALLS[name](x, mask, dim), CALLS[name](x, mask.to_bool(), dim))


@pytest.mark.parametrize("name", NAMES)
def test_intervals_have_a_second_derivative(name):
    x, mask = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), Mask.from_lengths([2, 5, 0], 5)
    finite = torch.where(mask.to_bool(), 1.0, 0.0)

    def call(x):
        return torch.where(mask.to_bool(), CALLS[name](x, mask, 1), 0.0) * finite

    with force("kernel"):
        assert torch.autograd.gradgradcheck(call, x)
