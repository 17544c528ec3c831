"""Every function that has a Triton kernel, against the plain route in float64: shapes at the edges of tiles."""

import math
import os

import pytest
import torch

import maskwise as mw
from maskwise.ops.backends import why_not_served
from maskwise.ops.gpu import geometry, launch
from maskwise.plan.dispatch import force
from tests.gpu.interpreter import permuted
from tests.laws.functions import FUNCTIONS
from tests.laws.odd_bytes import odd
from tests.laws.samples import differentiable, needed, outputs

FAMILIES = ("reduce", "softmax", "scan", "fill")
KERNELS = [f for f in FUNCTIONS.values() if f.family in FAMILIES and f.kernel]
#: `make test-gpu` has every function in every test; the default run has each in a sample of them.
EVERYTHING = os.environ.get("MASKWISE_INTERPRET_ALL") == "1"
EACH = pytest.mark.parametrize("function", KERNELS, ids=[f.name for f in KERNELS])

SOME, OTHERS = (
    pytest.mark.parametrize("function", chosen, ids=[f.name for f in chosen])
    for chosen in ((KERNELS, KERNELS) if EVERYTHING else (KERNELS[::2], KERNELS[1::2]))
)


@EACH
def test_has_a_kernel_of_its_own(function):
    assert why_not_served(function.name, "cpu", torch.bfloat16) is None
    assert len(KERNELS) >= 24


