"""Tensors of one shape as a kernel addresses them: rows and their elements, by as few sizes and strides as possible.

Adjacent dims are collapsed where the strides of every operand allow it, so that a kernel seldom has to divide an index.
A broadcast mask has strides of 0 and is never materialized.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from maskwise.ops.operation import as_bits, kept_mask

__all__ = [
    "Geometry",
    "Kept",
    "Operand",
    "Strides",
    "are_alike",
    "elementwise",
    "in_memory_order",
    "kept_rows",
    "lay_out",
    "row_strides",
]

#: A tensor, or the strides of one.
Operand = Tensor | tuple[int, ...]

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
    dims: Sequence[int],  # not negative
    *operands: Operand,  # each of one shape, expanded to it if it broadcasts
    shape: Sequence[int],
    ordered: bool = False,
    in_order: bool = False,
) -> Geometry:
    """The geometry with ``dims`` within a row and all others across rows, in the memory order of the first operand.

    ``ordered`` leaves the dims within a row in their order, and ``in_order`` those across rows, for functions that
    depend on it.
    """
    strides = [operand.stride() if isinstance(operand, Tensor) else operand for operand in operands]
    rows = [d for d in range(len(shape)) if d not in dims]
    rows = rows if in_order else in_memory_order(rows, strides[0])
    within = dims if ordered else in_memory_order(dims, strides[0])
    outer, across = merge([shape[d] for d in rows], [[each[d] for d in rows] for each in strides])
    inner, along = merge([shape[d] for d in within], [[each[d] for d in within] for each in strides])
    return Geometry(outer, inner, tuple(map(Strides, across, along)), wide(inner, along))


def in_memory_order(dims: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dims by falling strides; those along which a tensor repeats come first.

    >>> in_memory_order([0, 1, 2], (1, 0, 8))
    [1, 2, 0]
    """
    return sorted(dims, key=lambda d: (strides[d] != 0, -strides[d]))


def row_strides(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor with an element for each row, 0 along ``dims``.

    >>> row_strides((2, 3, 4), [1])
    (4, 0, 1)
    """
    strides, step = [0] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        if d not in dims:
            strides[d] = step
            step *= shape[d]
    return tuple(strides)


def are_alike(geometry: Geometry, *which: int) -> bool:
    """Whether operands lie alike in memory, so that one's vectors are the other's, or repeat along rows."""
    first, *others = (geometry.operands[i] for i in which)
    return all(each == first or not any(each.inner) for each in others)


# -- masks -------------------------------------------------------------------------------------------------------------
class Kept(NamedTuple):
    """A mask as kernels take it; see `maskwise.ops.gpu.triton.extents`."""

    kind: str
    #: Bytes, or the starts and ends of intervals.
    tensor: Tensor
    strides: tuple[int, ...]
    #: Of intervals: the elements of a position along the row or the rows of one across, positions, where ends begin.
    unit: int = 1
    size: int = 1
    step: int = 1


def kept_rows(
    mask: Tensor, along: int, shape: Sequence[int], dims: Sequence[int], order: Sequence[int], ordered: bool = False
) -> Kept:
    """The mask of rows along ``dims``; ``order`` are the strides of the first operand, which order the dims.

    Intervals that are no range of a row, nor the same for all of it, become bits.
    """
    if along:
        starts = mask[0].expand(tuple(shape))
        strides, d = starts.stride(), len(shape) + along
        within = [each for each in dims if shape[each] > 1]
        within = within if ordered else in_memory_order(within, order)
        if all(strides[each] == 0 for each in within):
            if d not in dims or shape[d] == 1:
                rows = in_memory_order([each for each in range(len(shape)) if each not in dims], order)
                unit = prod(shape[each] for each in rows[rows.index(d) + 1 :]) if d in rows else 1
                return Kept("across", mask, strides, unit, shape[d] if d in rows else 1, mask.stride(0))
            if within and within[0] == d:
                return Kept("along", mask, strides, prod(shape[each] for each in within[1:]), shape[d], mask.stride(0))
        mask = as_bits(kept_mask(mask, along, tuple(shape)))
    strides = mask.expand(tuple(shape)).stride()
    is_constant = all(strides[d] == 0 or shape[d] == 1 for d in dims) and prod(shape[d] for d in dims) > 1
    return Kept("rows" if is_constant else "bits", mask.view(torch.uint8), strides)


def elementwise(*operands: Operand, mask: Tensor, along: int, shape: Sequence[int]) -> tuple[list[int], Kept]:
    """The dims within a row for elementwise kernels, and the mask of these rows.

    In the memory order of the first operand, the last dims that every operand has without a gap; or from the dim of
    the mask's intervals on.
    """
    order = operands[0].stride() if isinstance(operands[0], Tensor) else operands[0]
    dims = [d for d in in_memory_order(range(len(shape)), order) if shape[d] > 1]
    if along and len(shape) + along in dims:
        dims = dims[dims.index(len(shape) + along) :]
        return dims, kept_rows(mask, along, shape, dims, order)
    bits = kept_rows(mask, along, shape, dims[-1:], order)
    if bits.kind == "across":
        return dims[-1:], bits
    strides = [bits.strides, *(each.stride() if isinstance(each, Tensor) else each for each in operands)]
    first = len(dims) - 1
    while first > 0 and all(each[dims[first - 1]] == each[dims[first]] * shape[dims[first]] for each in strides):
        first -= 1
    dims = dims[max(first, 0) :]
    return dims, kept_rows(bits.tensor, 0, shape, dims, order)


def wide(sizes: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> bool:
    """Whether the offset or the index of an element of a row exceeds 32 bits, with a margin for a block."""
    last = max(sum((n - 1) * abs(s) for n, s in zip(sizes, each, strict=True)) for each in strides)
    return max(last, prod(sizes)) + (1 << 16) > REACH
