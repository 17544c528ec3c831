"""What kernels accumulate in, and how they read what Triton has no type for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["accumulator", "as_bytes", "triton_type"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are added up in: halves in float32, small integers in int32."""
    if dtype.is_floating_point:
        return torch.float64 if dtype is torch.float64 else torch.float32
    return torch.int64 if dtype is torch.int64 else torch.int32


def triton_type(dtype: torch.dtype) -> Any:
    """The dtype as kernels name it."""
    from maskwise.ops.gpu import triton

    return getattr(triton.tl, str(dtype).removeprefix("torch."))


def as_bytes(x: Tensor) -> Tensor:
    """A bool tensor as the bytes that it is, anything else as it is; never a copy."""
    return x.view(torch.uint8) if x.dtype is torch.bool else x
