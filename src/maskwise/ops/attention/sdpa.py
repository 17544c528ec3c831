"""Attention by torch's SDPA with a mask, and what makes that leak-proof.

SDPA computes what is dropped and gives it a weight of 0, and 0 * NaN is NaN. So the result is checked, and one that
is not finite is computed again from zeros for what is dropped.

Large scores need more than that. The backward pass of torch's kernel recomputes a weight as exp(score - logsumexp).
Both are rounded, by up to D * eps of the product of the norms of query and key; where that is far above 1, the weight
may be inf, and inf times a gradient of zero is NaN at every key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention import reference
from maskwise.ops.attention.arguments import Call, bits_of, kept_of
from maskwise.ops.primitives import where_kept
from maskwise.ops.torch_private import is_tracing
from maskwise.plan import calibration
from maskwise.plan.cost import Rates, Work, microseconds
from maskwise.plan.dispatch import Facts

__all__ = [
    "attend_finite",
    "attend_without_sync",
    "cost",
    "dense_work",
    "fitting_rows",
    "is_finite",
    "is_small",
    "is_sound",
    "requires_grad",
    "rerun",
    "run",
    "run_without_sync",
    "work_of",
]

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


# -- the work ----------------------------------------------------------------------------------------------------------
#: How many torch calls a call of torch's kernel is worth, with what is prepared for it.
_CALLS = 8
#: Up to as many calls, nothing that could be skipped pays for looking at the mask: a `Mask`, which caches its blocks,
#: and a bool tensor, whose blocks are found anew in every call.
_SMALL_CALLS, _SMALL_CALLS_OF_BITS = 20, 100


def work_of(calls: int, pairs: int, features: int, gathered: int = 0) -> Work:
    """What it is to score so many pairs of a query and a key, and to add up the values: two products.

    ``gathered`` keys and values, in bytes per feature, are gathered first: each is read and written.
    """
    return Work(calls=calls * _CALLS, attention_flops=4 * pairs * features, gathered=4 * gathered * features)


def dense_work(facts: Facts) -> Work:
    """One call for all pairs."""
    return work_of(1, math.prod(facts.shape), facts.detail.features)


def cost(facts: Facts, work: Work, rates: Rates) -> float:
    """The forward pass alone: the backward pass is proportional to it, whichever the route."""
    return microseconds(work, rates.plain_call, rates)


def is_small(facts: Facts) -> bool:
    """Whether looking at the mask costs more than any block that could be skipped."""
    rates = calibration.rates_for(facts.device)
    has_cached_blocks = facts.detail.is_structured or facts.mask == "none"
    calls = _SMALL_CALLS if has_cached_blocks else _SMALL_CALLS_OF_BITS
    return cost(facts, dense_work(facts), rates) < calls * rates.plain_call


# -- one call with a mask ----------------------------------------------------------------------------------------------
def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    call: Call,
    dropout_p: float,
    scale: float | None,
    bias: Tensor | None = None,
) -> Tensor:
    """One call of SDPA for all pairs."""
    bits, is_causal = bits_of(mask, call.mask_index, call.sizes), call.is_causal
    if bias is not None:
        return _with_bias(q, k, v, bits, bias, is_causal, dropout_p, scale)
    attend, kept = _with_mask(bits, call, dropout_p, scale)
    out = attend(q, k, v)
    drops = kept is not None or is_causal
    if not is_sound(out, q, k, scale, drops=drops, recomputes=dropout_p == 0.0 and requires_grad(q, k, v)):
        out = attend_finite(attend, q, k, v, kept_of(bits, is_causal, call.sizes), dropout_p, scale)
    if kept is None or not out.requires_grad:
        return out
    # The gradient of a row that keeps nothing may be anything, and ends here.
    some = kept.any(-1, keepdim=True)
    return out if some.all() else where_kept(out, some, 0.0)


def rerun(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, call: Call, scale: float | None) -> Tensor:
    """The same for a call of which a kernel has found that something in it is not finite."""
    bits = bits_of(mask, call.mask_index, call.sizes)
    attend, _ = _with_mask(bits, call, 0.0, scale)
    return attend_finite(attend, q, k, v, kept_of(bits, call.is_causal, call.sizes), 0.0, scale)


def _with_mask(bits: Tensor | None, call: Call, dropout_p: float, scale: float | None) -> tuple[Attend, Tensor | None]:
    """SDPA with its options bound, and the mask that it is given. Every call of it drops the same weights."""
    state = torch.get_rng_state() if dropout_p > 0.0 else None
    kept = None if bits is None else kept_of(bits, call.is_causal, call.sizes)
    # Without a mask, SDPA is causal by itself.
    is_causal = call.is_causal and kept is None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if state is not None:
            torch.set_rng_state(state)
        gqa = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, kept, dropout_p, is_causal, scale=scale, enable_gqa=gqa)

    return attend, kept


# -- without a host-device sync ----------------------------------------------------------------------------------------
def run_without_sync(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    call: Call,
    dropout_p: float,
    scale: float | None,
    bias: Tensor | None = None,
) -> Tensor:
    """For devices, and for graphs: the values of a result are not looked at, so what is dropped is zero beforehand."""
    kept = bits_of(mask, call.mask_index, call.sizes)
    return attend_without_sync(q, k, v, kept, is_causal=call.is_causal, dropout_p=dropout_p, scale=scale, bias=bias)


def attend_without_sync(
    q: Tensor,  # (B, H, Lq, D)
    k: Tensor,  # (B, Hkv, Lk, D)
    v: Tensor,  # (B, Hkv, Lk, Dv)
    kept: Tensor | None,  # bool, broadcasts to (B, H, Lq, Lk)
    *,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    bias: Tensor | None = None,  # broadcasts to (B, H, Lq, Lk)
) -> Tensor:
    """SDPA with a mask, leak-proof: nothing of what no query keeps, or of a query without keys, is read."""
    if kept is None and not is_causal and bias is None:
        gqa = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, None, dropout_p, scale=scale, enable_gqa=gqa)
    if kept is None and bias is None:
        return _causal_alone(q, k, v, dropout_p, scale)
    kept = reference.expand_kept(q, k, kept, is_causal)
    some = kept.any(-1, keepdim=True)
    q, k, v = reference.fill_dropped_inputs(q, k, v, kept)
    k, v = reference.repeat_heads(q, k, v)
    # torch.jit.trace serves inputs with a gradient and without; a compiled graph is for one of them.
    is_traced = not torch.compiler.is_compiling() and is_tracing()
    if bias is None and not is_traced and not requires_grad(q, k, v):
        return where_kept(scaled_dot_product_attention(q, k, v, kept | ~some, dropout_p, scale=scale), some, 0.0)
    finite, added = reference.finite_rows(q), kept | ~some
    if bias is not None:
        added, has_softmax = _masked_bias(bias, kept, some)
        finite = finite & has_softmax
    q = where_kept(q, finite, 0.0)
    out = scaled_dot_product_attention(q, k, v, added, dropout_p, scale=scale)
    return where_kept(reference.with_nan(out, ~finite), some, 0.0)


def _causal_alone(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None) -> Tensor:
    """SDPA that is causal by itself: no mask of pairs is made, and no head of keys repeated."""
    gqa, queries = bool(q.shape[1] != k.shape[1]), q.shape[2]
    # Keys after the last query are dropped by all, and not read.
    k, v = k[:, :, :queries], v[:, :, :queries]
    is_traced = not torch.compiler.is_compiling() and is_tracing()
    if not is_traced and not requires_grad(q, k, v):
        return scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal=True, scale=scale, enable_gqa=gqa)
    finite = reference.finite_rows(q)
    q = where_kept(q, finite, 0.0)
    out = scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal=True, scale=scale, enable_gqa=gqa)
    return reference.with_nan(out, ~finite)


# -- a bias ------------------------------------------------------------------------------------------------------------
def _masked_bias(bias: Tensor, kept: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
    """The bias with -inf for what is dropped, and the queries that have a softmax with it: bool (B, H, Lq, 1).

    A query without keys, or without a softmax, has zeros: it computes something finite, which is replaced later.
    """
    clean = torch.where(kept, bias, 0.0)
    there = clean.detach()
    has_softmax = ~(there.isnan() | (there == math.inf)).any(-1, keepdim=True)
    has_softmax = has_softmax & ((there > -math.inf) & kept).any(-1, keepdim=True) | ~some
    return torch.where(kept | ~some, where_kept(clean, has_softmax, 0.0), -math.inf), has_softmax


def _with_bias(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor | None,  # bool, broadcasts to (B, H, Lq, Lk)
    bias: Tensor,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """SDPA with a bias; the reference where something that is kept is not finite, or scores are too large for it."""
    kept = reference.expand_kept(q, k, bits, is_causal)
    clean_q, clean_k, clean_v = (x.detach() for x in reference.fill_dropped_inputs(q, k, v, kept))
    sizes = where_kept(bias.detach().abs(), kept & (bias.detach() > -math.inf), 0.0)
    largest = float(sizes.amax()) if sizes.numel() else 0.0
    # The weights are recomputed in the backward pass from scores, which the bias is a part of.
    is_small_bias = largest * torch.finfo(_accumulates_in(q)).eps <= 1e-3
    is_finite_input = is_finite(clean_k) and is_finite(clean_v)
    if is_small_bias and is_finite_input and scores_fit(clean_q.nan_to_num(), clean_k, scale, recomputes=True):
        return attend_without_sync(q, k, v, kept, is_causal=False, dropout_p=dropout_p, scale=scale, bias=bias)
    return reference.attention(q, k, v, kept, False, dropout_p, scale, bias)


# -- results that are not finite ---------------------------------------------------------------------------------------
def requires_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the result requires grad."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def is_finite(x: Tensor) -> bool:
    """Whether all is finite, from its sum: one pass that makes no tensor. One that overflows says no, which is safe."""
    total = x.sum() if x.dtype is torch.float32 or x.dtype is torch.float64 else x.sum(dtype=torch.float32)
    return math.isfinite(total.item())


def is_sound(out: Tensor, q: Tensor, k: Tensor, scale: float | None, *, drops: bool, recomputes: bool) -> bool:
    """Whether nothing that is not finite was met: in the result, and in scores, which only the gradient reveals.

    Where nothing that is computed is dropped, the result has NaN only of what its query keeps, or of the query itself.
    """
    if out.requires_grad and not scores_fit(q.detach(), k.detach(), scale, recomputes=recomputes):
        return False
    return not drops or is_finite(out.detach())


def attend_finite(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor | None,  # bool, broadcasts to (B, H, Lq, Lk)
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """The same with zeros for what is dropped, and for queries that are NaN; the reference where that is not enough.

    Something that a query drops may have reached it as 0 * NaN. With zeros there ``attend`` gives what it gives for
    padding of zeros, bit for bit. What is left then is not finite in keys or values that a query keeps. Queries whose
    weights the backward pass would not reproduce are zeros, too, beside their own result with its own gradient.
    """
    # Only the kernel without dropout recomputes its weights in the backward pass.
    recomputes = dropout_p == 0.0 and requires_grad(q, k, v)
    given = q, k, v, kept
    kept = torch.ones((1, 1, 1, 1), dtype=torch.bool) if kept is None else kept
    q, k, v = reference.fill_dropped_inputs(q, k, v, kept)
    finite = reference.finite_rows(q)
    if not scores_fit(where_kept(q.detach(), finite, 0.0), k.detach(), scale, recomputes=False):
        # A query that is finite may have scores that are not.
        finite = finite & reference.finite_scores(q.detach(), k.detach(), kept, scale)
    q = where_kept(q, finite, 0.0)
    fit = fitting_rows(q.detach(), k.detach(), kept, scale) if recomputes else finite
    all_fit = not recomputes or bool(fit.all())
    out = attend(q if all_fit else where_kept(q, fit, 0.0), k, v)
    if not is_finite(out.detach()) or (out.requires_grad and not is_finite(k.detach())):
        return reference.attention(*given, dropout_p=dropout_p, scale=scale)
    if not all_fit:
        large: Tensor = _ReferenceGradient.apply(where_kept(q, ~fit, 0.0), k, v, attend, kept, scale)  # type: ignore[no-untyped-call]
        out = torch.where(fit, out, large)
    return out if bool(finite.all()) else reference.with_nan(out, ~finite)


# -- large scores ------------------------------------------------------------------------------------------------------
def scores_fit(q: Tensor, k: Tensor, scale: float | None, *, recomputes: bool) -> bool:
    """Whether all scores are finite and, if the backward ``recomputes`` the weights, small enough for that.

    It comes from a bound on the scores: one pass over q and one over k, which make a number for each row.

    >>> import torch
    >>> q, k = torch.full((1, 1, 1, 4), 1e15), torch.ones(1, 1, 1, 4)
    >>> scores_fit(q, k, None, recomputes=False), scores_fit(q, k, None, recomputes=True)
    (True, False)
    """
    if 0 in q.shape or 0 in k.shape:
        return True
    product = float(_norms(q).amax()) * float(_norms(k).amax())
    scale, info = _magnitude(q, scale), torch.finfo(_accumulates_in(q))
    fits = product * max(1.0, scale) <= info.max
    return fits and (not recomputes or product * scale * q.shape[-1] * info.eps <= 1.0)


def fitting_rows(q: Tensor, k: Tensor, kept: Tensor, scale: float | None) -> Tensor:
    """The queries whose weights the backward pass reproduces, from the keys that each keeps: bool (B, H, Lq, 1)."""
    norms, _ = reference.repeat_heads(q, _norms(k)[..., None], _norms(k)[..., None])  # (B, H, Lk, 1)
    largest = where_kept(norms.mT, kept, 0.0).amax(-1, keepdim=True)
    factor = _magnitude(q, scale) * q.shape[-1] * torch.finfo(_accumulates_in(q)).eps
    return _norms(q)[..., None] * largest * factor <= 1.0


class _ReferenceGradient(torch.autograd.Function):
    """What ``attend`` gives, with the gradients of the reference, in which only rows with a gradient take part."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attend: Attend, kept: Tensor, scale: float | None) -> Tensor:
        ctx.save_for_backward(q, k, v, kept)
        ctx.scale = scale
        out = attend(q, k, v)
        # The score of a key that the query drops may overflow.
        return out if is_finite(out) else reference.attention(q, k, v, kept, scale=scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, kept = ctx.saved_tensors
        has_grad = (grad != 0).any(-1, keepdim=True)
        if not has_grad.any():
            return (None,) * 6
        wide = _accumulates_in(grad)
        with torch.enable_grad():
            q, k, v = (x.detach().to(wide).requires_grad_() for x in tensors)
            out = reference.attention(where_kept(q, has_grad, 0.0), k, v, kept, scale=ctx.scale)
            gradients = torch.autograd.grad(out, (q, k, v), grad.to(wide))
        return (*(gradient.to(grad.dtype) for gradient in gradients), None, None, None)


def _norms(x: Tensor) -> Tensor:
    """The Euclidean norm of every row: (B, H, L). It may overflow, which only makes the bound larger."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=_accumulates_in(x))
    return norms


def _accumulates_in(x: Tensor) -> torch.dtype:
    """The dtype in which the kernel accumulates."""
    return torch.promote_types(x.dtype, torch.float32)


def _magnitude(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else abs(scale)
