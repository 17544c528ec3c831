"""The masked loss in plain torch operations: the ground truth of the tests, and the route that works everywhere.

What is dropped is replaced before the loss sees it, and what the loss makes of the replacement is replaced by 0: so
nothing comes through in either direction, whatever the loss does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from maskwise.ops.loss.call import Call, harmless

__all__ = ["UNDIVIDED", "loss", "reduce", "scales"]

UNDIVIDED = ("none", "sum", "batchmean")
"""The reductions in which no weight of an element or a class divides."""


def loss(call: Call, reduction: str) -> Tensor:
    """The loss of what is kept."""
    tensors = call.filled()
    out = harmless(call.run(tensors), call.keep, 0.0)
    divisors = None if reduction in UNDIVIDED else call.divisors(tensors)
    return reduce(out, call.keep, reduction, divisors)


def reduce(
    out: Tensor,  # (...), 0 where dropped
    keep: Tensor,  # bool, broadcasts to out
    reduction: str,
    divisors: Tensor | None = None,  # like out: by what each element counts in a mean
) -> Tensor:
    """The unreduced loss, reduced. Where nothing is kept it is 0, and so is its gradient."""
    if reduction == "none":
        return out
    if reduction == "sum":
        return out.sum()
    # Sums of many halves do not fit a half, their means do.
    wide = torch.promote_types(out.dtype, torch.float32)
    if reduction == "batchmean":
        return (out.sum(dtype=wide) / kept_rows(keep, out.shape).clamp(min=1)).to(out.dtype)
    counts = counted(keep, out.shape, divisors, rows=reduction == "sequence")
    if reduction == "sequence":
        sums = out.sum(row_dims(out.shape), dtype=wide) if out.dim() > 1 else out.to(wide)
        result = (sums / counts.where(counts != 0, 1)).sum() / (counts != 0).sum().clamp(min=1)
    else:
        result = out.sum(dtype=wide) / counts.where(counts != 0, 1)
    return result.to(out.dtype) if out.is_floating_point() else result


def counted(keep: Tensor, shape: Sequence[int], divisors: Tensor | None, rows: bool) -> Tensor:
    """How many are kept, or how much they weigh: in all, or in each row."""
    if divisors is not None:
        held = torch.where(keep, divisors, 0.0)
    elif rows:
        held = keep.expand(shape)
    else:
        return keep.sum() * (prod(shape) // max(keep.numel(), 1))
    if rows:
        return held.sum(row_dims(shape)) if len(shape) > 1 else held.to(torch.promote_types(held.dtype, torch.uint8))
    return held.sum()


def kept_rows(keep: Tensor, shape: Sequence[int]) -> Tensor:
    """How many rows, which are the indices of dim 0, keep something."""
    keep = keep.reshape((1,) * (len(shape) - keep.dim()) + tuple(keep.shape))
    rows = keep.reshape(keep.shape[0], -1).any(1) if keep.dim() else keep.reshape(1)
    # A mask that all rows share is looked at once.
    return rows.sum() * (shape[0] if shape and keep.shape[0] == 1 else 1)


def row_dims(shape: Sequence[int]) -> tuple[int, ...]:
    """The dims within a row: all but the first."""
    return tuple(range(1, len(shape)))


def scales(call: Call, reduction: str, divisors: Tensor | None) -> Tensor:
    """By what each element of the loss enters the result: one number, or for "sequence" one for each row, (N,)."""
    one = torch.ones((), dtype=torch.float64, device=call.keep.device)
    if reduction in ("none", "sum"):
        return one
    if reduction == "batchmean":
        return one / kept_rows(call.keep, call.shape).clamp(min=1)
    counts = counted(call.keep, call.shape, divisors, rows=reduction == "sequence")
    each = one / counts.where(counts != 0, 1)
    if reduction == "mean":
        return each
    return torch.where(counts != 0, each, 0.0) / (counts != 0).sum().clamp(min=1)
