"""Kernel launches: tile sizes from static facts, dtypes, the launch itself, and a record of launches for tests.

Nothing here reads data or causes a host-device sync.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.ops.gpu import traced
from maskwise.ops.gpu.geometry import Geometry, Kept

__all__ = [
    "Blocks", "Launch", "accumulator", "as_bytes", "blocks_for", "counters", "launch", "parts_for", "processors",
    "recording", "row_arguments", "row_blocks", "run_time", "splits_for", "triton_type",
]  # fmt: skip

#: The maximum size of the 1-D grid; beyond it, a program processes several tiles. ROCm allows 2**32 threads, and a
#: program has up to 1024.
MOST_PROGRAMS = 2**21
#: Threads of a warp, as few as any device has, and vectors of 16 bytes per thread of a tile: loads in flight.
WARP, VECTORS = 32, 2
#: The longest row that shares a tile with others.
SHORT = 512
#: Rows at least this long have twice, or four times, as many warps.
LONG = (8192, 65536)
#: The longest row that a kernel holds in registers, and how many of its elements a thread has.
LONGEST, HELD = 8192, 32
#: Processors of a device that is not there, and warps that each of them runs.
PROCESSORS, RESIDENT = 132, 64
#: Warps of each processor above which a program that reads its row again, from the cache, is faster than splits.
ENOUGH = 16
#: The fewest tiles of a split.
FEWEST = 4
#: The most programs whose results the last of them combines.
BUSY = 1024
#: Partial results that one program combines, and of each of many rows so many.
PARTS, FEWEST_SPLITS = 4096, 64


class Blocks(NamedTuple):
    """The tile of a kernel: rows, elements per row, warps, and how its memory is read."""

    rows: int
    elements: int
    warps: int
    #: Adjacent elements of a row that are one load.
    group: int
    #: Whether indices within a row have 64 bits.
    wide: bool
    #: Whether rows begin at 16-byte boundaries ("aligned") and end there ("even"), are read from the one before
    #: ("shifted"), or none of it (""). Of columns: whether 16 that are adjacent begin at such a boundary ("even").
    align: str = ""
    #: Adjacent bits of a mask that are one load, as those elements of x are; 0 where they do not lie as x does.
    bits: int = 0
    #: The direction of elements that are adjacent in memory: "rows" or "columns".
    side: str = "rows"


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel and its arguments."""

    kernel: Any
    programs: int
    arguments: Mapping[str, Any]
    warps: int
    #: How often each operand is read from memory, and which are written.
    reads: Mapping[str, int]
    writes: tuple[str, ...]

    @property
    def moved(self) -> int:
        """The bytes read and written; a broadcast operand counts once."""
        times = {**self.reads, **dict.fromkeys(self.writes, 1)}
        return sum(bytes_of(self.arguments[name]) * n for name, n in times.items() if self.arguments[name] is not None)


_recorders: list[tuple[list[Launch], bool]] = []


@contextmanager
def recording(*, runs: bool = False) -> Iterator[list[Launch]]:
    """Record the launches inside the block, in all threads.

    Args:
        runs: whether they run, too; else tensors may be on the meta device.
    """
    launches: list[Launch] = []
    entry = launches, runs
    _recorders.append(entry)
    try:
        yield launches
    finally:
        _recorders.remove(entry)


def launch(
    kernel: Any,
    programs: int,
    arguments: Mapping[str, Any],
    *,
    warps: int = 4,
    reads: Mapping[str, int],
    writes: tuple[str, ...],
) -> None:
    """Launch a kernel on the device of its operands."""
    programs = max(1, min(programs, MOST_PROGRAMS))
    if traced.is_tracing_launches():
        traced.launch_in_graph(kernel, programs, arguments, warps)
        return
    if _recorders:
        launches, runs = _recorders[-1]
        launches.append(Launch(kernel, programs, dict(arguments), warps, reads, writes))
        if not runs:
            return
    with on(arguments[writes[0]].device), _internally():
        compiled = kernel[(programs,)](**arguments, num_warps=warps)
    if _notes.launches is not None:
        _notes.launches.append(_as_started(kernel, compiled, programs, arguments, warps))


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, on whose stream kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# -- what was started, to start it again -------------------------------------------------------------------------------
class Started(NamedTuple):
    """A launch that ran: its arguments in the kernel's order, and a call that starts it with others."""

    names: tuple[str, ...]
    arguments: Mapping[str, Any]
    again: Callable[..., Any]
    #: The counters among its arguments, and how many were requested.
    counters: tuple[Tensor, ...]
    wanted: int


