"""Losses without a kernel of their own on the CPU: torch's loss between the kernels of fill and sum, or in chunks.

Large inputs are cut into chunks that fit the cache, each with only what is kept, or with other values in the place of
the rest: it is the uninitialised memory of large temporaries that makes a masked loss slow on the CPU. There are two
layouts. "rows": everything that one element of the mask decides on is a row of dim 0, so the kept rows are gathered,
and what is dropped is never touched. "cells": the mask decides within rows, so a chunk is a stretch of memory.

Where a gradient is required and the loss is reduced, it is computed with the loss, while the chunk is in the cache; the
backward pass then only scales it. An unreduced loss, and a graph that is walked a second time, compute their chunks
again instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from maskwise.ops.loss.functional_losses import AlignedLoss, Fill, Prepared, align, why_not_on_cpu
from maskwise.ops.loss.reference import UNDIVIDED, reduce, scales
from maskwise.ops.primitives import fill_dropped, sum_kept, where_kept
from maskwise.plan.dispatch import NOT_APPLICABLE, Facts, Route, Skips

__all__ = ["ROUTES", "ChunkedLoss", "chunk"]

#: Where a chunk lies: rows by their indices, or slices of the first dim, and perhaps of the last.
Place: TypeAlias = Tensor | tuple[slice, ...]
#: Elements of the largest operand in a chunk: 1 MB of float32.
_CHUNK = 1 << 18
#: Elements of the largest operand from which chunks pay: where rows that are dropped are left out, and where the chunks
#: only save temporaries.
_LARGE_ROWS, _LARGE_CELLS = 1 << 15, 1 << 23


# -- cutting -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Chunk:
    """A part of the call: its operands, filled, and what is kept of the loss (None for all of it)."""

    place: Place
    tensors: list[Tensor]
    keep: Tensor | None


@dataclass(frozen=True)
class ChunkedLoss:
    """A call that can be cut."""

    aligned: AlignedLoss
    #: Whether chunks are gathered rows.
    rows: bool
    #: How many rows of the chunks are one row of the loss as the caller sees it.
    repeats: int = 1

    def chunks(self, size: int = _CHUNK, fill: Fill = fill_dropped) -> Iterator[Chunk]:
        """The chunks in the order of memory, ``size`` elements each; without those of which nothing is kept."""
        tensors, keep = self.aligned.tensors, self.aligned.keep
        each = max(1, *(x[:1].numel() for x in tensors))
        n = tensors[0].shape[0]
        step = max(1, size // each)
        if not self.rows:
            yield from self._cells(n, step, max(1, size // max(1, each // max(1, tensors[0].shape[-1]))), fill)
            return
        kept = keep.nonzero().squeeze(1)
        for at in range(0, kept.shape[0], step):
            index = kept[at : at + step]
            first, end = int(index[0]), int(index[-1]) + 1
            # Rows next to each other, as those of an interval are, need no copy.
            place: Place = (slice(first, end),) if end - first == index.shape[0] else index
            yield Chunk(place, [_part(x, place) for x in tensors], None)

    def _cells(self, n: int, step: int, stretch: int, fill: Fill) -> Iterator[Chunk]:
        aligned = self.aligned
        length = aligned.shape[-1]
        # A row that is larger than a chunk is cut along the last dim too, where there is one behind the classes.
        cut = stretch < length and step == 1 and len(aligned.shape) > 1
        for at in range(0, n, step):
            for start in range(0, length, stretch) if cut else (0,):
                place = (slice(at, at + step), slice(start, start + stretch)) if cut else (slice(at, at + step),)
                keep = _part(aligned.keep, place)
                if keep.any():
                    parts = tuple(_part(x, place) for x in aligned.tensors)
                    inner = replace(aligned, tensors=parts, keep=keep, shape=tuple(keep.shape))
                    yield Chunk(place, inner.filled(fill), keep)


def _part(x: Tensor, place: Place) -> Tensor:
    """The part of x at ``place``."""
    if isinstance(place, Tensor):
        return x.index_select(0, place)
    return x[place] if len(place) == 1 else x[place[0], ..., place[1]]


def _write_part(x: Tensor, place: Place, values: Tensor) -> None:
    """Write the part of x at ``place``."""
    if isinstance(place, Tensor):
        x.index_copy_(0, place, values)
    else:
        _part(x, place).copy_(values)


def chunk(aligned: AlignedLoss, reduction: str) -> ChunkedLoss | None:
    """The call as one that can be cut, or None. It follows from shapes and strides alone."""
    if any(fill is None for fill in aligned.fills) or any(
        isinstance(value, Tensor) and value.requires_grad for value in aligned.rest.values()
    ):
        return None
    return _as_rows(aligned) or _as_cells(aligned, by_rows=reduction == "sequence")


def _as_rows(aligned: AlignedLoss) -> ChunkedLoss | None:
    """The call as rows, by views alone; None where the mask varies within rows, or memory has another layout."""
    keep, shape = aligned.keep, aligned.shape
    lead = len(shape)
    tensors = list(aligned.tensors)
    if aligned.spec.alignment == "elements":
        # Trailing dims that the mask broadcasts over make a row.
        sizes = [1] * (len(shape) - keep.dim()) + list(keep.shape)
        while lead and sizes[lead - 1] == 1:
            lead -= 1
        if lead == len(shape) or len(shape) - lead < aligned.shared_dims:
            return None
        keep = keep.reshape(sizes[:lead])
    elif aligned.spec.alignment == "classes":
        tensors = [x.movedim(1, -1) if x.dim() == lead + 1 and lead else x for x in tensors]
    if lead == 0 or prod(shape) == 0:
        return None
    if lead > 1 and not all(x.is_contiguous() for x in tensors if x.dim() > lead):
        return None
    flat = [x.reshape(-1, *x.shape[lead:]) for x in tensors]
    rows = keep.expand(shape[:lead]).reshape(-1)
    changed = replace(aligned, tensors=tuple(flat), keep=rows, shape=(rows.shape[0], *shape[lead:]))
    return ChunkedLoss(changed, rows=True, repeats=rows.shape[0] // shape[0])


def _as_cells(aligned: AlignedLoss, by_rows: bool) -> ChunkedLoss | None:
    """The call as cells, by views alone; ``by_rows`` where the rows of the loss must not be cut through."""
    shape, tensors = aligned.shape, aligned.tensors
    if not shape or prod(shape) == 0 or aligned.spec.alignment == "rows":
        return None
    keep = aligned.keep.expand(shape)
    if aligned.spec.alignment == "elements":
        if any(x.shape != shape for x in tensors) or aligned.shared_dims >= len(shape):
            return None
        contiguous = keep.is_contiguous() and all(x.is_contiguous() for x in tensors)
        if not by_rows and not aligned.shared_dims and contiguous:
            flat = tuple(x.reshape(-1) for x in tensors)
            return ChunkedLoss(replace(aligned, tensors=flat, keep=keep.reshape(-1), shape=(prod(shape),)), rows=False)
    elif len(shape) > 2 and all(x.is_contiguous() for x in tensors):
        # (N, C, H, W) -> (N, C, S)
        flat = tuple(x.flatten(2) if x.dim() > len(shape) else x.flatten(1) for x in tensors)
        changed = replace(aligned, tensors=flat, keep=keep.flatten(1), shape=(shape[0], prod(shape[1:])))
        return ChunkedLoss(changed, rows=False)
    return ChunkedLoss(replace(aligned, keep=keep), rows=False)


# -- the loss of chunks ------------------------------------------------------------------------------------------------
def _run_in_chunks(prepared: Prepared, operands: tuple[Tensor, ...], bits: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """The loss of what is kept, chunk by chunk."""
    reduction = prepared.reduction
    aligned = align(prepared.fn, prepared.spec, operands, bits, kwargs)
    chunked = chunk(aligned, reduction)
    assert chunked is not None  # The route was decided by the shapes and strides of this call.
    divisors = None if reduction in UNDIVIDED else aligned.divisors(_fill_classes(aligned))
    scale = scales(aligned.keep, aligned.shape, reduction, divisors)
    if scale.dim() and chunked.repeats > 1:
        scale = scale.repeat_interleave(chunked.repeats)
    unreduced = reduction == "none"
    stripped = replace(chunked, aligned=replace(chunked.aligned, tensors=()))
    out: Tensor = _Chunked.apply(stripped, scale, unreduced, *chunked.aligned.tensors)  # type: ignore[no-untyped-call]
    return out.reshape(aligned.shape) if unreduced else out


def _fill_classes(aligned: AlignedLoss) -> Sequence[Tensor]:
    """The operands as `AlignedLoss.divisors` takes them: only the target and the weights, which are small, filled."""
    if aligned.spec.divides_by != "classes" or "weight" not in aligned.rest:
        return aligned.tensors
    pairs = zip(aligned.tensors, aligned.fills, strict=True)
    return replace(aligned, fills=tuple(None if x.is_floating_point() else value for x, value in pairs)).filled()


class _Chunked(torch.autograd.Function):
    """The loss in chunks, with the gradients of its tensors."""

    @staticmethod
    def forward(ctx: Any, chunked: ChunkedLoss, scale: Tensor, unreduced: bool, *tensors: Tensor) -> Tensor:
        ctx.chunked, ctx.scale, ctx.unreduced = chunked, scale, unreduced
        ctx.save_for_backward(*tensors)
        chunked = replace(chunked, aligned=replace(chunked.aligned, tensors=tensors))
        if unreduced:
            return _unreduced_loss(chunked)
        total, ctx.gradients = _reduced_loss(chunked, scale, ctx.needs_input_grad[3:])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        chunked = replace(ctx.chunked, aligned=replace(ctx.chunked.aligned, tensors=tensors))
        if torch.is_grad_enabled():
            gradients = _differentiable_gradients(chunked, ctx.scale, ctx.unreduced, grad, needed)
        elif ctx.unreduced or ctx.gradients is None:
            gradients = _recompute_gradients(chunked, ctx.scale, grad, needed)
        else:
            # They are given away: a second walk through the graph computes them again.
            gradients, ctx.gradients = ctx.gradients, None
            factor = grad.item()
            if factor != 1.0:
                gradients = [None if g is None else g.mul_(factor) for g in gradients]
        return None, None, None, *gradients


def _unreduced_loss(chunked: ChunkedLoss) -> Tensor:
    aligned = chunked.aligned
    out: Tensor | None = None
    for part in chunked.chunks():
        values = aligned.run(part.tensors)
        if out is None:
            out = values.new_zeros(aligned.shape)
        _write_part(out, part.place, values if part.keep is None else fill_dropped(values, part.keep))
    return aligned.tensors[0].new_zeros(aligned.shape) if out is None else out


def _reduced_loss(chunked: ChunkedLoss, scale: Tensor, needed: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and the gradients of the tensors that need one."""
    totals: list[Tensor] = []
    gradients = _zeros_for_gradients(chunked, needed)
    dtype = chunked.aligned.tensors[0].dtype
    for part in chunked.chunks():
        leaves = _leaves_of(part, needed)
        with torch.set_grad_enabled(any(needed)):
            out = chunked.aligned.run(leaves)
        factor = _part_of_scale(scale, part.place, out)
        if any(needed):
            _write_gradients(gradients, part, leaves, out, factor)
        out = out.detach()
        dtype = out.dtype
        totals.append(_total(out * factor if scale.dim() else out, part.keep))
    if not totals:
        return torch.zeros((), dtype=dtype), gradients
    total = torch.stack(totals).sum(dtype=torch.float64)
    return (total if scale.dim() else total * scale).to(dtype), gradients


