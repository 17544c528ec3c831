"""Attention in plain torch operations: the ground truth of the routes, and the route where no other serves."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.primitives import where_kept
from maskwise.ops.torch_private import is_tracing

__all__ = [
    "attention",
    "causal",
    "expand_kept",
    "fill_dropped_inputs",
    "finite_rows",
    "finite_scores",
    "nan_backward",
    "nan_like",
    "repeat_heads",
    "with_nan",
]


def attention(
    q: Tensor,  # (B, H, Lq, D)
    k: Tensor,  # (B, Hkv, Lk, D)
    v: Tensor,  # (B, Hkv, Lk, Dv)
    kept: Tensor | None,  # bool, broadcasts to (B, H, Lq, Lk)
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,  # broadcasts to (B, H, Lq, Lk)
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (H,)
) -> Tensor:
    """Attention over what is kept; what is not finite reaches the queries that keep it, as NaN, and no others.

    >>> import torch
    >>> q, k, v = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 3, 1), torch.tensor([1.0, 3.0, torch.nan])
    >>> attention(q, k, v[None, None, :, None], torch.tensor([True, True, False])).flatten()
    tensor([2.])
    """
    kept = expand_kept(q, k, kept, is_causal)
    q, k, v = fill_dropped_inputs(q, k, v, kept)
    k, v = repeat_heads(q, k, v)
    sound_v = v.isfinite()
    v = where_kept(v, sound_v, 0.0)
    scores = _scores(q, k, kept, scale, bias, softcap)
    # A row that keeps nothing, or whose softmax is NaN, takes part with all its scores made 0: 0 * NaN is no gradient.
    some, sound = kept.any(-1, keepdim=True), _has_softmax(scores, kept, sinks)
    weights = where_kept(_softmax(where_kept(scores, sound, 0.0), sinks), kept, 0.0)
    spoiled = (kept.to(v.dtype) @ (~sound_v).to(v.dtype) > 0) | ~sound
    weights = torch.nn.functional.dropout(weights, dropout_p)
    out = with_nan(weights @ v, spoiled)
    # The gradient of a row that keeps nothing may be anything, and ends here.
    return where_kept(out, some, 0.0)


def _scores(
    q: Tensor,
    k: Tensor,
    kept: Tensor,
    scale: float | None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The scores of what is kept, capped and with the bias added, and -inf elsewhere: (B, H, Lq, Lk)."""
    # A product with something that is not finite is NaN also where its weight is zero, so the products get none.
    sound_q, sound_k = q.isfinite(), k.isfinite()
    q, k = where_kept(q, sound_q, 0.0), where_kept(k, sound_k, 0.0)
    scores = (q @ k.mT) * (1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale)
    if softcap is not None:
        # Of finite scores: the derivative at NaN is NaN, also times a gradient of 0.
        finite = scores.detach().isfinite()
        capped = softcap * torch.tanh(where_kept(scores, finite, 0.0) / softcap)
        scores = torch.where(finite, capped, scores.detach().clamp(-softcap, softcap))
    scores = where_kept(scores, sound_q.all(-1)[..., None] & sound_k.all(-1)[..., None, :], math.nan)
    if bias is not None:
        scores = scores + bias
    return where_kept(scores, kept, -math.inf)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax along keys, of which a sink takes the part that its logit has."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    column = where_kept(column, column < math.inf, 0.0)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


def _has_softmax(scores: Tensor, kept: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Which queries have one: something is kept, is no infinity, and not all of it is -inf. Bool (B, H, Lq, 1)."""
    some, sound = (scores > -math.inf).any(-1, keepdim=True), ~(kept & ~(scores < math.inf)).any(-1, keepdim=True)
    if sinks is None:
        return some & sound
    logits = sinks.detach()[:, None, None]
    return (some | (logits > -math.inf)) & sound & (logits < math.inf)


def finite_scores(q: Tensor, k: Tensor, kept: Tensor, scale: float | None) -> Tensor:
    """Which queries that keep something have a softmax, others included: bool (B, H, Lq, 1)."""
    k, _ = repeat_heads(q, k, k)
    return _has_softmax(_scores(q, k, kept, scale), kept) | ~kept.any(-1, keepdim=True)


def fill_dropped_inputs(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs with zeros where they are dropped: keys that no query keeps, queries that keep no key."""
    heads, shared = k.shape[1], q.shape[1] // k.shape[1]
    keys = kept.any(-2)
    if keys.shape[1] > 1 and shared > 1:
        keys = keys.reshape(keys.shape[0], heads, shared, keys.shape[-1]).any(2)
    keys = keys[..., None]
    return where_kept(q, kept.any(-1)[..., None], 0.0), where_kept(k, keys, 0.0), where_kept(v, keys, 0.0)


def finite_rows(q: Tensor) -> Tensor:
    """Which queries are finite: bool (B, H, Lq, 1)."""
    return q.detach().isfinite().all(-1, keepdim=True)


def with_nan(out: Tensor, spoiled: Tensor) -> Tensor:
    """The result of attention with NaN where it is ``spoiled``, bool that broadcasts to it.

    ``out`` comes from finite stand-ins. So a row whose incoming gradient is all zero takes no part in the backward
    pass, while NaN goes on where it has a gradient.
    """
    # A Function would make torch.compile warn, and a registered op has no forward mode.
    if torch.compiler.is_compiling():
        nan = torch.ops.maskwise.attention_nan(out)
    else:
        # torch.jit.trace follows plain operations only.
        nan = math.nan if is_tracing() else _Nan.apply(out)  # type: ignore[no-untyped-call]
    return torch.where(spoiled, nan, out)


def nan_like(out: Tensor) -> Tensor:
    """NaN everywhere."""
    return torch.full_like(out, math.nan)


def nan_backward(ctx: Any, above: Tensor) -> Tensor:
    """The gradient through NaN: NaN in the rows that have one, zero in the others."""
    return torch.where((above != 0).any(-1, keepdim=True), math.nan, torch.zeros_like(above))


class _Nan(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(nan_like)
    backward = staticmethod(nan_backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return nan_like(tangents[0])


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values with as many heads as the queries have."""
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return k, v
    return k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which keys a query sees up to its own position, counted from the top left: bool (queries, keys)."""
    return torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None]


def expand_kept(q: Tensor, k: Tensor, kept: Tensor | None, is_causal: bool) -> Tensor:
    """What is kept, with four dims, of which batch and heads have size 1 where it does not depend on them."""
    if is_causal:
        below = causal(q.shape[2], k.shape[2], q.device)
        kept = below if kept is None else kept & below
    if kept is None:
        kept = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device)
    kept = kept[(None,) * (4 - kept.dim())]
    return kept.expand(*kept.shape[:2], q.shape[2], k.shape[2])
