"""Filling on a GPU: one launch."""

from __future__ import annotations

import struct

from torch import Tensor

from maskwise.ops.fill.triton import fill_kernel
from maskwise.ops.gpu.dtypes import as_bytes
from maskwise.ops.gpu.geometry import elementwise
from maskwise.ops.gpu.launch import blocks_for, launch
from maskwise.ops.layout import room_like

__all__ = ["fill"]


def fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """X where it is kept, the value where it is dropped."""
    out = room_like(x)
    mask, number = mask.expand(x.shape), number_of(value)
    # What is read or written by neighbours decides on the order: the result, whose order is x's where x has one.
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
            **dict(WIDE=geometry.wide, ROWS=blocks.rows, ELEMENTS=blocks.elements, GROUP=blocks.group),
            **dict(SKIP=blocks.skip),
        },
        warps=blocks.warps,
        reads={"x": 1, "mask": 1, "values": 1},
        writes=("out",),
    )
    return out


def number_of(value: Tensor) -> float | None:
    """The value as a number that can be handed to a kernel: one that lies on the host, and that 32 bits can hold."""
    if value.device.type != "cpu" or value.dim() > 0:
        return None
    number: float = value.item()
    if not value.dtype.is_floating_point:
        return int(number)
    return number if single(number) or number != number else None


def single(number: float) -> bool:
    """Whether a number is one of float32.

    >>> single(0.5), single(0.1), single(1e300)
    (True, False, False)
    """
    try:
        return bool(struct.unpack("f", struct.pack("f", number))[0] == number)
    except OverflowError:
        return False
