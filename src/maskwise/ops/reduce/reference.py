"""The reductions in plain torch operations: the ground truth of the tests, and the route where no kernel serves.

Each is leak-proof, forward and backward, and differentiable by torch itself, transforms included. ``mask`` is a bool
tensor that broadcasts to x, ``dim`` a list of dims that are not negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropped", "sum"]


def dropped(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """X with ``value`` where it is dropped. Unlike a product with the mask, it lets no NaN through."""
    # A Python scalar of x's own kind: any other would make torch promote, and copy, x.
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return torch.where(mask, x, float(value))
    return torch.where(mask, x, bool(value) if x.dtype is torch.bool else int(value))


def sum(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The sum of what is kept; 0 where nothing is."""
    # torch reads an empty list of dims as "all", which for x of no dims is what is meant.
    return dropped(x, mask, 0.0).sum(dim, keepdim=keepdim)
