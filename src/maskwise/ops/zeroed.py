"""Zeros in the place of what is dropped, as a step of many functions."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from maskwise.ops.numbers import number
from maskwise.ops.register import find
from maskwise.plan import planner
from maskwise.plan.planner import small

__all__ = ["zeroed"]

_fill = replace(find("fill"), is_step=True)
_kernel = torch.ops.maskwise.fill_fused_forward.default


def zeroed(
    x: Tensor,  # floating
    bits: Tensor,  # bool, broadcasts to x
) -> Tensor:
    """X with 0 where it is dropped, the cheapest way, outside of graphs and transforms; no log hears of it.

    >>> zeroed(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    if not x.requires_grad and x.is_cpu:
        most = _by_torch(x.dtype)
        if x.numel() <= most:
            return torch.where(bits, x, number(0.0, x.dtype, x.device))
        if most < _ALWAYS:
            out: Tensor = _kernel(x, bits, number(0.0, x.dtype, x.device))
            return out
    filled: Tensor = _fill(x, bits, None, 0.0)
    return filled


#: More elements than any tensor has.
_ALWAYS = 1 << 62


@lru_cache(maxsize=16)
def _by_torch(dtype: torch.dtype) -> int:
    """Up to how many elements torch is quicker than the kernel; without a kernel, all of them."""
    return small("fill", dtype) if planner.has_kernel("fill", dtype, "cpu") else _ALWAYS


planner.on_forget(_by_torch.cache_clear)
