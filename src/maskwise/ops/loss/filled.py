"""The masked loss by the kernels of fill and sum, around a loss that has no kernel of its own.

What is dropped is replaced before the loss sees it; the sum then passes over what the loss made of the replacement.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from maskwise.ops.backends import why_not_served
from maskwise.ops.loss import reference
from maskwise.ops.loss.call import Call, harmless
from maskwise.ops.primitives import fill as fill_op
from maskwise.ops.reduce.sums import _sum

__all__ = ["fill", "loss", "total"]


def loss(call: Call, reduction: str) -> Tensor:
    """The loss of what is kept."""
    tensors = call.filled(fill)
    out = call.run(tensors)
    divisors = None if reduction in reference.UNDIVIDED else call.divisors(tensors)
    # Sums of halves do not fit a half; a weighted mean has more to sum up than the loss.
    wide = torch.promote_types(out.dtype, torch.float32)
    if reduction in ("none", "sequence", "batchmean") or divisors is not None or out.dtype != wide:
        return reference.reduce(fill(out, call.keep, 0.0), call.keep, reduction, divisors)
    return total(out, call.keep) / (1 if reduction == "sum" else kept_in(call).clamp(min=1))


def fill(x: Tensor, keep: Tensor, value: float) -> Tensor:
    """X with ``value`` where it is dropped: by the kernel of mw.fill, where there is one."""
    if why_not_served("fill", "cpu", x.dtype) is not None:
        return harmless(x, keep, value)
    return by_kernel("fill", x, keep, [], value)


def total(out: Tensor, keep: Tensor) -> Tensor:
    """The sum of what is kept: by the kernel of mw.sum, where there is one."""
    if why_not_served("sum", "cpu", out.dtype) is not None:
        return harmless(out, keep, 0.0).sum()
    return by_kernel("sum", out, keep, list(range(out.dim())), False)


def kept_in(call: Call) -> Tensor:
    """How many elements of the loss are kept."""
    keep = call.keep
    # torch counts bools a hundred times slower than the kernel of sum does.
    everything = torch.ones((), dtype=torch.bool)
    kept = by_kernel("sum", keep, everything, list(range(keep.dim())), False)
    repeated = prod(call.shape) // max(keep.numel(), 1)
    return kept if repeated == 1 else kept * repeated


def by_kernel(name: str, x: Tensor, *rest: object) -> Tensor:
    """Run the kernel of an op, with its gradient if one is asked for."""
    op = fill_op if name == "fill" else _sum
    run = op.route("fused" if x.requires_grad and torch.is_grad_enabled() else "bare")
    out: Tensor = run(x, *rest)
    return out
