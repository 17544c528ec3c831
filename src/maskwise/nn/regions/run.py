"""How a step runs on a part of its map: the tiles that cover it, by predicted cost, and the step on their batch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from maskwise.nn.regions.area import Area, Cover, box_cover, tile_cover
from maskwise.nn.regions.program import Program, Step, run_tail
from maskwise.nn.regions.rules import Local
from maskwise.ops.conv import Geometry, tiles
from maskwise.ops.primitives import number
from maskwise.plan import dispatch
from maskwise.plan.cost import Rates, Work, microseconds
from maskwise.plan.dispatch import Facts, Route, Skips

__all__ = ["choose", "compute", "dense", "geometry_of_step", "place", "saved"]

#: Of the rate of a matrix product: torch's convolution of a map or a box, of tiles of 8 x 8 and of 4 x 4, a product.
_DENSE, _TILES, _SMALL_TILES, _PIXELS = 0.85, 0.65, 0.4, 0.8
#: The same of tiles of any size that read their map in place.
_DIRECT = 0.75
#: The share of a box from which on its positions are computed together.
_DENSE_BOX = 0.6
#: Tiles of a result, in coarse positions.
_SIZES = ((8, 8), (4, 4))


class _Detail(NamedTuple):
    """What routes of a step read: the candidates as (tiles, positions per tile, positions that a tile reads)."""

    flops: int
    whole: tuple[int, int, int]
    tiles: tuple[int, int, int]
    pixels: tuple[int, int, int] | None
    channels: tuple[int, int]
    nodes: int
    efficiency: float


def geometry_of_step(step: Step, sizes: tuple[int, int]) -> tuple[Geometry, bool]:
    """How the positions of its result relate to those of its source."""
    if step.head is None:
        return Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1, sizes, sizes), False
    return step.head.geometry, step.head.is_transposed


def choose(
    step: Step, area: Area, program: Program, dtype: torch.dtype, device: torch.device
) -> tuple[Cover | None, str]:
    """The tiles on which a step is computed; None where that is the whole map. And the name of the route."""
    batch, outputs, height, width = program.shapes[step.out]
    geometry, is_transposed = geometry_of_step(step, (height, width))
    count = area.positions(batch)
    box = batch * prod(area.sizes)
    is_direct = _is_direct(step, dtype, device)
    if is_direct:
        covers = [
            box_cover(area, geometry, False, batch)
            if area.bits is None
            else tile_cover(area, geometry, False, (1, 1), batch)
        ]
        efficiency = _DIRECT
    elif area.bits is None or count > _DENSE_BOX * box:
        covers, efficiency = [box_cover(area, geometry, is_transposed, batch)], _DENSE
    else:
        covers = [tile_cover(area, geometry, is_transposed, size, batch) for size in _SIZES]
        efficiency = _TILES
    inputs = outputs if step.source is None else program.shapes[step.source][1]
    flops = 0 if step.head is None else step.head.flops
    can_pixels = flops > 0 and not is_transposed and geometry.groups == 1 and geometry.dilation == (1, 1)
    read = height * width if step.source is None else prod(program.shapes[step.source][2:])
    best, best_facts = None, None
    for cover in covers:
        each = (cover.tiles.shape[0], prod(cover.tiling.size), 0 if is_direct else prod(cover.tiling.window))
        share = efficiency if each[1] >= 64 or is_direct else _SMALL_TILES
        detail = _Detail(
            flops,
            (batch, height * width, read),
            each,
            (count, 1, geometry.taps) if can_pixels and area.bits is not None and not is_direct else None,
            (inputs, outputs),
            1 + len(step.tail),
            share,
        )
        facts = Facts("regions", (batch, outputs, height, width), dtype, device.type, detail=detail)
        if best is None or _ROUTES[0].predict(facts)[1] < _ROUTES[0].predict(best_facts)[1]:  # type: ignore[index,arg-type]
            best, best_facts = cover, facts
    assert best is not None
    key = (best_facts, dispatch.is_any_forced() and dispatch.forced())
    decision = dispatch.cache.get(key)
    if decision is None:
        decision = dispatch.cache[key] = dispatch.decide(best_facts, _ROUTES)  # type: ignore[arg-type]
    name = decision.route.name
    if name == "plain":
        return None, name
    if name == "pixels":
        best = tile_cover(area, geometry, is_transposed, (1, 1), batch)
    elif efficiency == _DENSE or (is_direct and area.bits is None):
        name = "box"
    elif is_direct:
        name = "pixels"
    return best._replace(tiles=best.tiles.to(device)), name


def _is_direct(step: Step, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the head reads its map in place."""
    is_served = step.head is not None and step.head.on_map is not None
    return is_served and dtype is torch.float32 and device.type == "cpu"


