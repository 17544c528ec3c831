"""What the normalizing layers share: the precision that they compute in, and their weight and bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.ops.fill import fill

__all__ = ["scaled", "wide"]


def wide(x: Tensor) -> Tensor:
    """Half precision as float32: torch's layers compute in it as well, and round once at the end."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scaled(
    self: Any,  # a layer with a weight and a bias, either of which may be None
    normalized: Tensor,  # (N, C, *places), 0 where dropped
    bits: Tensor,
) -> Tensor:
    """The layer's weight and bias, one of each for a channel, and 0 again where dropped."""
    if self.weight is None:
        return normalized
    shape = (-1, *[1] * (normalized.dim() - 2))
    weight = self.weight.to(normalized.dtype).reshape(shape)
    if self.bias is None:
        return fill(normalized * weight, bits, 0.0)
    return fill(torch.addcmul(self.bias.to(normalized.dtype).reshape(shape), normalized, weight), bits, 0.0)
