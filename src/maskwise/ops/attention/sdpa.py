"""Attention in one call of torch's SDPA with a mask, for what is too small for blocks, or too dense."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from maskwise.ops.attention.reference import causal

__all__ = ["attend_whole", "end_gradients"]


def attend_whole(
    q: Tensor,  # (B, H, Lq, D)
    k: Tensor,  # (B, Hkv, Lk, D)
    v: Tensor,  # (B, Hkv, Lk, Dv)
    kept: Tensor | None,  # bool, broadcasts to (B, H, Lq, Lk)
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Attention by SDPA; the caller looks whether anything dropped has leaked into the result."""
    if kept is None:
        return scaled_dot_product_attention(
            q, k, v, None, dropout_p, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    kept = with_causal(kept, is_causal, q, k)
    gqa = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, kept, dropout_p, scale=scale, enable_gqa=gqa)


def end_gradients(out: Tensor, kept: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
    """The result, through which no gradient reaches a row that keeps nothing: it may be anything there."""
    if kept is None or not out.requires_grad:
        return out
    some = with_causal(kept, is_causal, q, k).any(-1, keepdim=True)
    return out if some.all() else torch.where(some, out, 0.0)


def with_causal(kept: Tensor, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
    """What is kept, and not later than the query."""
    return kept & causal(q.shape[2], k.shape[2], q.device) if is_causal else kept
