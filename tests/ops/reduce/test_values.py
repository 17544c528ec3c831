"""What the reductions give: special values, complex numbers, extremes, long sums, dtypes, errors."""

import pytest
import torch

import maskwise as mw
from maskwise.errors import DtypeError, OutOfRangeError, ShapeError
from maskwise.plan.dispatch import force
from tests.laws.samples import ROUTES
from tests.ops.reduce.cases import CALLS, GRADIENTS, INF, gradient, label, run

NAN = float("nan")
every_call = pytest.mark.parametrize(("name", "kwargs"), CALLS, ids=label)
every_route = pytest.mark.parametrize("route", ROUTES)

TORCH = {
    "std": lambda x, correction=1: torch.std(x, correction=correction),
    "var": lambda x, correction=1: torch.var(x, correction=correction),
    "norm": lambda x, ord=2: torch.linalg.vector_norm(x, ord),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
}
SPECIALS = [
    [1.0, NAN, 2.0],
    [INF, 1.0],
    [-INF, 1.0],
    [-INF, -INF],
    [INF, INF],
    [INF, -INF],
    [INF, NAN],
    [-INF, NAN],
    [0.0, -0.0],
    [3e38, 3e38],
    [1e-45, 1e-40],
    [-1e30, -1e30, 1.0],
]


SPECIAL_CALLS = [(name, kwargs, special) for name, kwargs in CALLS for special in SPECIALS]


def of_torch(name, kept, kwargs):
    if name in ("var", "std"):
        # In float32 torch's two implementations of the variance disagree beyond 1e19: one gives inf, one uses float64.
        return getattr(torch, name)(kept.double(), **kwargs).to(kept.dtype)
    return TORCH.get(name, lambda x, **kw: getattr(torch, name)(x, **kw))(kept, **kwargs)


@pytest.mark.kernel
@every_route
@pytest.mark.parametrize(("name", "kwargs", "special"), SPECIAL_CALLS, ids=label)
def test_special_values_among_the_kept_give_what_torch_gives_for_them(name, kwargs, special, route):
    kept = torch.tensor(special)
    expected = of_torch(name, kept, kwargs)
    if name in ("argmax", "argmin"):
        # Torch numbers the kept values, Maskwise the positions.
        expected = expected * 2 + 1
    # Between and around the kept, and in rows long enough for every path through the kernel.
    for before, after in ((0, 0), (0, 90), (64, 3), (300, 0)):
        x = torch.stack([torch.full_like(kept, 7.0), kept], 1).flatten()
        x = torch.cat([torch.full((before,), NAN), x, torch.full((after,), -INF)])
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask[before + 1 : before + 1 + 2 * len(kept) : 2] = True
        place = before if name in ("argmax", "argmin") else 0
        for out in (
            run(route, name, x, mask, 0, **kwargs),
            run(route, name, x[:, None].expand(-1, 6).contiguous(), mask[:, None], 0, **kwargs)[2],
        ):
            if kwargs.get("ord") in (3, -2.5) and expected.isinf() != out.isinf():
                # The kernel's powers have the range of float64; torch's of float32 over- or underflow.
                continue
            torch.testing.assert_close(out, expected + place if place else expected, equal_nan=True)


@pytest.mark.kernel
@every_route
@pytest.mark.parametrize("name", ["amax", "amin", "logsumexp", "mean", "sum", "var", "std"])
@pytest.mark.parametrize("special", SPECIALS, ids=str)
def test_gradients_at_special_values_are_what_torch_gives_for_the_kept(name, special, route):
    kept = torch.tensor(special, requires_grad=True)
    (expected,) = torch.autograd.grad(of_torch(name, kept, {}), kept, torch.tensor(0.5))
    x = torch.stack([torch.full((len(special),), NAN), kept.detach()], 1).flatten()
    mask = torch.arange(len(x)) % 2 == 1
    got = gradient(route, name, x, mask, 0)
    if route == "plain" and name == "var" and not expected.isfinite().all():
        # Autograd takes the way through the mean too, whose part is inf - inf where the formula's is 0.
        assert not got[mask].isfinite().any()
    elif route == "kernel" and name == "std" and 0 < kept.abs().max() < 1e-38:
        # Of subnormals the factor 1 / std is beyond float32, and so the gradient: inf, not hidden.
        assert got[mask].isinf().all()
    else:
        torch.testing.assert_close(got[mask], expected, equal_nan=True)
    assert torch.equal(got[~mask], torch.zeros(len(special)))


