"""What is known of the masks that `mw.linear` was called with: layouts, and the calls whose way is settled."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.linear.layouts import SparseLayout
from maskwise.ops.linear.routes import Extra, Sizes, build_cost, choose, dense_cost, sparse_cost
from maskwise.plan import Plan, planner
from maskwise.plan.dispatch import Refusal

__all__ = ["OP", "Settled", "mask_of", "plan_for", "settled"]

OP = "linear"
#: Ways that are remembered with one mask.
_WAYS_KEPT = 64


@dataclass
class Known:
    """What was made of a mask, what would have been saved if more had been, and the calls whose way is settled."""

    layout: SparseLayout | None = None
    forgone: float = 0.0
    ways: dict[tuple[Any, ...], SparseLayout | None] = field(default_factory=dict)


class Settled(NamedTuple):
    """A call that was made before: its mask, and the layout of the sparse product, or None for the dense one."""

    mask: Mask
    layout: SparseLayout | None


# By identity and weakly: a tensor that nobody holds any more takes its mask along.
_masks: MutableMapping[Tensor, tuple[int, Mask]] = WeakIdKeyDictionary()


def mask_of(mask: MaskLike) -> Mask:
    """The mask as one that remembers; a tensor's is found again as long as the tensor lives unchanged."""
    found = mask if isinstance(mask, Mask) else _found(mask)
    if found is not None:
        return found
    assert isinstance(mask, Tensor)
    # A Mask that held the tensor itself would keep it alive, and its entry with it.
    made = Mask(mask.detach())
    if not mask.is_inference():
        _masks[mask] = (mask._version, made)
    return made


def _found(mask: Tensor) -> Mask | None:
    version, found = _masks.get(mask, (None, None))
    return None if found is None or version != mask._version else found


def settled(x: Tensor, weight: Tensor, mask: MaskLike, bias: Tensor | None) -> Settled | None:
    """What is settled of a call that was checked and planned before with the same mask and sizes; else None."""
    found = mask if isinstance(mask, Mask) else _found(mask) if isinstance(mask, Tensor) else None
    known = None if found is None else found._cache.get(OP)
    if found is None or known is None:
        return None
    ways = known[0].ways
    try:
        facts = _facts(x, weight, bias)
    except AttributeError:
        return None
    return Settled(found, ways[facts]) if facts in ways else None


def _facts(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...] | None:
    """All that the checks look at beside the mask, and since when; None where this is no plain call on the CPU."""
    if not (x.is_cpu and weight.is_cpu and (bias is None or bias.is_cpu)) or torch.is_autocast_enabled("cpu"):
        return None
    told = None if bias is None else (bias.shape, bias.dtype)
    return (x.shape, x.dtype, x.is_contiguous(), weight.shape, weight.dtype, told, planner.era(), planner.forced())


def plan_for(
    x: Tensor, weight: Tensor, mask: Mask, bias: Tensor | None, *, transformed: bool
) -> tuple[Plan, SparseLayout | None]:
    """The plan of a call that was checked, and the layout where it is the sparse one."""
    outputs, inputs = weight.shape
    batch, contiguous = x.numel() // max(inputs, 1), x.is_contiguous()
    nothing = Sizes(batch, inputs, outputs, 0)
    dense, least = Extra.of(nothing, contiguous=contiguous)
    if not transformed and planner.forced() is None and sparse_cost(nothing) + least >= dense_cost(nothing) + dense:
        # Nothing is counted where nothing could come of it.
        reason = "too small a product for a kernel to pay"
        plan = Plan(OP, "plain", reason, dense_cost(nothing) + dense, (Refusal("sparse", reason),))
        return _settle(x, weight, mask, bias, plan, None)
    sizes = nothing._replace(kept=inputs * outputs if transformed else mask.count())
    extra = Extra.of(sizes, contiguous=contiguous)
    plan = choose(OP, sizes, x.dtype, x.device.type, transformed=transformed, extra=extra)
    if transformed:
        return plan, None
    if plan.route == "plain":
        return _settle(x, weight, mask, bias, plan, None)
    known = mask._once(OP, Known)
    if known.layout is None:
        # A layout is made when what it would have saved so far pays for it: whoever calls once does not pay.
        full, cost = dense_cost(sizes) + extra.dense, build_cost(sizes)
        known.forgone += full - plan.microseconds
        if known.forgone < cost and planner.forced() is None:
            reason = f"a layout would cost {cost:.0f} µs, and has been worth {known.forgone:.0f} µs so far"
            return Plan(OP, "plain", reason, full, (Refusal("sparse", reason),), plan.dense, plan.dense), None
        known.layout = SparseLayout.from_mask(mask.to_bool())
    return _settle(x, weight, mask, bias, plan, known.layout)


def _settle(
    x: Tensor, weight: Tensor, mask: Mask, bias: Tensor | None, plan: Plan, layout: SparseLayout | None
) -> tuple[Plan, SparseLayout | None]:
    """Remember with the mask which way this call goes from here on."""
    facts = _facts(x, weight, bias)
    if facts is not None:
        ways = mask._once(OP, Known).ways
        if len(ways) >= _WAYS_KEPT:
            ways.clear()
        ways[facts] = layout
    return plan, layout
