"""mw.median and mw.quantile beyond the laws: ties and specials, layouts, threads, SIMD levels, the ops, errors."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError
from maskwise.ops.backends import FLOATING, INTEGRAL, status
from maskwise.ops.order.reference import INTERPOLATIONS
from maskwise.plan.dispatch import force
from tests.laws.samples import as_bool
from tests.ops.arrays import masked_inputs
from tests.ops.order.inputs import tricky
from tests.simd import SIMD_LEVELS

ROUTES = ("plain", "kernel")
QS = [0.0, 0.1, 0.25, 0.5, 0.77, 1.0]


def rows_of(x, mask, dim):
    """The slices over the dims, as rows of (x, mask), and the shape of the result."""
    mask = as_bool(mask)
    dims = (
        list(range(x.dim())) if dim is None else sorted(d % x.dim() for d in ([dim] if isinstance(dim, int) else dim))
    )
    others = [d for d in range(x.dim()) if d not in dims]
    sizes = [x.shape[d] for d in others]
    length = int(np.prod([x.shape[d] for d in dims]))
    count = int(np.prod(sizes))
    flat = [t.permute(*others, *dims).reshape(count, length) for t in (x, mask.expand(x.shape))]
    return *flat, sizes


def median_loop(x, mask, dim=None):
    rows, bits, sizes = rows_of(x, mask, dim)
    nothing = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min
    outs = [
        row[keep].median() if keep.any() else torch.tensor(nothing, dtype=x.dtype)
        for row, keep in zip(rows, bits, strict=True)
    ]
    return torch.stack(outs).reshape(sizes) if outs else x.new_zeros(sizes)


def quantile_loop(x, mask, q, dim=None, interpolation="linear"):
    rows, bits, sizes = rows_of(x.double(), mask, dim)
    q = torch.as_tensor(q, dtype=torch.float64)
    empty = torch.full(q.shape, torch.nan, dtype=torch.float64)
    outs = [
        row[keep].quantile(q, interpolation=interpolation) if keep.any() else empty
        for row, keep in zip(rows, bits, strict=True)
    ]
    return torch.stack(outs, -1).reshape([*q.shape, *sizes]) if outs else x.new_zeros([*q.shape, *sizes])


def assert_quantiles(x, mask, q, dim=None, interpolation="linear"):
    """Equal to a float64 loop, to the rounding of one interpolation in x's own type (float32 for half precisions)."""
    out = mw.quantile(x, mask, q, dim, interpolation=interpolation)
    exact = quantile_loop(x, mask, q, dim, interpolation)
    assert out.dtype == x.dtype
    scale = torch.where(as_bool(mask) & x.isfinite(), x.abs().double(), 0).max() if x.numel() else 0.0
    torch.testing.assert_close(
        out.double(), exact.double(), rtol=0, atol=float(4 * torch.finfo(x.dtype).eps * scale), equal_nan=True
    )


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGRAL])
def test_the_median_is_torchs_of_what_is_kept_for_every_dtype(dtype, dim, route):
    for shape in [(301, 37), (37, 301), (5, 4)]:
        x, mask = tricky(shape, dtype), torch.rand(shape) < 0.6
        mask[2] = False
        with force(route):
            out = mw.median(x, mask, dim)
        torch.testing.assert_close(out, median_loop(x, mask, dim), rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_quantiles_are_torchs_of_what_is_kept_for_every_dtype(dtype, interpolation, route):
    for shape in [(201, 17), (17, 201), (5, 4)]:
        x, mask = torch.randn(shape).mul(3).to(dtype), torch.rand(shape) < 0.6
        mask[2] = False
        with force(route):
            for dim in (None, 0, 1):
                assert_quantiles(x, mask, 0.3, dim, interpolation)
                assert_quantiles(x, mask, QS, dim, interpolation)


@pytest.mark.kernel
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_nan_and_infinities_among_the_kept_do_what_they_do_in_torch(interpolation, route):
    x, mask = tricky((60, 40), torch.float64), torch.rand(60, 40) < 0.5
    x[:30] = x[:30].nan_to_num(0.0, torch.inf, -torch.inf)
    with force(route):
        out = mw.quantile(x, mask, QS, 1, interpolation=interpolation)
    # The last bit may differ: where torch adds weight * (b - a), a compiler may fuse the two.
    torch.testing.assert_close(
        out, quantile_loop(x, mask, QS, 1, interpolation), rtol=1e-14, atol=1e-14, equal_nan=True
    )
    assert out[:, 30:].isnan().any()


@pytest.mark.kernel
@given(masked_inputs(), st.floats(0, 1), st.sampled_from(INTERPOLATIONS))
def test_any_shape_stride_and_dim_agrees_with_a_loop(case, q, interpolation):
    x, mask, dim, keepdim = case
    with force("kernel"):
        medians = mw.median(x, mask, dim, keepdim)
        assert torch.equal(mw.median(x, mask, dim).reshape(-1).nan_to_num(7), medians.reshape(-1).nan_to_num(7))
        torch.testing.assert_close(mw.median(x, mask, dim), median_loop(x, mask, dim), rtol=0, atol=0, equal_nan=True)
        assert_quantiles(x, mask, q, dim, interpolation)
        leaf = x.clone().requires_grad_()
        through_places = mw.quantile(leaf, mask, q, dim, keepdim=keepdim, interpolation=interpolation)
    assert medians.shape == through_places.shape == x.sum(dim, keepdim=keepdim).shape
    plain = mw.quantile(x, mask, q, dim, keepdim=keepdim, interpolation=interpolation)
    torch.testing.assert_close(through_places.detach(), plain, equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_slices_of_every_length_and_many_ties_find_every_rank(dtype):
    for n in (1, 2, 63, 64, 65, 100, 1000, 70_000):
        for values in (
            torch.randn(n),
            torch.randn(n).round(),
            torch.zeros(n),
            torch.arange(float(n)),
            -torch.arange(n),
        ):
            x, mask = values.mul(30).clamp(-100, 100).to(dtype), torch.rand(n) < 0.8
            mask[0] = True
            assert mw.median(x, mask) == x[mask].median()
            if dtype.is_floating_point:
                ordered = x[mask].sort().values
                for rank in {0, 1, len(ordered) // 3, len(ordered) - 1} & set(range(len(ordered))):
                    q = rank / max(1, len(ordered) - 1)
                    assert mw.quantile(x, mask, q, interpolation="nearest") == ordered[rank]


def test_ranks_of_a_float32_q_round_as_in_torch():
    # 0.1 in float32, times 10, is 1 in float32, as older torch has it, and a little more than 1 in float64, as in torch
    # from 2.14 on: "higher" tells them apart.
    x, q = torch.arange(11.0), torch.tensor([0.1, 0.3, 0.7])
    mask = torch.ones(11, dtype=torch.bool)
    for interpolation in INTERPOLATIONS:
        for route in ROUTES:
            with force(route):
                out = mw.quantile(x, mask, q, interpolation=interpolation)
            assert torch.equal(out, x.quantile(q, interpolation=interpolation))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(3, 300_001), (300_001, 3), (1, 1_000_003), (300, 5000)])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_the_bits_do_not_depend_on_the_number_of_threads(shape, dim):
    x, mask = torch.randn(shape), torch.rand(shape) < 0.5
    threads = torch.get_num_threads()
    try:
        outs = []
        for n in (1, 2, 7):
            torch.set_num_threads(n)
            outs.append(torch.stack([mw.median(x, mask, dim), mw.quantile(x, mask, 0.3, dim)]).nan_to_num(7))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.kernel
@pytest.mark.skipif(not status().loaded, reason="there are no SIMD levels without the extension")
@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGRAL])
@pytest.mark.parametrize("level", SIMD_LEVELS)
def test_every_simd_level_that_this_cpu_has_gives_the_same(level, dtype):
    x, mask = tricky((45, 1037), dtype), torch.rand(45, 1037) < 0.5
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        for dim in (0, 1):
            out = mw.median(x, mask, dim)
            torch.testing.assert_close(out, median_loop(x, mask, dim), rtol=0, atol=0, equal_nan=True)
            if dtype.is_floating_point:
                finite = x.nan_to_num(0.5, 9.0, -9.0)
                assert_quantiles(finite, mask, 0.3, dim)
                assert_quantiles(finite, mask, QS, dim)
    finally:
        torch.ops.maskwise.simd_level(before)


