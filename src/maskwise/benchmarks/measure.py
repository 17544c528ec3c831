"""Interleaved timing and its statistics. Pure Python: clock and randomness come in as arguments.

A ratio of two times taken one after the other compares two moments of a machine as much as two programs. Here all
sides run in every round, in a new random order, and the ratio is taken within the round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Samples", "Spread", "Timer", "measure", "spread"]

Clock = Callable[[], float]
Timer = Callable[[Callable[[], object], int], float]
MAX_CALLS = 1_000_000


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles.

    >>> print(Spread(14.0, 15.0, 17.0))
    15.0 [14.0, 17.0]
    """

    q1: float
    median: float
    q3: float

    def __str__(self) -> str:
        digits = 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f} [{self.q1:.{digits}f}, {self.q3:.{digits}f}]"


def spread(values: list[float]) -> Spread:
    """Return the median and the quartiles of some values; a single value is its own spread.

    >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
    Spread(q1=2.0, median=3.0, q3=4.0)
    """
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(q1, median, q3)


@dataclass(frozen=True)
class Samples:
    """Seconds a call for every side, index-aligned: entry `i` of every side was taken in round `i`."""

    seconds: Mapping[str, list[float]]

    def best(self, side: str) -> float:
        """The shortest time of a side: what it can do when nothing disturbs it."""
        return min(self.seconds[side])

    def median(self, side: str) -> float:
        """The typical time of a side."""
        return statistics.median(self.seconds[side])

    def ratio(self, side: str, ours: str) -> Spread:
        """How many times longer `side` takes than `ours`, round by round."""
        return spread([a / b for a, b in zip(self.seconds[side], self.seconds[ours], strict=True)])

    def difference(self, side: str, ours: str) -> float:
        """How much longer `ours` takes than `side`, in seconds, each at its best.

        A busy neighbour that halves the machine's speed leaves a ratio within a round as it is, and doubles a
        difference: only where nothing disturbs are a few microseconds what they are.
        """
        return self.best(ours) - self.best(side)


def measure(
    sides: Mapping[str, Callable[[], object]],
    *,
    budget: float = 8.0,
    rounds: tuple[int, int] = (5, 40),
    sample_seconds: float = 1e-3,
    clock: Clock = time.perf_counter,
    timer: Timer | None = None,
    order: random.Random | None = None,
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> Samples:
    """Time the sides, interleaved.

    Args:
        sides: name to a call without arguments.
        budget: about how many seconds the rounds may take together.
        rounds: the fewest and the most rounds, whatever the budget says.
        sample_seconds: a sample repeats its call until it takes about this long, so that the clock's own cost and
            resolution do not count. The number of repeats is fixed before the first round.
        clock: returns seconds.
        timer: returns the seconds that a call takes when it is made so many times; by the clock unless given.
        order: shuffles the sides in each round; seeded by default, so that a run can be repeated.
        on_round: called with (rounds done, rounds in all), for a progress bar.
    """
    order = order or random.Random(0)
    timer = timer or (lambda call, times: _time(call, times, clock))
    calls: dict[str, int] = {}
    one_round = 0.0
    for name, call in sides.items():
        calls[name], took = _warm_up(call, sample_seconds, timer)
        one_round += took
    fewest, most = rounds
    total = max(fewest, min(most, int(budget / max(one_round, 1e-9))))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for done in range(total):
        order.shuffle(names)
        for name in names:
            seconds[name].append(timer(sides[name], calls[name]) / calls[name])
        on_round(done + 1, total)
    return Samples(seconds)


def _time(call: Callable[[], object], times: int, clock: Clock) -> float:
    start = clock()
    for _ in range(times):
        call()
    return clock() - start


def _warm_up(call: Callable[[], object], sample_seconds: float, timer: Timer) -> tuple[int, float]:
    # The first call pays for lazy initialisation and cold caches, so it must not decide how often to repeat.
    call()
    calls = 1
    while (took := timer(call, calls)) < sample_seconds and calls < MAX_CALLS:
        calls *= 2
    return calls, took
