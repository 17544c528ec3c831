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

#: Programs of the only axis of a grid; where there is more to do, each does several tiles.
MOST_PROGRAMS = 2**31 - 1
#: Elements of a tile: 16 for each of 128 threads.
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


#: The widths of tiles there are, so that the kernels there can be are few enough to compile them all.
WIDTHS = (16, 128, 1024)
#: Columns are read side by side, 64 of them, 32 elements down.
COLUMNS = (64, 32)


def blocks_for(geometry: Geometry, itemsize: int, tile: int = TILE) -> Blocks:
    """The tile of a kernel that walks along rows."""
    if geometry.columns:
        return Blocks(*COLUMNS, warps=4, group=1)
    if geometry.rows == 1 and geometry.length > WIDTHS[-1]:
        return Blocks(1, tile, warps=4, group=group(geometry, itemsize))
    width = next((w for w in WIDTHS if geometry.length <= w), WIDTHS[-1])
    return Blocks(tile // width, width, warps=4, group=group(geometry, itemsize))


def row_blocks(geometry: Geometry, itemsize: int) -> Blocks | None:
    """The tile of a kernel that holds whole rows in registers; None where they are too long for that."""
    if geometry.length <= (COLUMNS[1] if geometry.columns else WIDTHS[-1]):
        return blocks_for(geometry, itemsize)
    if geometry.columns:
        return None
    if geometry.length <= LONGEST:
        width = max(2048, power(geometry.length))
        return Blocks(1, width, warps=width // 512, group=group(geometry, itemsize))
    return None


def group(geometry: Geometry, itemsize: int) -> int:
    """How many neighbours make 16 bytes, which one thread reads at once, or not at all where none is kept."""
    return max(1, 16 // itemsize) if geometry.operands[0].inner[-1] == 1 else 1


def splits_for(geometry: Geometry, blocks: Blocks) -> int:
    """Into how many parts each row is cut, so that a few long rows keep a whole device busy."""
    tiles = -(-geometry.rows // blocks.rows)
    steps = -(-geometry.length // blocks.elements)
    most = max(1, PARTS // blocks.rows)
    wanted = min(most, BUSY // tiles, -(-steps // 4)) if tiles else 1
    # A power of two, for the same reason as the widths.
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)


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