class _Notes(threading.local):
    """What this thread has started, and how many counters it has requested by their tensor; autograd has threads."""

    launches: list[Started] | None = None
    requested: dict[int, int] | None = None
    is_internal = False


_notes = _Notes()


@contextmanager
def started() -> Iterator[list[Started]]:
    """Note the launches inside the block, which run."""
    _notes.launches, _notes.requested = [], {}
    try:
        yield _notes.launches
    finally:
        _notes.launches = _notes.requested = None


@contextmanager
def _internally() -> Iterator[None]:
    before, _notes.is_internal = _notes.is_internal, True
    try:
        yield
    finally:
        _notes.is_internal = before


def is_internal() -> bool:
    """Whether a kernel is being started or counters are made, which is no part of what a launcher computes itself."""
    return _notes.is_internal


def is_recording() -> bool:
    """Whether launches are recorded: none of them is replayed then."""
    return bool(_recorders)


def _as_started(kernel: Any, compiled: Any, programs: int, arguments: Mapping[str, Any], warps: int) -> Started:
    names = tuple(kernel.arg_names)
    # Triton's interpreter compiles nothing.
    is_interpreted = compiled is None
    again = functools.partial(kernel[programs,], num_warps=warps) if is_interpreted else compiled[programs, 1, 1]
    requested = _notes.requested or {}
    found = tuple(x for x in arguments.values() if isinstance(x, Tensor) and id(x) in requested)
    return Started(names, arguments, again, found, requested[id(found[0])] if found else 0)


def bytes_of(x: Tensor) -> int:
    """The bytes of an operand, without the dims along which it broadcasts."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride else 1
    return elements * x.element_size()


# -- numbers -----------------------------------------------------------------------------------------------------------
def run_time(**names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare which numbers of a launcher are no part of what it computes, but arguments of its kernels.

    One that changes with every call, an annealed epsilon, neither compiles a kernel nor records launches anew. A
    launcher may depend on whether such a number is 0.

    Args:
        names: of the launcher's parameters, each with that of the kernels' parameter.
    """

    def declare(launcher: Callable[..., Any]) -> Callable[..., Any]:
        at = list(inspect.signature(launcher).parameters)
        launcher.run_time = {at.index(mine): its for mine, its in names.items()}  # type: ignore[attr-defined]
        return launcher

    return declare


# -- block sizes -------------------------------------------------------------------------------------------------------
def power(n: int) -> int:
    """The next power of two.

    >>> power(1), power(5), power(8)
    (1, 8, 8)
    """
    return 1 << max(n - 1, 0).bit_length()


#: Rows per tile where rows are adjacent in memory: as many as there are, up to 64.
COLUMNS = (4, 16, 64)
#: Elements of such a tile.
COLUMN_TILE = 2048


