"""The kernel of the losses of single elements: every code, dtype and SIMD level, and special values."""

import math

import pytest
import torch

import maskwise as mw
from maskwise.ops.backends import FLOATING, status
from maskwise.ops.loss.element_losses import KERNEL_LOSSES, element_loss, unreduced
from maskwise.ops.loss.functional_losses import REDUCTION_CODES
from tests.simd import SIMD_LEVELS

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not status().loaded, reason="there is no kernel without the extension"),
]

CODES = range(len(KERNEL_LOSSES))
NAMES = [f"{served.fn.__name__}{list(served.settings.values()) or ''}" for served in KERNEL_LOSSES]
every_code = pytest.mark.parametrize("code", CODES, ids=NAMES)


def parameter_of(code):
    """A parameter that is not the default one."""
    return {"beta": 0.7, "delta": 0.7, "eps": 1e-3, "margin": 0.7}.get(
        (KERNEL_LOSSES[code].parameter or ("", 0))[0], 0.0
    )


def operands(code, dtype, n=301):
    """Values that every loss takes: x positive where it is a rate, signs where the target is one."""
    x = torch.rand(n, dtype=torch.float64) + 0.05 if code == 8 else torch.randn(n, dtype=torch.float64) * 2
    target = torch.randn(n).sign() if code in (9, 10) else torch.rand(n) + 0.01
    mask = torch.rand(n) < 0.6
    return x.to(dtype), target.to(dtype), mask


def kernel(code, x, target, mask, reduction="none"):
    """The loss and the gradient of x, by the kernel."""
    leaf = x.detach().requires_grad_()
    out, _ = element_loss.route("fused")(leaf, target, mask, code, parameter_of(code), REDUCTION_CODES[reduction])
    above = torch.linspace(0.5, 2.0, out.numel()).to(out.dtype).reshape(out.shape)
    return out.detach(), torch.autograd.grad(out, leaf, above)[0]


def exact(code, x, target, dtype=torch.float64):
    """The unreduced loss and the gradient of x by torch, for all elements, kept or not."""
    leaf = x.detach().to(dtype).requires_grad_()
    out = unreduced(leaf, target.to(dtype), code, parameter_of(code))
    above = torch.linspace(0.5, 2.0, out.numel()).to(x.dtype).to(dtype)
    return out.detach(), torch.autograd.grad(out, leaf, above)[0]


@pytest.mark.parametrize("level", SIMD_LEVELS)
@pytest.mark.parametrize("dtype", FLOATING)
@every_code
def test_every_dtype_and_simd_level_agrees_with_float64(code, dtype, level):
    x, target, mask = operands(code, dtype)
    poisoned = x.masked_fill(~mask, math.nan), target.masked_fill(~mask, math.inf)
    before = torch.ops.maskwise.simd_level(-1)
    try:
        torch.ops.maskwise.simd_level(level)
        out, grad = kernel(code, *poisoned, mask)
    finally:
        torch.ops.maskwise.simd_level(before)
    loss, slope = exact(code, x, target)
    # Each is a few operations in float32 or better, and one rounding to the dtype.
    ulps = 8 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if dtype != torch.float64 else 0)
    torch.testing.assert_close(out.double(), loss.where(mask, 0), rtol=ulps, atol=ulps)
    torch.testing.assert_close(grad.double(), slope.where(mask, 0), rtol=ulps, atol=ulps)


@every_code
def test_special_values_among_the_kept_give_what_torch_gives(code):
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-30, 30.0, -30.0]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor([0.0, 1.0, -1.0, 0.5, math.nan, math.inf]))
    x, target = pairs.unbind(1)
    out, grad = kernel(code, x, target, torch.ones(len(x), dtype=torch.bool))
    loss, slope = (both.float() for both in exact(code, x, target))
    if KERNEL_LOSSES[code].fn is torch.nn.functional.soft_margin_loss:
        # At infinity torch's exp overflows, and its gradient is inf / inf; here it is the limit.
        overflow = (-target * x).isposinf()
        slope = slope.where(~overflow, -target * torch.linspace(0.5, 2.0, len(x)))
    torch.testing.assert_close(out, loss, equal_nan=True)
    torch.testing.assert_close(grad, slope, equal_nan=True)


def test_a_soft_margin_far_on_the_wrong_side_does_not_overflow():
    x = torch.tensor([-200.0], requires_grad=True)
    out = mw.loss(torch.nn.functional.soft_margin_loss, x, torch.ones(1), torch.tensor([True]))
    out.backward()
    assert out.item() == 200.0
    assert x.grad.item() == -1.0


@every_code
def test_the_op_passes_opcheck(code):
    x, target, mask = operands(code, torch.float32, n=37)
    arguments = (x.requires_grad_(), target, mask, code, parameter_of(code), REDUCTION_CODES["mean"])
    torch.library.opcheck(torch.ops.maskwise.loss_fused.default, arguments)
