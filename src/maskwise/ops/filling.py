"""A number in the place of what is dropped, asking no more than is needed: for fill itself, and as a step of others.

Whoever calls this has checked that the mask is bool, broadcasts to x and is on its device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from maskwise.ops.numbers import number
from maskwise.ops.operation import Operation
from maskwise.ops.register import find
from maskwise.plan.planner import forced, is_served, small

__all__ = ["filled"]


def filled(
    x: Tensor,
    bits: Tensor,  # bool, broadcasts to x
    value: float = 0.0,  # x's dtype holds it
) -> Tensor:
    """X with a number where it is dropped, the cheapest way, outside of graphs and transforms; no log hears of it.

    >>> filled(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    if x.requires_grad or not x.is_cpu:
        out: Tensor = _step()(x, bits, None, value)
        return out
    other = number(value, x.dtype, x.device)
    route = forced()
    if x.numel() <= small("fill", x.dtype, route) or not is_served("fill", x.dtype, route):
        return torch.where(bits, x, other)
    return _kernel()(x, bits, other)


# Found when they are first asked for: the family of fill asks here, too.
@lru_cache(maxsize=1)
def _step() -> Operation:
    return replace(find("fill"), is_step=True)


@lru_cache(maxsize=1)
def _kernel() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    find("fill")
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.ops.maskwise.fill_fused_forward.default
    return kernel