def sample(function, shape, mask_shape, dtype=torch.float32):
    """Values and a mask; of products near 1, of either sign: one of thousands of them is still a number."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if "prod" in function.name:
        x = x.sign() * (1.0 + 0.01 * x)
    return x.to(dtype), torch.rand(mask_shape, generator=generator) < 0.6


def run(function, x, mask, dim, route):
    """Outputs, and the gradient of a weighted sum of them."""
    kwargs = needed(function) | ({} if function.kind == "elementwise" else {"dim": dim})
    x = x.detach().clone().as_strided(x.shape, x.stride()) if x.is_contiguous() else x.detach()
    x = x.requires_grad_(function.gradient > 0)
    with force(route):
        result = function.call(x, mask, **kwargs)
        total = 0.0
        for out in differentiable(result) if function.gradient else []:
            # Numbers that half precision has too: the gradient that comes in must be the same for every dtype.
            weights = torch.arange(out.numel()).remainder(5).add(1).mul(0.5).reshape(out.shape).to(out.dtype)
            total = total + (torch.where(out.isfinite(), out, 0.0) * weights).sum()
        gradient = torch.autograd.grad(total, x) if function.gradient else ()
    return [out.detach() for out in outputs(result)], list(gradient)


def assert_as_plain(function, x, mask, dim, found=None, **tolerance):
    mine, of_x = found or run(function, x, mask, dim, "kernel")
    truth, of_truth = run(function, x.double(), mask, dim, "plain")
    for a, b in zip((*mine, *of_x), (*truth, *of_truth), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), equal_nan=True, **tolerance)


SHAPES = [
    ("1x1", (1, 1), (1, 1), -1),
    ("129x7 down, broadcast mask", (129, 7), (129, 1), 0),
    ("7x127", (7, 127), (7, 127), -1),
    ("3x5x129 in the middle", (3, 5, 129), (5, 129), 1),
]


@pytest.mark.parametrize(
    ("function", "shape", "mask_shape", "dim"),
    [
        pytest.param(f, *rest, id=f"{f.name}-{label}")
        for i, f in enumerate(KERNELS)
        for j, (label, *rest) in enumerate(SHAPES)
        if EVERYTHING or (i + j) % 2
    ],
)
def test_agrees_with_plain_torch_in_float64(function, shape, mask_shape, dim):
    # Sums of a hundred float32 of size 1 are off by a few 1e-7 of their terms. To standardize two values that are
    # nearly equal makes that 300 times more, which is 1 / sqrt(eps).
    tolerance = 2e-3 if function.name == "standardize" else 2e-5
    assert_as_plain(function, *sample(function, shape, mask_shape), dim, rtol=tolerance, atol=tolerance)


@OTHERS
def test_rows_longer_than_registers(function, monkeypatch):
    monkeypatch.setattr(launch, "LONGEST", 64)
    monkeypatch.setattr(launch, "SHORT", 16)
    monkeypatch.setattr(launch, "WARP", 4)
    monkeypatch.setattr(launch, "PROCESSORS", 0)
    shape = (3, 2049) if EVERYTHING else (3, 137)
    assert_as_plain(function, *sample(function, shape, shape), -1, rtol=2e-4, atol=2e-4)


@SOME
def test_half_precision_is_added_up_in_float32(function):
    x, mask = sample(function, (3, 127), (3, 127), torch.bfloat16)
    # bfloat16 has 8 bits. The gradients of logarithms are made of the result, rounded: its exponential is then off by
    # 2 % of what it is multiplied with, the sum of some 100 gradients.
    tolerance = {"rtol": 5e-2, "atol": 1e-1} if "log" in function.name else {"rtol": 1.6e-2, "atol": 1e-2}
    assert_as_plain(function, x, mask, -1, **tolerance)


@OTHERS
def test_float64_is_computed_in_float64(function):
    # A number that was rounded to float32 on the way would be off by 1e-8.
    assert_as_plain(function, *sample(function, (3, 20), (3, 20), torch.float64), -1, rtol=1e-12, atol=1e-12)


def test_a_nan_makes_what_is_normalized_nan():
    x, mask = torch.tensor([[float("nan"), 1.0, 2.0], [3.0, 4.0, 5.0]]), torch.tensor([True, True, False])
    with force("kernel"):
        out = FUNCTIONS["normalize"].call(x, mask.expand(2, 3), dim=-1)
    torch.testing.assert_close(out, torch.tensor([[float("nan")] * 2 + [0.0], [0.6, 0.8, 0.0]]), equal_nan=True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # What is infinite takes everything from there on, and what that means for itself nobody can tell.
        ([0.0, 1.0, torch.inf], [1 + 1 / (1 + math.e), math.e / (1 + math.e), torch.nan]),
        ([0.0, torch.inf, 100.0], [1.0, torch.nan, 0.0]),
        ([0.0, -torch.inf, 0.0], [2.5, 0.0, 0.5]),
        ([-torch.inf, -torch.inf, 3.0], [0.0, 0.0, 1.0]),
    ],
)
def test_infinities_in_a_running_sum_of_exponentials(values, expected):
    x = torch.tensor([values], requires_grad=True)
    with force("kernel"):
        out = FUNCTIONS["logcumsumexp"].call(x, torch.ones(1, 3, dtype=torch.bool), dim=-1)
        (of_x,) = torch.autograd.grad(out, x, torch.ones(1, 3))
    torch.testing.assert_close(of_x, torch.tensor([expected]), equal_nan=True)


def test_a_number_of_float64_is_filled_in_to_the_last_bit():
    x, mask = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.bool)
    for number in (0.1, 1e300, -0.0, 5e-324, 0.5):
        with force("kernel"):
            out = FUNCTIONS["fill"].call(x, mask, number)
        assert torch.equal(out.view(torch.int64), torch.full_like(x, number).view(torch.int64))


#: Intervals along rows, along columns, of whole rows, and of what is no range of a row: those become bits.
INTERVALS = [
    ("lengths", (5, 70), -1, lambda: mw.Mask.from_lengths([0, 70, 33, 1, 64], 70)),
    ("left padding", (5, 70), -1, lambda: mw.Mask.from_lengths([0, 70, 33, 1, 64], 70, side="left")),
    ("causal", (40, 40), -1, lambda: mw.Mask.causal(40)),
    ("causal down", (40, 40), 0, lambda: mw.Mask.causal(40)),
    ("window", (40, 40), -1, lambda: mw.Mask.window(40, 7)),
    ("lengths of columns", (3, 30, 20), 1, lambda: mw.Mask.from_lengths([0, 30, 7], 30)[..., None]),
    ("whole rows", (3, 30, 20), 2, lambda: mw.Mask.from_lengths([0, 30, 7], 30)[..., None]),
    ("short rows", (3, 30, 4), 2, lambda: mw.Mask.from_lengths([0, 30, 7], 30)[..., None]),
    ("across the batch", (3, 30, 20), 0, lambda: mw.Mask.from_lengths([0, 30, 7], 30)[..., None]),
    ("heads", (2, 3, 70), -1, lambda: mw.Mask.from_lengths([70, 9], 70)[:, None]),
    ("full", (3, 70), -1, lambda: mw.Mask.full((3, 70))),
    ("none", (3, 70), -1, lambda: mw.Mask.none((3, 70))),
]


@pytest.mark.parametrize(
    ("function", "shape", "dim", "make"),
    [
        pytest.param(f, *rest, id=f"{f.name}-{label}")
        for i, f in enumerate(KERNELS)
        for j, (label, *rest) in enumerate(INTERVALS)
        if EVERYTHING or (i + j) % 4 == 0
    ],
)
def test_intervals_are_what_their_bits_are(function, shape, dim, make):
    x, mask = sample(function, shape, shape)[0], make()
    if function.name == "standardize":
        # Of two kept elements the gradient is 0: where they are nearly equal, a rounding error over their distance.
        ramp = 10.0 * torch.arange(shape[dim])
        x = x + ramp.reshape([-1 if d == dim % len(shape) else 1 for d in range(len(shape))]).to(x.dtype)
    assert mask.operand == "intervals"
    found = run(function, torch.where(mask.to_bool(), x, float("nan")), make(), dim, "kernel")
    truth = run(function, torch.where(mask.to_bool(), x, 0.0).double(), mask.to_bool(), dim, "plain")
    for mine, other in zip((*found[0], *found[1]), (*truth[0], *truth[1]), strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype), rtol=2e-3, atol=2e-4, equal_nan=True)


@EACH
def test_long_intervals_split_between_programs_are_one_row(function, monkeypatch):
    split(monkeypatch)
    x, mask = sample(function, (3, 301), (3, 301))[0], mw.Mask.from_lengths([301, 0, 170], 301, side="left")
    with permuted(2):
        mine = run(function, torch.where(mask.to_bool(), x, float("nan")), mask, -1, "kernel")
    truth = run(function, x.double(), mask.to_bool(), -1, "plain")
    for a, b in zip((*mine[0], *mine[1]), (*truth[0], *truth[1]), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=2e-3, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize("name", ["sum", "mean", "softmax", "fill", "cumsum"])
def test_no_mask_byte_is_made_of_intervals_along_rows(name, monkeypatch):
    def refused(*_):
        raise AssertionError("a bool tensor was made of intervals")

    function = FUNCTIONS[name]
    x, mask = sample(function, (3, 70), (3, 70))[0], mw.Mask.from_lengths([70, 0, 33], 70)
    bits = mw.Mask.from_lengths([70, 0, 33], 70).to_bool()
    monkeypatch.setattr(mw.Mask, "to_bool", refused)
    mine = run(function, x, mask, -1, "kernel")
    monkeypatch.undo()
    for a, b in zip(mine[0], run(function, x, bits, -1, "kernel")[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


@EACH
def test_poison_changes_no_bit_and_gets_no_gradient(function):
    x, mask = sample(function, (5, 33), (5, 33))
    mask[1] = False
    clean = run(function, torch.where(mask, x, 0.0), mask, -1, "kernel")
    dirty = run(function, torch.where(mask, x, float("nan")), mask, -1, "kernel")
    for a, b in zip((*clean[0], *clean[1]), (*dirty[0], *dirty[1]), strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if function.gradient:
        assert torch.equal(dirty[1][0][~mask], torch.zeros_like(dirty[1][0][~mask]))


@SOME
def test_few_programs_do_the_tiles_of_many_with_64_bit_indices(function, monkeypatch):
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 2)
    monkeypatch.setattr(geometry, "REACH", 0)
    x, mask = sample(function, (10, 40), (10, 40))
    assert_as_plain(function, x.T, mask.T, 0, rtol=2e-5, atol=2e-5)


def split(monkeypatch):
    """Rows of hundreds of elements are split, as those of millions are."""
    monkeypatch.setattr(launch, "LONGEST", 32)
    monkeypatch.setattr(launch, "SHORT", 16)
    monkeypatch.setattr(launch, "WARP", 1)
    monkeypatch.setattr(launch, "FEWEST", 1)


@EACH
@pytest.mark.parametrize("seed", range(3) if EVERYTHING else [1])
def test_a_long_row_split_between_programs_in_any_order_is_one_row(function, seed, monkeypatch):
    split(monkeypatch)
    x, mask = sample(function, (2, 300), (2, 300))
    results = [run(function, x, mask, -1, "kernel")]
    with permuted(seed) as orders:
        results.append(run(function, x, mask, -1, "kernel"))
    assert_as_plain(function, x, mask, -1, results[-1], rtol=2e-4, atol=2e-4)
    # More programs than the two rows: they are split.
    assert any(programs > 2 and order != sorted(order) for programs, order in orders.items())
    # Which program is the last changes no bit.
    for mine, other in zip(*results, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("zeros", [(), (5,), (150,), (150, 151), (40, 299)], ids=str)
def test_the_gradient_of_a_split_product_meets_zeros_in_any_part(zeros, monkeypatch):
    split(monkeypatch)
    function = FUNCTIONS["cumprod"]
    x, mask = sample(function, (2, 300), (2, 300))
    mask[:, 3] = False
    x[:, 3] = 0.0
    for at in zeros:
        x[0, at], mask[0, at] = 0.0, True
    assert_as_plain(function, x, mask, -1, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_the_gradient_of_a_split_extremum_is_one_sum_where_a_run_crosses_parts(name, monkeypatch):
    split(monkeypatch)
    # One extremum for the whole row, one that ends in the middle of a part, and ties in every part.
    x = torch.zeros(3, 300)
    x[0, 7], x[1, 100] = 9.0, 9.0
    x[1, 210] = 10.0
    if name == "cummin":
        x = -x
    assert_as_plain(FUNCTIONS[name], x, torch.rand(3, 300) < 0.9, -1, rtol=1e-5, atol=1e-5)


@SOME
def test_a_long_column_split_between_programs_is_one_column(function, monkeypatch):
    split(monkeypatch)
    monkeypatch.setattr(launch, "COLUMN_TILE", 64)
    with permuted(1):
        assert_as_plain(function, *sample(function, (150, 5), (150, 5)), 0, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        pytest.param(f, dtype, id=f"{f.name}-{dtype}")
        for f in KERNELS
        for dtype in (torch.int64, torch.uint8, torch.bool)
        if f.family in ("reduce", "scan") and why_not_served(f.name, "cpu", dtype) is None
    ],
)
def test_integers_and_bools_are_exact(function, dtype):
    x = torch.randint(0, 2 if dtype is torch.bool else 5, (5, 40)).to(dtype)
    mask = torch.rand(5, 40) < 0.5
    mask[3] = False
    for dim in (0, 1):
        with force("kernel"):
            mine = outputs(function.call(x, mask, dim=dim, **needed(function)))
        with force("plain"):
            truth = outputs(function.call(x, mask, dim=dim, **needed(function)))
        for a, b in zip(mine, truth, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@EACH
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_no_elements_are_no_trouble(function, shape):
    x, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    kwargs = needed(function) | ({} if function.kind == "elementwise" else {"dim": -1})
    with force("kernel"):
        mine = outputs(function.call(x, mask, **kwargs))
    with force("plain"):
        truth = outputs(function.call(x, mask, **kwargs))
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@EACH
@pytest.mark.parametrize("dim", [0, 1])
def test_any_byte_but_zero_keeps(function, dim):
    x, mask = sample(function, (7, 130), (7, 130))
    for layout in (mask, mask[:1], mask[:, :1]):
        for a, b in zip(
            run(function, x, layout, dim, "kernel"), run(function, x, odd(layout), dim, "kernel"), strict=True
        ):
            for mine, other in zip(a, b, strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        f
        for f in KERNELS
        if f.family in ("reduce", "scan", "fill") and why_not_served(f.name, "cpu", torch.bool) is None
    ],
    ids=lambda f: f.name,
)
def test_any_byte_but_zero_is_true_as_a_value_too(function):
    x, mask = torch.rand(5, 140) < 0.5, torch.rand(5, 140) < 0.5
    for dim in (0, 1):
        kwargs = needed(function) | ({} if function.kind == "elementwise" else {"dim": dim})
        with force("kernel"):
            plain, found = (outputs(function.call(*given, **kwargs)) for given in ((x, mask), (odd(x), odd(mask))))
        for a, b in zip(plain, found, strict=True):
            assert torch.equal(a, b)
