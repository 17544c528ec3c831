"""What is known of an attention call from static facts alone, remembered: checks would cost a tiny call its work."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention.arguments import KEYS, Index, lowers, recipe_for
from maskwise.ops.attention.pieces import Sizes
from maskwise.ops.attention.routes import plan_unseen
from maskwise.plan import Plan, planner
from maskwise.plan.remembered import Remembered

__all__ = ["Recipe", "remembered"]


class Recipe(NamedTuple):
    """A call that was checked: how its mask lines up, and its plan where that needs no look at the mask."""

    sizes: Sizes
    #: The index that gives the mask four dims.
    lifting: Index
    #: Whether the mask is (B, keys).
    is_of_keys: bool
    #: What the scores are multiplied by unless the caller says.
    scale: float
    #: Whether autocast lowers the dtype, and whether a gradient is asked for.
    is_lowered: bool
    grad: bool
    plan: Plan | None


_recipes: Remembered[Recipe] = Remembered()

# Bound here, because to find them anew takes a tiny call longer than to ask them.
_is_grad_enabled, _transform = torch.is_grad_enabled, torch._C._functorch.peek_interpreter_stack


def remembered(q: Any, k: Any, v: Any, mask: MaskLike | None, is_causal: bool, dropout_p: float) -> Recipe:
    """The recipe of this call: from the cache, or checked and planned now."""
    try:
        device = q.device
        lower = torch.get_autocast_dtype(device.type) if lowers(device.type) else None
        grad = (q.requires_grad or k.requires_grad or v.requires_grad) and _is_grad_enabled()
        transformed = _transform() is not None or forward_ad._current_level >= 0
        of_mask = None if mask is None else (mask.shape, mask.dtype, mask.device, type(mask) is Mask)
        # fmt: off
        facts = (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, device, k.device, v.device, of_mask, lower, grad,
            transformed, is_causal, dropout_p > 0.0, planner.forced(),
        )
        # fmt: on
        found = _recipes.get(facts)
    except (AttributeError, TypeError):
        # Not tensors, which the checks say in full.
        recipe_for(q, k, v, mask)
        raise
    if found is not None:
        return found
    sizes, index = recipe_for(q, k, v, mask)
    dtype = q.dtype if lower is None or q.dtype is torch.float64 else lower
    plan = plan_unseen(q, k, v, mask, dtype, is_causal, dropout_p, sizes, grad=grad, transformed=transformed)
    scale = 1 / math.sqrt(max(q.shape[-1], 1))
    found = _recipes[facts] = Recipe(sizes, index, index == KEYS, scale, lower is not None, grad, plan)
    return found
