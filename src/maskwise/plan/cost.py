"""What a route costs: pure arithmetic on numbers, no tensors.

A route is described by its ``Work``: how many torch calls it makes, the bytes that it streams through, the bytes of
fresh memory that it writes, the rows that it moves together, and its floating point operations. What a machine does of
each in a microsecond are its ``Rates``. Fresh memory is a rate of its own, because the operating system hands it out
page by page: on the CPU a temporary of 64 MB costs ten times more than reading it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["BUILT_IN", "Rates", "Work", "microseconds"]


@dataclass(frozen=True)
class Rates:
    """What a machine does: microseconds for a call, bytes or FLOPs a microsecond for the rest."""

    #: A torch operation on a tiny tensor; one of our kernels without autograd around it, and with.
    plain_call: float = 3.0
    bare_call: float = 4.0
    fused_call: float = 9.0
    #: What a gradient of a tiny tensor costs beside that: of one torch operation and its sum, and of a kernel.
    plain_backward: float = 45.0
    fused_backward: float = 44.0
    #: Bytes that are read, or written where memory is already there.
    streamed: float = 20_000.0
    #: Bytes of memory that is new, and from how many of them on: smaller results the allocator has already.
    fresh: float = 2_000.0
    fresh_from: float = float(1 << 25)
    #: Bytes of rows that are moved together, or back; and of elements that torch's own indexing by a mask gives.
    gathered: float = 20_000.0
    indexed: float = 360.0
    #: Floating point operations of a matrix product, and of attention, which has exponentials between its two.
    flops: float = 144_000.0
    attention_flops: float = 100_000.0

    def __post_init__(self) -> None:
        """Refuse what no machine does: a rate that is not positive would make every plan nonsense."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < 1e15:
                raise ValueError(
                    f"Rates: `{field.name}` must be a positive number, got {value!r}. Hint: maskwise calibrate."
                )


#: By kind of device, for machines that `maskwise calibrate` has not measured. For a GPU these are estimates: a kernel
#: is started from Python, which takes longer than an operation of torch does, and its memory is a hundred times
#: faster, fresh or not.
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


@dataclass(frozen=True)
class Work:
    """What a route has to do: torch calls, bytes and FLOPs."""

    calls: int = 0
    streamed: int = 0
    fresh: int = 0
    gathered: int = 0
    flops: int = 0
    attention_flops: int = 0

    @property
    def bytes(self) -> int:
        """All bytes that are moved, whichever way."""
        return self.streamed + self.fresh + self.gathered

    @property
    def operations(self) -> int:
        """All floating point operations."""
        return self.flops + self.attention_flops


def microseconds(work: Work, per_call: float, rates: Rates) -> float:
    """The predicted time of a piece of work.

    >>> microseconds(Work(calls=2, streamed=40_000), per_call=3.0, rates=Rates())
    8.0
    """
    fresh_rate = rates.fresh if work.fresh >= rates.fresh_from else rates.streamed
    took = work.calls * per_call + work.streamed / rates.streamed + work.fresh / fresh_rate
    if work.gathered:
        took += work.gathered / rates.gathered
    if work.flops or work.attention_flops:
        took += work.flops / rates.flops + work.attention_flops / rates.attention_flops
    return took