def test_the_median_agrees_with_numpy_ma_where_the_count_is_odd():
    x, mask = torch.randn(7, 51).double(), torch.rand(7, 51) < 0.5
    mask[:, 0] ^= mask.sum(1) % 2 == 0
    theirs = np.ma.median(np.ma.array(x.numpy(), mask=~mask.numpy()), axis=1)
    assert np.array_equal(mw.median(x, mask, 1).numpy(), theirs.data)
    # With two in the middle numpy takes their mean, which is the quantile that interpolates.
    theirs = np.ma.median(np.ma.array(x.numpy(), mask=~mask.numpy()))
    assert mw.quantile(x, mask, 0.5) == pytest.approx(theirs, abs=1e-15)


def test_the_median_of_more_than_two_to_the_31_elements():
    n = 2**31 + 4096
    x = torch.zeros(n, dtype=torch.int8)
    x[7], x[2**31 + 5], x[-1] = 3, 4, 5
    mask = torch.zeros(n, dtype=torch.bool)
    mask[[7, 2**31 + 5, n - 1]] = True
    assert mw.median(x, mask) == 4


@pytest.mark.kernel
def test_an_index_beyond_two_to_the_32_is_found():
    # Rows of one expanded row, of which the mask keeps the last but one.
    n, width = 2**16 + 2, 2**16
    row = torch.randperm(width)
    mask = torch.zeros(n, 1, dtype=torch.bool)
    mask[-2] = True
    for dtype in (torch.int32, torch.float64):
        place = torch.ops.maskwise.median_places(row.to(dtype).expand(n, width), mask, [0, 1], False)
        assert place == (n - 2) * width + row.tolist().index((width - 1) // 2)


def test_quantiles_have_no_limit_of_size():
    # torch.quantile takes 16 million elements at most.
    x = torch.arange(2.0**24 + 3, dtype=torch.float64)
    mask = torch.ones_like(x, dtype=torch.bool)
    assert mw.quantile(x, mask, 0.25) == 0.25 * (2**24 + 2)
    out = mw.quantile(x.float(), mask, torch.tensor(1.0))
    assert out == 2**24 + 2


def test_integers_with_nothing_kept_give_the_least_one_or_empty():
    x, mask = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[True, True], [False, False]])
    assert mw.median(x, mask, 1).tolist() == [1, torch.iinfo(torch.int64).min]
    assert mw.median(x, mask, 1, empty=-1).tolist() == [1, -1]


