"""Timing one route of ours, whichever the planner would take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from maskwise.benchmarks.measure import Timer
from maskwise.plan.planner import force

__all__ = ["Forced", "forcing"]


@dataclass(frozen=True)
class Forced:
    """A call by one route."""

    call: Callable[[], object]
    route: str

    def __call__(self) -> object:
        """Make the call once."""
        with force(self.route):
            return self.call()


def forcing(timer: Timer | None) -> Timer:
    """The timer, by which a route is forced outside of what is timed."""
    inner = timer or _by_the_clock

    def seconds(call: Callable[[], object], times: int) -> float:
        if not isinstance(call, Forced):
            return inner(call, times)
        with force(call.route):
            call.call()
            return inner(call.call, times)

    return seconds


def _by_the_clock(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start
