"""What a route costs: pure arithmetic on numbers, no tensors.

A route is described by its ``Work``: how many torch calls it makes, the bytes that it streams through, and the bytes of
fresh memory that it writes. Fresh memory is a rate of its own, because the operating system hands it out page by page:
on the CPU a temporary of 64 MB costs ten times more than reading it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RATES", "Rates", "Work", "microseconds"]


@dataclass(frozen=True)
class Rates:
    """What a machine does: microseconds for a call, bytes a microsecond for memory."""

    plain_call: float = 3.0
    bare_call: float = 4.0
    fused_call: float = 9.0
    plain_backward: float = 45.0
    fused_backward: float = 44.0
    streamed: float = 20_000.0
    fresh: float = 2_000.0
    #: Smaller results come from memory that the allocator already has.
    fresh_from: int = 1 << 20


#: By kind of device. For a GPU these are estimates, which nobody has measured yet: a kernel is started from Python,
#: which takes longer than an operation of torch does, and its memory is a hundred times faster, fresh or not.
RATES = {
    "cpu": Rates(),
    "cuda": Rates(
        plain_call=5.0,
        bare_call=25.0,
        fused_call=35.0,
        plain_backward=40.0,
        fused_backward=50.0,
        streamed=1_500_000.0,
        fresh=1_500_000.0,
    ),
}


@dataclass(frozen=True)
class Work:
    """What a route has to do."""

    calls: int
    streamed: int
    fresh: int


def microseconds(work: Work, per_call: float, rates: Rates) -> float:
    """The predicted time of a piece of work.

    >>> microseconds(Work(calls=2, streamed=40_000, fresh=0), per_call=3.0, rates=Rates())
    8.0
    """
    fresh_rate = rates.fresh if work.fresh >= rates.fresh_from else rates.streamed
    return work.calls * per_call + work.streamed / rates.streamed + work.fresh / fresh_rate
