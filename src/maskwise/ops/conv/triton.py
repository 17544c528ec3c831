"""Tiles as Triton kernels: what they read as a batch, and their results into a map; cuDNN convolves between."""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import beginning

__all__ = ["gather_kernel", "scatter_kernel"]


@triton.jit
def position(tiles, pixel, height, width, row_step, column_step, top, left):
    """The batch entry, the row and the column of a pixel of a tile, and the tile."""
    tile = pixel // (height * width)
    batch = tl.load(tiles + 3 * tile).to(tl.int64)
    row = tl.load(tiles + 3 * tile + 1) * row_step + top + pixel // width % height
    column = tl.load(tiles + 3 * tile + 2) * column_step + left + pixel % width
    return tile, batch, row, column


@triton.jit
def gather_kernel(
    x, bits, fill, tiles, out,
    x_batch, x_channel, x_row, x_column, bits_batch, bits_row, bits_column,
    pixels, channels, rows, columns, height, width, row_step, column_step, top, left, blocks, steps,
    EDGE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The windows of tiles, channels last; ``fill`` where nothing is valid, and outside unless the edge is repeated."""
    for job in range(tl.program_id(0), blocks * steps, tl.num_programs(0)):
        pixel = beginning(job // steps, PIXELS, True) + tl.arange(0, PIXELS)
        there = pixel < pixels
        known = tl.where(there, pixel, 0)
        _, batch, row, column = position(tiles, known, height, width, row_step, column_step, top, left)
        if EDGE:
            row = tl.minimum(tl.maximum(row, 0), rows - 1)
            column = tl.minimum(tl.maximum(column, 0), columns - 1)
        keep = there & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        if bits is not None:
            at = batch * bits_batch + row * bits_row + column * bits_column
            keep = keep & (tl.load(bits + at, mask=keep, other=0) != 0)
        channel = beginning(job % steps, CHANNELS, True) + tl.arange(0, CHANNELS)
        inside = (channel < channels)[None, :]
        at = (batch * x_batch + row * x_row + column * x_column)[:, None] + (channel * x_channel)[None, :]
        value = tl.load(x + at, mask=keep[:, None] & inside, other=0)
        if fill is not None:
            value = tl.where(keep[:, None], value, tl.load(fill))
        tl.store(out + pixel[:, None] * channels + channel[None, :], value, mask=there[:, None] & inside)


@triton.jit
def scatter_kernel(
    values, bits, tiles, out,
    values_tile, values_channel, values_row, values_column, out_batch, out_channel, out_row, out_column,
    bits_batch, bits_row, bits_column,
    pixels, channels, rows, columns, height, width, crop_top, crop_left, blocks, steps,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Tiles into their places of a map; only what is wanted is written."""
    for job in range(tl.program_id(0), blocks * steps, tl.num_programs(0)):
        pixel = beginning(job // steps, PIXELS, True) + tl.arange(0, PIXELS)
        there = pixel < pixels
        known = tl.where(there, pixel, 0)
        tile, batch, row, column = position(tiles, known, height, width, height, width, 0, 0)
        keep = there & (row < rows) & (column < columns)
        if bits is not None:
            at = batch * bits_batch + row * bits_row + column * bits_column
            keep = keep & (tl.load(bits + at, mask=keep, other=0) != 0)
        channel = beginning(job % steps, CHANNELS, True) + tl.arange(0, CHANNELS)
        written = keep[:, None] & (channel < channels)[None, :]
        source = tile * values_tile + (crop_top + known // width % height) * values_row
        source = source + (crop_left + known % width) * values_column
        value = tl.load(values + source[:, None] + (channel * values_channel)[None, :], mask=written, other=0)
        at = (batch * out_batch + row * out_row + column * out_column)[:, None] + (channel * out_channel)[None, :]
        tl.store(out + at, value, mask=written)
