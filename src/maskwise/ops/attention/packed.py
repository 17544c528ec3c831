"""Attention of packed tokens: by sequences where each attends to its own, else in the original layout.

On a GPU, torch's varlen kernel takes all sequences in one call, from their cumulative lengths on the device. Otherwise,
by sequences, there is one call of SDPA for each run of sequences of equal length, and padding does not exist. Tokens
are split and joined once, so the backward pass is linear too: slices taken one by one would each make a gradient of the
full size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention import reference
from maskwise.ops.attention.arguments import OP, Sizes, line_up
from maskwise.ops.attention.bias import ScoreMod, check_score_mod
from maskwise.ops.attention.delegated import attend_rows, why_no_varlen
from maskwise.ops.attention.scored import attend_sequences
from maskwise.ops.attention.sdpa import is_finite, requires_grad, work_of
from maskwise.ops.primitives import where_kept
from maskwise.ops.select.packed import Packed, collect
from maskwise.ops.torch_private import is_tracing, is_vmapped_or_functional
from maskwise.plan import calibration, dispatch
from maskwise.plan.cost import microseconds
from maskwise.plan.dispatch import NOT_APPLICABLE, Decision, Facts, Plan, Route, Skips, decide, is_any_observing
from maskwise.plan.explain import record

__all__ = ["Run", "attend", "attend_packed", "runs"]


def attend_packed(
    q: Any,
    k: Any,
    v: Any,
    mask: MaskLike | None,
    dense: Callable[..., Any],
    mod: ScoreMod | None = None,
    *,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Packed:
    """Attention of packed q, k and v; ``dense`` is attention of (B, H, L, D)."""
    _check_packed(q, k, v)
    options: dict[str, Any] = {"is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
    if mod is not None:
        check_score_mod(mod, q.values.shape[1], q.values.device)
        options["mod"] = mod
    if is_tracing():
        return _in_layout(q, k, v, mask, dense, options)
    decision = _decision(q, k, v, mask, options)
    if decision.plan.route == "sequences" and is_any_observing() and (planned := _report(decision.plan, q, k)):
        return planned  # type: ignore[return-value]
    return decision.run(q, k, v, mask, dense, options)  # type: ignore[no-any-return]


def _by_sequences(
    q: Packed, k: Packed, v: Packed, mask: None, dense: Callable[..., Any], options: dict[str, Any]
) -> Packed:
    lengths, key_lengths = _lengths(q), _lengths(k)
    mod = options.get("mod")
    places = _places(q, k) if mod is not None and mod.bias is not None else None
    out = attend(q.values, k.values, v.values, lengths, key_lengths=key_lengths, places=places, **options)
    # A causal query drops later keys, which as NaN could have reached it. A device is not waited for.
    if options["is_causal"] and out.device.type == "cpu" and not is_finite(out):
        return _in_layout(q, k, v, None, dense, options)
    return Packed(out, q.mask)


def _places(q: Packed, k: Packed) -> tuple[Tensor, Tensor] | None:
    """The positions that packed queries and keys have in their sequences; None where they are 0, 1, 2, ... each."""
    if q.mask.is_prefix and k.mask.is_prefix:
        return None
    columns = [x.mask.to_bool().to(x.values.device).nonzero()[:, 1] for x in (q, k)]
    return columns[0], columns[1]


def _by_varlen(
    q: Packed, k: Packed, v: Packed, mask: None, dense: Callable[..., Any], options: dict[str, Any]
) -> Packed:
    """All sequences in one call of torch's varlen kernel; how long they are stays on the device."""
    x, rows = q.values, q.values.shape[0]
    # What does not fit into a capacity is not there.
    ends, key_ends = (packed.mask.cu_seqlens.to(x.device).clamp(max=packed.values.shape[0]) for packed in (q, k))
    finite = reference.finite_rows(x) if requires_grad(x, k.values, v.values) else None
    out = attend_rows(
        x if finite is None else where_kept(x, finite, 0.0),
        k.values,
        v.values,
        (ends, key_ends),
        (q.mask.shape[-1], k.mask.shape[-1]),
        scale=options["scale"],
        is_causal=options["is_causal"],
    )
    if finite is not None:
        out = reference.with_nan(out, ~finite)
    if q.capacity is not None or q.mask is not k.mask:
        # Rows of no sequence, and queries without a key.
        row = torch.arange(rows, device=x.device, dtype=torch.int32)
        sequence = torch.searchsorted(ends, row, right=True, out_int32=True) - 1
        some = torch.cat((key_ends.diff(), key_ends.new_zeros(1)))[sequence] > 0
        out = where_kept(out, some[:, None, None], 0.0)
    return Packed(out, q.mask, q.capacity)


