"""Selection on a GPU: pack and unpack, without a host-device sync where the capacity is given; and segments."""

from __future__ import annotations

from math import inf, prod

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import Geometry, lay_out
from maskwise.ops.gpu.launch import as_bytes, launch
from maskwise.ops.gpu.rows import Stat, expand_rows, map_rows, reduce_rows
from maskwise.ops.select.triton import count_kernel, pack_kernel, unpack_kernel

__all__ = ["pack_capacity", "pack_rows", "segment_backward", "segments", "unpack_capacity"]

#: The block size of mask counts, and the longest mask that every program counts by itself.
BLOCK, SHORT = 4096, 1 << 16
#: Rows and elements per tile, for wide rows, narrow rows, and single elements.
TILES = ((16, 128), (128, 16), (1024, 1))


def tile_for(width: int) -> tuple[int, int]:
    """Rows and elements of a tile."""
    return TILES[0] if width > 16 else TILES[1] if width > 1 else TILES[2]


def row_geometry(mask: Tensor, rest: torch.Size, moved: Tensor) -> Geometry:
    """The geometry of the rows: of the padded operand, and of the mask."""
    lead = mask.reshape(*mask.shape, *[1] * len(rest)).expand(moved.shape)
    dims = list(range(mask.dim(), moved.dim()))
    return lay_out(dims, moved, lead, shape=moved.shape, ordered=True, in_order=True)


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
# A segment is a row of all values, of which an interval is kept: nothing else of it is read or written.
EXPONENTIALS = Stat("logsumexp", -inf, b=True)
STATS = {
    "sum": Stat("sum", 0),
    "mean": Stat("mean", 0, n=True),
    "amax": Stat("amax", -inf),
    "amin": Stat("amin", inf),
    "logsumexp": EXPONENTIALS,
    "softmax": EXPONENTIALS,
}
#: The gradient of each reduction, and what it needs of a segment besides.
GRADIENTS = {
    "sum": ("sum", None),
    "mean": ("mean", Stat("count", 0, n=True)),
    "amax": ("ties", Stat("ties", 0, n=True)),
    "amin": ("ties", Stat("ties", 0, n=True)),
    "logsumexp": ("logsumexp", None),
}


def as_segments(values: Tensor, many: int) -> Tensor:
    """All values for each segment, (S, n, width), which repeats them in no memory."""
    width = prod(values.shape[1:])
    return values.reshape(values.shape[0], width).unsqueeze(0).expand(many, values.shape[0], width)


def intervals_of(bounds: Tensor) -> tuple[Tensor, int]:
    """The bounds of segments as a mask of intervals, (2, S, 1, 1), and their number."""
    many = bounds.shape[0] - 1
    bounds = bounds.contiguous()
    return bounds.as_strided((2, many, 1, 1), (1, 1, 0, 0)), many


def segments(values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """A reduction of each segment, (S, *rest), or its softmax, (n, *rest)."""
    values = values.contiguous()
    mask, many = intervals_of(bounds)
    typical = max(1, values.shape[0] // max(many, 1))
    x = as_segments(values, many)
    if op == "softmax":
        out = torch.empty_like(values)
        map_rows(op, EXPONENTIALS, x, mask, [1], -2, out=as_segments(out, many), typical=typical)
    else:
        out = values.new_empty((many, *values.shape[1:]))
        reduce_rows(STATS[op], x, mask, [1], -2, out, typical=typical)
    return out


def segment_backward(grad: Tensor, saved: Tensor, values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """The gradient of a reduction over segments; ``saved`` is its result."""
    grad_values = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    mask, many = intervals_of(bounds)
    typical = max(1, values.shape[0] // max(many, 1))
    grad_x = as_segments(grad_values, many)
    if op == "softmax":
        of_out = as_segments(grad.contiguous(), many)
        map_rows(op, None, as_segments(saved, many), mask, [1], -2, grad=of_out, out=grad_x, typical=typical)
        return grad_values
    name, state = GRADIENTS[op]
    need_x = op not in ("sum", "mean")
    x = as_segments(values.contiguous(), many) if need_x else grad_x
    out = saved.reshape(many, -1) if need_x else None
    grad = grad.reshape(many, -1)
    expand_rows(name, state, grad, out, x, mask, [1], -2, need_x=need_x, grad_x=grad_x, typical=typical)
    return grad_values
