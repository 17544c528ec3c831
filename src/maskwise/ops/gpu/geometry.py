"""Tensors of one shape as a kernel addresses them: rows and their elements, by as few sizes and strides as possible.

Adjacent dims are collapsed where the strides of every operand allow it, so that a kernel seldom has to divide an index.
A broadcast mask has strides of 0 and is never materialized.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

__all__ = ["Geometry", "Strides", "elementwise", "lay_out"]

#: The largest 32-bit index.
REACH = 2**31 - 1


class Strides(NamedTuple):
    """The strides of one operand: from row to row, and within a row."""

    outer: tuple[int, ...]
    inner: tuple[int, ...]


class Geometry(NamedTuple):
    """Rows and their elements: sizes, and strides for each operand."""

    outer: tuple[int, ...]
    inner: tuple[int, ...]
    operands: tuple[Strides, ...]
    #: Whether indices within a row need 64 bits; those of rows always have them.
    wide: bool

    @property
    def rows(self) -> int:
        """The number of rows."""
        return prod(self.outer)

    @property
    def length(self) -> int:
        """The number of elements per row."""
        return prod(self.inner)

    @property
    def columns(self) -> bool:
        """Whether adjacent elements in the memory of the first operand are in different rows."""
        first = self.operands[0]
        return first.inner[-1] != 1 and first.outer[-1] == 1 and self.rows > 1


def merge(sizes: list[int], strides: list[list[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Collapse adjacent dims where the strides of every operand allow it.

    >>> merge([2, 3, 4], [[12, 4, 1], [0, 4, 1]])
    ((2, 12), [(12, 1), (0, 1)])
    """
    out: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(sizes):
        if size == 1:
            continue
        if out and all(mine[-1] == its[d] * size for mine, its in zip(kept, strides, strict=True)):
            out[-1] *= size
            for mine, its in zip(kept, strides, strict=True):
                mine[-1] = its[d]
            continue
        out.append(size)
        for mine, its in zip(kept, strides, strict=True):
            mine.append(its[d])
    if not out:
        return (1,), [(0,) for _ in strides]
    return tuple(out), [tuple(mine) for mine in kept]


def lay_out(
    dims: Sequence[int],  # not negative, sorted
    *operands: Tensor,  # each of one shape, expanded to it if it broadcasts
) -> Geometry:
    """The geometry with ``dims`` within a row and all others across rows, both in their order."""
    shape = operands[0].shape
    rows = [d for d in range(len(shape)) if d not in dims]
    outer, across = merge([shape[d] for d in rows], [[x.stride(d) for d in rows] for x in operands])
    inner, along = merge([shape[d] for d in dims], [[x.stride(d) for d in dims] for x in operands])
    return Geometry(outer, inner, tuple(map(Strides, across, along)), wide(inner, along))


def elementwise(*operands: Tensor) -> Geometry:
    """The geometry of elementwise kernels, in the memory order of the first operand; one dim is the row."""
    first = operands[0]
    strides = list(first.stride())
    order = sorted(range(first.dim()), key=lambda d: (-strides[d], d))
    sizes, across = merge([first.shape[d] for d in order], [[x.stride(d) for d in order] for x in operands])
    pairs = tuple(Strides(each[:-1] or (0,), each[-1:]) for each in across)
    return Geometry(sizes[:-1] or (1,), sizes[-1:], pairs, wide(sizes[-1:], [at.inner for at in pairs]))


def wide(sizes: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> bool:
    """Whether the offset or the index of an element of a row exceeds 32 bits, with a margin for a block."""
    last = max(sum((n - 1) * abs(s) for n, s in zip(sizes, each, strict=True)) for each in strides)
    return max(last, prod(sizes)) + (1 << 16) > REACH
