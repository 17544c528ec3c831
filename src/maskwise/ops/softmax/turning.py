"""Few long slices that lie side by side are turned first, so that each lies in one piece.

Kernels walk slices side by side with a slice in each lane of a vector. With fewer slices than fill a few vectors, each
step is a short one, and to turn x costs less than to walk it like that twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.operation import Operation
from maskwise.ops.register import find

__all__ = ["in_rows", "turning"]

#: Slices side by side that are few, and too few to be turned by the kernel of fill; elements that make a slice long.
_FEW, _TOO_FEW, _LONG = 16, 8, 4096


def turning(op: Operation) -> Operation:
    """The operation with a kernel that gets few long slices in rows."""
    kernel = op.bare

    def bare(x: Tensor, mask: Tensor, dims: list[int], *rest: Any) -> Any:
        return kernel(x if x.is_contiguous() else in_rows(x, dims), mask, dims, *rest)

    return replace(op, bare=bare)


def in_rows(x: Tensor, dims: list[int]) -> Tensor:
    """X as it is, or contiguous where it has few long slices along the last dim, which lie side by side.

    >>> few, many = torch.zeros(5000, 3).T, torch.zeros(5000, 300).T
    >>> in_rows(few, [1]).is_contiguous(), in_rows(many, [1]) is many
    (True, True)
    """
    last = x.dim() - 1
    if dims != [last] or not x.is_cpu or x.shape[last] < _LONG or x.stride(last) == 1:
        return x
    side = next((d for d in range(last) if x.stride(d) == 1 and x.shape[d] > 1), None)
    if side is None or x.shape[side] > _FEW:
        return x
    return x.contiguous() if x.shape[side] < _TOO_FEW else _turned(x)


def _turned(x: Tensor) -> Tensor:
    """A contiguous copy: nothing filled with x, which the kernel of fill turns tile by tile, on all threads."""
    find("fill")
    kernel: Callable[..., Tensor] = torch.ops.maskwise.fill_fused_forward.default
    nothing, dropped = x.new_zeros(()).expand(x.shape), torch.zeros((), dtype=torch.bool)
    return kernel(nothing, dropped, x)
