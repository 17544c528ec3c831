"""Masked normalize and standardize."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.ops.arguments import Dim, MaskLike
from maskwise.ops.row_functions import row_dim, serve, serve_module
from maskwise.ops.softmax.reference import mean_dtype
from maskwise.ops.softmax.softmax import check_floating, define_backward, slicewise

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
        eps: the lower bound of the divisor.

    Returns:
        The normalized values, of x's shape: 0 where dropped, so a zero row for an empty slice.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or p or eps is not a number.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
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
        correction: the variance divides by the count minus this; 0 as in ``layer_norm``, 1 for Bessel's.
        eps: added to the variance before its square root is taken, so that equal values give 0 and not NaN.

    Returns:
        The standardized values, of x's shape: 0 where dropped, so a zero row for an empty slice. Kept elements are NaN
        where at most ``correction`` of them are kept, as in ``torch.var``.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or correction or eps is not a number.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, eps is negative, or x or the mask is sparse.
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
# The gradients in plain torch operations: the reference of the backward kernels, and the route of a double backward.
# None reads the gradient of a dropped element: it may be NaN, as after the logarithm of a probability of 0.
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
    # The norm has no gradient where eps is larger.
    grad_norm = torch.where(norm >= eps, (grad * kept).sum(dim, keepdim=True) / divisor.square(), 0.0)
    grad_x = grad / divisor - grad_norm * norm_derivative(kept, mask, norm, dim, p)
    return torch.where(mask, grad_x, 0.0).to(x.dtype)


def norm_derivative(x: Tensor, mask: Tensor, norm: Tensor, dim: list[int], p: float) -> Tensor:
    """The derivative of the p-norm by each element of x, as in torch: 0 where the norm is 0."""
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        return x.sgn()
    if math.isinf(p):
        # Split evenly among ties.
        extreme = torch.where(mask, x.abs() == norm, False)
        return x.sgn() * extreme / extreme.sum(dim, keepdim=True).clamp_min(1)
    safe = torch.where(norm == 0, 1.0, norm)
    if p == 2:
        return x / safe
    # The derivative at 0 is 0, and a negative power of 0 must not be computed.
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
    grad_x = grad - grad.sum(dim, keepdim=True) / divisor - out * ((grad * out).sum(dim, keepdim=True) / freedom)
    return torch.where(mask, grad_x * scale, 0.0).to(x.dtype)


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
#: The same as a step of another function: no log records it.
standardize_step = replace(_standardize, is_step=True)


# -- rows of `mw.apply` ------------------------------------------------------------------------------------------------
_normalize_step = replace(_normalize, is_step=True)


def _bind_normalize(
    x: Tensor, row_dims: int, p: float = 2.0, dim: int = 1, eps: float = 1e-12
) -> Callable[[Tensor, MaskLike], Tensor] | None:
    along = row_dim(dim, row_dims)
    numbers = float(p), float(eps)
    return None if along is None else lambda x, mask: _normalize_step(x, mask, along, *numbers)


def _bind_layer_norm(
    x: Tensor,
    row_dims: int,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Callable[[Tensor, MaskLike], Tensor] | None:
    shape, eps = tuple(normalized_shape), float(eps)
    fits = 0 < len(shape) <= row_dims and tuple(x.shape[-len(shape) :]) == shape
    if not fits or weight is not None or bias is not None or eps < 0:
        return None
    dims = tuple(range(-len(shape), 0))
    return lambda x, mask: standardize_step(x, mask, dims, 0.0, eps)


serve("normalize", _bind_normalize, torch.nn.functional.normalize)
serve("standardize", _bind_layer_norm, torch.nn.functional.layer_norm)
serve_module(
    torch.nn.LayerNorm,
    torch.nn.functional.layer_norm,
    lambda module: (module.normalized_shape, module.weight, module.bias, module.eps),
)
