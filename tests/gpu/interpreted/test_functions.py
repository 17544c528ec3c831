"""Every function that has a Triton kernel, against the plain route in float64: shapes at the edges of tiles."""

import pytest
import torch

from maskwise.ops.gpu import geometry, launch
from maskwise.ops.registry import FUNCTIONS
from maskwise.plan.capability import can_serve
from maskwise.plan.planner import force
from tests.laws.samples import differentiable, needed, outputs

KERNELS = [f for f in FUNCTIONS.values() if f.name != "loss" and can_serve(f.name, "cpu", torch.float32)[0]]
EACH = pytest.mark.parametrize("function", KERNELS, ids=[f.name for f in KERNELS])


def test_every_family_but_order_has_kernels():
    assert {f.family for f in KERNELS} == {"reduce", "softmax", "scan", "fill"}
    assert len(KERNELS) == 24


def sample(shape, mask_shape, dtype=torch.float32, density=0.6):
    """Values near 1, of either sign: a product of thousands of them is still a number."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.rand(shape, generator=generator, dtype=torch.float64).mul(0.02).add(0.99).to(dtype)
    x = torch.where(torch.rand(shape, generator=generator) < 0.5, x, -x)
    return x, torch.rand(mask_shape, generator=generator) < density


def run(function, x, mask, dim, route):
    """Outputs, and the gradient of a weighted sum of them."""
    kwargs = needed(function) | ({} if function.kind == "elementwise" else {"dim": dim})
    x = x.detach().clone().as_strided(x.shape, x.stride()) if x.is_contiguous() else x.detach()
    x = x.requires_grad_(function.gradient > 0)
    with force(route):
        result = function.call(x, mask, **kwargs)
        total = 0.0
        for out in differentiable(result) if function.gradient else []:
            weights = torch.linspace(0.5, 2.0, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
            total = total + (torch.where(out.isfinite(), out, 0.0) * weights).sum()
        gradient = torch.autograd.grad(total, x) if function.gradient else ()
    return [out.detach() for out in outputs(result)], list(gradient)


def assert_as_plain(function, x, mask, dim, **tolerance):
    mine, of_x = run(function, x, mask, dim, "kernel")
    truth, of_truth = run(function, x.double(), mask, dim, "plain")
    for a, b in zip((*mine, *of_x), (*truth, *of_truth), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), equal_nan=True, **tolerance)


SHAPES = [
    pytest.param((1, 1), (1, 1), -1, id="1x1"),
    pytest.param((7, 127), (7, 127), -1, id="7x127"),
    pytest.param((129, 7), (129, 1), 0, id="129x7 down, broadcast mask"),
    pytest.param((3, 5, 129), (5, 129), 1, id="3x5x129 in the middle"),
]


@EACH
@pytest.mark.parametrize(("shape", "mask_shape", "dim"), SHAPES)
def test_agrees_with_plain_torch_in_float64(function, shape, mask_shape, dim):
    # Sums of a hundred float32 of size 1 are off by a few 1e-7 of their terms.
    assert_as_plain(function, *sample(shape, mask_shape), dim, rtol=2e-5, atol=2e-5)


@EACH
def test_rows_longer_than_registers_and_half_precision(function):
    # 2 x 8209 is longer than what is held at once; bfloat16 has 8 bits, and rounds once.
    x, mask = sample((2, 4097 if function.family == "scan" else 8209), (1,), torch.bfloat16, density=2.0)
    assert_as_plain(function, x, mask, -1, rtol=1.6e-2, atol=1e-2)


@EACH
def test_poison_changes_no_bit_and_gets_no_gradient(function):
    x, mask = sample((5, 33), (5, 33))
    mask[1] = False
    clean = run(function, torch.where(mask, x, 0.0), mask, -1, "kernel")
    dirty = run(function, torch.where(mask, x, float("nan")), mask, -1, "kernel")
    for a, b in zip((*clean[0], *clean[1]), (*dirty[0], *dirty[1]), strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if function.gradient:
        assert torch.equal(dirty[1][0][~mask], torch.zeros_like(dirty[1][0][~mask]))


@EACH
def test_few_programs_do_the_tiles_of_many_with_64_bit_indices(function, monkeypatch):
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 2)
    monkeypatch.setattr(geometry, "REACH", 0)
    x, mask = sample((70, 40), (70, 40))
    assert_as_plain(function, x.T, mask.T, 0, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("function", [f for f in KERNELS if f.family == "reduce"], ids=lambda f: f.name)
@pytest.mark.parametrize("parts", [1, 4])
def test_a_long_row_cut_into_parts_is_one_row(function, parts, monkeypatch):
    monkeypatch.setattr(launch, "splits_for", lambda *_: parts)
    monkeypatch.setattr("maskwise.ops.reduce.gpu.splits_for", lambda *_: parts)
    x, mask = sample((2, 4500), (2, 4500))
    x[0, 100], x[1, 4400] = 1.5, -1.5
    assert_as_plain(function, x, mask, -1, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("function", [f for f in KERNELS if f.family in ("reduce", "scan")], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_and_bools_are_exact(function, dtype):
    if not can_serve(function.name, "cpu", dtype)[0] or (dtype is torch.bool and function.kind == "position"):
        pytest.skip(f"{function.name} has no kernel for {dtype}")
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
    (mine, _), (truth, _) = (run(function, x, mask, -1, route) for route in ("kernel", "plain"))
    for a, b in zip(mine, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
