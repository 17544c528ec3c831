"""Selection on a GPU: pack and unpack, without a host-device sync where the capacity is given; and segments."""

from __future__ import annotations

from math import inf, prod

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import Geometry, lay_out
from maskwise.ops.gpu.launch import accumulator, as_bytes, launch, triton_type
from maskwise.ops.select.triton import (
    count_kernel,
    pack_kernel,
    segment_backward_kernel,
    segment_kernel,
    unpack_kernel,
)

__all__ = ["pack_capacity", "pack_rows", "segment_backward", "segments", "unpack_capacity"]

#: The block size of mask counts, and the longest mask that every program counts by itself.
BLOCK, SHORT = 4096, 1 << 16
#: Rows and elements per tile, for wide rows, narrow rows, and single elements.
TILES = ((16, 128), (128, 16), (1024, 1))
#: Columns and rows per tile of segments, for wide rows and for single elements.
SEGMENT_TILES = ((64, 32), (1, 1024))
#: The same for gradients, which need more registers per element.
GRADIENT_TILES = ((64, 16), (1, 512))


def tile_for(width: int) -> tuple[int, int]:
    """Rows and elements of a tile."""
    return TILES[0] if width > 16 else TILES[1] if width > 1 else TILES[2]


def row_geometry(mask: Tensor, rest: torch.Size, moved: Tensor) -> Geometry:
    """The geometry of the rows: of the padded operand, and of the mask."""
    lead = mask.reshape(*mask.shape, *[1] * len(rest)).expand(moved.shape)
    return lay_out(list(range(mask.dim(), moved.dim())), moved, lead)


def counts_of(mask: Tensor, rows: Geometry) -> tuple[Tensor | None, int]:
    """The counts per block of a mask that is too long for every program to count."""
    length = mask.numel()
    if length <= SHORT:
        return None, 0
    blocks = -(-length // BLOCK)
    counts = mask.new_empty(blocks, dtype=torch.int32)
    at = rows.operands[1].outer
    arguments = dict(mask=as_bytes(mask), counts=counts, outer=rows.outer, mask_outer=at, length=length, blocks=blocks)
    launch(count_kernel, blocks, arguments | dict(BLOCK=BLOCK), warps=4, reads={"mask": 1}, writes=("counts",))
    return counts, blocks


def pack_capacity(
    x: Tensor,  # (*mask.shape, *rest)
    mask: Tensor,
    capacity: int,
) -> Tensor:
    """The kept rows, padded with zeros to ``capacity`` rows."""
    rest = x.shape[mask.dim() :]
    out = x.new_empty((capacity, *rest))
    geometry = row_geometry(mask, rest, x)
    counts, blocks = counts_of(mask, geometry)
    length, width = mask.numel(), prod(rest)
    rows, elements = tile_for(width)
    tiles, steps = -(-max(length, capacity) // rows), -(-width // elements)
    x_at, mask_at = geometry.operands
    launch(
        pack_kernel,
        tiles * steps,
        {
            **dict(x=as_bytes(x), mask=as_bytes(mask), counts=counts, out=as_bytes(out), outer=geometry.outer),
            **dict(inner=geometry.inner, x_outer=x_at.outer, x_inner=x_at.inner, mask_outer=mask_at.outer),
            **dict(length=length, width=width, blocks=blocks, capacity=capacity, tiles=tiles, steps=steps),
            **dict(ROWS=rows, ELEMENTS=elements, BLOCK=BLOCK),
        },
        warps=4,
        reads={"x": 1, "mask": 1},
        writes=("out",),
    )
    return out


def pack_rows(x: Tensor, mask: Tensor) -> Tensor:
    """The kept rows: a host-device sync for their number, which is the shape of the result."""
    return pack_capacity(x, mask, int(mask.sum()))


def unpack_capacity(
    values: Tensor,  # (n, *rest)
    mask: Tensor,
    other: Tensor,  # broadcasts to (*mask.shape, *rest)
) -> Tensor:
    """The rows scattered to kept positions, ``other`` elsewhere."""
    rest = values.shape[1:]
    shape = (*mask.shape, *rest)
    if values.shape[0] == 0:
        return other.expand(shape).clone(memory_format=torch.contiguous_format)
    out = values.new_empty(shape)
    other = other.expand(shape)
    geometry = row_geometry(mask, rest, other)
    counts, blocks = counts_of(mask, geometry)
    length, width = mask.numel(), prod(rest)
    rows, elements = tile_for(width)
    tiles, steps = -(-length // rows), -(-width // elements)
    other_at, mask_at = geometry.operands
    launch(
        unpack_kernel,
        tiles * steps,
        {
            **dict(values=as_bytes(values.contiguous()), mask=as_bytes(mask), counts=counts, other=as_bytes(other)),
            **dict(out=as_bytes(out), outer=geometry.outer, inner=geometry.inner, other_outer=other_at.outer),
            **dict(other_inner=other_at.inner, mask_outer=mask_at.outer, length=length, width=width, blocks=blocks),
            **dict(many=values.shape[0], tiles=tiles, steps=steps, ROWS=rows, ELEMENTS=elements, BLOCK=BLOCK),
        },
        warps=4,
        reads={"values": 1, "mask": 1, "other": 1},
        writes=("out",),
    )
    return out


# -- segments of rows --------------------------------------------------------------------------------------------------
IDENTITIES = {"sum": 0.0, "mean": 0.0, "amax": -inf, "amin": inf, "logsumexp": -inf, "softmax": -inf}


def segments(values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """A reduction of each segment, (S, *rest), or its softmax, (n, *rest)."""
    values = values.contiguous()
    many = bounds.shape[0] - 1
    rest = values.shape[1:]
    out = torch.empty_like(values) if op == "softmax" else values.new_empty((many, *rest))
    width = prod(rest)
    columns, rows = SEGMENT_TILES[width == 1]
    steps = -(-width // columns)
    launch(
        segment_kernel,
        many * steps,
        {
            **dict(values=values, bounds=bounds, out=out, segments=many, width=width, steps=steps, OP=op),
            **dict(IDENTITY=IDENTITIES[op], DTYPE=triton_type(accumulator(values.dtype)), COLUMNS=columns, ROWS=rows),
        },
        warps=4,
        reads={"values": 2 if op == "softmax" else 1, "bounds": 1},
        writes=("out",),
    )
    return out


def segment_backward(grad: Tensor, saved: Tensor, values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """The gradient of a reduction over segments."""
    grad_values = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    many, width = bounds.shape[0] - 1, prod(values.shape[1:])
    columns, rows = GRADIENT_TILES[width == 1]
    steps = -(-width // columns)
    passes = 2 if op in ("softmax", "amax", "amin") else 1
    launch(
        segment_backward_kernel,
        many * steps,
        {
            **dict(grad=grad.contiguous(), saved=saved, values=values.contiguous(), bounds=bounds),
            **dict(grad_values=grad_values, segments=many, width=width, steps=steps, OP=op, COLUMNS=columns, ROWS=rows),
            **dict(DTYPE=triton_type(accumulator(values.dtype))),
        },
        warps=4,
        reads={"grad": passes if op == "softmax" else 1, "saved": 1, "bounds": 1}
        | ({} if op in ("sum", "mean", "softmax") else {"values": passes}),
        writes=("grad_values",),
    )
    return grad_values
