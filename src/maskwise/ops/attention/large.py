"""Queries with scores so large that the backward pass of torch's kernel does not reproduce their weights.

It recomputes a weight as exp(score - logsumexp). Both are rounded, by up to D * eps of the product of the norms of
query and key; where that is far above 1, the weight may be inf, and inf times a gradient of zero is NaN at every key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.attention import reference
from maskwise.ops.attention.blocks import is_finite

__all__ = ["attend_read", "fitting_rows", "scores_fit"]


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
    scale, info = _scale(q, scale), torch.finfo(_wide(q))
    fits = product * max(1.0, scale) <= info.max
    return fits and (not recomputes or product * scale * q.shape[-1] * info.eps <= 1.0)


def fitting_rows(q: Tensor, k: Tensor, kept: Tensor, scale: float | None) -> Tensor:
    """The queries whose weights the backward pass reproduces, from the keys that each keeps: bool (B, H, Lq, 1)."""
    norms, _ = reference.repeat_heads(q, _norms(k)[..., None], _norms(k)[..., None])  # (B, H, Lk, 1)
    largest = torch.where(kept, norms.mT, 0.0).amax(-1, keepdim=True)
    factor = _scale(q, scale) * q.shape[-1] * torch.finfo(_wide(q)).eps
    return _norms(q)[..., None] * largest * factor <= 1.0


def attend_read(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    scale: float | None,
) -> Tensor:
    """What ``attend`` gives, with the gradients of the reference, in which only rows with a gradient take part."""
    out: Tensor = _Read.apply(q, k, v, attend, kept, scale)  # type: ignore[no-untyped-call]
    return out


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        kept: Tensor,
        scale: float | None,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, kept)
        ctx.scale = scale
        out = attend(q, k, v)
        # The score of a key that the query drops may overflow.
        return out if is_finite(out) else reference.attention(q, k, v, kept, scale=scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, kept = ctx.saved_tensors
        read = (above != 0).any(-1, keepdim=True)
        if not read.any():
            return (None,) * 6
        wide = _wide(above)
        with torch.enable_grad():
            q, k, v = (x.detach().to(wide).requires_grad_() for x in tensors)
            out = reference.attention(torch.where(read, q, 0.0), k, v, kept, scale=ctx.scale)
            gradients = torch.autograd.grad(out, (q, k, v), above.to(wide))
        return (*(gradient.to(above.dtype) for gradient in gradients), None, None, None)


def _norms(x: Tensor) -> Tensor:
    """The Euclidean norm of every row: (B, H, L). It may overflow, which only makes the bound larger."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=_wide(x))
    return norms


def _wide(x: Tensor) -> torch.dtype:
    """What the kernel accumulates in."""
    return torch.promote_types(x.dtype, torch.float32)


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else abs(scale)