@pytest.mark.kernel
@every_route
@pytest.mark.parametrize("name", ["amax", "amin"])
def test_ties_share_the_gradient_in_equal_parts(name, route):
    x = torch.tensor([[2.0, 5.0, 5.0, 5.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 0]], dtype=torch.bool)
    tied = mask & (x == mw.__dict__[name](x, mask, 1, keepdim=True))
    expected = torch.where(tied, torch.tensor([[0.5], [2.0]]) / tied.sum(1, keepdim=True), 0.0)
    torch.testing.assert_close(gradient(route, name, x, mask, 1), expected)


@every_route
@pytest.mark.parametrize("kind", [("argmax", -INF), ("argmin", INF)], ids=str)
def test_the_position_is_a_kept_one_also_when_all_kept_are_the_worst(kind, route):
    name, worst = kind
    x = torch.full((3, 40), worst)
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[0, 7:9], mask[1, 39] = True, True
    assert run(route, name, x, mask, 1).tolist() == [7, 39, -1]
    assert run(route, name, x, mask, 0)[[0, 7, 39]].tolist() == [-1, 0, 1]
    assert run(route, name, x, mask) == 7
    assert run(route, name, x[2:], mask[2:]) == -1


@every_route
def test_ties_return_the_first_kept_index(route):
    x = torch.tensor([3.0, 9.0, 9.0, 1.0, 9.0, 1.0]).repeat(1, 50)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[:, :2] = False
    assert run(route, "argmax", x, mask, 1) == 2
    assert run(route, "argmin", x, mask, 1) == 3
    assert run(route, "argmax", x.T.contiguous().expand(300, 8), mask.T, 0)[3] == 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "norm", "any", "all"])
def test_complex_numbers_are_reduced_and_differentiated(name, dtype):
    x = torch.randn(4, 6, dtype=torch.complex128)
    mask = torch.rand(4, 6) < 0.6
    mask[:, 0] = True
    out = run("kernel", name, torch.where(mask, x, complex(NAN, NAN)).to(dtype), mask, 1)
    expected = torch.stack([of_torch(name, row[keep], {}) for row, keep in zip(x, mask, strict=True)])
    torch.testing.assert_close(out.to(expected.dtype), expected, rtol=1e-5, atol=1e-5)
    if name not in ("any", "all"):
        x.requires_grad_()
        assert torch.autograd.gradcheck(lambda x: run("kernel", name, x, mask, 1), (x,))


@every_route
@pytest.mark.parametrize("dim", [0, 1])
def test_the_variance_does_not_cancel_far_from_zero(route, dim):
    # The squares of a million and three are sixteen times what float32 can tell from those of a million.
    x = torch.tensor([1e6 - 1, 1e6, 1e6 + 1]).repeat(700, 1).T.contiguous() if dim == 0 else None
    x = torch.tensor([1e6 - 1, 1e6, 1e6 + 1]).repeat(4, 700) if x is None else x.repeat(400, 1)
    mask = torch.rand(x.shape) < 0.5
    expected = run("plain", "var", x.double(), mask, dim)
    torch.testing.assert_close(run(route, "var", x, mask, dim).double(), expected, rtol=1e-4, atol=0)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
def test_an_outlier_in_front_does_not_spoil_the_variance(dim):
    x = torch.randn(3000, 3000)[:, :40].contiguous() if dim == 0 else torch.randn(40, 3000)
    x.select(dim, 0).fill_(1e4)
    mask = torch.ones_like(x, dtype=torch.bool)
    torch.testing.assert_close(run("kernel", "var", x, mask, dim).double(), x.double().var(dim), rtol=1e-5, atol=0)


@pytest.mark.kernel
def test_long_rows_do_not_drift():
    x = torch.full((1_000_000,), 0.1)
    mask = torch.ones_like(x, dtype=torch.bool)
    assert mw.mean(x, mask).item() == pytest.approx(0.1, rel=1e-6)
    assert mw.norm(x, mask).item() == pytest.approx(100, rel=1e-6)
    assert mw.logsumexp(x, mask).item() == pytest.approx(0.1 + 13.815510558, rel=1e-6)
    assert mw.var(x, mask).item() == pytest.approx(0, abs=1e-15)


