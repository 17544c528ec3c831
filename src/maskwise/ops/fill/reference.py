"""Filling in plain torch operations: the ground truth of the tests, and the route where no kernel serves.

It is leak-proof, forward and backward, and differentiable by torch itself, transforms included.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fill"]


def fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """X where it is kept, ``value`` (of x's dtype, broadcasting to x) where it is dropped."""
    return torch.where(mask, x, value)
