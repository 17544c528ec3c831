"""Softmax and friends in plain torch operations: the ground truth of the tests, and the route where no kernel serves.

Each is leak-proof, forward and backward, and differentiable by torch itself, transforms included: what is dropped is
replaced before anything is computed of it, and the result is replaced again where it was dropped, so that no NaN of an
empty slice goes back through the gradient. ``mask`` is a bool tensor that broadcasts to x, ``dim`` a list of dims that
are not negative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["log_softmax", "normalize", "softmax", "softmin", "standardize"]


def softmax(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The softmax of what is kept; 0 where dropped."""
    return torch.where(mask, torch.softmax(torch.where(mask, x, -math.inf), dim[0]), 0.0)


def softmin(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The softmax of -x."""
    return softmax(-x, mask, dim)


def log_softmax(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The logarithm of the softmax; -inf where dropped."""
    return torch.where(mask, torch.log_softmax(torch.where(mask, x, -math.inf), dim[0]), -math.inf)


def normalize(x: Tensor, mask: Tensor, dim: list[int], p: float, eps: float) -> Tensor:
    """What is kept, divided by its p-norm or by eps, whichever is larger; 0 where dropped."""
    kept = torch.where(mask, x, 0.0)
    # torch has no largest magnitude of no elements at all.
    if math.isinf(p) and x.numel() == 0:
        return kept
    # A dropped value must not count: 0 adds nothing to a norm, except where small values count most.
    counted = torch.where(mask, x, math.inf) if p < 0 else kept
    # Half precision squares overflow soon; float64 stays float64.
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(counted, p, dim if x.dim() else None, keepdim=True, dtype=wide)
    return torch.where(mask, (kept / norm.clamp_min(eps)).to(x.dtype), 0.0)


def standardize(x: Tensor, mask: Tensor, dim: list[int], correction: float, eps: float) -> Tensor:
    """What is kept, less its mean, divided by sqrt(its variance + eps); 0 where dropped."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    kept = mask.expand(x.shape)
    count = kept.sum(dim, keepdim=True, dtype=wide.dtype)
    # An empty slice divides by 1: it gives zeros, and no NaN that would have to be kept out of the gradient.
    some = count > 0
    total = torch.where(mask, wide, 0.0).sum(dim, keepdim=True, dtype=mean_dtype(x))
    mean = (total / torch.where(some, count, 1.0)).to(wide.dtype)
    centered = torch.where(mask, wide - mean, 0.0)
    freedom = torch.where(some, (count - correction).clamp_min(0.0), 1.0)
    variance = centered.square().sum(dim, keepdim=True) / freedom
    return torch.where(mask, (centered * (variance + eps).rsqrt()).to(x.dtype), 0.0)


def mean_dtype(x: Tensor) -> torch.dtype:
    """What a mean is added up in: values that are all equal must equal their mean, or eps blows up their noise."""
    return torch.float32 if x.device.type == "mps" else torch.float64