def processors(device: torch.device) -> int:
    """The number of processors of a device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return PROCESSORS
    return _counted_processors(device)


@lru_cache
def _counted_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def blocks_for(
    geometry: Geometry,
    x: Tensor,  # the first operand
    mask: Kept,  # the second
    *,
    same: bool = True,
    weight: int = 1,
    typical: int = 0,
    loops: bool = True,
    vectors: int = VECTORS,
) -> Blocks:
    """The tile of a kernel that loops over rows.

    Args:
        geometry: its first operand is x, its second the mask.
        x: decides the size of a vector.
        mask: the mask.
        same: whether all operands with vectors are as large as x's; else no vector may go beyond a row.
        weight: accumulators of each element, of which a thread has as many as it has of columns.
        typical: the length of ranges that are but a part of their row each; 0 where they are not.
        loops: whether a program loops over a row; else each tile is a program's, and four warps are enough.
        vectors: of 16 bytes that a thread has in flight of x.
    """
    itemsize = x.element_size()
    if geometry.columns:
        rows = next((each for each in COLUMNS if geometry.outer[-1] <= each), COLUMNS[-1])
        elements = COLUMN_TILE // weight // rows
        align = "even" if same and are_even(geometry, x) else ""
        bits = bits_across(geometry, mask, 16 // itemsize) if align else 0
        return Blocks(rows, elements, warps=4, group=1, wide=geometry.wide, align=align, bits=bits, side="columns")
    group = max(1, 16 // itemsize) if geometry.operands[0].inner[-1] == 1 else 1
    align = alignment(geometry, x, group) if same else ""
    length = max(typical, SHORT + 1) if typical else geometry.length
    if length <= SHORT and not geometry.wide:
        # Rows that begin anywhere are read element by element, which adjacent threads do together.
        group, align = (group, align) if align in ("even", "aligned") else (1, "")
        width = max(power(length), group, 4)
        rows = max(1, WARP * 8 * 8 // width)
        bits = group if align and is_aligned(geometry, mask, group, align) else 0
        return Blocks(rows, width, warps=8, group=group, wide=False, align=align, bits=bits)
    warps = 4 << sum(length >= each for each in LONG) if loops else 4
    # Of int64, too, a thread has eight; of float64, which takes more registers, two vectors.
    is_double = group > 1 and x.dtype is torch.float64
    elements = WARP * warps * (VECTORS * group if is_double else max(vectors * group, 8))
    if loops and length <= WARP * HELD:
        # One warp reads such a row in one load, and no other waits for it.
        elements, warps = WARP * HELD, max(1, itemsize // 4)
    bits = group if align and is_aligned(geometry, mask, group, align) else 0
    return Blocks(1, elements, warps=warps, group=group, wide=geometry.wide, align=align, bits=bits)


def row_blocks(geometry: Geometry, x: Tensor, mask: Kept, *, same: bool = True, weight: int = 1) -> Blocks | None:
    """The tile of a kernel that holds rows in registers; None where they are too long."""
    blocks = blocks_for(geometry, x, mask, same=same, weight=weight)
    if geometry.length <= blocks.elements and (geometry.length <= SHORT or geometry.columns):
        return blocks
    if blocks.side == "rows" and geometry.length <= LONGEST and not blocks.wide:
        width = power(geometry.length + (blocks.group - 1 if blocks.align == "shifted" else 0))
        # Of float64, which takes two registers, a thread has half as many elements.
        each = HELD // 2 if x.element_size() == 8 else HELD
        return blocks._replace(rows=1, elements=width, warps=max(1, width // (WARP * each)))
    return None


def alignment(geometry: Geometry, x: Tensor, group: int) -> str:
    """How vectors of a row lie: see `Blocks`."""
    strides = geometry.operands[0]
    if group == 1 or len(strides.inner) > 1 or not begins_aligned(x):
        return ""
    if any(each % group for each in strides.outer):
        return "shifted"
    return "aligned" if geometry.length % group else "even"


def are_even(geometry: Geometry, x: Tensor) -> bool:
    """Whether columns are read in whole vectors: 16 that are adjacent are in one tile, and begin at a boundary."""
    outer, inner = geometry.operands[0]
    steps = (*outer[:-1], *inner)
    aligned = begins_aligned(x) and all(each * x.element_size() % 16 == 0 for each in steps)
    return aligned and geometry.outer[-1] % 16 == 0


def bits_across(geometry: Geometry, mask: Kept, group: int) -> int:
    """How many bits of a mask of columns are one load: as many as elements of x, or 0 where they lie otherwise."""
    outer, inner = geometry.operands[1]
    lie_alike = outer[-1] == 1 and not any(each % group for each in (*outer[:-1], *inner))
    return group if mask.kind == "bits" and lie_alike and begins_aligned(mask.tensor) else 0


def begins_aligned(x: Tensor) -> bool:
    """Whether x begins at a 16-byte boundary; in a graph, that is not known."""
    return not traced.is_tracing_launches() and x.data_ptr() % 16 == 0


def is_aligned(geometry: Geometry, mask: Kept, group: int, align: str) -> bool:
    """Whether the bits of a mask lie as x does, so that they are read in vectors too."""
    x_at, mask_at, *_ = geometry.operands
    if mask.kind != "bits" or mask_at.inner != (1,) or not begins_aligned(mask.tensor):
        return False
    if align != "shifted":
        return all(each % group == 0 for each in mask_at.outer)
    return all(m % group == x % group for m, x in zip(mask_at.outer, x_at.outer, strict=True))


def splits_for(
    geometry: Geometry, blocks: Blocks, device: torch.device, *, typical: int = 0, resident: int = RESIDENT
) -> tuple[int, int]:
    """The number of splits of each row, so that a few long rows saturate the device, and the maximum number of splits.

    It does so with ``resident`` warps on each processor; ``typical`` is as in `blocks_for`.

    The maximum is a compile-time constant of the kernel, so that one kernel serves every number of splits; 0 where rows
    are not split.
    """
    length = typical or geometry.length
    if length <= blocks.elements or not geometry.rows:
        return 1, 0
    tiles = -(-geometry.rows // blocks.rows)
    steps = -(-length // blocks.elements)
    max_splits = min(BUSY, max(PARTS // blocks.rows, FEWEST_SPLITS))
    wave = processors(device) * resident // blocks.warps
    splits = max(1, min(max_splits, wave // tiles, steps // FEWEST))
    return splits, max_splits if splits > 1 else 0


def parts_for(geometry: Geometry, blocks: Blocks) -> int:
    """The number of tiles of each row: where rows are written, each tile is a program's."""
    return max(1, -(-(geometry.length + (blocks.group - 1 if blocks.align == "shifted" else 0)) // blocks.elements))


def row_arguments(
    geometry: Geometry, blocks: Blocks, mask: Kept, names: Sequence[str], per_row: Sequence[str] = ()
) -> dict[str, Any]:
    """The arguments that all kernels of rows share: sizes and strides, what is kept, and the tile.

    Args:
        geometry: of the operands.
        blocks: the tile.
        mask: the mask.
        names: those of the geometry's operands.
        per_row: which of them have one element for each row.
    """
    at: dict[str, Any] = {}
    for name, strides in zip(names, geometry.operands, strict=True):
        at[f"{name}_outer"] = strides.outer
        if name not in per_row:
            at[f"{name}_inner"] = strides.inner
    return {
        **dict(mask=mask.tensor, outer=geometry.outer, inner=geometry.inner, **at, rows=geometry.rows),
        **dict(length=geometry.length, tiles=-(-geometry.rows // blocks.rows)),
        **dict(unit=mask.unit, size=mask.size, step=mask.step, MASK=mask.kind, BITS=blocks.bits, ALIGN=blocks.align),
        **dict(SIDE=blocks.side, WIDE=blocks.wide, ROWS=blocks.rows, ELEMENTS=blocks.elements, GROUP=blocks.group),
    }


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters(like: Tensor, n: int) -> Tensor:
    """Zero-initialized counters that identify the last program of a launch, which resets them to zero."""
    if traced.is_tracing_launches():
        return like.new_zeros(n, dtype=torch.int32)
    # The stream of x's device, which need not be the current one.
    with on(like.device), _internally():
        found = current_counters(like, n)
    if _notes.requested is not None:
        _notes.requested[id(found)] = n
    return found


def current_counters(like: Tensor, n: int) -> Tensor:
    """The same where x's device is the current one."""
    if like.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        # A captured graph must not share counters with eager code or another graph.
        return like.new_zeros(n, dtype=torch.int32)
    key = (like.device, torch.cuda.current_stream(like.device).cuda_stream)
    found = _counters.get(key)
    if found is None or found.numel() < n:
        found = _counters[key] = torch.zeros(max(n, BUSY), dtype=torch.int32, device=like.device)
    return found


# -- dtypes ------------------------------------------------------------------------------------------------------------
def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The accumulator dtype: float32 for half precision, int32 for small integers."""
    if dtype.is_floating_point:
        return torch.float64 if dtype is torch.float64 else torch.float32
    return torch.int64 if dtype is torch.int64 else torch.int32


def triton_type(dtype: torch.dtype) -> Any:
    """The Triton dtype."""
    from maskwise.ops.gpu import triton

    return getattr(triton.tl, str(dtype).removeprefix("torch."))


def as_bytes(x: Tensor) -> Tensor:
    """A bool tensor viewed as uint8; any other tensor unchanged."""
    return x.view(torch.uint8) if x.dtype is torch.bool else x
