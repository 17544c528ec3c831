"""Attention on the CPU by blocks: a list of pieces, each a range of queries with the keys that they see.

Every piece is one call of torch's own CPU kernel, forward and backward. Pieces are views, results are written where
they belong, and gradients are added there, so that neither pass makes tensors of the full size for each piece.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Piece", "attend_blocks", "is_finite", "learns", "serves"]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class Piece(NamedTuple):
    """Queries of some batch entries, and the keys that they see."""

    batch: tuple[int, int]
    rows: tuple[int, int]
    #: A range of keys; or their positions, where they have gaps: int64 (n,).
    keys: tuple[int, int] | Tensor
    #: Which of these keys each of these queries keeps: bool, broadcasts to (batch, H, rows, keys); None for all.
    bits: Tensor | None = None
    is_causal: bool = False

    @property
    def is_partial(self) -> bool:
        """Whether some query drops some key of this piece."""
        return self.bits is not None or self.is_causal

    def queries_of(self, x: Tensor) -> Tensor:
        """The part of q, of the result, or of their gradients that is this piece's: a view."""
        (first, last), (start, end) = self.batch, self.rows
        return x[first:last, :, start:end]

    def keys_of(self, x: Tensor) -> Tensor:
        """The part of k or v that is this piece's: a view, or a copy where the keys have gaps."""
        first, last = self.batch
        if isinstance(self.keys, Tensor):
            return x[first:last].index_select(2, self.keys)
        start, end = self.keys
        return x[first:last, :, start:end]

    def add_to_keys(self, gradient: Tensor, part: Tensor) -> None:
        """Add the gradient of this piece's keys where they belong."""
        first, last = self.batch
        if isinstance(self.keys, Tensor):
            gradient[first:last].index_add_(2, self.keys, part)
        else:
            start, end = self.keys
            gradient[first:last, :, start:end] += part

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bits as the kernel takes them: what is added to the scores."""
        if self.bits is None:
            return None
        return torch.where(self.bits, 0.0, -math.inf).to(dtype)


def serves(q: Tensor, k: Tensor, v: Tensor) -> tuple[bool, str]:
    """Whether the CPU kernel takes these, and the reason if not."""
    if q.dtype not in _DTYPES:
        return False, f"the CPU kernel does not take {q.dtype}"
    if q.shape[-1] != v.shape[-1]:
        return False, f"the CPU kernel needs keys and values of one size, got {q.shape[-1]} and {v.shape[-1]}"
    if 0 in q.shape or 0 in k.shape:
        return False, "there is nothing to compute"
    if q.shape[1] != k.shape[1] and _TORCH < (2, 13):
        return False, "the CPU kernel takes grouped-query heads from torch 2.13 on"
    return True, ""


_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, pieces: list[Piece], scale: float | None) -> Tensor:
    """Attention piece by piece; queries of no piece give 0."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if learns(q, k, v):
        out: Tensor = _Blocks.apply(q, k, v, pieces, scale)  # type: ignore[no-untyped-call]
        return out
    return _run(q, k, v, pieces, scale, None)


def _run(
    q: Tensor, k: Tensor, v: Tensor, pieces: list[Piece], scale: float | None, norms: list[Tensor] | None
) -> Tensor:
    """The forward pass; the logarithms of the sums, which the backward pass needs, go into ``norms``."""
    if len(pieces) == 1 and pieces[0].rows == (0, q.shape[2]) and pieces[0].batch == (0, q.shape[0]):
        piece = pieces[0]
        keys, values = piece.keys_of(k), piece.keys_of(v)
        out: Tensor
        out, norm = _forward(q, keys, values, 0.0, piece.is_causal, attn_mask=piece.bias(q.dtype), scale=scale)
        if norms is not None:
            norms.append(norm)
        return out
    out = torch.zeros_like(q)
    for piece in pieces:
        part, norm = _forward(
            piece.queries_of(q),
            piece.keys_of(k),
            piece.keys_of(v),
            0.0,
            piece.is_causal,
            attn_mask=piece.bias(q.dtype),
            scale=scale,
        )
        piece.queries_of(out).copy_(part)
        if norms is not None:
            norms.append(norm)
    return out


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: list[Piece], scale: float | None) -> Tensor:
        norms: list[Tensor] = []
        out = _run(q, k, v, pieces, scale, norms)
        ctx.save_for_backward(q, k, v, out, *norms)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        saved, pieces = ctx.saved_tensors, ctx.pieces
        above = above if above.stride(-1) == 1 else above.contiguous()
        gradients = _gradients(above, saved, pieces, ctx.scale)
        if any(piece.bits is not None for piece in pieces) and not (
            is_finite(gradients[1]) and is_finite(gradients[2])
        ):
            # The gradient of a query that keeps nothing may be anything, and takes no part.
            above = above.clone()
            for piece in pieces:
                if piece.bits is not None:
                    piece.queries_of(above).masked_fill_(~piece.bits.any(-1, keepdim=True), 0.0)
            gradients = _gradients(above, saved, pieces, ctx.scale)
        return (*gradients, None, None)


def _gradients(
    above: Tensor, saved: tuple[Tensor, ...], pieces: list[Piece], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, *norms = saved
    of_q, of_k, of_v = (torch.zeros_like(x) for x in (q, k, v))
    for piece, norm in zip(pieces, norms, strict=True):
        one, two, three = _backward(
            piece.queries_of(above),
            piece.queries_of(q),
            piece.keys_of(k),
            piece.keys_of(v),
            piece.queries_of(out),
            norm,
            0.0,
            piece.is_causal,
            attn_mask=piece.bias(q.dtype),
            scale=scale,
        )
        piece.queries_of(of_q).copy_(one)
        piece.add_to_keys(of_k, two)
        piece.add_to_keys(of_v, three)
    return of_q, of_k, of_v


def learns(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the result requires grad."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def is_finite(x: Tensor) -> bool:
    """Whether all is finite, from its sum: one pass that makes no tensor. One that overflows says no, which is safe."""
    total = x.sum() if x.dtype is torch.float32 or x.dtype is torch.float64 else x.sum(dtype=torch.float32)
    return math.isfinite(total.item())
