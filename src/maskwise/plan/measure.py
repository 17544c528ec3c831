"""The timer: interleaved rounds and their statistics. Clock, device timer and randomness are arguments.

The ratio of two times measured one after the other compares two moments of a machine as much as two programs. Here all
sides run in every round, in a new random order, and the ratio is computed within the round. ``maskwise calibrate``,
``maskwise demo``, ``mw.compress`` and the benchmarks of the repository all measure with it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Samples", "Spread", "Timer", "clock_timer", "event_timer", "in_words", "measure", "spread", "synced_timer"]

Clock = Callable[[], float]
#: (call, times) -> seconds for all of them.
Timer = Callable[[Callable[[], object], int], float]
MAX_CALLS = 1_000_000
#: Bytes written to flush a GPU's cache where the device does not report its size: more than any has.
FLUSHED = 256 * 2**20


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
    # Imported here and below: with its dependencies it takes milliseconds, which the first use of maskwise would pay.
    from statistics import quantiles

    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    q1, median, q3 = quantiles(values, n=4, method="inclusive")
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
        from statistics import median

        return median(self.seconds[side])

    def is_noisy(self, limit: float) -> bool:
        """Whether the median of a side is more than ``limit`` times its best: the machine is busy."""
        return any(self.median(side) > limit * self.best(side) for side in self.seconds)

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
    noisy: float | None = None,
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
        timer: returns the seconds of so many calls; by the clock unless given.
        noisy: the ratio of median and best time above which up to three times the rounds are run; None for never.
        order: shuffles the sides in each round; seeded by default, so that a run can be repeated.
        on_round: called with (rounds done, rounds in all), for a progress bar.
    """
    order = order or random.Random(0)
    timer = timer or clock_timer(clock)
    calls: dict[str, int] = {}
    one_round = 0.0
    for name, call in sides.items():
        calls[name], took = _warm_up(call, sample_seconds, timer)
        one_round += took
    fewest, most = rounds
    total = max(fewest, min(most, int(budget / max(one_round, 1e-9))))
    samples = Samples({name: [] for name in sides})
    names, done = list(sides), 0
    while done < total or (noisy is not None and done < 3 * total and samples.is_noisy(noisy)):
        order.shuffle(names)
        for name in names:
            samples.seconds[name].append(timer(sides[name], calls[name]) / calls[name])
        done += 1
        on_round(done, max(done, total))
    return samples


def _warm_up(call: Callable[[], object], sample_seconds: float, timer: Timer) -> tuple[int, float]:
    # The first call pays for lazy initialisation and cold caches, so it must not decide how often to repeat.
    call()
    calls = 1
    while (took := timer(call, calls)) < sample_seconds and calls < MAX_CALLS:
        calls *= 2
    return calls, took


# -- timers ------------------------------------------------------------------------------------------------------------
def clock_timer(clock: Clock = time.perf_counter) -> Timer:
    """The time of calls on the host, which for a CPU is the time of the work."""

    def seconds(call: Callable[[], object], times: int) -> float:
        start = clock()
        for _ in range(times):
            call()
        return clock() - start

    return seconds


def synced_timer(device: str) -> Timer:
    """The time until a GPU has finished all calls, with one host-device sync at either end."""

    def seconds(call: Callable[[], object], times: int) -> float:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return seconds


def event_timer(device: str) -> Timer:
    """The time that a GPU is busy with each call, by its own events, with its cache flushed before.

    A call that launches a kernel returns before the kernel has run, so the host's clock does not measure it; and a
    result that is still in the cache from the call before would be read at a speed that no real step has.
    """
    # An event belongs to the device that is current when it is recorded.
    current = torch.cuda.device(device)
    size = max(2 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0), FLUSHED)
    scratch = torch.empty(size, dtype=torch.uint8, device=device)

    def seconds(call: Callable[[], object], times: int) -> float:
        events = []
        with current:
            for _ in range(times):
                scratch.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                call()
                end.record()
                events.append((start, end))
        torch.cuda.synchronize(device)
        # elapsed_time is in milliseconds.
        return float(sum(start.elapsed_time(end) for start, end in events)) / 1e3

    return seconds


def in_words(seconds: float) -> str:
    """A time with the unit that suits it.

    >>> in_words(2.3e-3), in_words(3.5e-6), in_words(1.5)
    ('2.30 ms', '3.50 µs', '1.50 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
