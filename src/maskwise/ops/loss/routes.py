"""Which way a known loss goes down.

- ``plain``: dense, with stand-ins for what is dropped. It works everywhere, and makes no device wait.
- ``kept``: small inputs on the CPU. What is kept is gathered, and torch does the rest.
- ``pieces``: large inputs on the CPU. Piece by piece, without temporaries outside the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from maskwise.ops.loss import blocks, kept, reference
from maskwise.ops.loss.call import Call
from maskwise.plan import Plan, planner
from maskwise.plan.plan import Refusal

__all__ = ["choose"]

#: Elements of the largest operand up to which gathering pays, and from which cutting into pieces does.
SMALL, LARGE = 1 << 11, 1 << 16
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)

Run = Callable[[], Tensor]


def choose(call: Call, reduction: str) -> tuple[Plan, Run]:
    """The plan of a call outside of compiled graphs, and the call itself as a function without arguments."""
    forced = planner.forced()
    why = obstacle(call) if forced != "plain" else "forced"
    size = max(x.numel() for x in call.tensors)
    if not why and forced is None and size <= SMALL:
        if kept.serves(call, reduction):
            return _KEPT, partial(kept.loss, call, reduction)
        why = "too small for pieces"
    if not why and (forced == "kernel" or size >= LARGE):
        form = blocks.form_of(call, reduction)
        if form is not None:
            reason = "kept rows only" if form.rows else "in pieces that fit the cache"
            return Plan("loss", "pieces", reason, 0.0), partial(blocks.loss, call, form, reduction)
        why = "memory does not lie in pieces"
    plan = Plan("loss", "plain", why, 0.0, (Refusal("pieces", why),)) if why else _BETWEEN
    return plan, partial(reference.loss, call, reduction)


_KEPT = Plan("loss", "kept", "small: gathering what is kept is cheapest", 0.0)
_BETWEEN = Plan("loss", "plain", "neither small nor large", 0.0, (Refusal("pieces", "too small for pieces"),))


def obstacle(call: Call) -> str:
    """Why neither gathering nor cutting can be done; empty where they can."""
    x = call.tensors[0]
    if x.device.type != "cpu":
        return f"what is kept cannot be gathered on {x.device.type} without waiting for it"
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "torch.func transforms and forward-mode AD see through plain torch operations only"
    if torch.is_autocast_enabled("cpu"):
        return "autocast decides on dtypes inside of the loss"
    if not all(type(t) in _PLAIN_TYPES for t in call.tensors):
        return "an operand is a tensor subclass"
    return ""
