"""The routes of a convolution that skip: what they compute, what they cost, and which one a call takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import NamedTuple

from torch import Tensor

from maskwise.ops.backends import why_not_served
from maskwise.ops.conv import reference, rows, tiles
from maskwise.ops.conv.arguments import Geometry, Options, Pair
from maskwise.ops.primitives import number
from maskwise.plan import dispatch
from maskwise.plan.cost import Rates, Work, microseconds
from maskwise.plan.dispatch import Decision, Facts, Plan, Route, Skips, decide
from maskwise.plan.explain import record

__all__ = ["ROUTES", "Found", "Job", "Region", "decide_by_count", "report", "tile_size"]

# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_cached, _forced, _is_any_forced = dispatch.cache.get, dispatch.forced, dispatch.is_any_forced


class Region(NamedTuple):
    """Facts of the family."""

    geometry: Geometry
    batch: int
    #: Channels.
    inputs: int
    outputs: int
    is_transposed: bool
    channels_last: bool
    #: Whether there is a mask of the input, and one of the result.
    has_valid: bool
    has_wanted: bool
    #: Whether tiles are found without a host-device sync.
    is_known: bool = True
    #: Wanted positions, and the tiles that have some, once they are counted.
    wanted: int | None = None
    tiles: int | None = None

    @property
    def result(self) -> Pair:
        """The positions of the result."""
        return self.geometry.fine if self.is_transposed else self.geometry.coarse

    @property
    def flops(self) -> int:
        """FLOPs per coarse position."""
        coarse, fine = (self.inputs, self.outputs) if self.is_transposed else (self.outputs, self.inputs)
        return 2 * self.geometry.taps * (fine // self.geometry.groups) * coarse


class Job(NamedTuple):
    """What to convolve: the facts, what is valid of the input, and what is wanted of the result."""

    facts: Facts
    valid: Tensor | None
    wanted: Tensor | None
    #: Whether results that read nothing valid are 0, as in a gradient, which has no bias.
    is_gradient: bool = False
    #: Both masks on the host, where x is on a device: tiles are found there, without a host-device sync.
    host: tuple[Tensor | None, Tensor | None] | None = None


def tile_size(detail: Region) -> Pair:
    """Coarse positions of a tile: larger for kernels whose halo is wide."""
    height, width = detail.geometry.span
    if detail.geometry.coarse[0] == 1:
        return 1, 64
    return (8, 8) if max(height, width) <= 4 else (16, 16)


class Found(NamedTuple):
    """The tiles to compute, and how many positions of them are wanted."""

    tiling: tiles.Tiling
    tiles: Tensor
    wanted: int


def _find(job: Job, size: Pair) -> Found:
    detail: Region = job.facts.detail
    tiling = tiles.tiling_of(detail.geometry, size, detail.is_transposed)
    valid, wanted = (job.valid, job.wanted) if job.host is None else job.host
    source = valid if job.is_gradient else None
    found, count = tiles.find(wanted, source, detail.batch, detail.geometry, tiling, detail.is_transposed)
    if job.host is not None:
        found = found.to(next(bits.device for bits in (job.wanted, job.valid) if bits is not None), non_blocking=True)
    return Found(tiling, found, count)


def decide_by_count(job: Job) -> tuple[Decision, Found]:
    """Decide a call from the tiles that are active and the positions that are wanted."""
    detail: Region = job.facts.detail
    found = _find(job, tile_size(detail))
    facts = job.facts._replace(detail=detail._replace(wanted=found.wanted, tiles=found.tiles.shape[0]))
    key = (facts, _is_any_forced() and _forced())
    decision: Decision | None = _cached(key)
    if decision is None:
        decision = dispatch.cache[key] = decide(facts, ROUTES)
    return decision, found


# -- what runs ---------------------------------------------------------------------------------------------------------
def _run_tiles(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, job: Job, found: Found) -> Tensor:
    """The route ``tiles`` without autograd."""
    detail: Region = job.facts.detail
    fill = number(0.0, x.dtype, x.device) if other is None else other.to(x.dtype)
    return tiles.convolve(
        x, weight, bias, job.valid, job.wanted, fill, detail.geometry, found.tiling, found.tiles,
        detail.is_transposed, detail.channels_last,
    )  # fmt: skip


def _run_pixels(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, job: Job, found: Found) -> Tensor:
    """The route ``pixels`` without autograd: tiles of one position."""
    return _run_tiles(x, weight, bias, other, job, _find(job, (1, 1)))


def _run_rows(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, job: Job, found: Found) -> Tensor:
    """The route ``rows`` without autograd."""
    detail: Region = job.facts.detail
    fill = number(0.0, x.dtype, x.device) if other is None else other.to(x.dtype)
    return rows.convolve(
        x, weight, bias, job.valid, job.wanted, fill, detail.geometry, detail.is_transposed, detail.channels_last
    )


# -- what it costs -----------------------------------------------------------------------------------------------------
#: Of the rate of a matrix product: torch's convolution of a whole map, of a batch of tiles, a product of gathered rows.
_DENSE, _TILES, _PIXELS = 0.9, 0.8, 0.9
#: The same of depthwise convolutions: torch's, torch's of a batch of tiles, and by rows.
_DEPTHWISE, _DEPTHWISE_TILES, _ROWS = 0.3, 0.1, 0.3
#: FLOPs of a dense convolution below which the mask is not looked at; of a depthwise one, which takes longer for them.
_FEW_FLOPS, _FEW_DEPTHWISE = 20_000_000, 2_000_000
#: Single positions of planes are gathered an element at a time, which takes that many times as long.
_STRIDED = 4


def _serves(facts: Facts) -> str | None:
    if facts.mask == "none":
        return "nothing is dropped"
    if not facts.detail.is_known:
        return "the mask lies on the device, where finding its tiles would be a host-device sync"
    return why_not_served("conv_tiles", facts.device, facts.dtype)


def _serves_rows(facts: Facts) -> str | None:
    d: Region = facts.detail
    why = rows.serves(d.geometry, d.inputs, d.outputs, d.is_transposed, d.channels_last)
    return why or (_serves(facts) if facts.mask == "none" else why_not_served("conv_rows", facts.device, facts.dtype))


def _serves_pixels(facts: Facts) -> str | None:
    g: Geometry = facts.detail.geometry
    if g.groups != 1 or g.dilation != (1, 1) or (facts.detail.is_transposed and g.stride != (1, 1)):
        return "single positions are gathered without groups, dilation and transposed strides"
    return _serves(facts)


def _pays(facts: Facts) -> str | None:
    few = _FEW_DEPTHWISE if _is_depthwise(facts.detail) else _FEW_FLOPS
    return "too little to look at the mask for" if _dense_flops(facts.detail) < few else None


def _is_depthwise(detail: Region) -> bool:
    return detail.geometry.groups > 1 and detail.geometry.groups == detail.inputs


def _dense_flops(detail: Region) -> int:
    return detail.batch * prod(detail.geometry.coarse) * detail.flops


def _moved(facts: Facts) -> tuple[int, int]:
    """The bytes of the input and of the result."""
    detail: Region = facts.detail
    fine, coarse = prod(detail.geometry.fine), prod(detail.geometry.coarse)
    read, written = (coarse, fine) if detail.is_transposed else (fine, coarse)
    size = facts.dtype.itemsize * detail.batch
    return read * detail.inputs * size, written * detail.outputs * size


def _plain_work(facts: Facts) -> Work:
    detail: Region = facts.detail
    read, written = _moved(facts)
    # The fills before and after read and write everything.
    streamed = read + written + 2 * read * detail.has_valid + 2 * written * detail.has_wanted
    return Work(calls=1 + detail.has_valid + detail.has_wanted, streamed=streamed, flops=_dense_flops(detail))


def _tiles_work(facts: Facts) -> Work:
    detail: Region = facts.detail
    return _gathered(facts, tile_size(detail), 0 if detail.tiles is None else detail.tiles)


def _rows_work(facts: Facts) -> Work:
    detail: Region = facts.detail
    read, written = _moved(facts)
    kept = (detail.wanted or 0) / max(1, detail.batch * prod(detail.result))
    return Work(calls=2, streamed=round(kept * read) + written, flops=(detail.wanted or 0) * detail.flops)


def _pixels_work(facts: Facts) -> Work:
    work = _gathered(facts, (1, 1), facts.detail.wanted or 0)
    return work if facts.detail.channels_last else work._replace(gathered=_STRIDED * work.gathered)


def _gathered(facts: Facts, size: Pair, count: int) -> Work:
    detail: Region = facts.detail
    tiling = tiles.tiling_of(detail.geometry, size, detail.is_transposed)
    windows, written = count * prod(tiling.window), count * prod(tiling.size)
    # A transposed convolution with a stride has its taps for each position that is read.
    flops = detail.flops * (windows if detail.is_transposed and detail.geometry.stride != (1, 1) else written)
    moved = 2 * facts.dtype.itemsize * (windows * detail.inputs + written * detail.outputs)
    # A product or a convolution between three kernels, all of which Python prepares.
    return Work(calls=12, streamed=_moved(facts)[1] + moved, gathered=moved, flops=flops)


def _cost(efficiency: float, depthwise: float) -> Callable[[Facts, Work, Rates], float]:
    def cost(facts: Facts, work: Work, rates: Rates) -> float:
        share = depthwise if _is_depthwise(facts.detail) else efficiency
        return microseconds(work._replace(flops=round(work.flops / share)), rates.plain_call, rates)

    return cost


def _flops(facts: Facts) -> int:
    detail: Region = facts.detail
    return _dense_flops(detail) // max(1, detail.batch * prod(detail.result))


ROUTES = (
    Route(
        "rows",
        _run_rows,
        _serves_rows,
        _rows_work,
        _pays,
        _cost(_ROWS, _ROWS),
        skips=Skips.READING,
        flops=_flops,
        is_kernel=True,
    ),
    Route(
        "tiles",
        _run_tiles,
        _serves,
        _tiles_work,
        _pays,
        _cost(_TILES, _DEPTHWISE_TILES),
        skips=Skips.COMPUTING,
        flops=_flops,
        is_kernel=True,
    ),
    Route(
        "pixels",
        _run_pixels,
        _serves_pixels,
        _pixels_work,
        _pays,
        _cost(_PIXELS, _PIXELS),
        skips=Skips.COMPUTING,
        flops=_flops,
    ),
    Route("plain", reference.dense, work=_plain_work, cost=_cost(_DENSE, _DEPTHWISE), flops=_flops, transforms=True),
)


def report(plan: Plan, facts: Facts, options: Options, x: Tensor, wanted: Tensor | None) -> Plan | None:
    """Record a call: what counts is the positions of the result."""
    detail: Region = facts.detail
    total = detail.batch * prod(detail.result)
    skipped = 0
    if plan.work is not None and plan.route != "plain":
        skipped = total - plan.work.flops // max(1, _flops(facts))
        plan = replace(plan, reason=_why(plan, detail, total - skipped, total))
    positions = x.new_empty(()).expand(detail.batch, *detail.result[-options.dims :])
    return record(plan, positions, wanted, skipped=skipped)


def _why(plan: Plan, detail: Region, computed: int, total: int) -> str:
    if plan.route == "rows":
        return f"{plan.reason}: {computed:,} of {total:,} positions"
    size = (1, 1) if plan.route == "pixels" else tile_size(detail)
    tiling = tiles.tiling_of(detail.geometry, size, detail.is_transposed)
    count = computed // max(1, prod(tiling.size))
    of = -(-detail.result[0] // tiling.size[0]) * -(-detail.result[1] // tiling.size[1]) * detail.batch
    halo = prod(tiling.window) / max(1, prod(tiling.step))
    shape = " x ".join(map(str, tiling.size))
    return f"{plan.reason}: {count:,} of {of:,} tiles of {shape}, whose halo reads {halo:.2f} x their positions"
