"""Attention of Packed tokens: by sequences where each attends to its own, else through the original layout."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention.arguments import line_up
from maskwise.ops.attention.blocks import is_finite
from maskwise.ops.attention.pieces import Sizes
from maskwise.ops.attention.routes import work_of
from maskwise.ops.attention.sequences import attend
from maskwise.ops.select.packed import Packed, collect
from maskwise.plan import Plan, planner
from maskwise.plan.cost import microseconds
from maskwise.plan.dispatch import Refusal, Skips, is_observed
from maskwise.plan.explain import record

__all__ = ["attend_packed"]

OP = "attention"


def attend_packed(
    q: Any,
    k: Any,
    v: Any,
    mask: MaskLike | None,
    dense: Callable[..., Tensor],
    *,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Packed:
    """Attention of packed q, k and v; ``dense`` is attention of (B, H, L, D)."""
    _check(q, k, v)
    options: dict[str, Any] = {"is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
    why_not = _not_by_sequences(q, k, mask, is_causal)
    if why_not is None:
        lengths, key_lengths = q.mask.lengths.reshape(-1).tolist(), k.mask.lengths.reshape(-1).tolist()
        if is_observed() and (planned := _report(q, k, lengths, key_lengths)):
            return planned  # type: ignore[return-value]
        out = attend(q.values, k.values, v.values, lengths, key_lengths=key_lengths, **options)
        # A causal query drops later keys, which as NaN could have reached it.
        if not is_causal or torch.compiler.is_compiling() or is_finite(out):
            return Packed(out, q.mask)
    layouts = [x.unpack().transpose(1, 2) for x in (q, k, v)]
    keys = k.mask[:, None, None, :]
    out = dense(*layouts, keys if mask is None else keys & _four_dims(mask, q, k, layouts[0]), **options)
    return collect(out.transpose(1, 2), q.mask, capacity=q.capacity)


def _report(q: Packed, k: Packed, lengths: list[int], key_lengths: list[int]) -> Plan | None:
    """Report the call to those who listen; the elements are the pairs of the padded layout."""
    _, heads, features = q.values.shape
    pairs = heads * sum(a * b for a, b in zip(lengths, key_lengths, strict=True))
    padded = (len(lengths), heads, q.mask.shape[-1], k.mask.shape[-1])
    work, dense, rates = work_of(1, pairs, features), work_of(1, prod(padded), features), planner.rates_for("cpu")
    refused = (Refusal("whole", "the padding would be computed, too"),)
    reason, cost = f"{len(lengths)} sequences, each attends to its own", microseconds(work, rates.plain_call, rates)
    plan = Plan(OP, "sequences", reason, cost, refused, work, dense, Skips.COMPUTING, 4 * features)
    # Of what was packed everything is read.
    return record(plan, q.values.new_empty(()).expand(padded), q.mask, skipped=prod(padded) - pairs, skipped_bytes=0)


def _four_dims(mask: MaskLike, q: Packed, k: Packed, queries: Tensor) -> Mask:
    index = line_up(mask, queries, Sizes(queries.shape[0], queries.shape[1], queries.shape[2], k.mask.shape[-1]))
    return (mask if isinstance(mask, Mask) else Mask(mask))[index]


def _not_by_sequences(q: Packed, k: Packed, mask: MaskLike | None, is_causal: bool) -> str | None:
    """Why the sequences cannot be treated one by one; None where they can."""
    if mask is not None:
        return "there is a mask besides the packing"
    if q.capacity is not None or k.capacity is not None:
        return "the number of kept rows is not known"
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return "the lengths must be known on the host"
    if q.values.device.type != "cpu" and not (q.mask.facts.on_host and k.mask.facts.on_host):
        return "the lengths are on the device"
    # Causal is a matter of positions: rows of one mask are in order, and leading runs are at their positions.
    same = q.mask is k.mask
    if is_causal and not (same or (q.mask.is_prefix and k.mask.is_prefix) or q.mask.equal(k.mask)):
        return "queries and keys are packed by different masks"
    return None


def _check(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Packed):
            must, hint = "be Packed, as the others are", f"mw.pack({name}.transpose(1, 2), mask), or unpack() them all"
            raise DtypeError(say(OP, name, must=must, got=type(x).__name__, hint=hint))
        if x.values.dim() != 3 or x.mask.ndim != 2:
            must = "be packed from (B, L, heads, D) by a (B, L) mask"
            got = f"rows {tuple(x.values.shape[1:])} and a mask {tuple(x.mask.shape)}"
            raise ShapeError(say(OP, name, must=must, got=got, hint="mw.pack(x.transpose(1, 2), mask)"))
    if k.mask is not v.mask and not k.mask.equal(v.mask):
        raise ArgumentError(say(OP, "v", must="be packed by k's mask", got="another", hint="mw.pack(v, k.mask)"))
    if q.mask.shape[0] != k.mask.shape[0]:
        must, hint = f"have q's {q.mask.shape[0]} sequences", "pack both from one batch"
        raise ShapeError(say(OP, "k", must=must, got=k.mask.shape[0], hint=hint))
