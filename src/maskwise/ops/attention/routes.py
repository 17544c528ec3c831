"""Which way an attention call goes, from static facts, and from the mask where it lies on the host.

``bare``: our own CPU kernel, without autograd around it; it packs the keys that are kept, and reads no others.
``whole``: one call of torch's SDPA with a mask. ``blocks``: its CPU kernel, piece by piece, for what is kept only.
``sdpa``: SDPA on inputs that are zero where masked out, for devices that must not be
waited for. ``sequences``: packed tokens, see `maskwise.ops.attention.packed`. ``plain``: the reference.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention.arguments import Index, lift
from maskwise.ops.attention.blocks import Piece, serves
from maskwise.ops.attention.pieces import Sizes, bits_of, pieces_of
from maskwise.ops.backends import why_not_served
from maskwise.plan import Plan, planner
from maskwise.plan.cost import Work, microseconds
from maskwise.plan.dispatch import Refusal, Skips
from maskwise.plan.explain import record

__all__ = ["Call", "bits_from", "choose", "plan_unseen", "report", "work_of"]


class Call(NamedTuple):
    """How the mask of a call lines up with its pairs."""

    #: The index that gives the mask four dims.
    lifting: Index
    is_causal: bool
    sizes: Sizes


OP = "attention"
#: How many torch calls a call of torch's kernel is worth, with what is made ready for it.
_CALLS = 8
#: Up to as many, nothing that could be skipped pays for looking at the mask: at a Mask, which remembers what was seen,
#: and at a bool tensor, which is looked at for every call.
_SMALL_CALLS, _SMALL_CALLS_OF_BITS = 20, 100
#: Our kernel packs keys, which that few queries do not pay for where there is much to pack: so many numbers.
_FEW_QUERIES, _MUCH_TO_PACK = 16, 1 << 18

_SMALL_REASON = "too small for blocks to pay"
_SMALL_PLAN = Plan(OP, "whole", _SMALL_REASON, 0.0, (Refusal("blocks", _SMALL_REASON),))
_TRANSFORMED = "torch.func transforms and forward-mode AD see through plain torch operations only"
_OURS = ("kernel", "bare", "fused")


def plan_unseen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    dtype: torch.dtype,
    is_causal: bool,
    dropout_p: float,
    sizes: Sizes,
    *,
    grad: bool,
    transformed: bool,
) -> Plan | None:
    """The plan from static facts, ``dtype`` being what autocast makes of q's; None where the mask must be looked at."""
    forced, device = _forced(), q.device.type
    if forced == "plain":
        return Plan(OP, "plain", "forced", 0.0, (Refusal("blocks", "another is forced"),))
    if transformed:
        return Plan(OP, "plain", _TRANSFORMED, 0.0, (Refusal("blocks", _TRANSFORMED),))
    if device != "cpu":
        why = f"the blocks are for the CPU, not for {device}"
        return Plan(OP, "sdpa", why, 0.0, (Refusal("blocks", why),))
    features = q.shape[-1]
    in_one = _in_one(sizes, features)
    small = _SMALL_CALLS if isinstance(mask, Mask) or mask is None else _SMALL_CALLS_OF_BITS
    is_small = forced is None and in_one < small * planner.rates_for("cpu").plain_call
    why = _why_not_bare(dtype, dropout_p, mask is not None or is_causal, grad)
    if why or forced not in (None, *_OURS):
        return _SMALL_PLAN if is_small else None
    reason = "forced"
    if forced is None:
        if sizes.queries < _FEW_QUERIES and prod(k.shape) > _MUCH_TO_PACK:
            return None
        # A mask that knows of pairs may tell of blocks that are all dropped, without its bits being made.
        if isinstance(mask, Mask) and mask.ndim > 1 and not _is_of_keys(mask, sizes) and not is_small:
            return None
        reason = "the kernel reads only what is kept"
    work = work_of(1, prod(sizes), features)
    cost = microseconds(replace(work, calls=1), planner.rates_for("cpu").bare_call, planner.rates_for("cpu"))
    refused = tuple(Refusal(route, reason) for route in ("whole", "blocks"))
    return Plan(OP, "bare", reason, cost, refused, replace(work, calls=1), work)


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    index: Index,
    is_causal: bool,
    dropout_p: float,
    sizes: Sizes,
    *,
    grad: bool,
) -> tuple[Plan, list[Piece]]:
    """The plan of a call on the CPU that needs a look at the mask, and the pieces of the routes that have such."""
    rates, features, forced = planner.rates_for("cpu"), q.shape[-1], _forced()
    in_one = _in_one(sizes, features)
    whole = work_of(1, prod(sizes), features)
    ok, why = serves(q, k, v)
    if ok and dropout_p > 0.0:
        ok, why = False, "the CPU kernel has no dropout"
    if ok and mask is None and not is_causal:
        ok, why = False, "nothing is dropped"
    if ok and forced == "whole":
        ok, why = False, "another is forced"
    if not ok:
        return Plan(OP, "whole", why, in_one, (Refusal("blocks", why),), whole, whole), []
    pieces = _remembered(mask, index, is_causal, sizes)
    pairs = sum(map(_pairs, pieces)) * sizes.heads
    works = {
        "whole": whole,
        "blocks": work_of(
            len(pieces), pairs, features, gathered=sum(map(_picked, pieces)) * k.shape[1] * k.element_size()
        ),
    }
    costs = {"whole": in_one, "blocks": microseconds(works["blocks"], rates.plain_call, rates)}
    few = sizes.queries < _FEW_QUERIES
    if not few and not _why_not_bare(q.dtype, dropout_p, mask is not None or is_causal, grad):
        # It skips the same blocks, and reads the bits of every head to find them.
        works["bare"] = Work(calls=1, streamed=prod(sizes), attention_flops=4 * pairs * features)
        costs["bare"] = microseconds(works["bare"], rates.bare_call, rates)
        del costs["whole"]
    best = forced if forced in costs else min(costs, key=lambda route: costs[route])
    if forced in _OURS and best != "bare":
        best = "blocks"
    count = f"{len(pieces)} block{'s' if len(pieces) != 1 else ''}"
    told = {
        "whole": f"{count} would skip too little",
        "blocks": f"{count} {'holds' if len(pieces) == 1 else 'hold'} {pairs:,} of {prod(sizes):,} pairs",
        "bare": "the kernel reads only what is kept",
    }
    refused = tuple(
        Refusal(route, f"predicted {cost:.0f} µs against {costs[best]:.0f} µs")
        for route, cost in costs.items()
        if route != best
    )
    return Plan(OP, best, told[best], costs[best], refused, works[best], whole), pieces if best == "blocks" else []


