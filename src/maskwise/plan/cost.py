"""The cost model of routes: arithmetic on numbers, no tensors.

The ``Work`` of a route is its torch calls, the bytes it streams, the bytes it allocates, the bytes of rows it gathers,
and its FLOPs. The ``Rates`` of a machine convert these into microseconds. Allocated memory has a rate of its own,
because of page faults: on the CPU, writing a temporary of 64 MB costs ten times more than reading it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

__all__ = ["BUILT_IN", "Rates", "Work", "microseconds"]


@dataclass(frozen=True)
class Rates:
    """The rates of a machine: microseconds per call, bytes or FLOPs per microsecond for the rest."""

    #: Microseconds of a torch operation on a tiny tensor; of one of our kernels without and with autograd.
    plain_call: float = 3.0
    bare_call: float = 4.0
    fused_call: float = 9.0
    #: Additional microseconds of the backward pass on a tiny tensor: of a torch operation and a sum, and of a kernel.
    plain_backward: float = 45.0
    fused_backward: float = 44.0
    #: Bytes that are read, or written to memory that is mapped already.
    streamed: float = 20_000.0
    #: Bytes written to newly allocated memory; the allocator reuses blocks below ``fresh_from`` bytes.
    fresh: float = 2_000.0
    fresh_from: float = float(1 << 25)
    #: Bytes of rows gathered or scattered by our kernels; and of elements by torch's boolean indexing.
    gathered: float = 20_000.0
    indexed: float = 360.0
    #: FLOPs of a matrix product, and of attention, which computes exponentials between its two products.
    flops: float = 144_000.0
    attention_flops: float = 100_000.0

    def __post_init__(self) -> None:
        """Reject rates that are not positive: they would make every prediction meaningless."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < 1e15:
                raise ValueError(
                    f"Rates: `{field.name}` must be a positive number, got {value!r}. Hint: maskwise calibrate."
                )


#: Default rates by device type, for machines without a calibration. Those of a GPU are estimates: a Triton kernel is
#: launched from Python, which takes longer than a torch operation, and memory is a hundred times faster, new or not.
BUILT_IN = {
    "cpu": Rates(),
    "cuda": Rates(
        plain_call=5.0,
        bare_call=25.0,
        fused_call=35.0,
        plain_backward=40.0,
        fused_backward=50.0,
        streamed=1_500_000.0,
        fresh=1_500_000.0,
        gathered=700_000.0,
        indexed=100_000.0,
        flops=20_000_000.0,
        attention_flops=10_000_000.0,
    ),
}


class Work(NamedTuple):
    """The work of a route: torch calls, bytes and FLOPs."""

    calls: int = 0
    streamed: int = 0
    fresh: int = 0
    gathered: int = 0
    flops: int = 0
    attention_flops: int = 0

    @property
    def bytes(self) -> int:
        """All bytes that are moved."""
        return self.streamed + self.fresh + self.gathered

    @property
    def operations(self) -> int:
        """All FLOPs."""
        return self.flops + self.attention_flops


def microseconds(work: Work, per_call: float, rates: Rates) -> float:
    """The predicted time of some work.

    >>> microseconds(Work(calls=2, streamed=40_000), per_call=3.0, rates=Rates())
    8.0
    """
    fresh_rate = rates.fresh if work.fresh >= rates.fresh_from else rates.streamed
    time = work.calls * per_call + work.streamed / rates.streamed + work.fresh / fresh_rate
    if work.gathered:
        time += work.gathered / rates.gathered
    if work.flops or work.attention_flops:
        time += work.flops / rates.flops + work.attention_flops / rates.attention_flops
    return time