def _recompute_gradients(
    chunked: ChunkedLoss, scale: Tensor, grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the tensors from the gradient of the result, chunk by chunk."""
    gradients = _zeros_for_gradients(chunked, needed)
    for part in chunked.chunks():
        leaves = _leaves_of(part, needed)
        with torch.enable_grad():
            out = chunked.aligned.run(leaves)
        factor = _part(grad, part.place) if grad.dim() else _part_of_scale(scale, part.place, out) * grad
        _write_gradients(gradients, part, leaves, out, factor)
    return gradients


def _differentiable_gradients(
    chunked: ChunkedLoss, scale: Tensor, unreduced: bool, grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the tensors in one chunk, such that they can be differentiated again."""
    tensors = chunked.aligned.tensors
    learned = [x for x, need in zip(tensors, needed, strict=True) if need]
    for part in chunked.chunks(size=2**62, fill=where_kept):
        out = chunked.aligned.run(part.tensors)
        out = out if part.keep is None else where_kept(out, part.keep, 0.0)
        factor = _part(grad, part.place) if unreduced else _part_of_scale(scale, part.place, out) * grad
        found = iter(torch.autograd.grad((out * factor).sum(), learned, create_graph=True))
        return [next(found) if need else None for need in needed]
    return [torch.zeros_like(x) if need else None for x, need in zip(tensors, needed, strict=True)]


def _leaves_of(part: Chunk, needed: Sequence[bool]) -> list[Tensor]:
    """The tensors of a chunk, apart from every graph; those that need a gradient require one."""
    return [x.detach().requires_grad_(need) for x, need in zip(part.tensors, needed, strict=True)]


def _write_gradients(
    gradients: list[Tensor | None], part: Chunk, leaves: list[Tensor], out: Tensor, factor: Tensor
) -> None:
    """Compute the gradients of one chunk and put them in their place."""
    learned = [x for x in leaves if x.requires_grad]
    factor = factor.to(out.dtype).expand_as(out)
    seed = factor if part.keep is None else fill_dropped(factor, part.keep)
    found = iter(torch.autograd.grad(out, learned, seed))
    for gradient, leaf in zip(gradients, leaves, strict=True):
        if gradient is not None and leaf.requires_grad:
            _write_part(gradient, part.place, next(found))


def _total(out: Tensor, keep: Tensor | None) -> Tensor:
    """The sum of what is kept, in float32 or better."""
    wide = torch.promote_types(out.dtype, torch.float32)
    if keep is None:
        return out.sum(dtype=wide)
    return sum_kept(out, keep) if out.dtype == wide else where_kept(out, keep, 0.0).sum(dtype=wide)


def _part_of_scale(scale: Tensor, place: Place, out: Tensor) -> Tensor:
    """By what each element of a chunk enters the result."""
    if not scale.dim():
        return scale.to(out.dtype)
    each = _part(scale, place if isinstance(place, Tensor) else place[:1]).to(out.dtype)
    return each.reshape(-1, *[1] * (out.dim() - 1))


def _zeros_for_gradients(chunked: ChunkedLoss, needed: Sequence[bool]) -> list[Tensor | None]:
    pairs = zip(chunked.aligned.tensors, needed, strict=True)
    return [torch.zeros(x.shape, dtype=x.dtype) if need else None for x, need in pairs]


# -- between the kernels of fill and sum -------------------------------------------------------------------------------
def _run_filled(prepared: Prepared, operands: tuple[Tensor, ...], bits: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """The loss of what is kept: filled before, and summed without what the loss makes of the filling."""
    reduction = prepared.reduction
    aligned = align(prepared.fn, prepared.spec, operands, bits, kwargs)
    tensors, keep = aligned.filled(fill_dropped), aligned.keep
    out = aligned.run(tensors)
    divisors = None if reduction in UNDIVIDED else aligned.divisors(tensors)
    # Sums of halves do not fit a half; a weighted mean has more to sum up than the loss.
    wide = torch.promote_types(out.dtype, torch.float32)
    if reduction in ("none", "sequence", "batchmean") or divisors is not None or out.dtype != wide:
        return reduce(fill_dropped(out, keep), keep, reduction, divisors)
    total = sum_kept(out, keep)
    if reduction == "sum":
        return total
    # torch counts bools a hundred times slower than the kernel of sum does.
    kept, repeated = sum_kept(keep, keep), prod(aligned.shape) // max(keep.numel(), 1)
    return total / (kept if repeated == 1 else kept * repeated).clamp(min=1)


# -- the routes --------------------------------------------------------------------------------------------------------
def _serves_rows(facts: Facts) -> str | None:
    if facts.detail.chunks == "cells":
        return NOT_APPLICABLE
    return why_not_on_cpu(facts) or (None if facts.detail.chunks else "memory is not contiguous in chunks")


def _serves_cells(facts: Facts) -> str | None:
    return why_not_on_cpu(facts) if facts.detail.chunks == "cells" else NOT_APPLICABLE


def _pays_from(elements: int) -> Callable[[Facts], str | None]:
    return lambda facts: None if facts.detail.largest >= elements else "too small for pieces"


ROUTES = (
    Route(
        "pieces", _run_in_chunks, _serves_rows, pays=_pays_from(_LARGE_ROWS), reason="kept rows only",
        skips=Skips.READING, is_kernel=True,
    ),
    Route(
        "pieces", _run_in_chunks, _serves_cells, pays=_pays_from(_LARGE_CELLS), reason="in pieces that fit the cache",
        is_kernel=True,
    ),
    Route("filled", _run_filled, why_not_on_cpu, reason="fill and sum have kernels"),
)  # fmt: skip
