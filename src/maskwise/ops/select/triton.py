"""Pack, unpack, and reductions over segments of rows, as Triton kernels.

The packed index of a row is the number of kept rows before it. Each program computes it by itself: from the mask, where
that is short, else from block counts of a first launch. There is no sync between programs, nor with the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import beginning, joined, lift, merge, number, offsets

__all__ = ["count_kernel", "pack_kernel", "segment_backward_kernel", "segment_kernel", "unpack_kernel"]


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


# -- segments of rows --------------------------------------------------------------------------------------------------
@triton.jit
def state_of(values, column, there, begin, end, width, OP: tl.constexpr, IDENTITY: tl.constexpr, DTYPE: tl.constexpr,
             COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The accumulators of one segment, for each of a tile's columns."""
    a = tl.full((COLUMNS,), IDENTITY, DTYPE)
    b = tl.zeros((COLUMNS,), DTYPE)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = there[:, None] & (row < end)[None, :]
        value = tl.load(values + row[None, :] * width + column[:, None], mask=inside, other=0).to(DTYPE)
        value = tl.where(inside, value, IDENTITY)
        la, lb, ln = lift(value, inside, value, value, OP, 0, IDENTITY)
        ta, tb, tn = merge(la, lb, ln, OP, False)
        a, b, _ = joined(a, b, number(COLUMNS, False, 0), ta, tb, tn, OP, False)
    return a, b


@triton.jit
def segment_kernel(
    values, bounds, out,
    segments, width, steps,
    OP: tl.constexpr, IDENTITY: tl.constexpr, DTYPE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Reduce each segment, or compute its softmax."""
    for job in range(tl.program_id(0), segments * steps, tl.num_programs(0)):
        segment = (job // steps).to(tl.int64)
        begin = tl.load(bounds + segment).to(tl.int64)
        end = tl.load(bounds + segment + 1).to(tl.int64)
        column = (job % steps) * COLUMNS + tl.arange(0, COLUMNS)
        there = column < width
        if OP == "softmax":
            a, b = state_of(values, column, there, begin, end, width, "logsumexp", IDENTITY, DTYPE, COLUMNS, ROWS)
            shift = tl.where(tl.abs(a) == float("inf"), 0.0, a)
            for first in range(begin, end, ROWS):
                row = first + tl.arange(0, ROWS)
                inside = there[:, None] & (row < end)[None, :]
                at = row[None, :] * width + column[:, None]
                value = tl.load(values + at, mask=inside, other=0).to(DTYPE)
                result = tl.exp(value - shift[:, None]) / b[:, None]
                tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
        else:
            if OP == "mean":
                a, b = state_of(values, column, there, begin, end, width, "sum", IDENTITY, DTYPE, COLUMNS, ROWS)
                a = a / (end - begin).to(DTYPE)
            else:
                a, b = state_of(values, column, there, begin, end, width, OP, IDENTITY, DTYPE, COLUMNS, ROWS)
                if OP == "logsumexp":
                    a = tl.log(b) + tl.where(tl.abs(a) == float("inf"), 0.0, a)
            tl.store(out + segment * width + column, a.to(out.dtype.element_ty), mask=there)


@triton.jit
def segment_backward_kernel(
    grad, saved, values, bounds, grad_values,
    segments, width, steps,
    OP: tl.constexpr, DTYPE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of a reduction over segments; ``saved`` is its result."""
    for job in range(tl.program_id(0), segments * steps, tl.num_programs(0)):
        segment = (job // steps).to(tl.int64)
        begin = tl.load(bounds + segment).to(tl.int64)
        end = tl.load(bounds + segment + 1).to(tl.int64)
        column = (job % steps) * COLUMNS + tl.arange(0, COLUMNS)
        there = column < width
        g, k = tl.zeros((COLUMNS,), DTYPE), tl.zeros((COLUMNS,), DTYPE)
        if OP != "softmax":
            g = tl.load(grad + segment * width + column, mask=there, other=0).to(DTYPE)
            k = tl.load(saved + segment * width + column, mask=there, other=0).to(DTYPE)
        if OP == "mean":
            g = g / (end - begin).to(DTYPE)
        total = tl.zeros((COLUMNS,), DTYPE)
        if OP == "softmax" or OP == "amax" or OP == "amin":
            for first in range(begin, end, ROWS):
                row = first + tl.arange(0, ROWS)
                inside = there[:, None] & (row < end)[None, :]
                at = row[None, :] * width + column[:, None]
                if OP == "softmax":
                    slope = tl.load(grad + at, mask=inside, other=0).to(DTYPE)
                    total += tl.sum(slope * tl.load(saved + at, mask=inside, other=0).to(DTYPE), 1)
                else:
                    value = tl.load(values + at, mask=inside, other=0).to(DTYPE)
                    total += tl.sum(tl.where(inside & (value == k[:, None]), 1.0, 0.0).to(DTYPE), 1)
        for first in range(begin, end, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = there[:, None] & (row < end)[None, :]
            at = row[None, :] * width + column[:, None]
            if OP == "softmax":
                slope = tl.load(grad + at, mask=inside, other=0).to(DTYPE)
                result = tl.load(saved + at, mask=inside, other=0).to(DTYPE) * (slope - total[:, None])
            elif OP == "sum" or OP == "mean":
                result = tl.broadcast_to(g[:, None], (COLUMNS, ROWS))
            else:
                value = tl.load(values + at, mask=inside, other=0).to(DTYPE)
                if OP == "logsumexp":
                    result = tl.exp(value - k[:, None]) * g[:, None]
                else:
                    result = tl.where(value == k[:, None], (g / total)[:, None], 0.0)
            tl.store(grad_values + at, result.to(grad_values.dtype.element_ty), mask=inside)
