"""Softmax and normalization in plain torch operations: the ground truth of the tests, and the fallback.

Each is leak-proof, forward and backward, and differentiable by torch itself, transforms included: dropped elements are
replaced before anything is computed, and the result is replaced again where they were dropped, so that no NaN of an
empty slice reaches the gradient. ``mask`` is a bool tensor that broadcasts to x, ``dim`` a list of non-negative dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["log_softmax", "normalize", "softmax", "softmin", "standardize"]


def softmax(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The softmax of kept elements; 0 where dropped."""
    return torch.where(mask, torch.softmax(torch.where(mask, x, -math.inf), dim[0]), 0.0)


def softmin(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The softmax of -x."""
    return softmax(-x, mask, dim)


def log_softmax(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The logarithm of the softmax; -inf where dropped."""
    return torch.where(mask, torch.log_softmax(torch.where(mask, x, -math.inf), dim[0]), -math.inf)


def normalize(x: Tensor, mask: Tensor, dim: list[int], p: float, eps: float) -> Tensor:
    """Kept elements divided by the larger of their p-norm and eps; 0 where dropped."""
    kept = torch.where(mask, x, 0.0)
    # torch has no inf-norm of an empty tensor.
    if math.isinf(p) and x.numel() == 0:
        return kept
    # The fill value must not change the norm: 0, or inf for a negative p.
    counted = torch.where(mask, x, math.inf) if p < 0 else kept
    # Squares of half precision overflow.
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(counted, p, dim if x.dim() else None, keepdim=True, dtype=wide)
    return torch.where(mask, (kept / norm.clamp_min(eps)).to(x.dtype), 0.0)


def standardize(x: Tensor, mask: Tensor, dim: list[int], correction: float, eps: float) -> Tensor:
    """Kept elements minus their mean, divided by sqrt(variance + eps); 0 where dropped."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    kept = mask.expand(x.shape)
    count = kept.sum(dim, keepdim=True, dtype=wide.dtype)
    # An empty slice divides by 1, so that it gives zeros, and no NaN in the gradient.
    some = count > 0
    total = torch.where(mask, wide, 0.0).sum(dim, keepdim=True, dtype=mean_dtype(x))
    mean = (total / torch.where(some, count, 1.0)).to(wide.dtype)
    centered = torch.where(mask, wide - mean, 0.0)
    freedom = torch.where(some, (count - correction).clamp_min(0.0), 1.0)
    variance = centered.square().sum(dim, keepdim=True) / freedom
    return torch.where(mask, (centered * (variance + eps).rsqrt()).to(x.dtype), 0.0)


def mean_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a mean accumulates: equal values must equal their mean, or 1 / eps amplifies the rounding."""
    return torch.float32 if x.device.type == "mps" else torch.float64