@pytest.mark.kernel
def test_half_precision_does_not_overflow_on_the_way():
    x = torch.full((3, 5000), 60.0, dtype=torch.float16)
    mask = torch.ones_like(x, dtype=torch.bool)
    for route in ROUTES:
        assert run(route, "mean", x, mask, 1).tolist() == [60] * 3
        assert run(route, "norm", x, mask, 1)[0].item() == pytest.approx(60 * 5000**0.5, rel=1e-3)


def test_dtype_casts_first_as_in_torch():
    x, mask = torch.tensor([200, 100], dtype=torch.uint8), torch.tensor([True, True])
    assert mw.mean(x, mask, dtype=torch.float64).dtype == torch.float64
    assert mw.prod(x, mask, dtype=torch.float32) == 20000
    assert mw.prod(x, mask).dtype == torch.int64
    assert mw.norm(x, mask, 1, dtype=torch.float32) == 300


def test_integers_are_cast_to_the_default_dtype_by_logsumexp():
    out = mw.logsumexp(torch.tensor([1, 2]), torch.tensor([True, True]))
    torch.testing.assert_close(out, torch.tensor([1.0, 2.0]).logsumexp(0))


@every_route
def test_an_empty_slice_of_integers_gives_the_end_of_their_range(route):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        x = torch.ones(2, 3, dtype=dtype)
        assert run(route, "amax", x, mask, 1).tolist() == [torch.iinfo(dtype).min] * 2
        assert run(route, "amin", x, mask, 1).tolist() == [torch.iinfo(dtype).max] * 2
    flags = torch.ones(2, 3, dtype=torch.bool)
    assert run(route, "amax", flags, mask, 1).tolist() == [False, False]
    assert run(route, "amin", flags, mask, 1).tolist() == [True, True]


