"""A part of a map, and what a convolution makes of it: where an edit reaches, and which tiles cover that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from maskwise.ops.conv import Geometry, tiles

__all__ = ["Area", "Cover", "box_cover", "of_bits", "reached", "tile_cover", "union", "whole"]

Pair = tuple[int, int]


class Area(NamedTuple):
    """A box of a map, of all batch entries, and which of its positions: all of them where ``bits`` is None.

    >>> Area((2, 4), (3, 8), None).sizes
    (1, 4)
    """

    start: Pair
    stop: Pair
    #: bool, (batch, *sizes of the box).
    bits: Tensor | None
    #: How many positions the bits keep, where that is known.
    kept: int | None = None

    @property
    def sizes(self) -> Pair:
        """The sizes of the box."""
        return self.stop[0] - self.start[0], self.stop[1] - self.start[1]

    @property
    def is_empty(self) -> bool:
        """Whether the box has no position."""
        return min(self.sizes) <= 0

    def positions(self, batch: int) -> int:
        """How many positions it has, in all batch entries."""
        if self.bits is None:
            return batch * self.sizes[0] * self.sizes[1]
        return int(self.bits.sum()) if self.kept is None else self.kept


def whole(sizes: Pair) -> Area:
    """All positions of a map.

    >>> whole((4, 6))
    Area(start=(0, 0), stop=(4, 6), bits=None, kept=None)
    """
    return Area((0, 0), sizes, None)


def of_bits(bits: Tensor) -> Area | None:
    """The positions of a mask, (batch, height, width), in the smallest box; None where nothing is True.

    >>> bits = torch.zeros(1, 4, 6, dtype=torch.bool)
    >>> bits[0, 1:3, 2] = True
    >>> of_bits(bits)
    Area(start=(1, 2), stop=(3, 3), bits=None, kept=None)
    """
    plane = bits.any(0)
    edges = [_edges(plane.any(1 - d)) for d in (0, 1)]
    if edges[0] is None or edges[1] is None:
        return None
    (top, bottom), (left, right) = edges[0], edges[1]
    inner = bits[:, top:bottom, left:right]
    return Area((top, left), (bottom, right), None if bool(inner.all()) else inner.contiguous())


def _edges(line: Tensor) -> Pair | None:
    kept = line.nonzero()
    return (int(kept[0]), int(kept[-1]) + 1) if kept.numel() else None


def union(first: Area, second: Area, batch: int) -> Area:
    """The positions of either.

    >>> union(Area((0, 0), (2, 2), None), Area((1, 1), (2, 2), None), 1)
    Area(start=(0, 0), stop=(2, 2), bits=None, kept=None)
    """
    for one, other in ((first, second), (second, first)):
        if one.bits is None and all(
            a <= b and c >= d for a, b, c, d in zip(one.start, other.start, one.stop, other.stop, strict=True)
        ):
            return one
    start = (min(first.start[0], second.start[0]), min(first.start[1], second.start[1]))
    stop = (max(first.stop[0], second.stop[0]), max(first.stop[1], second.stop[1]))
    device = next((each.bits.device for each in (first, second) if each.bits is not None), None)
    bits = torch.zeros(batch, stop[0] - start[0], stop[1] - start[1], dtype=torch.bool, device=device)
    for each in (first, second):
        inner = bits[
            :, each.start[0] - start[0] : each.stop[0] - start[0], each.start[1] - start[1] : each.stop[1] - start[1]
        ]
        inner |= True if each.bits is None else each.bits
    return Area(start, stop, bits)


# -- through a convolution ---------------------------------------------------------------------------------------------
def reached(area: Area, geometry: Geometry, is_transposed: bool) -> Area | None:
    """The positions of a result that read something of an area; None where there is none.

    Of a box, that is a box, and so has the few positions between the taps of a dilated kernel too.

    >>> geometry = Geometry((3, 3), (2, 2), (1, 1), (1, 1), 1, (8, 8), (4, 4))
    >>> reached(Area((3, 0), (4, 2), None), geometry, False)
    Area(start=(1, 0), stop=(3, 2), bits=None, kept=None)
    """
    start, stop, bits = [0, 0], [0, 0], area.bits
    for d in (0, 1):
        start[d], stop[d] = _reached_range(area.start[d], area.stop[d], geometry, d, is_transposed)
        if start[d] >= stop[d]:
            return None
        if bits is not None:
            along = _transposed_along if is_transposed else _along
            bits = along(bits, d, area.start[d], start[d], stop[d] - start[d], geometry)
    return Area((start[0], start[1]), (stop[0], stop[1]), bits)


def _reached_range(start: int, stop: int, geometry: Geometry, d: int, is_transposed: bool) -> Pair:
    stride, before, span = geometry.stride[d], geometry.before[d], geometry.span[d]
    if is_transposed:
        return max(0, start * stride - before), min(geometry.fine[d], (stop - 1) * stride - before + span + 1)
    return max(0, -(-(start + before - span) // stride)), min(geometry.coarse[d], (stop - 1 + before) // stride + 1)


def _along(bits: Tensor, d: int, at: int, start: int, count: int, geometry: Geometry) -> Tensor:
    """Which of ``count`` coarse positions from ``start`` on read one of the fine ones, along a dim."""
    stride, before, dim = geometry.stride[d], geometry.before[d], 1 + d
    shape = list(bits.shape)
    shape[dim] = count
    out, size = bits.new_zeros(shape), bits.shape[dim]
    for tap in range(geometry.kernel[d]):
        # Coarse position start + i reads fine position first + i * stride of the box.
        first = start * stride - before + tap * geometry.dilation[d] - at
        low = max(0, -(first // stride))
        high = min(count, (size - 1 - first) // stride + 1)
        if low >= high:
            continue
        found = bits.narrow(dim, first + low * stride, (high - low - 1) * stride + 1)
        found = found if stride == 1 else found.transpose(dim, -1)[..., ::stride].transpose(dim, -1)
        part = out.narrow(dim, low, high - low)
        part |= found
    return out


def _transposed_along(bits: Tensor, d: int, at: int, start: int, count: int, geometry: Geometry) -> Tensor:
    """Which of ``count`` fine positions from ``start`` on read one of the coarse ones, along a dim."""
    stride, before, dim = geometry.stride[d], geometry.before[d], 1 + d
    shape = list(bits.shape)
    shape[dim] = count
    out, size = bits.new_zeros(shape), bits.shape[dim]
    for tap in range(geometry.kernel[d]):
        # Coarse position at + i is read by fine position first + i * stride of the result's box.
        first = at * stride - before + tap * geometry.dilation[d] - start
        low = max(0, -(first // stride))
        high = min(size, (count - 1 - first) // stride + 1)
        if low < high:
            part = out.narrow(dim, first + low * stride, (high - low - 1) * stride + 1)
            part = part if stride == 1 else part.transpose(dim, -1)[..., ::stride].transpose(dim, -1)
            part |= bits.narrow(dim, low, high - low)
    return out


# -- tiles -------------------------------------------------------------------------------------------------------------
class Cover(NamedTuple):
    """Tiles of a result: where their grid starts, their tiling, and (batch entry, row, column) of each."""

    origin: Pair
    tiling: tiles.Tiling
    tiles: Tensor

    @property
    def reads(self) -> list[int]:
        """What the tiles read, as the ops take it."""
        return self.tiling.reads

    @property
    def own(self) -> list[int]:
        """The positions of the result themselves, as the ops take them."""
        return [*self.tiling.size, *self.origin, *self.tiling.size]

    @property
    def positions(self) -> int:
        """How many positions are computed."""
        return self.tiles.shape[0] * self.tiling.size[0] * self.tiling.size[1]


def _cover(
    geometry: Geometry, is_transposed: bool, start: Pair, size: Pair, found: Tensor | None, bits: Tensor | None
) -> Cover:
    """Tiles of so many coarse positions, from a start that lies on the grid of the stride."""
    tiling = tiles.tiling_of(geometry, size, is_transposed)
    strides = geometry.stride
    if is_transposed:
        first = tuple(f + o // s for f, o, s in zip(tiling.first, start, strides, strict=True))
    else:
        first = tuple(f + o * s for f, o, s in zip(tiling.first, start, strides, strict=True))
    if found is None:
        assert bits is not None
        found, _ = tiles.active(bits, None, list(bits.shape), list(tiling.size), tiling.reads)
    return Cover(start, tiling._replace(first=first), found)  # type: ignore[arg-type]


def box_cover(area: Area, geometry: Geometry, is_transposed: bool, batch: int) -> Cover:
    """One tile for each batch entry: the box."""
    start, size = area.start, area.sizes
    if is_transposed:
        steps = geometry.stride
        start = (start[0] // steps[0] * steps[0], start[1] // steps[1] * steps[1])
        size = (-(-(area.stop[0] - start[0]) // steps[0]), -(-(area.stop[1] - start[1]) // steps[1]))
    found = torch.zeros(batch, 3, dtype=torch.int32)
    found[:, 0] = torch.arange(batch)
    if area.bits is not None and batch > 1:
        found = found[area.bits.flatten(1).any(1).cpu()]
    return _cover(geometry, is_transposed, start, size, found, None)


def tile_cover(area: Area, geometry: Geometry, is_transposed: bool, size: Pair, batch: int) -> Cover:
    """The tiles of a size that have a position of an area."""
    start, bits = area.start, area.bits
    if bits is None:
        bits = torch.ones(batch, *area.sizes, dtype=torch.bool)
    elif bits.shape[0] != batch:
        bits = bits.expand(batch, *bits.shape[1:])
    if is_transposed:
        offset = [o % s for o, s in zip(start, geometry.stride, strict=True)]
        start = (start[0] - offset[0], start[1] - offset[1])
        bits = torch.nn.functional.pad(bits, (offset[1], 0, offset[0], 0)) if any(offset) else bits
    return _cover(geometry, is_transposed, start, size, None, bits)