def _in_layout(
    q: Packed, k: Packed, v: Packed, mask: MaskLike | None, dense: Callable[..., Any], options: dict[str, Any]
) -> Packed:
    """Attention in the layout that the tokens were packed from, where it takes its own route."""
    layouts = [x.unpack().transpose(1, 2) for x in (q, k, v)]
    keys = k.mask[:, None, None, :]
    options = dict(options)
    if (mod := options.pop("mod", None)) is not None:
        options.update(mod._asdict())
    out = dense(*layouts, keys if mask is None else keys & _four_dims(mask, k, layouts[0]), **options)
    if isinstance(out, Plan):
        return out  # type: ignore[return-value]
    return collect(out.transpose(1, 2), q.mask, capacity=q.capacity)


def _four_dims(mask: MaskLike, k: Packed, queries: Tensor) -> Mask:
    index = line_up(mask, queries, Sizes(queries.shape[0], queries.shape[1], queries.shape[2], k.mask.shape[-1]))
    return (mask if isinstance(mask, Mask) else Mask(mask))[index]


def _lengths(x: Packed) -> list[int]:
    # Not `lengths`, which are on the mask's device.
    return x.mask._host_lengths().reshape(-1).tolist()


# -- the routes --------------------------------------------------------------------------------------------------------
def _why_not_sequences(q: Packed, k: Packed, mask: MaskLike | None, is_causal: bool, has_mod: bool) -> str | None:
    """Why the sequences cannot be treated one by one; None where they can."""
    if mask is not None:
        return "there is a mask besides the packing"
    if q.capacity is not None or k.capacity is not None:
        return "the number of kept rows is not known"
    if has_mod and q.values.device.type != "cpu":
        return "scores are changed in the padded layout, by flex_attention"
    if q.values.device.type != "cpu" and not (q.mask.facts.on_host and k.mask.facts.on_host):
        return "the lengths are on the device"
    # Causal is a matter of positions: rows of one mask are in order, and leading runs are at their positions.
    same = q.mask is k.mask
    if is_causal and not (same or (q.mask.is_prefix and k.mask.is_prefix) or q.mask.equal(k.mask)):
        return "queries and keys are packed by different masks"
    return None


def _why_not_varlen(q: Packed, k: Packed, v: Packed, mask: MaskLike | None, options: dict[str, Any]) -> str | None:
    """Why torch's varlen kernel cannot take the sequences; None where it can. Nothing on a device is looked at."""
    x = q.values
    why_not = why_no_varlen(x.dtype, x.shape[-1], v.values.shape[-1], x.device.type)
    if why_not is not None:
        return why_not
    if mask is not None:
        return "there is a mask besides the packing"
    if options["dropout_p"] > 0.0 or "mod" in options:
        return "varlen changes no scores and has no dropout"
    # It counts causal positions from the last key, which are the same where there are as many queries.
    if options["is_causal"] and q.mask is not k.mask and not (_is_on_host(q, k) and q.mask.equal(k.mask)):
        return "queries and keys are packed by different masks"
    return None


def _is_on_host(*packed: Packed) -> bool:
    """Whether masks can be compared without a host-device sync."""
    return all(x.values.device.type == "cpu" or x.mask.facts.on_host for x in packed)


def _no_route(why_not: tuple[str | None, str | None]) -> bool:
    """Whether neither route by sequences serves."""
    return None not in why_not


_ROUTES = (
    Route("varlen", _by_varlen, lambda facts: facts.detail[1], reason="one call takes all sequences", is_kernel=True),
    Route("sequences", _by_sequences, lambda facts: facts.detail[0], skips=Skips.COMPUTING),
    Route(
        "plain",
        _in_layout,
        pays=lambda facts: (
            None if facts.transformed or _no_route(facts.detail) else "the padding would be computed, too"
        ),
        transforms=True,
    ),
)


