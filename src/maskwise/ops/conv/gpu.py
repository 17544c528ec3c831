"""Tiles on a GPU: gather and scatter, one launch each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.ops.conv.triton import gather_kernel, scatter_kernel
from maskwise.ops.gpu.launch import as_bytes, launch

__all__ = ["gather", "scatter", "scatter_out"]

#: Pixels and channels of a block, for maps of many channels and of few.
BLOCKS = ((32, 64), (512, 4))


def _block(channels: int) -> tuple[int, int]:
    return BLOCKS[0] if channels > 4 else BLOCKS[1]


def _strides(x: Tensor | None, names: str) -> dict[str, int]:
    return {name: 0 if x is None else x.stride(d) for d, name in enumerate(names.split())}


def gather(
    x: Tensor,  # (batch, channels, height, width)
    bits: Tensor | None,  # bool, (batch, height, width)
    tiles: Tensor,  # int32, (n, 3)
    reads: list[int],
    fill: Tensor | None = None,
    edge: bool = False,
) -> Tensor:
    """The windows of tiles: (n, channels, *window), channels last."""
    row_step, column_step, top, left, height, width = reads
    out = x.new_empty(tiles.shape[0], height, width, x.shape[1])
    pixels, channels = out.numel() // max(1, x.shape[1]), x.shape[1]
    if pixels and channels:
        some, wide = _block(channels)
        blocks, steps = -(-pixels // some), -(-channels // wide)
        value = None if fill is None else fill.to(device=x.device, dtype=x.dtype)
        arguments: dict[str, Any] = {
            **dict(x=x, bits=None if bits is None else as_bytes(bits), fill=value, tiles=tiles.contiguous(), out=out),
            **_strides(x, "x_batch x_channel x_row x_column"),
            **_strides(bits, "bits_batch bits_row bits_column"),
            **dict(pixels=pixels, channels=channels, rows=x.shape[2], columns=x.shape[3], height=height, width=width),
            **dict(row_step=row_step, column_step=column_step, top=top, left=left, blocks=blocks, steps=steps),
            **dict(EDGE=edge, PIXELS=some, CHANNELS=wide),
        }
        launch(gather_kernel, blocks * steps, arguments, warps=4, reads={"x": 1, "bits": 1}, writes=("out",))
    return out.permute(0, 3, 1, 2)


def scatter_out(
    batch: Tensor,  # (n, channels, *tile), with what is cropped around it
    tiles: Tensor,  # int32, (n, 3)
    wanted: Tensor | None,  # bool, (batch, height, width)
    size: list[int],
    crop: list[int],
    out: Tensor,  # (batch, channels, height, width)
) -> None:
    """Write the positions of tiles that are wanted into a result."""
    pixels, channels = tiles.shape[0] * size[0] * size[1], out.shape[1]
    if not pixels or not out.numel():
        return
    some, wide = _block(channels)
    blocks, steps = -(-pixels // some), -(-channels // wide)
    arguments: dict[str, Any] = {
        **dict(values=batch, bits=None if wanted is None else as_bytes(wanted), tiles=tiles.contiguous(), out=out),
        **_strides(batch, "values_tile values_channel values_row values_column"),
        **_strides(out, "out_batch out_channel out_row out_column"),
        **_strides(wanted, "bits_batch bits_row bits_column"),
        **dict(pixels=pixels, channels=channels, rows=out.shape[2], columns=out.shape[3], height=size[0]),
        **dict(width=size[1], crop_top=crop[0], crop_left=crop[1], blocks=blocks, steps=steps),
        **dict(PIXELS=some, CHANNELS=wide),
    }
    launch(scatter_kernel, blocks * steps, arguments, warps=4, reads={"values": 1, "bits": 1}, writes=("out",))


def scatter(
    batch: Tensor,
    tiles: Tensor,
    wanted: Tensor | None,
    other: Tensor,
    sizes: list[int],
    size: list[int],
    crop: list[int],
    channels_last: bool,
) -> Tensor:
    """A result that holds ``other`` wherever no tile writes: (batch, channels, height, width)."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty(sizes, dtype=batch.dtype, device=batch.device, memory_format=layout)
    scatter_out(batch, tiles, wanted, size, crop, out.copy_(other.expand(sizes)))
    return out