def test_x_of_no_dims_is_one_slice():
    assert mw.median(torch.tensor(3.0), torch.tensor(True)) == 3
    assert mw.median(torch.tensor(3.0), torch.tensor(False)).isnan()
    assert mw.quantile(torch.tensor(3.0), torch.tensor(True), [0.1, 0.9]).tolist() == [3, 3]


def test_several_quantiles_add_a_leading_dim():
    x, mask = torch.randn(4, 5, 6), torch.ones(4, 5, 6, dtype=torch.bool)
    for q in ([0.1, 0.5, 0.9], (0.1, 0.5, 0.9), torch.tensor([0.1, 0.5, 0.9])):
        assert mw.quantile(x, mask, q, 1).shape == (3, 4, 6)
        assert mw.quantile(x, mask, q, (0, 2), keepdim=True).shape == (3, 1, 5, 1)
        exact = x.quantile(torch.tensor([0.1, 0.5, 0.9]), 1)
        torch.testing.assert_close(mw.quantile(x, mask, q, 1), exact)
    assert mw.quantile(x, mask, [], 1).shape == (0, 4, 6)
    assert mw.quantile(x, mask, torch.tensor(0.5), 1).shape == (4, 6)


@pytest.mark.kernel
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("dim", [None, 0, 1, (0, 2)])
def test_gradients_are_torchs_of_what_is_kept_by_both_routes(dim, interpolation):
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    mask = torch.ones(4, 5, 6, dtype=torch.bool)
    weights = torch.randn(3, 4, 5, 6, dtype=torch.float64)

    def gradient(call):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        return torch.autograd.grad((out * weights.flatten()[: out.numel()].reshape(out.shape)).sum(), leaf)[0]

    q = torch.tensor([0.1, 0.5, 0.77], dtype=torch.float64)
    gradients = []
    for route in ROUTES:
        with force(route):
            gradients.append(gradient(lambda x: mw.quantile(x, mask, q, dim, interpolation=interpolation)))
    torch.testing.assert_close(*gradients)
    if not isinstance(dim, tuple):
        torch.testing.assert_close(gradients[0], gradient(lambda x: x.quantile(q, dim, interpolation=interpolation)))