def _decision(q: Packed, k: Packed, v: Packed, mask: MaskLike | None, options: dict[str, Any]) -> Decision:
    """The route of one call, from the cache or decided now."""
    x, transformed = q.values, is_vmapped_or_functional()
    # Data of a transform cannot be compared.
    why_not: tuple[str | None, str | None] = None, NOT_APPLICABLE
    if not transformed:
        by_sequences = _why_not_sequences(q, k, mask, options["is_causal"], "mod" in options)
        why_not = by_sequences, _why_not_varlen(q, k, v, mask, options)
    facts = Facts(OP, tuple(x.shape[1:]), x.dtype, x.device.type, transformed=transformed, detail=why_not)
    key = (OP, facts, dispatch.is_any_forced() and dispatch.forced())
    decision: Decision | None = dispatch.cache.get(key)
    if decision is None:
        decision = dispatch.cache[key] = decide(facts, _ROUTES)
    return decision


def _report(plan: Plan, q: Packed, k: Packed) -> Plan | None:
    """Record a call by sequences; the elements are the pairs of the padded layout."""
    lengths, key_lengths = _lengths(q), _lengths(k)
    _, heads, features = q.values.shape
    pairs = heads * sum(a * b for a, b in zip(lengths, key_lengths, strict=True))
    padded = (len(lengths), heads, q.mask.shape[-1], k.mask.shape[-1])
    work, rates = work_of(1, pairs, features), calibration.rates_for(q.values.device.type)
    plan = replace(
        plan,
        reason=plan.reason if plan.reason == "forced" else f"{len(lengths)} sequences, each attends to its own",
        microseconds=microseconds(work, rates.plain_call, rates),
        work=work,
        dense=work_of(1, prod(padded), features),
        flops=4 * features,
    )
    # Of what was packed everything is read.
    return record(plan, q.values.new_empty(()).expand(padded), q.mask, skipped=prod(padded) - pairs, skipped_bytes=0)


def _check_packed(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Packed):
            must, hint = "be Packed, as the others are", f"mw.pack({name}.transpose(1, 2), mask), or unpack() them all"
            raise DtypeError(say(OP, name, must=must, got=type(x).__name__, hint=hint))
        if x.values.dim() != 3 or x.mask.ndim != 2:
            must = "be packed from (B, L, heads, D) by a (B, L) mask"
            got = f"rows {tuple(x.values.shape[1:])} and a mask {tuple(x.mask.shape)}"
            raise ShapeError(say(OP, name, must=must, got=got, hint="mw.pack(x.transpose(1, 2), mask)"))
    # Masks on a device are not compared, which would take a host-device sync.
    if k.mask is not v.mask and (
        k.values.shape[0] != v.values.shape[0] or (_is_on_host(k, v) and not k.mask.equal(v.mask))
    ):
        raise ArgumentError(say(OP, "v", must="be packed by k's mask", got="another", hint="mw.pack(v, k.mask)"))
    if q.mask.shape[0] != k.mask.shape[0]:
        must, hint = f"have q's {q.mask.shape[0]} sequences", "pack both from one batch"
        raise ShapeError(say(OP, "k", must=must, got=k.mask.shape[0], hint=hint))


# -- one call per run of sequences -------------------------------------------------------------------------------------
class Run(NamedTuple):
    """Consecutive sequences of one length."""

    sequences: int
    queries: int
    keys: int