#: Queries of our kernel that meet a block of keys together: kRowBlock of csrc/attention.h.
_ROW_BLOCK = 24


def report(plan: Plan, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, lined_up: Call) -> Plan | None:
    """Report a call to those who listen, with the pairs that its route leaves out: nobody else counts."""
    index, is_causal, sizes = lined_up
    # What attention is made of is pairs of a query and a key, so those are the elements.
    pairs, features = q.new_empty(()).expand(sizes), q.shape[-1]
    skipped, skipped_bytes = 0, 0
    if plan.route == "bare":
        kept = bits_of(bits_from(mask, index, sizes), is_causal, sizes)
        if kept is not None:
            skipped, unread = _left_out(kept.expand(sizes), is_causal)
            skipped_bytes = unread * k.shape[1] * (k.shape[-1] + v.shape[-1]) * k.element_size()
        reason = f"{plan.reason}: {prod(sizes) - skipped:,} of {prod(sizes):,} pairs are computed"
        plan = replace(plan, skips=Skips.READING, reason=reason)
    elif plan.route == "blocks" and plan.work is not None:
        # Blocks are scored as a whole, dropped pairs inside of them too.
        skipped = prod(sizes) - plan.work.attention_flops // max(4 * features, 1)
        plan = replace(plan, skips=Skips.COMPUTING)
    plan = replace(plan, flops=4 * features)
    of_pairs = mask[index] if isinstance(mask, Mask) else mask
    return record(plan, pairs, of_pairs, skipped=skipped, skipped_bytes=skipped_bytes)


