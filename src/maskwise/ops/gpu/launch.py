"""Starting kernels: block sizes from static facts, one launch at a time, and a record of launches for tests and docs.

Nothing here looks at data or waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import Geometry

__all__ = ["Blocks", "Launch", "blocks_for", "counters", "launch", "recording", "row_blocks", "splits_for"]

#: Programs of the only axis of a grid; where there is more to do, each does several tiles. ROCm takes 2**32 threads,
#: and a program has up to 1024.
MOST_PROGRAMS = 2**21
#: Elements of a tile of short rows: 16 for each of 128 threads.
TILE = 2048
#: The longest row that a kernel holds in registers.
LONGEST = 8192
#: Programs that keep a large device busy, and so how far a few long rows are cut up.
BUSY = 512
#: Partial results of a row that one program puts together.
PARTS = 4096


class Blocks(NamedTuple):
    """The tile of a kernel: rows, elements of a row, warps; and how many neighbours are read, or skipped, as one."""

    rows: int
    elements: int
    warps: int
    group: int
    #: Whether indices within a row have 64 bits.
    wide: bool

    @property
    def skip(self) -> str:
        """Along what neighbours in memory lie, which are read or skipped together."""
        return "columns" if (self.rows, self.elements) == COLUMNS else "rows"


@dataclass(frozen=True)
class Launch:
    """One launch: what was started, with what."""

    kernel: Any
    programs: int
    arguments: Mapping[str, Any]
    warps: int
    #: How often each operand is read from memory, and which are written.
    reads: Mapping[str, int]
    writes: tuple[str, ...]

    @property
    def moved(self) -> int:
        """The bytes that are read and written; an operand that broadcasts counts once."""
        times = {**self.reads, **dict.fromkeys(self.writes, 1)}
        return sum(bytes_of(self.arguments[name]) * n for name, n in times.items() if self.arguments[name] is not None)


_recorders: list[list[Launch]] = []


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Note what would be started inside the block, and start nothing; tensors may be on the device "meta"."""
    noted: list[Launch] = []
    _recorders.append(noted)
    try:
        yield noted
    finally:
        _recorders.remove(noted)


def launch(
    kernel: Any,
    programs: int,
    arguments: Mapping[str, Any],
    *,
    warps: int = 4,
    reads: Mapping[str, int],
    writes: tuple[str, ...],
) -> None:
    """Start a kernel on the device of its operands."""
    programs = max(1, min(programs, MOST_PROGRAMS))
    if _recorders:
        _recorders[-1].append(Launch(kernel, programs, dict(arguments), warps, reads, writes))
        return
    device = arguments[writes[0]].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[(programs,)](**arguments, num_warps=warps)


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


#: The widths of tiles there are, so that the kernels there can be are few enough to compile them all. A tile of the
#: last one is part of one row, any other has as many rows as fit.
WIDTHS = (16, 128, 1024)
#: Columns are read side by side, 64 of them, 32 elements down.
COLUMNS = (64, 32)


def blocks_for(geometry: Geometry, itemsize: int, tile: int = TILE) -> Blocks:
    """The tile of a kernel that walks along rows."""
    # Where neighbours are read one by one, indices are few for the elements of a tile: 64 bits cost nothing there.
    if geometry.columns:
        return Blocks(*COLUMNS, warps=4, group=1, wide=True)
    side = group(geometry, itemsize)
    if side == 1:
        return Blocks(tile // WIDTHS[1], WIDTHS[1], warps=4, group=1, wide=True)
    width = WIDTHS[-1] if geometry.wide else next((w for w in WIDTHS if geometry.length <= w), WIDTHS[-1])
    return Blocks(1 if width == WIDTHS[-1] else tile // width, width, warps=4, group=side, wide=geometry.wide)


def row_blocks(geometry: Geometry, itemsize: int) -> Blocks | None:
    """The tile of a kernel that holds whole rows in registers; None where they are too long for that."""
    blocks = blocks_for(geometry, itemsize)
    if geometry.length <= blocks.elements:
        # Rows that are strided, or out of reach for 32 bits, are not worth a kernel of their own.
        return blocks if geometry.columns or not blocks.wide else None
    if blocks.elements == WIDTHS[-1] and geometry.length <= LONGEST and not blocks.wide:
        width = max(2048, power(geometry.length))
        return Blocks(1, width, warps=width // 512, group=blocks.group, wide=False)
    return None


def group(geometry: Geometry, itemsize: int) -> int:
    """How many neighbours make 16 bytes, which one thread reads at once, or not at all where none is kept."""
    return max(1, 16 // itemsize) if geometry.operands[0].inner[-1] == 1 else 1


def splits_for(geometry: Geometry, blocks: Blocks) -> tuple[int, int]:
    """Into how many parts each row is cut, so that a few long rows keep a whole device busy, and the room for parts.

    The room is the same for all numbers of parts, so that one kernel serves them; 0 where rows are not cut. Rows that
    are have 64-bit indices, whether they need them or not, for the same reason.
    """
    if blocks.skip == "rows" and blocks.elements < WIDTHS[-1]:
        return 1, 0
    tiles = -(-geometry.rows // blocks.rows)
    steps = -(-geometry.length // blocks.elements)
    room = min(BUSY, PARTS // blocks.rows)
    splits = max(1, min(room, BUSY // tiles, -(-steps // 4))) if tiles else 1
    return splits, room if splits > 1 or (blocks.wide and not geometry.columns) else 0


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters(like: Tensor, n: int) -> Tensor:
    """Zeros by which the programs of a launch learn who is last; that one puts them back to zero."""
    if like.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        # A captured graph must not share what eager code, or another graph, may use at the same time.
        return like.new_zeros(n, dtype=torch.int32)
    key = (like.device, torch.cuda.current_stream(like.device).cuda_stream)
    found = _counters.get(key)
    if found is None or found.numel() < n:
        found = _counters[key] = torch.zeros(max(n, BUSY), dtype=torch.int32, device=like.device)
    return found
