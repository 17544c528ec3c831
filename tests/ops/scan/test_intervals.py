"""Scans of masks that are intervals: as with the same mask as bits, and nothing of what is dropped."""

import math

import pytest
import torch

import maskwise as mw
from maskwise import Mask
from maskwise.ops.backends import FLOATING, status
from maskwise.plan.dispatch import force
from tests.ops.scan.scans import EXTREMES, NAMES, call
from tests.simd import SIMD_LEVELS

L = 37
LENGTHS = torch.tensor([3, 0, L, 20, 11, L])
MANY = torch.arange(70) * 7919 % 301
#: Of every origin, with the shape of x: along the scanned dim, along another, along neither, and bounds per column.
MASKS = {
    "lengths": ((6, L), lambda: Mask.from_lengths(LENGTHS, L)),
    "left": ((6, L), lambda: Mask.from_lengths(LENGTHS, L, side="left")),
    "outside": ((6, L - 5), lambda: Mask.from_lengths(LENGTHS, L)[:, 5:]),
    "of rows": ((6, L, 19), lambda: Mask.from_lengths(LENGTHS, L)[..., None]),
    "of heads": ((6, 19, L), lambda: Mask.from_lengths(LENGTHS, L)[:, None]),
    "causal": ((3, L, L), lambda: Mask.causal(L)),
    "causal transposed": ((3, L, L), lambda: Mask.causal(L).T),
    "window": ((3, L, L), lambda: Mask.window(L, left=3)),
    "window transposed": ((L, L), lambda: Mask.window(L, left=3).T),
    "segments": ((L, L), lambda: Mask.from_segments(torch.arange(L) // 5)),
    "both": ((6, L, L), lambda: Mask.causal(L) & Mask.from_lengths(LENGTHS, L)[:, None]),
    "rows of rows": ((6, L, L), lambda: Mask.from_lengths(LENGTHS, L)[..., None] & Mask.causal(L)),
    "full": ((6, L), lambda: Mask.full((6, L))),
    "none": ((6, L), lambda: Mask.none((6, L))),
    "many rows": ((70, 300), lambda: Mask.from_lengths(MANY, 300)),
    "many columns": ((300, 70), lambda: Mask.from_lengths(MANY, 300).T),
    "a row": ((5, 1), lambda: Mask.from_lengths([0, 1, 1, 0, 1], 1)),
}
CASES = [
    (name, dtype)
    for name in NAMES
    for dtype in (*FLOATING, *(() if name == "logcumsumexp" else (torch.int8, torch.int64, torch.bool)))
]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
}


def poisoned(shape, bits, dtype=torch.float64):
    """Values near 1 in size, so that products stay in range; NaN where dropped, as far as the dtype has it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (x.sign() * (1 + x.abs() / 64) if dtype.is_floating_point else x * 3).to(dtype)
    return torch.where(bits, x, math.nan) if dtype.is_floating_point else x


def gradient(name, x, mask, dim):
    """The gradient of what is finite."""
    leaf = x.detach().requires_grad_()
    out = call(name, leaf, mask, dim)
    above = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    return torch.autograd.grad(out, leaf, torch.where(out.isfinite(), above, 0.0))[0]


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("origin", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_a_scan_of_intervals_is_that_of_the_same_bits(name, origin, layout):
    shape, make = MASKS[origin]
    mask = make()
    bits = mask.to_bool()
    assert mask.operand == "intervals"
    x = LAYOUTS[layout](poisoned(shape, bits))
    for dim in range(len(shape)):
        with force("kernel"):
            assert torch.equal(call(name, x, mask, dim), call(name, x, bits, dim))
            if name in EXTREMES:
                assert torch.equal(getattr(mw, name)(x, mask, dim).indices, getattr(mw, name)(x, bits, dim).indices)
            found, of_bits = gradient(name, x, mask, dim), gradient(name, x, bits, dim)
        with force("plain"):
            out, expected = call(name, x, bits, dim), gradient(name, x, bits, dim)
        # Sums of up to 300 gradients, in another order.
        torch.testing.assert_close(call(name, x, mask, dim), out, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-8)
        torch.testing.assert_close(of_bits, expected, rtol=1e-9, atol=1e-8)
        assert (found[~bits.expand(shape)] == 0).all()


@pytest.mark.kernel
@pytest.mark.skipif(not status().loaded, reason="there are no SIMD levels without the extension")
@pytest.mark.parametrize("level", SIMD_LEVELS)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_dtype_and_simd_level_scans_intervals_as_bits(name, dtype, level):
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        for origin in ("many rows", "many columns", "causal"):
            shape, make = MASKS[origin]
            mask = make()
            bits = mask.to_bool()
            x = poisoned(shape, bits, dtype)
            for dim in range(len(shape)):
                assert torch.equal(call(name, x, mask, dim), call(name, x, bits, dim))
                if dtype.is_floating_point:
                    assert (gradient(name, x, mask, dim)[~bits.expand(shape)] == 0).all()
    finally:
        torch.ops.maskwise.simd_level(before)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_a_scan_of_intervals_do_not_depend_on_the_number_of_threads(name, dim):
    mask = Mask.causal(700)
    x = poisoned((700, 700), mask.to_bool(), torch.float32)
    threads = torch.get_num_threads()
    try:
        outs = []
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            outs.append((call(name, x, mask, dim), gradient(name, x, mask, dim)))
    finally:
        torch.set_num_threads(threads)
    for out, of_x in outs[1:]:
        assert torch.equal(out, outs[0][0])
        assert torch.equal(of_x, outs[0][1])


@pytest.mark.kernel
@pytest.mark.parametrize("name", NAMES)
def test_both_orders_of_gradient_check_with_intervals(name):
    mask = Mask.from_lengths([3, 0, 5], 5)
    x = poisoned((3, 5), mask.to_bool()).nan_to_num(0.5) + torch.linspace(0, 0.1, 15, dtype=torch.float64).reshape(3, 5)
    x.requires_grad_()
    for dim in (0, 1):

        def finite(x, dim=dim):
            out = call(name, x, mask, dim)
            return torch.where(out.isfinite(), out, 0.0)

        with force("kernel"):
            assert torch.autograd.gradcheck(finite, (x,))
            assert torch.autograd.gradgradcheck(finite, (x,))


@pytest.mark.kernel
@pytest.mark.parametrize("name", NAMES)
def test_no_bits_are_made_of_intervals(name, monkeypatch):
    mask = Mask.from_lengths([300, 20], 400)
    x = torch.rand(2, 400, requires_grad=True)

    def refuse(self):
        raise AssertionError("bits were made")

    monkeypatch.setattr(Mask, "to_bool", refuse)
    with force("kernel"):
        for dim in (0, 1):
            call(name, x.detach(), mask, dim)
            torch.autograd.grad(call(name, x, mask, dim).nan_to_num(neginf=0.0, posinf=0.0).sum(), x)
