"""Attention on a GPU by torch's kernels that skip what is dropped: varlen for runs of keys, flex for other masks.

Neither looks at data, so neither causes a host-device sync. What makes them leak-proof is one pass over keys and values
by the mask of keys: a key that no query keeps is zero, in the forward pass and in its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.mask.block_mask import block_mask_of
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention import reference
from maskwise.ops.attention.arguments import Call, Scores, Sizes, lift
from maskwise.ops.attention.bias import ScoreMod, StructuredBias
from maskwise.ops.attention.sdpa import requires_grad
from maskwise.ops.backends import why_no_triton
from maskwise.ops.primitives import where_kept
from maskwise.plan.dispatch import NOT_APPLICABLE, Facts

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "attend_rows",
    "flex_pays",
    "flex_serves",
    "run_flex",
    "run_varlen",
    "varlen_serves",
    "why_no_varlen",
]

#: What FlashAttention takes, which is under torch's varlen.
_HALVES = (torch.float16, torch.bfloat16)
_MOST_FEATURES, _FEATURES = 256, 8
#: The side of a block of flex_attention; below so many pairs of a head, one call of SDPA with a mask is as fast.
_BLOCK, _FEW_PAIRS = 128, 4 * 128 * 128


# -- varlen ------------------------------------------------------------------------------------------------------------
def why_no_varlen(dtype: torch.dtype, features: int, value_features: int, device: str) -> str | None:
    """Why torch's varlen attention cannot run, or None."""
    if device != "cuda":
        return NOT_APPLICABLE
    if dtype not in _HALVES:
        return "torch's varlen attention takes bfloat16 and float16"
    if features != value_features or features % _FEATURES or not 0 < features <= _MOST_FEATURES:
        return f"torch's varlen attention takes heads of one size, a multiple of {_FEATURES} up to {_MOST_FEATURES}"
    return _why_no_flash()


@cache
def _why_no_flash() -> str | None:
    if find_spec("torch.nn.attention.varlen") is None:
        return "this torch has no torch.nn.attention.varlen"
    if torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "torch's varlen attention needs a GPU of compute capability 8.0"
    return None


def varlen_serves(facts: Facts) -> str | None:
    """Why a call of padded tensors cannot go by runs of keys, or None."""
    scores: Scores = facts.detail
    if facts.device != "cuda" or facts.mask == "none":
        return NOT_APPLICABLE
    if not scores.has_key_runs:
        return "the mask is not a run of keys for each batch entry"
    if scores.is_causal:
        return "varlen counts causal positions from the last key"
    if scores.has_bias or scores.has_score_mod or scores.has_dropout:
        return "varlen changes no scores and has no dropout"
    return why_no_varlen(facts.dtype, scores.features, scores.value_features, facts.device)


def run_varlen(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, call: Call, dropout_p: float, scale: float | None
) -> Tensor:
    """Attention over one run of keys for each batch entry, of tensors that stay padded.

    Keys outside of the run are sequences of their own, without queries: nothing is packed, and nothing is counted.
    """
    assert isinstance(mask, Mask)
    batch, _, queries, keys = call.sizes
    four = lift(mask, call.mask_index, call.sizes)
    starts, ends = (bound.to(q.device, non_blocking=True) for bound in _runs(four, batch))
    first = torch.arange(batch, device=q.device)
    # Of each entry: keys before the run, the run, and keys after it. Only the run has queries.
    key_rows = torch.stack((first * keys, first * keys + starts, first * keys + ends), 1)
    query_rows = torch.stack((first * queries, first * queries, (first + 1) * queries), 1)
    kept = four.to_bool().expand(batch, 1, 1, keys).mT  # (B, 1, Lk, 1)
    some = (ends > starts)[:, None, None, None]
    q, finite = _clean_queries(q, k, v, some)
    k, v = where_kept(k, kept, 0.0), where_kept(v, kept, 0.0)
    out = attend_rows(
        _rows(q),
        _rows(k),
        _rows(v),
        (_cumulative(query_rows, batch * queries), _cumulative(key_rows, batch * keys)),
        (queries, keys),
        scale=scale,
    )
    out = out.reshape(batch, queries, *out.shape[1:]).transpose(1, 2)
    return where_kept(out if finite is None else reference.with_nan(out, ~finite), some, 0.0)


def _rows(x: Tensor) -> Tensor:
    """The tokens of all batch entries one after the other: (B * L, H, D)."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _runs(four: Mask, batch: int) -> tuple[Tensor, Tensor]:
    """The first key and the end of each batch entry's run: (B,)."""
    keys = four.shape[-1]
    starts, ends = four._bounds().clamp(0, keys).reshape(2, -1).expand(2, batch).unbind()
    return starts, torch.maximum(starts, ends)


def _cumulative(rows: Tensor, total: int) -> Tensor:
    return torch.cat((rows.reshape(-1), rows.new_full((1,), total))).to(torch.int32)


def attend_rows(
    q: Tensor,  # (N, H, D)
    k: Tensor,  # (M, Hkv, D)
    v: Tensor,  # (M, Hkv, D)
    cumulative: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None,
    is_causal: bool = False,
) -> Tensor:
    """Attention of sequences that lie one after the other, by torch's varlen kernel: (N, H, D).

    ``cumulative`` are the ends of the sequences in q and in k, int32 from 0 on; ``longest`` bounds their lengths.
    """
    from torch.nn.attention import varlen

    known = signature(varlen.varlen_attn).parameters
    options: dict[str, Any] = {"scale": scale}
    # torch 2.10 has `is_causal`; later ones say it by the window, and share keys between heads.
    if "window_size" in known:
        options["window_size"] = (-1, 0) if is_causal else (-1, -1)
    else:
        options["is_causal"] = is_causal
    if "enable_gqa" in known:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    elif q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    attend: Callable[..., Any] = varlen.varlen_attn
    out: Tensor = attend(q, k, v, *cumulative, *longest, **options)
    return out


