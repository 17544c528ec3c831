"""Attention by our own CPU kernel, without autograd: it packs the keys that are kept, and reads no others.

``attention_fused_forward`` gives the result, and whether every key and value that it read is finite: one that is not
could have reached queries that drop it, where queries of one head keep different keys.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention import reference, sdpa
from maskwise.ops.attention.arguments import Call, Scores
from maskwise.ops.backends import INTERPRETED, provide, why_not_served
from maskwise.ops.flops import count_kept
from maskwise.ops.operation import define, differentiate
from maskwise.plan.cost import Work
from maskwise.plan.dispatch import Facts

__all__ = ["REASON", "attend_fused", "count_skipped", "pays", "run", "serves", "work"]


# -- the op ------------------------------------------------------------------------------------------------------------
def _by_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_of_keys: bool, is_causal: bool, scale: float
) -> tuple[Tensor, bool]:
    """The same in plain torch operations, which no value that is dropped gets through."""
    kept = mask[:, None, None] if mask is not None and is_of_keys else mask
    return reference.attention(q, k, v, kept, is_causal, 0.0, scale), True


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_of_keys: bool, is_causal: bool, scale: float
) -> tuple[Tensor, bool]:
    """The result without its data, in q's order of heads and queries, as torch's kernel gives it."""
    batch, heads, queries, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2), True
    return q.new_empty(batch, heads, queries, v.shape[-1]), True


def _flops(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_of_keys: bool, is_causal: bool, scale: float, **_: Any
) -> int:
    """Pairs that are kept, once with the keys and once with the values.

    >>> q = torch.ones(1, 2, 4, 8)
    >>> _flops(q, q, q, torch.tensor([[True, True, False, False]]), True, False, 1.0)
    512
    """
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    shape = (batch, heads, queries, keys)
    kept = mask[:, None, None, :] if mask is not None and is_of_keys else mask
    if is_causal:
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if queries <= keys else 0)
        kept = seen if kept is None else kept.cpu() & seen
    return 2 * count_kept(kept, shape) * (width + v.shape[-1])


define(
    "attention_fused_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_of_keys, bool is_causal, float scale) -> (Tensor, bool)",
    reference=_by_reference,
    fake=_fake,
    flops=_flops,
)
define("attention_nan", "(Tensor out) -> Tensor", reference=reference.nan_like, fake=torch.empty_like)
differentiate("attention_nan", reference.nan_backward, None)
if not INTERPRETED:
    provide("attention", "cpu", (torch.float32, torch.float64))
attend_fused = torch.ops.maskwise.attention_fused_forward.default


def run(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, call: Call, dropout_p: float, scale: float | None
) -> Tensor:
    """The kernel; a call in which it meets something that is not finite is computed again by SDPA."""
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    out: Tensor
    out, is_sound = attend_fused(q, k, v, bits, call.is_of_keys, call.is_causal, call.scale if scale is None else scale)
    return out if is_sound else sdpa.rerun(q, k, v, mask, call, scale)


# -- when it is the route ----------------------------------------------------------------------------------------------
REASON = "the kernel reads only what is kept"
#: Why a route that computes scores itself does not serve a call.
BIAS = "a bias is added to the scores"
SCORE_MOD = "scores are capped, biased by distance, or shared with sinks"
#: It packs keys, which that few queries do not pay for where there is much to pack: so many numbers.
_FEW_QUERIES, _MUCH_TO_PACK = 16, 1 << 18


def serves(facts: Facts) -> str | None:
    """Why the kernel cannot serve a call, or None."""
    if facts.detail.has_bias or facts.detail.has_score_mod:
        return BIAS if facts.detail.has_bias else SCORE_MOD
    if facts.mask == "none" and not facts.detail.is_causal:
        return "nothing is dropped"
    if facts.grad:
        return "the kernel has no gradient"
    if facts.detail.has_dropout:
        return "the kernel has no dropout"
    return why_not_served("attention", facts.device, facts.dtype)


def pays(facts: Facts) -> str | None:
    """Why packing keys would not pay, or None."""
    batch, _, queries, keys = facts.shape
    if queries >= _FEW_QUERIES:
        return None
    packed = batch * facts.detail.kv_heads * keys * facts.detail.features
    if packed > _MUCH_TO_PACK or (may_skip_blocks(facts) and not sdpa.is_small(facts)):
        return "so few queries do not pay for packing keys"
    return None


def may_skip_blocks(facts: Facts) -> bool:
    """Whether the mask may know of blocks of pairs that are all dropped, without its bits being made."""
    scores: Scores = facts.detail
    return scores.is_structured and scores.has_pairs


def work(facts: Facts) -> Work:
    """Two products for each pair; with the blocks known, the bits of every head are read to find them."""
    pairs, blocks = prod(facts.shape), facts.detail.blocks
    if blocks is None:
        return Work(calls=1, attention_flops=4 * pairs * facts.detail.features)
    return Work(calls=1, streamed=pairs, attention_flops=4 * blocks.pairs * facts.detail.features)


# -- what it leaves out ------------------------------------------------------------------------------------------------
#: Queries that meet a block of keys together: kRowBlock of csrc/attention.h.
_ROW_BLOCK = 24


def count_skipped(
    kept: Tensor,  # bool, (B, H, Lq, Lk)
    is_causal: bool,
) -> tuple[int, int]:
    """The pairs that the kernel is sure not to score, and the keys of all batch entries that it does not read.

    It packs the keys that some query of a head keeps, and scores all of them with every query; where it is causal, up
    to the last query of a block of rows.
    """
    packed = kept.any(-2, keepdim=True)  # (B, H, 1, Lk)
    scored = packed.expand(kept.shape)
    if is_causal:
        queries, keys = (torch.arange(size, device=kept.device) for size in kept.shape[-2:])
        scored = scored & (keys < queries[:, None] + _ROW_BLOCK)
    return kept.numel() - int(scored.sum()), int((~packed.any(1)).sum())
