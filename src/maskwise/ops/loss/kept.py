"""The masked loss for small inputs on the CPU: gather what is kept, and leave the rest to torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from maskwise.ops.loss.call import Call

__all__ = ["loss", "serves"]


def serves(call: Call, reduction: str) -> bool:
    """Whether torch's own reduction of what is kept, put side by side, is the masked loss."""
    if reduction not in ("mean", "sum") or None in call.fills:
        return False
    # A mean that divides by weights must not divide by their sum if that is 0.
    if "weight" in call.rest or "weight" in call.names or call.shared_dims:
        return False
    return call.kind.lines_up == "elements" or len(call.shape) == 1


def loss(call: Call, reduction: str) -> Tensor:
    """The loss of what is kept."""
    if call.kind.lines_up == "elements":
        tensors = [x.masked_select(call.keep) for x in call.tensors]
    else:
        index = call.keep.expand(call.shape).nonzero().squeeze(1)
        tensors = [x.index_select(0, index) for x in call.tensors]
    n = tensors[0].shape[0]
    if n == 0:
        # The sum of nothing is a zero that belongs to the graph.
        return sum((x.sum() for x in tensors[1:] if x.is_floating_point()), tensors[0].sum())
    if reduction == "mean" and call.fn is F.kl_div:
        # torch warns that this mean is one.
        return call.run(tensors, "sum") / n
    return call.run(tensors, reduction)
