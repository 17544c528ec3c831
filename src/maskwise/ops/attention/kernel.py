"""The CPU kernel of attention as a registered op: keys that are dropped are never read.

``attention_fused_forward`` gives the result, and whether every key and value that it read is finite: one that is not
could have reached queries that drop it, where queries of one head keep different keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.ops import backends
from maskwise.ops.attention import reference
from maskwise.ops.backends import INTERPRETED
from maskwise.ops.operation import define, differentiate

__all__ = ["attend_fused"]

DTYPES = (torch.float32, torch.float64)


def by_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_of_keys: bool, is_causal: bool, scale: float
) -> tuple[Tensor, bool]:
    """The same in plain torch operations, which no value that is dropped gets through."""
    kept = mask[:, None, None] if mask is not None and is_of_keys else mask
    return reference.attention(q, k, v, kept, is_causal, 0.0, scale), True


def fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_of_keys: bool, is_causal: bool, scale: float
) -> tuple[Tensor, bool]:
    """The result without its data, in q's order of heads and queries, as torch's kernel gives it."""
    batch, heads, queries, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2), True
    return q.new_empty(batch, heads, queries, v.shape[-1]), True


define(
    "attention_fused_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_of_keys, bool is_causal, float scale) -> (Tensor, bool)",
    reference=by_reference,
    fake=fake,
)
define("attention_nan", "(Tensor out) -> Tensor", reference=reference.nan_like, fake=torch.empty_like)
differentiate("attention_nan", reference.nan_backward, None)
if not INTERPRETED:
    backends.provide("attention", "cpu", DTYPES)
attend_fused = torch.ops.maskwise.attention_fused_forward.default
