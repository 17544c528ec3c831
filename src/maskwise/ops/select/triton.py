"""Pack and unpack as Triton kernels.

The packed index of a row is the number of kept rows before it. Each program computes it by itself: from the mask, where
that is short, else from block counts of a first launch. There is no sync between programs, nor with the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import beginning, offsets

__all__ = ["count_kernel", "pack_kernel", "unpack_kernel"]


@triton.jit
def kept_at(mask, outer, mask_outer, row, length):
    """Which of the rows are kept."""
    return tl.load(mask + offsets(row, outer, mask_outer), mask=row < length, other=0) != 0


@triton.jit
def count_kernel(mask, counts, outer, mask_outer, length, blocks, BLOCK: tl.constexpr):
    """The number of kept rows in each block of a mask."""
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = beginning(block, BLOCK, True) + tl.arange(0, BLOCK)
        keep = kept_at(mask, outer, mask_outer, row, length)
        tl.store(counts + block, tl.sum(keep.to(tl.int32), 0))


@triton.jit
def kept_before(mask, counts, outer, mask_outer, length, blocks, start, BLOCK: tl.constexpr):
    """The number of kept rows before ``start``, and in total."""
    before, total = start * 0, start * 0
    if counts is None:
        for block in range(0, length, BLOCK):
            row = start * 0 + block + tl.arange(0, BLOCK)
            keep = kept_at(mask, outer, mask_outer, row, length).to(tl.int32)
            total += tl.sum(keep, 0)
            before += tl.sum(tl.where(row < start, keep, 0), 0)
    else:
        mine = start // BLOCK
        for first in range(0, blocks, BLOCK):
            block = first + tl.arange(0, BLOCK)
            count = tl.load(counts + block, mask=block < blocks, other=0).to(tl.int64)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where(block < mine, count, 0), 0)
        row = mine * BLOCK + tl.arange(0, BLOCK)
        keep = kept_at(mask, outer, mask_outer, row, length) & (row < start)
        before += tl.sum(keep.to(tl.int32), 0)
    return before, total


@triton.jit
def pack_kernel(
    x, mask, counts, out,
    outer, inner, x_outer, x_inner, mask_outer,
    length, width, blocks, capacity, tiles, steps,
    ROWS: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gather kept rows in order, and zero the remaining rows of ``capacity``.

    A dropped row zeroes one of the last rows instead, so that no row is written twice.
    """
    for job in range(tl.program_id(0), tiles * steps, tl.num_programs(0)):
        start = beginning(job // steps, ROWS, True)
        before, total = kept_before(mask, counts, outer, mask_outer, length, blocks, start, BLOCK)
        row = start + tl.arange(0, ROWS)
        keep = kept_at(mask, outer, mask_outer, row, length)
        rank = before + tl.cumsum(keep.to(tl.int32), 0) - keep.to(tl.int32)
        zeroed = capacity - 1 - (row - rank)
        goal = tl.where(keep, rank, zeroed)
        written = tl.where(keep, rank < capacity, (zeroed >= total) & (zeroed >= 0))
        column = beginning(job % steps, ELEMENTS, True) + tl.arange(0, ELEMENTS)
        there = (column < width)[None, :]
        at = offsets(row, outer, x_outer)[:, None] + offsets(column, inner, x_inner)[None, :]
        value = tl.load(x + at, mask=keep[:, None] & there, other=0)
        tl.store(out + goal[:, None] * width + column[None, :], value, mask=written[:, None] & there)


@triton.jit
def unpack_kernel(
    values, mask, counts, other, out,
    outer, inner, other_outer, other_inner, mask_outer,
    length, width, blocks, many, tiles, steps,
    ROWS: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scatter the rows to kept positions, with ``other`` elsewhere."""
    for job in range(tl.program_id(0), tiles * steps, tl.num_programs(0)):
        start = beginning(job // steps, ROWS, True)
        before, _ = kept_before(mask, counts, outer, mask_outer, length, blocks, start, BLOCK)
        row = start + tl.arange(0, ROWS)
        keep = kept_at(mask, outer, mask_outer, row, length)
        rank = before + tl.cumsum(keep.to(tl.int32), 0) - keep.to(tl.int32)
        rank = tl.minimum(rank, many - 1)
        column = beginning(job % steps, ELEMENTS, True) + tl.arange(0, ELEMENTS)
        there = (row < length)[:, None] & (column < width)[None, :]
        value = tl.load(values + rank[:, None] * width + column[None, :], mask=keep[:, None] & there, other=0)
        at = offsets(row, outer, other_outer)[:, None] + offsets(column, inner, other_inner)[None, :]
        stand_in = tl.load(other + at, mask=(keep == 0)[:, None] & there, other=0)
        result = tl.where(keep[:, None], value, stand_in)
        tl.store(out + row[:, None] * width + column[None, :], result, mask=there)