def _left_out(
    kept: Tensor,  # bool, (B, H, Lq, Lk)
    is_causal: bool,
) -> tuple[int, int]:
    """The pairs that our kernel is sure not to score, and the keys of all batch entries that it does not read.

    It packs the keys that some query of a head keeps, and scores all of them with every query; where it is causal, up
    to the last query of a block of rows.
    """
    packed = kept.any(-2, keepdim=True)  # (B, H, 1, Lk)
    scored = packed.expand(kept.shape)
    if is_causal:
        queries, keys = (torch.arange(size, device=kept.device) for size in kept.shape[-2:])
        scored = scored & (keys < queries[:, None] + _ROW_BLOCK)
    return kept.numel() - int(scored.sum()), int((~packed.any(1)).sum())


def _forced() -> str | None:
    """The route that is asked for, unless it is one of another family."""
    forced = planner.forced()
    return forced if forced in ("plain", "whole", "blocks", *_OURS) else None


def _in_one(sizes: Sizes, features: int) -> float:
    """What one call of SDPA takes, in microseconds."""
    rates = planner.rates_for("cpu")
    return _CALLS * rates.plain_call + 4 * prod(sizes) * features / rates.attention_flops


def _why_not_bare(dtype: torch.dtype, dropout_p: float, drops: bool, grad: bool) -> str:
    """Why our own kernel does not serve; empty where it does."""
    if not drops:
        return "nothing is dropped"
    if grad:
        return "the kernel has no gradient"
    if dropout_p > 0.0:
        return "the kernel has no dropout"
    return why_not_served(OP, "cpu", dtype) or ""


def _is_of_keys(mask: Mask, sizes: Sizes) -> bool:
    """Whether all queries of a head keep the same keys."""
    if mask.ndim == 2 and tuple(mask.shape) == (sizes.batch, sizes.keys):
        return True
    return mask.shape[-2] == 1


def work_of(calls: int, pairs: int, features: int, gathered: int = 0) -> Work:
    """What it is to score so many pairs of a query and a key, and to add up the values: two products.

    ``gathered`` keys and values, in bytes for each feature, are moved together first: each is read and written.
    """
    return Work(calls=calls * _CALLS, attention_flops=4 * pairs * features, gathered=4 * gathered * features)


def bits_from(mask: MaskLike | None, index: Index, sizes: Sizes) -> Tensor | None:
    """The bool tensor of four dims. A mask remembers its own, so that is asked and not a view of the mask."""
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    return None if bits is None else lift(bits, index, sizes)


def _remembered(mask: MaskLike | None, index: Index, is_causal: bool, sizes: Sizes) -> list[Piece]:
    """The pieces, which a mask remembers: every layer of a model asks it the same."""
    if not isinstance(mask, Mask):
        return pieces_of(None if mask is None else lift(mask, index, sizes), is_causal, sizes)
    name = f"attention {index} {is_causal} {tuple(sizes)}"
    return mask._once(name, lambda: pieces_of(lift(mask, index, sizes), is_causal, sizes))


def _picked(piece: Piece) -> int:
    """How many keys a head has to move together, because they do not lie side by side."""
    return (piece.batch[1] - piece.batch[0]) * piece.keys.shape[0] if isinstance(piece.keys, Tensor) else 0


def _pairs(piece: Piece) -> int:
    """How many pairs of a query and a key a head has to compute."""
    keys = piece.keys.shape[0] if isinstance(piece.keys, Tensor) else piece.keys[1] - piece.keys[0]
    return (piece.batch[1] - piece.batch[0]) * (piece.rows[1] - piece.rows[0]) * keys
