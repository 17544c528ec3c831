"""Normalize and standardize: what is kept, by its own norm, or by its own mean and variance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.ops.arguments import Dim, MaskLike
from maskwise.ops.softmax.reference import mean_dtype
from maskwise.ops.softmax.slicewise import check_floating, define_backward, slicewise

__all__ = ["normalize", "standardize"]


def normalize(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    p: float = 2.0,
    dim: Dim = 1,
    eps: float = 1e-12,
) -> Tensor:
    """Divide what the mask keeps by its p-norm; what it drops becomes 0.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[3.0, 4.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.normalize(x, mask)
    tensor([[0.6000, 0.8000, 0.0000],
            [0.0000, 0.0000, 0.0000]])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        p: the exponent of the norm; any float, inf and -inf included.
        dim: the dim or dims of one norm. 1 by default, as in ``torch.nn.functional.normalize``; None for all.
        eps: the least number that is divided by.

    Returns:
        The normalized values, of x's shape: 0 where dropped, and so a zero row where nothing is kept.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or p or eps is not a number.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    check_floating("normalize", x)
    numbers = check_number("normalize", "p", p), check_number("normalize", "eps", eps)
    out: Tensor = _normalize(x, mask, dim, *numbers)
    return out


def standardize(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = -1,
    *,
    correction: float = 0,
    eps: float = 1e-5,
) -> Tensor:
    """Subtract the mean of what the mask keeps, and divide by its standard deviation; what it drops becomes 0.

    It is ``(x - mean) / sqrt(var + eps)``, and so with its defaults ``torch.nn.functional.layer_norm`` of what is kept.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 3.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.standardize(x, mask, eps=0)
    tensor([[-1.,  1.,  0.],
            [ 0.,  0.,  0.]])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims of one mean and variance; None for all.
        correction: the variance divides by the number kept less this; 0 as in ``layer_norm``, 1 for Bessel's.
        eps: added to the variance before its square root is taken, so that equal values give 0 and not NaN.

    Returns:
        The standardized values, of x's shape: 0 where dropped, and so a zero row where nothing is kept. NaN for what is
        kept where no more than ``correction`` values are, as ``torch.var`` has it.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or correction or eps is not a number.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, an eps is below 0, or x or the mask is sparse.
    """
    check_floating("standardize", x)
    numbers = check_number("standardize", "correction", correction), check_number("standardize", "eps", eps)
    if eps < 0:
        raise ArgumentError(say("standardize", "eps", must="be at least 0", got=eps, hint="eps=1e-5"))
    out: Tensor = _standardize(x, mask, dim, *numbers)
    return out


def check_number(op: str, argument: str, value: Any) -> float:
    """The value as a float; an error unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DtypeError(say(op, argument, must="be a number", got=type(value).__name__, hint=f"float({argument})"))
    return float(value)


# -- gradients ---------------------------------------------------------------------------------------------------------
# The gradients in plain torch operations: the ground truth of the backward kernels, and what runs where a gradient is
# itself differentiated. None looks at a gradient of what is dropped: it may be NaN, as it is behind the logarithm of a
# probability that is 0.
def normalize_gradient(grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], p: float, eps: float) -> Tensor:
    """The gradient of normalize from its input."""
    wide = torch.promote_types(x.dtype, torch.float32)
    grad = torch.where(mask, grad, 0.0).to(wide)
    kept = torch.where(mask, x, 0.0).to(wide)
    if math.isinf(p) and x.numel() == 0:
        return kept.to(x.dtype)
    counted = torch.where(mask, x, math.inf).to(wide) if p < 0 else kept
    norm = torch.linalg.vector_norm(counted, p, dim if x.dim() else None, keepdim=True)
    divisor = norm.clamp_min(eps)
    # The norm itself has no say where eps is larger.
    pull = torch.where(norm >= eps, (grad * kept).sum(dim, keepdim=True) / divisor.square(), 0.0)
    slope = grad / divisor - pull * norm_slope(kept, mask, norm, dim, p)
    return torch.where(mask, slope, 0.0).to(x.dtype)


def norm_slope(x: Tensor, mask: Tensor, norm: Tensor, dim: list[int], p: float) -> Tensor:
    """How the p-norm grows with each element of x, as torch has it: 0 where the norm is 0."""
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        return x.sgn()
    if math.isinf(p):
        # Those who share the largest magnitude share the slope.
        extreme = torch.where(mask, x.abs() == norm, False)
        return x.sgn() * extreme / extreme.sum(dim, keepdim=True).clamp_min(1)
    safe = torch.where(norm == 0, 1.0, norm)
    if p == 2:
        return x / safe
    # The magnitude of a zero has no derivative of its own, and a power below 0 no value.
    magnitude = torch.where(x == 0, 1.0, x.abs())
    return x.sgn() * (magnitude / safe) ** (p - 1)


def standardize_gradient(
    grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], correction: float, eps: float
) -> Tensor:
    """The gradient of standardize from its input."""
    wide = torch.promote_types(x.dtype, torch.float32)
    grad = torch.where(mask, grad, 0.0).to(wide)
    count = mask.expand(x.shape).sum(dim, keepdim=True, dtype=wide)
    some = count > 0
    divisor = torch.where(some, count, 1.0)
    freedom = torch.where(some, (count - correction).clamp_min(0.0), 1.0)
    total = torch.where(mask, x.to(wide), 0.0).sum(dim, keepdim=True, dtype=mean_dtype(x))
    mean = (total / divisor).to(wide)
    centered = torch.where(mask, x.to(wide) - mean, 0.0)
    scale = (centered.square().sum(dim, keepdim=True) / freedom + eps).rsqrt()
    out = centered * scale
    slope = grad - grad.sum(dim, keepdim=True) / divisor - out * ((grad * out).sum(dim, keepdim=True) / freedom)
    return torch.where(mask, slope * scale, 0.0).to(x.dtype)


_normalize_settings, _standardize_settings = ", float p, float eps", ", float correction, float eps"
_normalize = slicewise(
    "normalize",
    _normalize_settings,
    8,
    normalize_gradient,
    define_backward("normalize", _normalize_settings, normalize_gradient),
    of_result=False,
)
_standardize = slicewise(
    "standardize",
    _standardize_settings,
    14,
    standardize_gradient,
    define_backward("standardize", _standardize_settings, standardize_gradient),
    of_result=False,
)
