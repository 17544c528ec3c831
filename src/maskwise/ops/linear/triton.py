"""Products with a weight of which 16 x 16 blocks are kept, as Triton kernels on the tensor cores.

The product and its gradient for x are one kernel, which gets the transposed layout for the latter; the gradient of the
weight is computed for kept blocks alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["product_kernel", "sampled_kernel"]


@triton.jit
def place_of(block, WIDE: tl.constexpr, SIDE: tl.constexpr):
    """Where the values of a block begin. Blocks are counted in 32 bits, and there are SIDE * SIDE as many values."""
    size = SIDE * SIDE
    if WIDE:
        size = tl.full((), SIDE * SIDE, tl.int64)
    return block * size


@triton.jit
def product_kernel(
    x, values, starts, columns, bias, out,
    batch, inputs, outputs, tiles, heights,
    WIDE: tl.constexpr, BATCH: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """X times the transposed weight: a program has a tile of the batch and one row of blocks."""
    for job in range(tl.program_id(0), tiles * heights, tl.num_programs(0)):
        # Neighbouring programs share the rows of blocks of one tile, and so the tile.
        tile, height = job // heights, job % heights
        item = tile * BATCH + tl.arange(0, BATCH)
        if WIDE:
            item = item.to(tl.int64)
        along = tl.arange(0, SIDE)
        there = item < batch
        total = tl.zeros((BATCH, SIDE), tl.float32)
        begin, end = tl.load(starts + height), tl.load(starts + height + 1)
        for block in range(begin, end):
            column = tl.load(columns + block) * SIDE + along
            at = item[:, None] * inputs + column[None, :]
            part = tl.load(x + at, mask=there[:, None] & (column < inputs)[None, :], other=0)
            # The block transposed: (inputs, outputs).
            cell = tl.load(values + place_of(block, WIDE, SIDE) + along[None, :] * SIDE + along[:, None])
            total += tl.dot(part, cell, input_precision="ieee")
        output = height * SIDE + along
        if bias is not None:
            total += tl.load(bias + output, mask=output < outputs, other=0).to(tl.float32)[None, :]
        at = item[:, None] * outputs + output[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=there[:, None] & (output < outputs)[None, :])


@triton.jit
def sampled_kernel(
    grad, x, starts, columns, of_values,
    batch, inputs, outputs, blocks, heights,
    WIDE: tl.constexpr, BATCH: tl.constexpr, SIDE: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """The gradient of kept blocks: a program has one block, and goes through the batch."""
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        # Its row of blocks is how many rows end before it.
        height = block * 0
        for first in range(0, heights, LOOK):
            row = first + tl.arange(0, LOOK)
            ends = tl.load(starts + 1 + row, mask=row < heights, other=blocks + 1)
            height += tl.sum((ends <= block).to(tl.int32), 0)
        along = tl.arange(0, SIDE)
        output, column = height * SIDE + along, tl.load(columns + block) * SIDE + along
        total = tl.zeros((SIDE, SIDE), tl.float32)
        for start in range(0, batch, BATCH):
            item = start + tl.arange(0, BATCH)
            if WIDE:
                item = item.to(tl.int64)
            there = item < batch
            at = item[None, :] * outputs + output[:, None]
            slope = tl.load(grad + at, mask=there[None, :] & (output < outputs)[:, None], other=0)
            at = item[:, None] * inputs + column[None, :]
            part = tl.load(x + at, mask=there[:, None] & (column < inputs)[None, :], other=0)
            total += tl.dot(slope, part, input_precision="ieee")
        at = place_of(block, WIDE, SIDE) + along[:, None] * SIDE + along[None, :]
        tl.store(of_values + at, total.to(of_values.dtype.element_ty))