def attend(
    q: Tensor,  # (N, H, D)
    k: Tensor,  # (M, Hkv, D)
    v: Tensor,  # (M, Hkv, Dv)
    lengths: list[int],
    *,
    key_lengths: list[int] | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    mod: ScoreMod | None = None,
    places: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of packed tokens: sequences one after the other, each attending to itself only.

    >>> import torch
    >>> from maskwise.ops.attention import attend
    >>> q, k, v = torch.zeros(3, 1, 2), torch.zeros(3, 1, 2), torch.arange(6.0).reshape(3, 1, 2)
    >>> attend(q, k, v, [1, 2])[:, 0]
    tensor([[0., 1.],
            [3., 4.],
            [3., 4.]])

    Args:
        q: the queries of all sequences, (N, H, D).
        k: the keys, (N, Hkv, D); H is a multiple of Hkv, and each key head serves H / Hkv query heads.
        v: the values, (N, Hkv, Dv).
        lengths: how many tokens each sequence has, on the host; they add up to N.
        key_lengths: how many keys each sequence has, where they are not as many as its queries; they add up to the
            rows of k. A sequence without keys gives zeros.
        is_causal: whether a query attends only to keys up to its own position in the sequence.
        dropout_p: the probability with which a weight is dropped; only the caller knows of training and eval.
        scale: what the scores are multiplied by; by default 1 / sqrt(D).
        mod: what changes scores: a soft cap, a bias by distance, sinks.
        places: the positions of all queries and of all keys, (N,) and (M,), by which a bias counts distances; by
            default each sequence has 0, 1, 2, ...

    Returns:
        (N, H, Dv), differentiable in q, k and v, and in what scores are changed by.

    Raises:
        ShapeError: the lengths do not add up to the rows, or the heads do not divide.
    """
    key_lengths = lengths if key_lengths is None else key_lengths
    _check(q, k, v, lengths, key_lengths)
    # Sequences with positions of their own are taken one by one.
    found = (
        runs(lengths, key_lengths)
        if places is None
        else [Run(1, *pair) for pair in zip(lengths, key_lengths, strict=True)]
    )
    if all(run.keys == 0 or run.queries == 0 for run in found):
        # Nothing is computed, and yet the result is part of the graph.
        leaves = (q, k, v) if mod is None else (q, k, v, mod.tensor, mod.sinks)
        nothing = sum(x[:0].sum().to(q.dtype) for x in leaves if x is not None)
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2]) + nothing
    gqa = q.shape[1] != k.shape[1]
    query_rows = [run.sequences * run.queries for run in found]
    key_rows = [run.sequences * run.keys for run in found]
    # One run needs no split, and its result no copy.
    whole = len(found) == 1
    outs: list[Tensor] = []
    position, key_position = 0, 0
    for run, a, b, c in zip(
        found,
        (q,) if whole else torch.split(q, query_rows),
        (k,) if whole else torch.split(k, key_rows),
        (v,) if whole else torch.split(v, key_rows),
        strict=True,
    ):
        if run.keys == 0 or run.queries == 0:
            outs.append(a.new_zeros(a.shape[0], q.shape[1], v.shape[2]))
            position, key_position = position + a.shape[0], key_position + b.shape[0]
            continue
        four = (
            a.reshape(run.sequences, run.queries, *q.shape[1:]).transpose(1, 2),
            b.reshape(run.sequences, run.keys, *k.shape[1:]).transpose(1, 2),
            c.reshape(run.sequences, run.keys, *v.shape[1:]).transpose(1, 2),
        )
        if mod is None:
            out = scaled_dot_product_attention(
                *four, is_causal=is_causal, dropout_p=dropout_p, scale=scale, enable_gqa=gqa
            )
        else:
            at = None
            if places is not None:
                at = places[0][position : position + run.queries], places[1][key_position : key_position + run.keys]
            out = attend_sequences(*four, mod, places=at, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
        position, key_position = position + a.shape[0], key_position + b.shape[0]
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return outs[0] if whole else torch.cat(outs)


def runs(lengths: list[int], key_lengths: list[int]) -> list[Run]:
    """Consecutive sequences of equal length, taken together.

    >>> runs([2, 2, 5], [2, 2, 5])
    [Run(sequences=2, queries=2, keys=2), Run(sequences=1, queries=5, keys=5)]
    """
    pairs = zip(lengths, key_lengths, strict=True)
    return [Run(len(list(same)), *pair) for pair, same in groupby(pairs) if pair != (0, 0)]


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], key_lengths: list[int]) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            hint = "mw.attention for (B, H, L, D)"
            must = "be packed tokens (N, heads, D)"
            raise ShapeError(say("attend", name, must=must, got=tuple(x.shape), hint=hint))
    if k.shape[:2] != v.shape[:2]:
        must = f"have k's rows and heads {tuple(k.shape[:2])}"
        raise ShapeError(
            say("attend", "v", must=must, got=tuple(v.shape[:2]), hint="only the last dim of v is its own")
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        must = f"have a number of heads that divides q's {q.shape[1]}"
        raise ShapeError(say("attend", "k", must=must, got=k.shape[1], hint="(N, heads, D), not (heads, N, D)"))
    if len(key_lengths) != len(lengths):
        must = f"name as many sequences as lengths, {len(lengths)}"
        raise ArgumentError(
            say("attend", "key_lengths", must=must, got=len(key_lengths), hint="0 for a sequence of no keys")
        )
    for name, x, parts in (("lengths", q, lengths), ("key_lengths", k, key_lengths)):
        if sum(parts) != x.shape[0]:
            hint = "mask.lengths.tolist() of the mask that packed them"
            must = f"add up to the {x.shape[0]} rows of {'q' if x is q else 'k'}"
            raise ShapeError(say("attend", name, must=must, got=sum(parts), hint=hint))
