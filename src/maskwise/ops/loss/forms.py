"""A call in a form that can be cut into pieces, each with only what is kept, or with the rest made harmless.

Two forms. "rows": everything that one element of the mask decides on is a row of dim 0, so the kept rows are gathered,
and what is dropped is never touched. "cells": the mask decides within rows, so a piece is a stretch of memory with
stand-ins where it is dropped. Pieces are small enough for the cache: it is the fresh memory of whole temporaries that
makes a masked loss slow on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from torch import Tensor

from maskwise.ops.loss.call import Call, Fill, harmless

__all__ = ["Form", "Piece", "cells_of", "rows_of"]

#: Where a piece lies: rows by their indices, or slices of the first dim, and perhaps of the last.
Place: TypeAlias = Tensor | tuple[slice, ...]
#: Elements of the largest operand in a piece: 1 MB of float32.
PIECE = 1 << 18


@dataclass(frozen=True)
class Piece:
    """A part of the call: operands that do no harm, and what is kept of the loss (None for all of it)."""

    place: Place
    tensors: list[Tensor]
    keep: Tensor | None


@dataclass(frozen=True)
class Form:
    """A call that can be cut."""

    call: Call
    #: Whether pieces are gathered rows.
    rows: bool
    #: How many rows of the form are one row of the loss as the caller sees it.
    repeats: int = 1

    def pieces(self, size: int = PIECE, fill: Fill = harmless) -> Iterator[Piece]:
        """The pieces in the order of memory, ``size`` elements each; without those of which nothing is kept."""
        tensors, keep = self.call.tensors, self.call.keep
        each = max(1, *(x[:1].numel() for x in tensors))
        n = tensors[0].shape[0]
        step = max(1, size // each)
        if not self.rows:
            yield from self._cells(n, step, max(1, size // max(1, each // max(1, tensors[0].shape[-1]))), fill)
            return
        kept = keep.nonzero().squeeze(1)
        if kept.shape[0] == n:
            for at in range(0, n, step):
                place = (slice(at, at + step),)
                yield Piece(place, [x[place] for x in tensors], None)
            return
        for at in range(0, kept.shape[0], step):
            index = kept[at : at + step]
            yield Piece(index, [x.index_select(0, index) for x in tensors], None)

    def _cells(self, n: int, step: int, stretch: int, fill: Fill) -> Iterator[Piece]:
        call = self.call
        length = call.shape[-1]
        # A row that is larger than a piece is cut along the last dim too, where there is one behind the classes.
        cut = stretch < length and step == 1 and len(call.shape) > 1
        for at in range(0, n, step):
            for start in range(0, length, stretch) if cut else (0,):
                place = (slice(at, at + step), slice(start, start + stretch)) if cut else (slice(at, at + step),)
                keep = part(call.keep, place)
                if keep.any():
                    parts = tuple(part(x, place) for x in call.tensors)
                    inner = replace(call, tensors=parts, keep=keep, shape=tuple(keep.shape))
                    yield Piece(place, inner.filled(fill), keep)


def part(x: Tensor, place: Place) -> Tensor:
    """The part of x that lies at ``place``."""
    if isinstance(place, Tensor):
        return x.index_select(0, place)
    return x[place] if len(place) == 1 else x[place[0], ..., place[1]]


def rows_of(call: Call) -> Form | None:
    """The call as rows, by views alone; None where the mask decides within rows, or memory lies otherwise."""
    keep, shape = call.keep, call.shape
    lead = len(shape)
    tensors = list(call.tensors)
    if call.kind.lines_up == "elements":
        # Trailing dims that the mask broadcasts over make a row.
        aligned = [1] * (len(shape) - keep.dim()) + list(keep.shape)
        while lead and aligned[lead - 1] == 1:
            lead -= 1
        if lead == len(shape) or len(shape) - lead < call.shared_dims:
            return None
        keep = keep.reshape(aligned[:lead])
    elif call.kind.lines_up == "classes":
        tensors = [x.movedim(1, -1) if x.dim() == lead + 1 and lead else x for x in tensors]
    if lead == 0 or prod(shape) == 0:
        return None
    if lead > 1 and not all(x.is_contiguous() for x in tensors if x.dim() > lead):
        return None
    flat = [x.reshape(-1, *x.shape[lead:]) for x in tensors]
    rows = keep.expand(shape[:lead]).reshape(-1)
    changed = replace(call, tensors=tuple(flat), keep=rows, shape=(rows.shape[0], *shape[lead:]))
    return Form(changed, rows=True, repeats=rows.shape[0] // shape[0])


def cells_of(call: Call, by_rows: bool) -> Form | None:
    """The call as cells, by views alone; ``by_rows`` where the rows of the loss must not be cut through."""
    shape, tensors = call.shape, call.tensors
    if not shape or prod(shape) == 0 or call.kind.lines_up == "rows":
        return None
    keep = call.keep.expand(shape)
    if call.kind.lines_up == "elements":
        if any(x.shape != shape for x in tensors) or call.shared_dims >= len(shape):
            return None
        if not by_rows and not call.shared_dims and keep.is_contiguous() and all(x.is_contiguous() for x in tensors):
            flat = tuple(x.reshape(-1) for x in tensors)
            return Form(replace(call, tensors=flat, keep=keep.reshape(-1), shape=(prod(shape),)), rows=False)
    elif len(shape) > 2 and all(x.is_contiguous() for x in tensors):
        # (N, C, H, W) -> (N, C, S)
        flat = tuple(x.flatten(2) if x.dim() > len(shape) else x.flatten(1) for x in tensors)
        return Form(replace(call, tensors=flat, keep=keep.flatten(1), shape=(shape[0], prod(shape[1:]))), rows=False)
    return Form(replace(call, keep=keep), rows=False)