@every_route
def test_integer_extrema_are_exact_to_the_last_bit(route):
    x = torch.tensor([[2**62 + 1, 2**62, -(2**62) - 1]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert run(route, "amax", x, mask, 1) == 2**62 + 1
    assert run(route, "argmax", x, mask, 1) == 0
    bytes_ = torch.tensor([[200, 100, 250]], dtype=torch.uint8)
    assert run(route, "amax", bytes_, mask, 1) == 250
    assert run(route, "argmin", bytes_, mask, 1) == 1


def test_any_and_all_of_uint8_are_uint8_as_in_torch():
    x, mask = torch.tensor([0, 2], dtype=torch.uint8), torch.tensor([True, True])
    for route in ROUTES:
        assert run(route, "any", x, mask).dtype == run(route, "all", x, mask).dtype == torch.uint8
        assert (run(route, "any", x, mask), run(route, "all", x, mask)) == (1, 0)


def test_keepdim_without_a_dim_keeps_every_dim_as_in_torch():
    x, mask = torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for route in ROUTES:
        for name in ("argmax", "amax", "mean", "count"):
            with force(route):
                out = mw.count(mask, None, True) if name == "count" else getattr(mw, name)(x, mask, keepdim=True)
            assert out.shape == (1, 1)


def test_x_of_no_dims_is_one_slice():
    for name, kwargs in CALLS:
        for route in ROUTES:
            if name in ("var", "std") and kwargs.get("correction", 1) != 0:
                continue
            out = run(route, name, torch.tensor(3.0), torch.tensor(True), **kwargs)
            expected = of_torch(name, torch.tensor([3.0]), kwargs)
            torch.testing.assert_close(out, expected.to(out.dtype))


@pytest.mark.parametrize("name", ["mean", "amax", "argmax", "logsumexp", "any"])
def test_empty_works_with_a_broadcast_mask(name):
    x, mask = torch.ones(3, 4), torch.tensor([[True], [False], [True]])
    out = getattr(mw, name)(x, mask, dim=1, empty=-3)
    assert out[1] == -3
    assert out[0] == getattr(mw, name)(x, mask, dim=1)[0]
    assert getattr(mw, name)(x, mask[1:2], empty=-3) == -3


# -- count -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("as_mask", [False, True])
def test_count_counts_along_dims(as_mask):
    bits = torch.rand(3, 4, 50) < 0.5
    mask = mw.Mask(bits) if as_mask else bits
    for dim in (None, 0, -1, (0, 2)):
        for keepdim in (False, True):
            out = mw.count(mask, dim, keepdim)
            assert out.dtype == torch.int64
            assert torch.equal(out, bits.sum(dim, keepdim=keepdim))


def test_count_of_a_structured_mask_is_not_materialised():
    mask = mw.Mask.from_lengths([5, 0, 10**12], max_len=10**12)
    assert mw.count(mask) == 10**12 + 5
    assert mw.count(mask, 1).tolist() == [5, 0, 10**12]
    assert mw.count(mw.Mask.full((10**6, 10**6))) == 10**12


def test_count_of_a_non_mask_raises_an_error_with_a_hint():
    with pytest.raises(
        DtypeError, match=r"count: `mask` must be a Mask or a bool tensor, got torch.float32. Hint: Mask"
    ):
        mw.count(torch.ones(3))
    with pytest.raises(DtypeError, match=r"got list"):
        mw.count([True])
    with pytest.raises(OutOfRangeError, match=r"count: `dim` must be in \[-1, 0\]"):
        mw.count(torch.ones(3, dtype=torch.bool), 1)


# -- errors ------------------------------------------------------------------------------------------------------------
KEEP = torch.ones(4, dtype=torch.bool)
INTS = torch.ones(4, dtype=torch.int64)
COMPLEX = torch.ones(4, dtype=torch.complex64)
ERRORS = [
    (
        lambda: mw.mean(INTS, KEEP),
        DtypeError,
        r"mean: `x` must be floating or complex, got torch.int64. Hint: mw.mean\(x, ",
    ),
    (lambda: mw.var(INTS, KEEP), DtypeError, r"var: `x` must be floating, got torch.int64. Hint: mw.var\(x.float\(\)"),
    (lambda: mw.std(COMPLEX, KEEP), DtypeError, r"std: `x` must be floating, got torch.complex64"),
    (lambda: mw.norm(INTS, KEEP), DtypeError, r"norm: `x` must be floating or complex.*Hint: mw.norm\(x, mask, dtype"),
    (
        lambda: mw.norm(KEEP.float(), KEEP, "fro"),
        DtypeError,
        r"norm: `ord` must be a number, got 'fro'. Hint: a vector",
    ),
    (lambda: mw.logsumexp(COMPLEX, KEEP), DtypeError, r"logsumexp: `x` must be floating, got torch.complex64"),
    (lambda: mw.amax(COMPLEX, KEEP), DtypeError, r"amax: `x` must be floating or integer.*Hint: x.abs\(\)"),
    (lambda: mw.argmax(KEEP, KEEP), DtypeError, r"argmax: `x` must be floating or integer.*Hint: x.to\(torch.uint8\)"),
    (
        lambda: mw.argmin(INTS, KEEP, (0,)),
        DtypeError,
        r"argmin: `dim` must be an int or None, got \(0,\). Hint: x.fl",
    ),
    (lambda: mw.mean(None, KEEP), DtypeError, r"mean: `x` must be a tensor"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_unsupported_arguments_raise_an_error_with_a_hint(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", sorted({name for name, _ in CALLS}))
def test_every_function_checks_its_mask_and_dim(name):
    call = getattr(mw, name)
    x = torch.ones(2, 3, 4)
    with pytest.raises(ShapeError, match=rf"^{name}: `mask` must broadcast.*mask\[\.\.\., None\]"):
        call(x, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(DtypeError, match=rf"^{name}: `mask` must be a Mask or a bool tensor"):
        call(x, torch.ones(2, 3, 4))
    with pytest.raises(OutOfRangeError, match=rf"^{name}: `dim` must be in \[-3, 2\]"):
        call(x, torch.ones(4, dtype=torch.bool), dim=3)


@pytest.mark.parametrize(("name", "kwargs"), GRADIENTS, ids=label)
def test_an_empty_slice_leaves_no_nan_in_a_double_backward(name, kwargs):
    x, mask = torch.rand(3, 4).add(0.5).requires_grad_(), torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    for route in ROUTES:
        out = run(route, name, x, mask, 1, empty=0.0, **kwargs)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        assert second.isfinite().all()
        assert torch.equal(second[1], torch.zeros(4))
