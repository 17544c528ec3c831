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
from maskwise.plan.plan import Refusal

__all__ = ["bits_from", "choose"]

#: What a call of the kernel costs beside its work, and what a pair of a query and a key costs for each element of D, in
#: microseconds. Only their ratio matters.
_CALL = 25.0
_PAIR = 4e-5
#: Below this, nothing that could be skipped pays for looking at the mask.
_SMALL = 60.0

_SMALL_PLAN = Plan("attention", "whole", "too small for blocks to pay", _SMALL)
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
        return Plan("attention", "plain", "forced", 0.0), []
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return Plan("attention", "plain", _TRANSFORMED, 0.0, (Refusal("blocks", _TRANSFORMED),)), []
    if q.device.type != "cpu":
        why = f"the blocks are for the CPU, not for {q.device.type}"
        return Plan("attention", "sdpa", why, 0.0, (Refusal("blocks", why),)), []
    in_one = _CALL + prod(sizes) * _PAIR * q.shape[-1]
    if in_one < _SMALL and planner.forced() is None:
        return _SMALL_PLAN, []
    ok, why = serves(q, k, v)
    if ok and dropout_p > 0.0:
        ok, why = False, "the CPU kernel has no dropout"
    if ok and mask is None and not is_causal:
        ok, why = False, "nothing is dropped"
    if not ok:
        return Plan("attention", "whole", why, in_one, (Refusal("blocks", why),)), []
    per_pair = _PAIR * q.shape[-1]
    pieces = _remembered(mask, index, is_causal, sizes)
    cost = sum(_CALL + _pairs(piece) * sizes.heads * per_pair for piece in pieces)
    if cost > in_one and planner.forced() is None:
        refused = Refusal("blocks", f"predicted {cost:.0f} µs against {in_one:.0f} µs")
        plan = Plan("attention", "whole", f"{len(pieces)} blocks would skip too little", in_one, (refused,))
        return plan, []
    pairs = sum(map(_pairs, pieces)) * sizes.heads
    reason = f"{len(pieces)} block{'s' if len(pieces) != 1 else ''} hold {pairs:,} of {prod(sizes):,} pairs"
    refused = Refusal("whole", f"predicted {in_one:.0f} µs against {cost:.0f} µs")
    return Plan("attention", "blocks", reason, cost, (refused,)), pieces


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


def _pairs(piece: Piece) -> int:
    """How many pairs of a query and a key a head has to compute."""
    keys = piece.keys.shape[0] if isinstance(piece.keys, Tensor) else piece.keys[1] - piece.keys[0]
    return (piece.batch[1] - piece.batch[0]) * (piece.rows[1] - piece.rows[0]) * keys
