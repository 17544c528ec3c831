"""Attention as a loop in float64: for each query, a softmax over the keys that it keeps."""

from __future__ import annotations

import math

import torch


def attention(q, k, v, kept=None, *, is_causal=False, scale=None):
    """(B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv) and bool (B, H, Lq, Lk) -> (B, H, Lq, Dv) in float64.

    Differentiable; a key that is not kept takes no part at all.
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, queries, size = q.shape
    keys, shared = k.shape[2], heads // k.shape[1]
    scale = 1 / math.sqrt(size) if scale is None else scale
    if kept is None:
        kept = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    if is_causal:
        kept = kept & torch.ones(queries, keys, dtype=torch.bool).tril()
    rows = []
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                chosen = kept[b, h, i].nonzero()[:, 0]
                if len(chosen) == 0:
                    rows.append(torch.zeros(v.shape[3], dtype=torch.float64))
                    continue
                weights = torch.softmax(k[b, h // shared][chosen] @ q[b, h, i] * scale, 0)
                rows.append(weights @ v[b, h // shared][chosen])
    if not rows:
        return q.new_zeros(batch, heads, queries, v.shape[3])
    return torch.stack(rows).reshape(batch, heads, queries, v.shape[3])


def tokens(*shape, dtype=torch.float32, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)