# -- what it costs -----------------------------------------------------------------------------------------------------
def _work(facts: Facts, candidate: tuple[int, int, int], share: float) -> Work:
    d: _Detail = facts.detail
    count, written, read = candidate
    moved = facts.dtype.itemsize * count * (2 * read * d.channels[0] + (4 + 2 * d.nodes) * written * d.channels[1])
    return Work(calls=8 + d.nodes, streamed=moved, flops=round(count * written * d.flops / share))


def _tiles_work(facts: Facts) -> Work:
    return _work(facts, facts.detail.tiles, facts.detail.efficiency)


def _pixels_work(facts: Facts) -> Work:
    return _work(facts, facts.detail.pixels or (0, 1, 1), _PIXELS)


def _plain_work(facts: Facts) -> Work:
    d: _Detail = facts.detail
    return _work(facts, d.whole, _DENSE)._replace(calls=1 + d.nodes)


def _serves_pixels(facts: Facts) -> str | None:
    return "it is no convolution of scattered positions" if facts.detail.pixels is None else None


def _cost(facts: Facts, work: Work, rates: Rates) -> float:
    return microseconds(work, rates.plain_call, rates)


_ROUTES = (
    Route("tiles", lambda: None, work=_tiles_work, cost=_cost, skips=Skips.READING, is_kernel=True),
    Route("pixels", lambda: None, _serves_pixels, work=_pixels_work, cost=_cost, skips=Skips.READING),
    Route("plain", lambda: None, work=_plain_work, cost=_cost),
)


# -- what runs ---------------------------------------------------------------------------------------------------------
def compute(
    step: Step,
    cover: Cover,
    program: Program,
    read: Callable[[fx.Node], Any],
    valid: Callable[[fx.Node, Local | None], Tensor | None] = lambda node, head: None,
) -> Tensor:
    """The result of a step on tiles: (n, channels, *size), channels last.

    Args:
        step: a step with positions.
        cover: the tiles.
        program: of the step.
        read: the value of a node.
        valid: the mask of what is read of a node, by windows or position by position; None where all of it counts.
    """
    own, found, value = cover.own, cover.tiles, None
    if step.head is not None:
        assert step.source is not None
        source, head, bits = read(step.source), step.head, valid(step.source, step.head)
        fill = None if head.fill is None else number(head.fill, source.dtype, source.device)
        if head.on_map is not None and _is_direct(step, source.dtype, source.device) and source.stride(1) == 1:
            value = head.on_map(source, bits, found, cover.tiling)
        else:
            windows = tiles.gather(source, bits, found, cover.reads, fill, head.edge)
            value = head.on_windows(windows, cover.tiling)
        if head.is_mean_of_map or (bits is not None and head.kind in ("max", "average")):
            ones = source.new_ones(1).expand(source.shape[0], 1, *source.shape[2:])
            share = head.on_windows(tiles.gather(ones, bits, found, cover.reads), cover.tiling)
            value = value if head.kind == "max" else value / torch.where(share > 0, share, 1.0)
            value = torch.where(share > 0, value, 0.0)
        top, left = head.crop(cover.tiling)
        height, width = cover.tiling.size
        value = value[:, :, top : top + height, left : left + width]
    batch, _, *positions = program.shapes[step.out]

    def read_tiles(node: fx.Node) -> Any:
        whole = read(node)
        if not isinstance(whole, Tensor) or whole.dim() < 2:
            return whole
        if tuple(whole.shape[-2:]) == tuple(positions):
            # Such as learned positions, which all entries of a batch share.
            whole = whole.reshape((1,) * (4 - whole.dim()) + tuple(whole.shape))
            whole = whole.expand(batch, -1, -1, -1) if whole.shape[0] != batch else whole
            return tiles.gather(whole, valid(node, None), found, own)
        return whole[found[:, 0].long()] if whole.dim() == 4 and whole.shape[0] == batch > 1 else whole

    return run_tail(step, value, read_tiles).contiguous(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def dense(step: Step, read: Callable[[fx.Node], Any]) -> Tensor:
    """The result of a step on the whole map, channels last."""
    value = None
    if step.head is not None:
        assert step.source is not None
        value = step.head.dense(read(step.source))
    return run_tail(step, value, read).contiguous(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def place(batch: Tensor, cover: Cover, out: Tensor, wanted: Tensor | None = None) -> None:
    """Write tiles into a map; where ``wanted`` is given, only these positions."""
    view = out[:, :, cover.origin[0] :, cover.origin[1] :]
    # A map from a call under autocast, for one, has another dtype.
    tiles.scatter_into(batch.to(out.dtype), cover.tiles, wanted, list(cover.tiling.size), [0, 0], view)


def saved(cover: Cover, out: Tensor) -> Tensor:
    """What a map holds where tiles are to be written, for `place`."""
    held: Tensor = tiles.gather(out, None, cover.tiles, cover.own)
    return held
