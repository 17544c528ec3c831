"""mw.fill on a GPU: one launch."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from maskwise.ops.fill.triton import fill_kernel
from maskwise.ops.gpu.geometry import elementwise
from maskwise.ops.gpu.launch import as_bytes, blocks_for, launch
from maskwise.ops.primitives import empty_dense

__all__ = ["fill"]


def fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """X where it is kept, the value where it is dropped."""
    out = empty_dense(x)
    mask, number = mask.expand(x.shape), number_of(value)
    # The strides of the result decide the order of elements; they are x's where x is dense.
    geometry = elementwise(out, mask, x, value.expand(x.shape) if number is None else out)
    blocks = blocks_for(geometry, x.element_size())
    out_at, mask_at, x_at, value_at = geometry.operands
    tiles, steps = -(-geometry.rows // blocks.rows), -(-geometry.length // blocks.elements)
    launch(
        fill_kernel,
        tiles * steps,
        {
            **dict(x=as_bytes(x), mask=as_bytes(mask), number=number, out=as_bytes(out)),
            **dict(values=as_bytes(value.to(x.device).expand(x.shape)) if number is None else None),
            **dict(outer=geometry.outer, inner=geometry.inner, x_outer=x_at.outer, x_inner=x_at.inner),
            **dict(mask_outer=mask_at.outer, mask_inner=mask_at.inner, values_outer=value_at.outer),
            **dict(values_inner=value_at.inner, out_outer=out_at.outer, out_inner=out_at.inner),
            **dict(rows=geometry.rows, length=geometry.length, tiles=tiles, steps=steps),
            **dict(WIDE=blocks.wide, ROWS=blocks.rows, ELEMENTS=blocks.elements, GROUP=blocks.group),
            **dict(SKIP=blocks.skip),
        },
        warps=blocks.warps,
        reads={"x": 1, "mask": 1, "values": 1},
        writes=("out",),
    )
    return out


def number_of(value: Tensor) -> float | None:
    """The value as a kernel argument, if it is on the host; a float64 as the integer of its bits."""
    if value.device.type != "cpu" or value.dim() > 0:
        return None
    number: float = value.item()
    if not value.dtype.is_floating_point:
        return int(number)
    return bits_of(number) if value.dtype is torch.float64 else number


def bits_of(number: float) -> int:
    """The 64 bits of a number as an integer.

    >>> hex(bits_of(1.0))
    '0x3ff0000000000000'
    """
    (bits,) = struct.unpack("q", struct.pack("d", number))
    return int(bits)
