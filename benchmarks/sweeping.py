"""What a sweep says in few words: how many cases are slower than their idiom, and how often dispatch was right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.cases.sweep import FAMILY
from benchmarks.run import Result

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Line", "Summary", "lines", "summarise", "swept", "table"]

AS_GOOD = 1.05
"""Within this factor of the fastest route, a route is as good as the fastest: times of one route differ as much."""
NEVER_BEYOND = 1.2
"""What dispatch may be off in the worst case."""
OFTEN = 0.9
"""How often it must be right."""


@dataclass(frozen=True)
class Line:
    """One case: whether it is slower than allowed, by which ratio, and how far the route is from the best."""

    case: str
    function: str
    slower: bool
    ratio: float
    off_best: float | None


@dataclass(frozen=True)
class Summary:
    """Many cases in few numbers.

    >>> found = Summary.of([Line("a", "sum", False, 2.0, 1.0), Line("b", "sum", True, 0.8, 1.5)])
    >>> print(found)
    2 cases, 1 slower than the idiom; the predicted route was the best in 50.0 % of 2, and 1.50 x the best at worst
    >>> found.holds
    False
    """

    cases: int
    slower: int
    worst_ratio: float
    planned: int
    right: int
    worst_off: float | None

    @classmethod
    def of(cls, found: Iterable[Line]) -> Summary:
        """Sum up some cases."""
        every = list(found)
        off = [line.off_best for line in every if line.off_best is not None]
        return cls(
            cases=len(every),
            slower=sum(line.slower for line in every),
            worst_ratio=min((line.ratio for line in every), default=1.0),
            planned=len(off),
            right=sum(each <= AS_GOOD for each in off),
            worst_off=max(off, default=None),
        )

    @property
    def holds(self) -> bool:
        """Whether nothing is slower, and dispatch right as often as it must be."""
        is_right = self.planned == 0 or (
            self.right >= OFTEN * self.planned and (self.worst_off is None or self.worst_off <= NEVER_BEYOND)
        )
        return not self.slower and is_right

    def __str__(self) -> str:
        told = f"{self.cases} cases, {self.slower} slower than the idiom"
        if not self.planned or self.worst_off is None:
            return told
        share = f"{100 * self.right / self.planned:.1f} %"
        return (
            f"{told}; the predicted route was the best in {share} of {self.planned}, and {self.worst_off:.2f} x the "
            "best at worst"
        )

    def as_data(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "holds": self.holds}


def swept(results: Sequence[Result]) -> list[Result]:
    """The results of a sweep among others."""
    return [result for result in results if result.case.family == FAMILY]


def lines(results: Sequence[Result]) -> list[Line]:
    """The results, a line each."""
    return [
        Line(
            result.case.name,
            result.case.function,
            not all(verdict.holds for verdict in result.verdicts),
            result.side("idiom").ratio.median,
            result.off_best,
        )
        for result in results
    ]


def summarise(results: Sequence[Result]) -> Summary:
    """All results in few numbers."""
    return Summary.of(lines(results))


def table(results: Sequence[Result]) -> Table:
    """The results for the terminal, a line a function."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = lines(results)
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("function", "cases", "slower", "× idiom, at worst", "best route", "× best, at worst"):
        out.add_column(heading, justify="left" if heading == "function" else "right")
    for function in dict.fromkeys(line.function for line in found):
        of = Summary.of(line for line in found if line.function == function)
        right = f"{100 * of.right / of.planned:.0f} %" if of.planned else "–"
        off = "–" if of.worst_off is None else f"{of.worst_off:.2f}"
        slower = f"[red]{of.slower}[/]" if of.slower else "[green]0[/]"
        out.add_row(function, str(of.cases), slower, f"{of.worst_ratio:.2f}", right, off)
    return out
