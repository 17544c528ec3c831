"""The gradients of softmax and friends in plain torch operations.

They are what the kernels of the backward pass are measured against, and what runs where a gradient is itself
differentiated. Each takes the gradient of the result and what the forward pass remembers, and never looks at a gradient
of what is dropped: it may be NaN, as it is behind the logarithm of a probability that is 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from maskwise.ops.softmax.reference import accumulator

__all__ = ["log_softmax", "normalize", "softmax", "standardize"]


def softmax(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int], negate: bool) -> Tensor:
    """The gradient of softmax, or of softmin if ``negate``, from its result."""
    grad = torch.where(mask, grad, 0.0)
    wide = torch.promote_types(out.dtype, torch.float32)
    dot = (grad.to(wide) * out).sum(dim, keepdim=True)
    slope = out * (grad - dot)
    return torch.where(mask, -slope if negate else slope, 0.0).to(out.dtype)


def log_softmax(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The gradient of log_softmax from its result."""
    grad = torch.where(mask, grad, 0.0)
    wide = torch.promote_types(out.dtype, torch.float32)
    total = grad.sum(dim, keepdim=True, dtype=wide)
    # A dropped log-probability is -inf, of which the exponential is 0, and so is that one's own gradient.
    return torch.where(mask, grad - torch.exp(out.to(wide)) * total, 0.0).to(out.dtype)


def normalize(grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], p: float, eps: float) -> Tensor:
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


def standardize(grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], correction: float, eps: float) -> Tensor:
    """The gradient of standardize from its input."""
    wide = torch.promote_types(x.dtype, torch.float32)
    grad = torch.where(mask, grad, 0.0).to(wide)
    count = mask.expand(x.shape).sum(dim, keepdim=True, dtype=wide)
    some = count > 0
    divisor = torch.where(some, count, 1.0)
    freedom = torch.where(some, (count - correction).clamp_min(0.0), 1.0)
    total = torch.where(mask, x.to(wide), 0.0).sum(dim, keepdim=True, dtype=accumulator(x))
    mean = (total / divisor).to(wide)
    centered = torch.where(mask, x.to(wide) - mean, 0.0)
    scale = (centered.square().sum(dim, keepdim=True) / freedom + eps).rsqrt()
    out = centered * scale
    slope = grad - grad.sum(dim, keepdim=True) / divisor - out * ((grad * out).sum(dim, keepdim=True) / freedom)
    return torch.where(mask, slope * scale, 0.0).to(x.dtype)
