"""How tensors of one shape look to a kernel: rows and their elements, by as few sizes and strides as will do.

Dims are put together wherever memory allows it for every operand, so that a kernel seldom has to divide an index. A
mask that broadcasts has strides of 0 and is never written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

__all__ = ["Geometry", "Strides", "elementwise", "lay_out"]

#: What a 32-bit index can reach.
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
        """How many rows there are."""
        return prod(self.outer)

    @property
    def length(self) -> int:
        """How many elements a row has."""
        return prod(self.inner)

    @property
    def columns(self) -> bool:
        """Whether neighbours in the memory of the first operand are in different rows."""
        first = self.operands[0]
        return first.inner[-1] != 1 and first.outer[-1] == 1 and self.rows > 1


def merge(sizes: list[int], strides: list[list[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Put neighbouring dims together where every operand allows it.

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
    """The geometry in which ``dims`` are within a row and all others tell rows apart, both in their natural order."""
    shape = operands[0].shape
    rows = [d for d in range(len(shape)) if d not in dims]
    outer, across = merge([shape[d] for d in rows], [[x.stride(d) for d in rows] for x in operands])
    inner, along = merge([shape[d] for d in dims], [[x.stride(d) for d in dims] for x in operands])
    return Geometry(outer, inner, tuple(map(Strides, across, along)), wide(inner, along))


def elementwise(*operands: Tensor) -> Geometry:
    """The geometry for work on single elements, in the order of the first operand's memory; one dim is the row."""
    first = operands[0]
    strides = list(first.stride())
    order = sorted(range(first.dim()), key=lambda d: (-strides[d], d))
    sizes, across = merge([first.shape[d] for d in order], [[x.stride(d) for d in order] for x in operands])
    pairs = tuple(Strides(each[:-1] or (0,), each[-1:]) for each in across)
    return Geometry(sizes[:-1] or (1,), sizes[-1:], pairs, wide(sizes[-1:], [at.inner for at in pairs]))


def wide(sizes: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> bool:
    """Whether an element of a row, or its index, is out of reach for 32 bits; blocks look a little beyond."""
    last = max(sum((n - 1) * abs(s) for n, s in zip(sizes, each, strict=True)) for each in strides)
    return max(last, prod(sizes)) + (1 << 16) > REACH
