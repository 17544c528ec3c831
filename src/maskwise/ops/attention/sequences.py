"""Attention within packed sequences: each sees itself only, and padding does not exist.

There is one SDPA call for each run of sequences of equal length. The tokens are split and joined once, so the backward
pass is linear too: slices taken one by one would each make a gradient of the full size.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from maskwise.errors import ArgumentError, ShapeError, say

__all__ = ["Run", "attend", "runs"]


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
        is_causal: whether a query sees only the keys up to its own position in the sequence.
        dropout_p: the probability with which a weight is dropped; nobody but the caller knows of training and eval.
        scale: what the scores are multiplied by; by default 1 / sqrt(D).

    Returns:
        (N, H, Dv), differentiable in q, k and v.

    Raises:
        ShapeError: the lengths do not add up to the rows, or the heads do not divide.
    """
    key_lengths = lengths if key_lengths is None else key_lengths
    _check(q, k, v, lengths, key_lengths)
    found = runs(lengths, key_lengths)
    if all(run.keys == 0 or run.queries == 0 for run in found):
        # Nothing is computed, and yet the result is part of the graph.
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2]) + (q[:0].sum() + k[:0].sum() + v[:0].sum())
    gqa = q.shape[1] != k.shape[1]
    query_rows = [run.sequences * run.queries for run in found]
    key_rows = [run.sequences * run.keys for run in found]
    # One run needs no split, and its result no copy.
    whole = len(found) == 1
    outs = []
    for run, a, b, c in zip(
        found,
        (q,) if whole else torch.split(q, query_rows),
        (k,) if whole else torch.split(k, key_rows),
        (v,) if whole else torch.split(v, key_rows),
        strict=True,
    ):
        if run.keys == 0 or run.queries == 0:
            outs.append(a.new_zeros(a.shape[0], q.shape[1], v.shape[2]))
            continue
        out = scaled_dot_product_attention(
            a.reshape(run.sequences, run.queries, *q.shape[1:]).transpose(1, 2),
            b.reshape(run.sequences, run.keys, *k.shape[1:]).transpose(1, 2),
            c.reshape(run.sequences, run.keys, *v.shape[1:]).transpose(1, 2),
            is_causal=is_causal,
            dropout_p=dropout_p,
            scale=scale,
            enable_gqa=gqa,
        )
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
