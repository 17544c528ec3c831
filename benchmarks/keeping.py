"""What the family `kept` says in few words: which bounds hold, and how time follows what is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.cases.kept import FAMILY, FULL, IDIOM, UNMASKED
from benchmarks.report import marks
from benchmarks.run import Result, Verdict
from maskwise.plan.measure import in_words

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["curves", "kept", "table", "tally", "verdicts", "work"]

#: The fewest kept fractions that are drawn as a curve.
POINTS = 3


def kept(results: Sequence[Result]) -> list[Result]:
    """The results of the family among others."""
    return [result for result in results if result.case.family == FAMILY]


def work(case: str) -> str:
    """The name of a case without its kept fraction: what the rows of one curve share.

    >>> work("sum lengths 4096x4096 dim=-1 keep=5%")
    'sum lengths 4096x4096 dim=-1'
    """
    return case.rpartition(" keep=")[0]


def curves(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each work that was measured at several kept fractions beside the unmasked op, few kept first."""
    found: dict[str, list[Result]] = {}
    for result in kept(results):
        if result.floor is not None:
            found.setdefault(work(result.case.name), []).append(result)
    return {
        name: sorted(rows, key=lambda result: result.case.density or 0.0)
        for name, rows in found.items()
        if len(rows) >= POINTS
    }


def tally(judged: Iterable[tuple[str, bool]]) -> dict[str, tuple[int, int]]:
    """How many rows meet each target, and how many there are.

    >>> tally([("a", True), ("a", False), ("b", True)])
    {'a': (1, 2), 'b': (1, 1)}
    """
    found: dict[str, tuple[int, int]] = {}
    for text, holds in judged:
        met, rows = found.get(text, (0, 0))
        found[text] = met + holds, rows + 1
    return found


def verdicts(results: Sequence[Result]) -> list[tuple[str, bool]]:
    """Every target of every result, and whether it holds."""
    return [(verdict.target.text, verdict.holds) for result in results for verdict in result.verdicts]


def table(results: Sequence[Result]) -> Table:
    """The results for the terminal, a line a row: its time, in units of t(1), and what it may take of what."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("case", min_width=22)
    for heading in ("ours", "÷ t(1)", "measured ≤ allowed", "× unmasked", "× idiom"):
        out.add_column(heading, justify="right", no_wrap=True)
    out.add_column("ok", no_wrap=True)
    for result in results:
        ratios = {side.name: side.ratio.median for side in result.sides}
        out.add_row(
            result.case.name,
            in_words(result.ours.median),
            f"{1 / ratios[FULL]:.2f}" if FULL in ratios else "–",
            _bound(result, result.verdicts[0]) if result.verdicts else "–",
            *(f"{ratios[name]:.3g}" if name in ratios else "–" for name in (UNMASKED, IDIOM)),
            marks(result, results),
        )
    return out


def _bound(result: Result, verdict: Verdict) -> str:
    """Our time and what is allowed, both in units of the side that the target is about."""
    ratio, target = result.side(verdict.side).ratio.median, verdict.target
    plus = 0.0 if target.plus is None else result.side(target.plus).ratio.median
    return f"{1 / ratio:.2f} ≤ {target.factor + plus / ratio:.2f}"