# -- flex --------------------------------------------------------------------------------------------------------------
def flex_serves(facts: Facts) -> str | None:
    """Why flex_attention cannot serve a call, or None."""
    scores: Scores = facts.detail
    if facts.device != "cuda":
        return NOT_APPLICABLE
    if facts.mask == "none" and not scores.has_score_mod:
        return "without a mask, SDPA is causal by itself"
    if scores.has_bias or scores.has_dropout:
        return "the route by flex_attention has no bias and no dropout"
    if facts.dtype not in (*_HALVES, torch.float32):
        return f"flex_attention does not take {facts.dtype}"
    if min(scores.features, scores.value_features) < 16:
        return "flex_attention takes heads of 16 features at least"
    return why_no_triton()


def flex_pays(facts: Facts) -> str | None:
    """Why one call of SDPA with a mask is as fast, or None."""
    _, _, queries, keys = facts.shape
    if facts.detail.has_score_mod:
        # All that is left makes tensors of all pairs.
        return None
    if not facts.detail.is_structured:
        return "the blocks of a bool tensor would be looked for in every call"
    return "so few pairs have no blocks to skip" if queries * keys < _FEW_PAIRS else None


class Blocks(NamedTuple):
    """What flex_attention takes of a mask, and which keys and queries it keeps at all."""

    blocks: BlockMask
    keys: Tensor  # bool, (B or 1, H or 1, Lk)
    queries: Tensor  # bool, (B or 1, H or 1, Lq)


def run_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    call: Call,
    dropout_p: float,
    scale: float | None,
    mod: ScoreMod | None = None,
) -> Tensor:
    """Attention by flex_attention, which skips the blocks that are dropped and changes scores as it makes them."""
    if mask is None:
        mask = Mask.full((1, 1, call.sizes.queries, call.sizes.keys), device=q.device)
    found = _blocks(mask if isinstance(mask, Mask) else Mask(mask), call, q.device)
    heads, shared = k.shape[1], q.shape[1] // k.shape[1]
    keys, some = found.keys, found.queries[..., None]
    if keys.shape[1] > 1 and shared > 1:
        keys = keys.reshape(keys.shape[0], heads, shared, keys.shape[-1]).any(2)
    q, finite = _clean_queries(q, k, v, some)
    k, v = (where_kept(x, keys[..., None], 0.0) for x in (k, v))
    options: dict[str, Any] = {"block_mask": found.blocks, "scale": scale, "enable_gqa": shared > 1}
    out = _flex()(q, k, v, **options) if mod is None else _flex_scored(q, k, v, mod, options)
    return where_kept(out if finite is None else reference.with_nan(out, ~finite), some, 0.0)


def _flex_scored(q: Tensor, k: Tensor, v: Tensor, mod: ScoreMod, options: dict[str, Any]) -> Tensor:
    """flex_attention with scores that are changed; of its softmax, sinks take the part that their logits have."""
    changed = score_mod(mod)
    if mod.sinks is None:
        out: Tensor = _flex()(q, k, v, score_mod=changed, **options)
        return out
    from torch.nn.attention.flex_attention import AuxRequest

    found: Any = _flex()(q, k, v, score_mod=changed, return_aux=AuxRequest(lse=True), **options)
    out, norm = found[0], found[1].lse
    return out * torch.sigmoid(norm - mod.sinks.to(norm.dtype)[:, None])[..., None].to(out.dtype)


def score_mod(mod: ScoreMod) -> Callable[..., Tensor]:
    """What flex_attention calls for each score."""
    bias, softcap, _ = mod
    four = bias[(None,) * (4 - bias.dim())] if isinstance(bias, Tensor) else None

    def change(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if isinstance(bias, StructuredBias):
            score = score + bias.score_of(key - query - bias.offset, head)
        elif four is not None:
            at = (each if size > 1 else 0 for each, size in zip((batch, head, query, key), four.shape, strict=True))
            score = score + four[tuple(at)]
        return score

    return change


def _blocks(mask: Mask, call: Call, device: torch.device) -> Blocks:
    """The blocks of a mask, which a `Mask` caches: the layers of a model share it."""
    sizes: Sizes = call.sizes

    def find() -> Blocks:
        four = lift(mask, call.mask_index, sizes)
        four = four.expand(-1, -1, sizes.queries, -1)
        if call.is_causal:
            four = four & Mask.causal(sizes.queries, sizes.keys, device=four.device)
        blocks, columns, rows = block_mask_of(four.to(device), _BLOCK)
        return Blocks(blocks, columns, rows)

    name = f"flex {sizes} {call.mask_index} {call.is_causal}"
    found = mask._once(name, find)
    # Tensors without data, and those of inference mode, serve this call alone.
    if type(found.keys) is not Tensor or found.keys.is_inference():
        mask._cache.pop(name, None)
    return found


@cache
def _flex() -> Callable[..., Tensor]:
    """flex_attention, compiled: as it is, it would make all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


# -- both --------------------------------------------------------------------------------------------------------------
def _clean_queries(q: Tensor, k: Tensor, v: Tensor, some: Tensor) -> tuple[Tensor, Tensor | None]:
    """The queries with zeros where they keep no key; with a gradient, also where they are not finite, and which are.

    A query that is NaN takes part in no gradient but its own: its result is made NaN afterwards.
    """
    if not requires_grad(q, k, v):
        return where_kept(q, some, 0.0), None
    finite = reference.finite_rows(q) | ~some
    return where_kept(q, finite & some, 0.0), finite