@pytest.mark.kernel
def test_ties_share_no_gradient_twice_and_both_routes_pick_the_same_elements():
    x = torch.tensor([[2.0, 1.0, 1.0, 1.0, 3.0], [0.0, -0.0, 0.0, -0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False, True])
    gradients = []
    for route in ROUTES:
        leaf = x.clone().requires_grad_()
        with force(route):
            mw.quantile(leaf, mask, [0.2, 0.5], 1).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(gradients[0].sum(1), torch.tensor([2.0, 2.0], dtype=torch.float64))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_registered_ops_pass_opcheck(dtype):
    x, mask = torch.randn(3, 4, 5).to(dtype), torch.tensor([True, False, True, True])[:, None]
    q = torch.tensor([0.2, 0.5], dtype=torch.float64)
    # Something is kept of every slice: opcheck takes no NaN for equal.
    for dim, keepdim in [([1], False), ([1, 2], True), ([0, 1, 2], False)]:
        for op in ("median_fused", "median_places"):
            torch.library.opcheck(getattr(torch.ops.maskwise, op), (x, mask, dim, keepdim))
        for op in ("quantile_fused", "quantile_places"):
            for quantiles in (q, q[0]):
                torch.library.opcheck(getattr(torch.ops.maskwise, op), (x, mask, dim, quantiles, keepdim, 0))


@pytest.mark.kernel
def test_the_indices_of_the_kernel_match_the_reference():
    from maskwise.ops.order import reference

    q = torch.tensor([0.0, 0.3, 0.5, 0.9, 1.0], dtype=torch.float64)
    for dtype in (*FLOATING, torch.int64, torch.int8):
        x, mask = tricky((13, 4, 31), dtype), torch.rand(13, 4, 31) < 0.4
        mask[3] = False
        for dim in ([0], [1], [2], [0, 2], [1, 2], [0, 1, 2]):
            for quantiles in (q, q[1], q[:2]):
                for interpolation in range(len(INTERPOLATIONS)):
                    args = (x, mask, dim, quantiles, False, interpolation)
                    mine = torch.ops.maskwise.quantile_places(*args)
                    theirs = reference.quantile_indices(*args)
                    # Where nothing is kept or a NaN is, the weight means nothing.
                    plain = (theirs[0] >= 0) & (theirs[0] != theirs[1])
                    assert torch.equal(mine[0], theirs[0])
                    assert torch.equal(mine[1], theirs[1])
                    torch.testing.assert_close(mine[2][plain], theirs[2][plain])


def test_compiles_with_a_tensor_of_quantiles():
    torch._dynamo.reset()
    x, mask = torch.randn(4, 30), torch.rand(4, 30) < 0.5
    compiled = torch.compile(lambda x, q: mw.quantile(x, mask, q, -1), fullgraph=True, backend="aot_eager")
    q = torch.tensor([0.2, 0.9])
    torch.testing.assert_close(compiled(x, q), mw.quantile(x, mask, q, -1), equal_nan=True)


BITS = torch.ones(1, dtype=torch.bool)
ERRORS = [
    (lambda x: mw.median(x, torch.ones(8, 12, dtype=torch.bool)), ShapeError, r"^median: .*mask\[\.\.\., None\]"),
    (lambda x: mw.median(x > 0, BITS), DtypeError, r"^median: .*got torch.bool. Hint: x\.to\(torch\.uint8\)"),
    (lambda x: mw.median(x.cfloat(), BITS), DtypeError, r"^median: .*Hint: x\.abs"),
    (lambda x: mw.median(x, BITS, 3), OutOfRangeError, r"^median: .*got 3"),
    (lambda x: mw.median([1.0], BITS), DtypeError, r"torch\.as_tensor\(x\)"),
    (lambda x: mw.quantile([1.0], BITS, 0.5), DtypeError, r"torch\.as_tensor\(x\)"),
    (
        lambda x: mw.quantile(x.int(), BITS, 0.5),
        DtypeError,
        r"^quantile: `x` must be floating.*x\.float\(\) or mw\.median",
    ),
    (
        lambda x: mw.quantile(x, BITS, 1.5),
        ArgumentError,
        r"^quantile: `q` must be in \[0, 1\], got 1.5. Hint: q=percent",
    ),
    (lambda x: mw.quantile(x, BITS, [0.5, -0.1]), ArgumentError, r"got -0.1"),
    (lambda x: mw.quantile(x, BITS, torch.tensor([0.5, 2.0])), ArgumentError, r"got 2.0"),
    (lambda x: mw.quantile(x, BITS, torch.tensor([[0.5]])), ShapeError, r"got \(1, 1\). Hint: q\.flatten\(\)"),
    (
        lambda x: mw.quantile(x, BITS, torch.tensor([1])),
        DtypeError,
        r"floating tensor, got torch.int64. Hint: q\.float",
    ),
    (lambda x: mw.quantile(x, BITS, "a"), DtypeError, r"a sequence of numbers or a floating tensor, got str"),
    (lambda x: mw.quantile(x, BITS, torch.tensor(0.5).requires_grad_()), ArgumentError, r"Hint: q\.detach\(\)"),
    (lambda x: mw.quantile(x, BITS, torch.tensor(0.5, device="meta")), DeviceError, r"cpu, got meta. Hint: q\.to"),
    (lambda x: mw.quantile(x, BITS, 0.5, interpolation="cubic"), ArgumentError, r"'linear', .* got 'cubic'"),
    (lambda x: mw.quantile(x, BITS, 0.5, (1, -2)), ArgumentError, r"not repeat a dim"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_arguments_raise_an_error_with_a_hint(call, error, message):
    x = torch.ones(8, 12, 64)
    for _ in range(2):
        with pytest.raises(error, match=message):
            call(x)
