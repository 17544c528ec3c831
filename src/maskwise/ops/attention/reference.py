"""Attention in plain torch operations: the ground truth of the routes, and the route where nothing else serves."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attention", "attention_by_sdpa", "causal", "clean", "repeat_heads"]


def attention(
    q: Tensor,  # (B, H, Lq, D)
    k: Tensor,  # (B, Hkv, Lk, D)
    v: Tensor,  # (B, Hkv, Lk, Dv)
    kept: Tensor | None,  # bool, broadcasts to (B, H, Lq, Lk)
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention over what is kept; what is not finite reaches the queries that keep it, as NaN, and no others.

    >>> import torch
    >>> q, k, v = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 3, 1), torch.tensor([1.0, 3.0, torch.nan])
    >>> attention(q, k, v[None, None, :, None], torch.tensor([True, True, False])).flatten()
    tensor([2.])
    """
    kept = _all_of(q, k, kept, is_causal)
    q, k, v = clean(q, k, v, kept)
    k, v = repeat_heads(q, k, v)
    # A product with something that is not finite is NaN also where its weight is zero, so the products see none.
    sound_q, sound_k, sound_v = q.isfinite(), k.isfinite(), v.isfinite()
    q, k, v = (torch.where(sound, x, 0.0) for sound, x in ((sound_q, q), (sound_k, k), (sound_v, v)))
    scores = (q @ k.mT) * (1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale)
    scores = torch.where(sound_q.all(-1)[..., None] & sound_k.all(-1)[..., None, :], scores, math.nan)
    # A row that keeps nothing takes part with all its scores made 0, for a softmax of nothing has no gradient.
    some = kept.any(-1, keepdim=True)
    scores = torch.where(kept, scores, torch.where(some, -math.inf, 0.0).to(scores.dtype))
    weights = torch.where(kept, torch.softmax(scores, -1), 0.0)
    spoiled = kept.to(v.dtype) @ (~sound_v).to(v.dtype) > 0
    weights = torch.nn.functional.dropout(weights, dropout_p)
    out = torch.where(spoiled, math.nan, weights @ v)
    # The gradient of a row that keeps nothing may be anything, and ends here.
    return torch.where(some, out, 0.0)


def attention_by_sdpa(
    q: Tensor,  # (B, H, Lq, D)
    k: Tensor,  # (B, Hkv, Lk, D)
    v: Tensor,  # (B, Hkv, Lk, Dv)
    kept: Tensor | None,  # bool, broadcasts to (B, H, Lq, Lk)
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """SDPA with a mask, made leak-proof: nothing of what no query keeps, or of a query without keys, is read."""
    if kept is None and not is_causal:
        gqa = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, None, dropout_p, scale=scale, enable_gqa=gqa)
    kept = _all_of(q, k, kept, is_causal)
    some = kept.any(-1, keepdim=True)
    q, k, v = clean(q, k, v, kept)
    k, v = repeat_heads(q, k, v)
    out = scaled_dot_product_attention(q, k, v, kept | ~some, dropout_p, scale=scale)
    return torch.where(some, out, 0.0)


def clean(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs with zeros where they are masked out: keys that no query keeps, queries that keep no key."""
    heads, shared = k.shape[1], q.shape[1] // k.shape[1]
    keys = kept.any(-2)
    if keys.shape[1] > 1 and shared > 1:
        keys = keys.reshape(keys.shape[0], heads, shared, keys.shape[-1]).any(2)
    keys = keys[..., None]
    return torch.where(kept.any(-1)[..., None], q, 0.0), torch.where(keys, k, 0.0), torch.where(keys, v, 0.0)


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values with as many heads as the queries have."""
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return k, v
    return k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which keys a query sees up to its own position, counted from the top left: bool (queries, keys)."""
    return torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None]


def _all_of(q: Tensor, k: Tensor, kept: Tensor | None, is_causal: bool) -> Tensor:
    """What is kept, with four dims, of which those it does not depend on have size 1."""
    if is_causal:
        below = causal(q.shape[2], k.shape[2], q.device)
        kept = below if kept is None else kept & below
    if kept is None:
        kept = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device)
    kept = kept[(None,) * (4 - kept.dim())]
    return kept.expand(*kept.shape[:2], q.shape[2], k.shape[2])
