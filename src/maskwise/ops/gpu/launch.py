"""Kernel launches: tile sizes from static facts, dtypes, the launch itself, and a record of launches for tests.

Nothing here reads data or causes a host-device sync.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import Geometry

__all__ = [
    "Blocks", "Launch", "accumulator", "as_bytes", "blocks_for", "counters", "launch", "recording", "row_blocks",
    "splits_for", "triton_type",
]  # fmt: skip

#: The maximum size of the 1-D grid; beyond it, a program processes several tiles. ROCm allows 2**32 threads, and a
#: program has up to 1024.
MOST_PROGRAMS = 2**21
#: Elements per tile of short rows: 16 for each of 128 threads.
TILE = 2048
#: The longest row that a kernel holds in registers.
LONGEST = 8192
#: Programs that saturate a large device: the target when a few long rows are split.
BUSY = 512
#: Partial results that one program combines.
PARTS = 4096


class Blocks(NamedTuple):
    """The tile of a kernel: rows, elements per row, warps; and the number of adjacent elements per load."""

    rows: int
    elements: int
    warps: int
    group: int
    #: Whether indices within a row have 64 bits.
    wide: bool

    @property
    def skip(self) -> str:
        """The direction of elements that are adjacent in memory, and so loaded or skipped together."""
        return "columns" if (self.rows, self.elements) == COLUMNS else "rows"


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


# -- block sizes -------------------------------------------------------------------------------------------------------
def power(n: int) -> int:
    """The next power of two.

    >>> power(1), power(5), power(8)
    (1, 8, 8)
    """
    return 1 << max(n - 1, 0).bit_length()


#: The widths of tiles: few, so that all kernels can be compiled ahead of time. A tile of the last width is part of one
#: row, any other has as many rows as fit.
WIDTHS = (16, 128, 1024)
#: The tile of strided rows: 64 rows, which are adjacent in memory, by 32 elements.
COLUMNS = (64, 32)


def blocks_for(geometry: Geometry, itemsize: int, tile: int = TILE) -> Blocks:
    """The tile of a kernel that loops over rows."""
    # Without vector loads, 64-bit indices cost nothing extra.
    if geometry.columns:
        return Blocks(*COLUMNS, warps=4, group=1, wide=True)
    side = group(geometry, itemsize)
    if side == 1:
        return Blocks(tile // WIDTHS[1], WIDTHS[1], warps=4, group=1, wide=True)
    width = WIDTHS[-1] if geometry.wide else next((w for w in WIDTHS if geometry.length <= w), WIDTHS[-1])
    return Blocks(1 if width == WIDTHS[-1] else tile // width, width, warps=4, group=side, wide=geometry.wide)


def row_blocks(geometry: Geometry, itemsize: int) -> Blocks | None:
    """The tile of a kernel that holds rows in registers; None where they are too long."""
    blocks = blocks_for(geometry, itemsize)
    if geometry.length <= blocks.elements:
        # Strided rows and 64-bit indices are not worth another kernel.
        return blocks if geometry.columns or not blocks.wide else None
    if blocks.elements == WIDTHS[-1] and geometry.length <= LONGEST and not blocks.wide:
        width = max(2048, power(geometry.length))
        return Blocks(1, width, warps=width // 512, group=blocks.group, wide=False)
    return None


def group(geometry: Geometry, itemsize: int) -> int:
    """The number of adjacent elements in 16 bytes: one vector load, which is skipped where none is kept."""
    return max(1, 16 // itemsize) if geometry.operands[0].inner[-1] == 1 else 1


def splits_for(geometry: Geometry, blocks: Blocks) -> tuple[int, int]:
    """The number of splits of each row, so that a few long rows saturate the device, and the maximum number of splits.

    The maximum is a compile-time constant of the kernel, so that one kernel serves every number of splits; 0 where rows
    are not split. Split rows always have 64-bit indices, for the same reason.
    """
    if blocks.skip == "rows" and blocks.elements < WIDTHS[-1]:
        return 1, 0
    tiles = -(-geometry.rows // blocks.rows)
    steps = -(-geometry.length // blocks.elements)
    max_splits = min(BUSY, PARTS // blocks.rows)
    splits = max(1, min(max_splits, BUSY // tiles, -(-steps // 4))) if tiles else 1
    return splits, max_splits if splits > 1 or (blocks.wide and not geometry.columns) else 0


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters(like: Tensor, n: int) -> Tensor:
    """Zero-initialized counters that identify the last program of a launch, which resets them to zero."""
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
