"""Times of several ways to do the same: interleaved, the best and the median of several rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["MARGIN", "Times", "measured"]

#: A way must be this much faster than another to be taken for it: less is noise.
MARGIN = 0.97
#: The fewest and the most rounds, and how long one sample lasts at least, in seconds.
ROUNDS = (7, 60)
SAMPLE = 2e-4
#: How many times its best a median is where the machine has other work; then up to three times the rounds are taken.
NOISY = 1.3


@dataclass(frozen=True)
class Times:
    """Seconds a call."""

    best: float
    median: float

    def beats(self, other: Times) -> bool:
        """Whether this is faster than the other by more than noise: by its best time, which others disturb the least.

        >>> Times(0.9, 1.0).beats(Times(1.0, 1.1)), Times(0.99, 1.0).beats(Times(1.0, 1.1))
        (True, False)
        """
        return self.best < MARGIN * other.best


def measured(ways: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Times]:
    """Time calls without arguments, one after the other in each round, for about this long in all.

    >>> sorted(measured({"a": lambda: None, "b": lambda: None}, 0.01))
    ['a', 'b']
    """
    calls: dict[str, int] = {}
    one_round = 0.0
    for name, way in ways.items():
        # The first calls pay for what is made once.
        way()
        once = min(_took(way, 1) for _ in range(3))
        calls[name] = max(1, min(1000, round(SAMPLE / max(once, 1e-9))))
        one_round += once * calls[name]
    fewest, most = ROUNDS
    rounds = max(fewest, min(most, int(seconds / max(one_round, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    turn = 0
    while turn < rounds or (turn < 3 * rounds and any(map(_is_noisy, samples.values()))):
        # Every other round goes backwards, so that nobody always follows the same neighbour.
        for name in list(ways) if turn % 2 else reversed(list(ways)):
            samples[name].append(_took(ways[name], calls[name]) / calls[name])
        turn += 1
    return {name: Times(min(found), _median(found)) for name, found in samples.items()}


def _median(samples: list[float]) -> float:
    # Imported when something is timed: with what it needs itself it takes milliseconds, which everybody would pay.
    from statistics import median

    return median(samples)


def _is_noisy(samples: list[float]) -> bool:
    """Whether somebody else is at work: then more samples are needed for one that is undisturbed."""
    return _median(samples) > NOISY * min(samples)


def _took(way: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        way()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
