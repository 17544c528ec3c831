"""mw.fill on a GPU: one launch."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from maskwise.ops.fill.triton import fill_kernel
from maskwise.ops.gpu.geometry import are_alike, elementwise, lay_out
from maskwise.ops.gpu.launch import as_bytes, blocks_for, launch, parts_for, row_arguments
from maskwise.ops.primitives import empty_dense

__all__ = ["fill"]


def fill(x: Tensor, mask: Tensor, value: Tensor, along: int = 0) -> Tensor:
    """X where it is kept, the value where it is dropped."""
    out = empty_dense(x)
    number = number_of(value)
    values = None if number is not None else value.to(x.device).expand(x.shape)
    # The strides of the result decide the order of elements; they are x's where x is dense.
    others = (out, x, out if values is None else values)
    dims, kept = elementwise(*others, mask=mask, along=along, shape=x.shape)
    geometry = lay_out(dims, out, kept.strides, *others[1:], shape=x.shape)
    blocks = blocks_for(geometry, out, kept, same=are_alike(geometry, 0, 2, 3), loops=False, vectors=4)
    parts = parts_for(geometry, blocks)
    arguments = row_arguments(geometry, blocks, kept, ("out", "mask", "x", "values"))
    launch(
        fill_kernel,
        arguments["tiles"] * parts,
        {
            **dict(x=as_bytes(x), number=number, out=as_bytes(out), **arguments, parts=parts),
            **dict(values=None if values is None else as_bytes(values)),
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
