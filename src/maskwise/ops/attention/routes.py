"""Which way an attention call goes, from static facts, and from the mask where it lies on the host.

``whole``: one call of torch's SDPA with a mask. ``blocks``: its CPU kernel, piece by piece, for what is kept only.
``sdpa``: SDPA on inputs that are zero where masked out, for devices that must not be
waited for. ``sequences``: packed tokens, see `maskwise.ops.attention.packed`. ``plain``: the reference.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.autograd import forward_ad

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention.arguments import Index, lift
from maskwise.ops.attention.blocks import Piece, serves
from maskwise.ops.attention.pieces import Sizes, pieces_of
from maskwise.plan import Plan, planner
from maskwise.plan.cost import Work, microseconds
from maskwise.plan.plan import Refusal

__all__ = ["bits_from", "choose", "work_of"]

#: How many torch calls a call of the kernel is worth, with what is made ready for it.
_CALLS = 8
#: Up to as many, nothing that could be skipped pays for looking at the mask: at a Mask, which remembers what was seen,
#: and at a bool tensor, which is looked at for every call.
_SMALL_CALLS, _SMALL_CALLS_OF_BITS = 20, 100

_SMALL_REASON = "too small for blocks to pay"
_SMALL_PLAN = Plan("attention", "whole", _SMALL_REASON, 0.0, (Refusal("blocks", _SMALL_REASON),))
_TRANSFORMED = "torch.func transforms and forward-mode AD see through plain torch operations only"


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    index: Index,
    is_causal: bool,
    dropout_p: float,
    sizes: Sizes,
) -> tuple[Plan, list[Piece]]:
    """The plan, and the pieces of the routes that have such."""
    if planner.forced() == "plain":
        return Plan("attention", "plain", "forced", 0.0, (Refusal("blocks", "another is forced"),)), []
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return Plan("attention", "plain", _TRANSFORMED, 0.0, (Refusal("blocks", _TRANSFORMED),)), []
    if q.device.type != "cpu":
        why = f"the blocks are for the CPU, not for {q.device.type}"
        return Plan("attention", "sdpa", why, 0.0, (Refusal("blocks", why),)), []
    rates, features = planner.rates_for("cpu"), q.shape[-1]
    in_one = _CALLS * rates.plain_call + 4 * prod(sizes) * features / rates.attention_flops
    small = _SMALL_CALLS if isinstance(mask, Mask) or mask is None else _SMALL_CALLS_OF_BITS
    if in_one < small * rates.plain_call and planner.forced() is None:
        return _SMALL_PLAN, []
    whole = work_of(1, prod(sizes), features)
    ok, why = serves(q, k, v)
    if ok and dropout_p > 0.0:
        ok, why = False, "the CPU kernel has no dropout"
    if ok and mask is None and not is_causal:
        ok, why = False, "nothing is dropped"
    if ok and planner.forced() == "whole":
        ok, why = False, "another is forced"
    if not ok:
        return Plan("attention", "whole", why, in_one, (Refusal("blocks", why),), whole, whole), []
    pieces = _remembered(mask, index, is_causal, sizes)
    pairs = sum(map(_pairs, pieces)) * sizes.heads
    work = work_of(len(pieces), pairs, features, gathered=sum(map(_picked, pieces)) * k.shape[1] * k.element_size())
    cost = microseconds(work, rates.plain_call, rates)
    count = f"{len(pieces)} block{'s' if len(pieces) != 1 else ''}"
    if cost > in_one and planner.forced() not in ("blocks", "kernel"):
        refused = Refusal("blocks", f"predicted {cost:.0f} µs against {in_one:.0f} µs")
        return Plan("attention", "whole", f"{count} would skip too little", in_one, (refused,), whole, whole), []
    verb = "holds" if len(pieces) == 1 else "hold"
    reason = f"{count} {verb} {pairs:,} of {prod(sizes):,} pairs"
    refused = Refusal("whole", f"predicted {in_one:.0f} µs against {cost:.0f} µs")
    return Plan("attention", "blocks", reason, cost, (refused,), work, whole), pieces


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
