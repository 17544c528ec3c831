"""mw.attention: scaled dot product attention that does no work for what is dropped."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention import blocks, delegated, kernel, reference, scored, sdpa
from maskwise.ops.attention.arguments import (
    KEYS,
    OP,
    Call,
    Scores,
    Sizes,
    as_mask_and_bias,
    bits_of,
    check,
    check_bias,
    drop_queries,
    is_autocast,
    kept_of,
    to_autocast,
)
from maskwise.ops.attention.bias import ScoreMod, StructuredBias, check_score_mod
from maskwise.ops.attention.packed import attend_packed
from maskwise.ops.select.packed import Packed
from maskwise.ops.torch_private import has_dispatch_modes, is_tracing, is_transformed
from maskwise.plan import dispatch
from maskwise.plan.dispatch import NOT_APPLICABLE, Decision, Facts, Plan, Route, Skips, decide
from maskwise.plan.explain import record

__all__ = ["attention"]

# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_is_grad_enabled, _autocast_dtype, _cached = torch.is_grad_enabled, torch.get_autocast_dtype, dispatch.cache.get
_is_any_forced, _is_any_observing, _forced = dispatch.is_any_forced, dispatch.is_any_observing, dispatch.forced


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None = None,
    *,
    query_mask: MaskLike | None = None,
    bias: Tensor | StructuredBias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    attn_mask: MaskLike | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor: ...
@overload
def attention(
    q: Packed,
    k: Packed,
    v: Packed,
    mask: MaskLike | None = None,
    *,
    query_mask: MaskLike | None = None,
    bias: Tensor | StructuredBias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    attn_mask: MaskLike | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Packed: ...
def attention(
    q: Tensor | Packed,  # (B, H, Lq, D)
    k: Tensor | Packed,  # (B, Hkv, Lk, D)
    v: Tensor | Packed,  # (B, Hkv, Lk, Dv)
    mask: MaskLike | None = None,
    *,
    query_mask: MaskLike | None = None,
    bias: Tensor | StructuredBias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    attn_mask: MaskLike | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor | Packed:
    """Scaled dot product attention over kept keys; dropped keys have no influence.

    >>> import torch, maskwise as mw
    >>> q, k = torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 3, 1)
    >>> v = torch.tensor([[1.0, torch.nan, torch.nan], [1.0, 3.0, torch.nan]])[:, None, :, None]
    >>> mw.attention(q, k, v, mw.Mask.from_lengths([1, 2], max_len=3)).flatten()
    tensor([1., 2.])

    Args:
        q: the queries, (B, H, Lq, D); or a Packed of rows (H, D), that is `mw.pack` of (B, Lq, H, D).
        k: the keys, (B, Hkv, Lk, D), H being a multiple of Hkv; Packed where q is.
        v: the values, (B, Hkv, Lk, Dv); packed by k's mask where k is Packed.
        mask: a Mask or a bool tensor; True means keep. (B, Lk) for the keys of each batch entry, or anything that
            broadcasts to (B, H, Lq, Lk). Its structure (lengths, causal, window, segments) is used.
        query_mask: a Mask or a bool tensor of the queries, (B, Lq) or (B, H, Lq), sizes of 1 included: a query that is
            dropped gives 0, has no gradient, and is not read. For tensors only: a Packed q has no other queries than
            those that are kept.
        bias: floats that are added to the scores after ``scale`` and ``softcap``: anything that broadcasts to
            (B, H, Lq, Lk), for tensors only; or an `AlibiBias` or `RelativeBias`, of which no tensor of all pairs is
            made, for Packed tokens too. It may require grad; that of a pair that is dropped is not read.
        softcap: scores become ``softcap * tanh(score / softcap)``, as in Gemma 2.
        sinks: a logit for each head, (H,), that takes part in every softmax and has no value, as in gpt-oss. It may
            require grad. A query that keeps no key gives 0 all the same.
        attn_mask: torch's spelling, instead of ``mask`` and ``bias``: bools of pairs, True means keep, or floats that
            are added, of which -inf drops. It broadcasts to (B, H, Lq, Lk) from the right, so two dims are (Lq, Lk).
        is_causal: whether a query attends only to keys up to its own position, counted from the top left; together with
            a mask, both must keep a key.
        dropout_p: the probability with which a weight is dropped, also outside of training: pass 0.0 there.
        scale: what the scores are multiplied by; by default 1 / sqrt(D).

    Returns:
        (B, H, Lq, Dv), or a Packed of q's mask with rows (H, Dv). A query that keeps no key gives 0, and has no
        gradient. It can be differentiated once.

    Raises:
        ShapeError: shapes do not fit each other.
        ArgumentError: the mask is (n, Lk) where n is both B and Lq, so that it could mean either; there is a query_mask
            or a bias of all pairs with Packed tokens; an attn_mask together with a mask or a bias; or a softcap that is
            not positive.
        DtypeError, DeviceError: dtypes or devices differ, a mask is not bool, or a bias not floating.

    A key that no query keeps may be NaN: it has no influence. A non-finite key that some queries keep affects only
    those queries (on the CPU, outside compiled graphs). A query whose output gradient is all zero is excluded from the
    backward pass, so padded queries may be NaN if the loss ignores their outputs; on the CPU, outside compiled graphs,
    they may also have any finite value. With ``query_mask``, dropped queries may have any value on every device, and
    the loss may read their outputs.
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ArgumentError(say(OP, "dropout_p", must="be between 0 and 1", got=dropout_p, hint="dropout_p=0.1"))
    if attn_mask is not None:
        if mask is not None or bias is not None:
            must, hint = "come without `mask` and `bias`, which it stands for", "mask=mask, bias=bias"
            raise ArgumentError(say(OP, "attn_mask", must=must, got="several", hint=hint))
        mask, bias = (attn_mask, None) if isinstance(q, Packed) else as_mask_and_bias(q, k, v, attn_mask)
    mod = None
    if softcap is not None or sinks is not None or isinstance(bias, StructuredBias):
        mod = ScoreMod(bias, softcap, sinks)
    if isinstance(q, Packed) or isinstance(k, Packed) or isinstance(v, Packed):
        _check_packed_options(bias, query_mask)
        return attend_packed(q, k, v, mask, attention, mod, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
    if query_mask is not None:
        mask = drop_queries(q, k, v, mask, query_mask)
    # Inside of a graph the choice must be a constant of it.
    if is_tracing():
        return _in_graph(q, k, v, mask, bias, mod, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
    try:
        device = q.device
        lower = _autocast_dtype(device.type) if is_autocast(device.type) else None
        kind: Any = Mask if mask is None or isinstance(mask, Mask) else (mask.dtype, mask.layout)
        if device.type == "cuda" and isinstance(mask, Mask):
            kind = Mask, mask._along
        of_mask = None if mask is None else (mask.shape, mask.device, kind)
        of_bias: Any = None
        learns = q.requires_grad or k.requires_grad or v.requires_grad
        if mod is not None:
            of_bias, learns = mod.key, learns or mod.requires_grad
        elif isinstance(bias, Tensor):
            of_bias, learns = (bias.shape, bias.dtype, bias.device, bias.layout), learns or bias.requires_grad
        # fmt: off
        key = (
            OP, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, device, k.device, v.device, q.layout, k.layout,
            v.layout, of_mask, of_bias, lower, is_causal, dropout_p > 0.0, learns and _is_grad_enabled(),
            is_transformed(), _is_any_forced() and _forced(),
        )
        # fmt: on
        decision = _cached(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, or nested ones without a shape, which the checks report in full.
        sizes, _ = check(q, k, v, mask)
        _check_scores(bias, mod, q, sizes)
        if not has_dispatch_modes():
            raise
        # Sizes that are symbols: a graph is made of the call, as by make_fx.
        return _in_graph(q, k, v, mask, bias, mod, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
    if decision is None:
        call = _check(key, q, k, v, mask, bias, mod)
        decision = dispatch.cache[key] = decide(call.facts, _ROUTES, call)
    call = decision.prepared
    if call.is_autocast:
        q, k, v = to_autocast(q, k, v)
    if decision.route is _BLOCKS:
        decision, call = _decide_by_blocks(mask, call)
    if _is_any_observing() and (planned := _report(decision.plan, q, k, v, mask, call)):
        return planned  # type: ignore[return-value]
    if mod is not None:
        return decision.run(q, k, v, mask, call, dropout_p, scale, mod=mod)  # type: ignore[no-any-return]
    if not isinstance(bias, Tensor):
        return decision.run(q, k, v, mask, call, dropout_p, scale)  # type: ignore[no-any-return]
    return decision.run(q, k, v, mask, call, dropout_p, scale, bias.to(q.dtype))  # type: ignore[no-any-return]


def _in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    bias: Tensor | StructuredBias | None,
    mod: ScoreMod | None,
    **options: Any,
) -> Tensor:
    """Make the call a part of a graph."""
    sizes, index = check(q, k, v, mask)
    _check_scores(bias, mod, q, sizes)
    q, k, v = to_autocast(q, k, v)
    kept = bits_of(mask, index, sizes)
    if mod is not None:
        return reference.attention(q, k, v, kept, bias=mod.dense(q, k), softcap=mod.softcap, sinks=mod.sinks, **options)
    added = bias.to(q.dtype) if isinstance(bias, Tensor) else None
    return sdpa.attend_without_sync(q, k, v, kept, bias=added, **options)


def _check_packed_options(bias: Any, query_mask: Any) -> None:
    """Raise for what Packed tokens do not take."""
    if bias is not None and not isinstance(bias, StructuredBias):
        must = "be None, or an AlibiBias or RelativeBias, for Packed tokens"
        hint = "mw.attention(q.unpack().transpose(1, 2), ..., bias=bias)"
        raise ArgumentError(say(OP, "bias", must=must, got=type(bias).__name__, hint=hint))
    if query_mask is not None:
        must, hint = "be None for Packed tokens, which are the queries that are kept", "mw.pack(q, query_mask)"
        raise ArgumentError(say(OP, "query_mask", must=must, got=type(query_mask).__name__, hint=hint))


def _check_scores(bias: Any, mod: ScoreMod | None, q: Tensor, sizes: Sizes) -> None:
    """Raise unless scores can be changed like this."""
    if bias is not None and not isinstance(bias, StructuredBias):
        check_bias(bias, q, sizes)
    if mod is not None:
        check_score_mod(mod, sizes.heads, q.device)


# -- the routes --------------------------------------------------------------------------------------------------------
def _pays_whole(facts: Facts) -> str | None:
    """Our kernel takes less, wherever it serves."""
    return kernel.REASON if kernel.serves(facts) is None and kernel.pays(facts) is None else None


def _why_whole(facts: Facts) -> str:
    why_not = blocks.serves(facts) or blocks.pays(facts)
    count = facts.detail.blocks
    if why_not is not None or count is None:
        return why_not or ""
    return f"{count.blocks} block{'s' if count.blocks != 1 else ''} would skip too little"


def _why_sdpa(facts: Facts) -> str:
    if facts.device == "cuda":
        return delegated.flex_serves(facts) or delegated.flex_pays(facts) or ""
    return blocks.serves(facts) or ""


def _run_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    call: Call,
    dropout_p: float,
    scale: float | None,
    bias: Tensor | None = None,
    mod: ScoreMod | None = None,
) -> Tensor:
    bits = bits_of(mask, call.mask_index, call.sizes)
    if mod is None:
        return reference.attention(q, k, v, bits, call.is_causal, dropout_p, scale, bias)
    return reference.attention(
        q, k, v, bits, call.is_causal, dropout_p, scale, mod.dense(q, k), softcap=mod.softcap, sinks=mod.sinks
    )


def _why_not_whole(facts: Facts) -> str | None:
    if facts.device != "cpu":
        return NOT_APPLICABLE
    return kernel.SCORE_MOD if facts.detail.has_score_mod else None


def _why_not_sdpa(facts: Facts) -> str | None:
    if facts.device == "cpu":
        return NOT_APPLICABLE
    return kernel.SCORE_MOD if facts.detail.has_score_mod else None


def _why_not_plain(facts: Facts) -> str | None:
    """It makes all scores, and is the route where no other serves."""
    if facts.transformed or (facts.detail.has_score_mod and facts.device != "cpu"):
        return None
    return NOT_APPLICABLE


def _flops(facts: Facts) -> int:
    """Of a pair of a query and a key: two products."""
    return 4 * int(facts.detail.features)


_BLOCKS = Route(
    "blocks",
    blocks.run,
    blocks.serves,
    blocks.work,
    blocks.pays,
    blocks.cost,
    reason=blocks.reason,
    skips=Skips.COMPUTING,
    flops=_flops,
    is_kernel=True,
)
_ROUTES = (
    Route(
        "bare",
        kernel.run,
        kernel.serves,
        kernel.work,
        kernel.pays,
        call="bare",
        reason=kernel.REASON,
        skips=Skips.READING,
        flops=_flops,
        is_kernel=True,
    ),
    Route(
        "whole",
        sdpa.run,
        _why_not_whole,
        sdpa.dense_work,
        _pays_whole,
        sdpa.cost,
        reason=_why_whole,
        flops=_flops,
    ),
    _BLOCKS,
    Route(
        "scored",
        scored.run,
        scored.serves,
        sdpa.dense_work,
        reason=scored.REASON,
        skips=Skips.COMPUTING,
        flops=_flops,
    ),
    Route(
        "varlen",
        delegated.run_varlen,
        delegated.varlen_serves,
        reason="each batch entry keeps one run of keys",
        skips=Skips.COMPUTING,
        flops=_flops,
        is_kernel=True,
    ),
    Route(
        "flex",
        delegated.run_flex,
        delegated.flex_serves,
        pays=delegated.flex_pays,
        reason="blocks that are dropped are skipped",
        skips=Skips.COMPUTING,
        flops=_flops,
        is_kernel=True,
    ),
    Route(
        "sdpa",
        sdpa.run_without_sync,
        _why_not_sdpa,
        reason=_why_sdpa,
        flops=_flops,
    ),
    Route(
        "plain",
        _run_plain,
        work=sdpa.dense_work,
        pays=_why_not_plain,
        cost=sdpa.cost,
        flops=_flops,
        transforms=True,
    ),
)


def _check(
    key: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    bias: Tensor | StructuredBias | None,
    mod: ScoreMod | None = None,
) -> Call:
    """Check a call that was not made before, and collect its facts."""
    sizes, index = check(q, k, v, mask)
    _check_scores(bias, mod, q, sizes)
    *_, lower, is_causal, has_dropout, grad, transformed, _ = key
    dtype = q.dtype if lower is None or q.dtype is torch.float64 else lower
    has_pairs = mask is not None and index != KEYS and mask.ndim > 1 and mask.shape[-2] != 1
    has_heads = mask is not None and index != KEYS and mask.ndim > 2 and mask.shape[-3] != 1
    scores = Scores(
        k.shape[1],
        q.shape[-1],
        v.shape[-1],
        is_causal,
        has_dropout,
        is_structured=isinstance(mask, Mask),
        has_pairs=has_pairs,
        has_bias=bias is not None and mod is None,
        has_score_mod=mod is not None,
        has_key_runs=isinstance(mask, Mask) and mask._along == -1 and not has_pairs and not has_heads,
    )
    facts = Facts(
        OP, sizes, dtype, q.device.type, grad, transformed, mask="none" if mask is None else "bits", detail=scores
    )
    return Call(facts, sizes, index, index == KEYS, is_causal, 1 / math.sqrt(max(q.shape[-1], 1)), lower is not None)


def _decide_by_blocks(mask: MaskLike | None, call: Call) -> tuple[Decision, Call]:
    """Decide a call that may go by blocks once more, from the blocks that its mask keeps."""
    found, count = blocks.find(mask, call)
    facts = call.facts._replace(detail=call.facts.detail._replace(blocks=count))
    key = (OP, facts, _is_any_forced() and _forced())
    decision: Decision | None = _cached(key)
    if decision is None:
        decision = dispatch.cache[key] = decide(facts, _ROUTES)
    return decision, call._replace(blocks=found)


def _report(plan: Plan, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, call: Call) -> Plan | None:
    """Record a call, with the pairs that its route leaves out: what attention is made of is pairs, so those count."""
    sizes = call.sizes
    pairs, total = q.new_empty(()).expand(sizes), math.prod(sizes)
    skipped, skipped_bytes = 0, 0
    if plan.route == "bare":
        kept = kept_of(bits_of(mask, call.mask_index, sizes), call.is_causal, sizes)
        if kept is not None:
            skipped, unread = kernel.count_skipped(kept.expand(sizes), call.is_causal)
            skipped_bytes = unread * k.shape[1] * (k.shape[-1] + v.shape[-1]) * k.element_size()
        plan = replace(plan, reason=f"{plan.reason}: {total - skipped:,} of {total:,} pairs are computed")
    elif plan.route == "blocks" and plan.work is not None:
        # Blocks are scored as a whole, dropped pairs inside of them too.
        skipped = total - plan.work.attention_flops // max(4 * q.shape[-1], 1)
    elif plan.route == "scored":
        skipped = total - blocks.find(mask, call)[1].pairs
    of_pairs = mask[call.mask_index] if isinstance(mask, Mask) else mask
    return record(plan, pairs, of_pairs, skipped=skipped, skipped_bytes=skipped_bytes)
