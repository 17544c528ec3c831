"""Which way a known loss goes down, if it is none of the `maskwise.ops.loss.quick` ones.

- ``plain``: dense, with stand-ins for what is dropped. It works everywhere, and makes no device wait.
- ``filled``: the same by the kernels of fill and sum, on the CPU.
- ``pieces``: large inputs on the CPU. Piece by piece, without temporaries outside the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from maskwise.ops.loss import blocks, filled, reference
from maskwise.ops.loss.call import Call
from maskwise.ops.torch_private import is_transformed
from maskwise.plan import Plan, planner
from maskwise.plan.dispatch import Refusal, Skips

__all__ = ["choose"]

#: Elements of the largest operand from which cutting into pieces pays: where rows that are dropped are left out, and
#: where the pieces only save temporaries.
LARGE_ROWS, LARGE_CELLS = 1 << 15, 1 << 23
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def choose(call: Call, reduction: str) -> tuple[Plan, Callable[[], Tensor]]:
    """The plan of a call outside of compiled graphs, and the call itself as a function without arguments."""
    why = obstacle(call)
    if why:
        refused = (Refusal("filled", why), Refusal("pieces", why))
        return Plan("loss", "plain", why, 0.0, refused), partial(reference.loss, call, reduction)
    form, why = None, "too small for pieces"
    elements = max(t.numel() for t in call.tensors)
    least = {None: LARGE_ROWS, "filled": 1 << 62}.get(planner.forced(), 0)
    if elements >= least:
        form = blocks.form_of(call, reduction)
        why = "memory does not lie in pieces" if form is None else why
    if form is not None and (form.rows or not least or elements >= LARGE_CELLS):
        reason = "kept rows only" if form.rows else "in pieces that fit the cache"
        slower = (Refusal("filled", "its temporaries would not fit the cache"),)
        skips = Skips.READING if form.rows else Skips.NOTHING
        return Plan("loss", "pieces", reason, 0.0, slower, skips=skips), partial(blocks.loss, call, form, reduction)
    return Plan("loss", "filled", why, 0.0, (Refusal("pieces", why),)), partial(filled.loss, call, reduction)


def obstacle(call: Call) -> str:
    """Why the kernels cannot serve the call; empty where they can."""
    x, forced = call.tensors[0], planner.forced()
    if forced == "plain":
        return "forced"
    if x.device.type != "cpu":
        return f"what is kept cannot be gathered on {x.device.type} without waiting for it"
    if is_transformed():
        return "torch.func transforms and forward-mode AD see through plain torch operations only"
    if torch.is_autocast_enabled("cpu"):
        return "autocast decides on dtypes inside of the loss"
    if not all(type(t) in _PLAIN_TYPES for t in call.tensors):
        return "an operand is a tensor subclass"
    if any(isinstance(value, Tensor) and value.device != x.device for value in (*call.tensors, call.keep)):
        return "tensors are on several devices"
    return ""
