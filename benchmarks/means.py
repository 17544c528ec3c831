"""Targets for the geometric mean of several cases: one number for a whole set of shapes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.cases import linear

__all__ = ["MEANS", "Mean", "Ratio", "judged"]

#: A measured ratio: the case, the side, and how many times faster than that side ours is.
Ratio = tuple[str, str, float]


@dataclass(frozen=True)
class Mean:
    """What the geometric mean over all cases whose name ends with ``ending`` must be against one side.

    >>> mean = Mean("sum", "keep=10%", "where+sum", at_least=3.0)
    >>> mean.of([("sum 8x8 keep=10%", "where+sum", 2.0), ("sum 4x4 keep=10%", "where+sum", 8.0)])
    4.0
    >>> mean.text
    'sum … keep=10%: geometric mean at least 3 x faster than where+sum'
    """

    function: str
    ending: str
    side: str
    at_least: float

    @property
    def text(self) -> str:
        """The target in words."""
        told = f"geometric mean at least {self.at_least:g} x faster than {self.side}"
        return f"{self.function} … {self.ending}: {told}"

    def of(self, ratios: Iterable[Ratio]) -> float | None:
        """The geometric mean of the ratios that it is about, or None when there are none."""
        names = re.compile(rf"{re.escape(self.function)} \S+ {re.escape(self.ending)}")
        found = [ratio for case, side, ratio in ratios if side == self.side and names.fullmatch(case)]
        return statistics.geometric_mean(found) if found else None


MEANS: tuple[Mean, ...] = tuple(Mean("SparseLinear", *mean) for mean in linear.MEANS)


def judged(ratios: Sequence[Ratio]) -> list[tuple[Mean, float, bool]]:
    """Every mean that was measured, its value, and whether it is reached."""
    found = [(mean, value) for mean in MEANS if (value := mean.of(ratios)) is not None]
    return [(mean, value, value >= mean.at_least) for mean, value in found]
