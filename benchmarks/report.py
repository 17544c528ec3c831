"""Results as rows, CSV, JSON and a table on the terminal."""

from __future__ import annotations

import csv
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape

import maskwise as mw
from benchmarks.run import Result, Verdict
from maskwise.cli.doctor import version_of
from maskwise.ops import backends
from maskwise.plan.calibration import atomic_path, cpu_model
from maskwise.plan.measure import in_words

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "HEADLINE",
    "Provenance",
    "describe_machine",
    "geometric_means",
    "large_ratios",
    "legend",
    "marks",
    "rows",
    "table",
    "to_json",
    "write_csv",
]

HEADLINE = frozenset({"sum", "mean", "var", "amax", "logsumexp", "softmax"})
"""The functions whose cases are summed up in one number."""


@dataclass(frozen=True)
class Provenance:
    """Where figures come from: what one needs to take them again."""

    command: str
    date: str
    quick: bool
    machine: dict[str, str | int]

    def columns(self) -> dict[str, Any]:
        """Return it flat, for a row."""
        return {**self.machine, "quick": self.quick, "date": self.date, "command": self.command}


def describe_machine(device: str = "cpu") -> dict[str, str | int]:
    """The machine and the versions that a figure depends on."""
    gpu: dict[str, str | int] = {}
    if device != "cpu":
        gpu = {"gpu": torch.cuda.get_device_name(device), "triton": version_of("triton") or "none"}
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "simd": backends.status().simd,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "maskwise": mw.__version__,
        **gpu,
    }


def rows(results: Sequence[Result], provenance: Provenance) -> list[dict[str, Any]]:
    """Return one flat row a side: everything that was measured, and where."""
    return [
        {
            "family": result.case.family,
            "function": result.case.function,
            "case": result.case.name,
            "shape": "x".join(map(str, result.case.shape)),
            "density": result.case.density,
            "dim": result.case.dim,
            "dtype": result.case.dtype,
            "side": side.name,
            "kind": side.kind,
            "route": result.route if side.kind == "ours" else None,
            "best_us": round(side.best * 1e6, 3),
            "median_us": round(side.median * 1e6, 3),
            "ratio": round(side.ratio.median, 4),
            "ratio_q1": round(side.ratio.q1, 4),
            "ratio_q3": round(side.ratio.q3, 4),
            "roofline_us": _in_microseconds(result.roofline) if side.kind == "ours" else None,
            "of_copy_bandwidth": _rounded(result.bandwidth) if side.kind == "ours" else None,
            "targets": "; ".join(map(_as_text, result.verdicts)) if side.kind == "ours" else None,
            **provenance.columns(),
        }
        for result in results
        for side in result.sides
    ]


def _in_microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 3)


def write_csv(path: Path, results: Sequence[Result], provenance: Provenance) -> None:
    """Write the rows as CSV, whole or not at all."""
    data = rows(results, provenance)
    with atomic_path(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(data[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(data)


def to_json(results: Sequence[Result], provenance: Provenance) -> dict[str, Any]:
    """Return the results as plain data, one entry a case."""
    return {
        **provenance.columns(),
        "cases": [
            {
                "case": result.case.name,
                "family": result.case.family,
                "sides": [
                    {
                        "name": side.name,
                        "kind": side.kind,
                        "best_seconds": side.best,
                        "median_seconds": side.median,
                        "ratio": {"q1": side.ratio.q1, "median": side.ratio.median, "q3": side.ratio.q3},
                    }
                    for side in result.sides
                ],
                "of_copy_bandwidth": result.bandwidth,
                "targets": [
                    {"text": verdict.target.text, "side": verdict.side, "holds": verdict.holds}
                    for verdict in result.verdicts
                ],
                "skipped": dict(result.skipped),
            }
            for result in results
        ],
    }


def large_ratios(results: Sequence[Result]) -> list[tuple[str, float]]:
    """The function of each large forward case, and how many times faster than the best peer it is."""
    # Only for these it is told how many bytes they move.
    return [
        (result.case.function, result.best_peer.ratio.median)
        for result in results
        if result.case.moved_bytes is not None and result.best_peer is not None
    ]


def geometric_means(ratios: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum up the ratios of each function in one number; and those of all HEADLINE functions, if all are there.

    >>> means = geometric_means([("sum", 4.0), ("sum", 16.0), ("mean", 3.0)])
    >>> {function: round(mean, 3) for function, mean in means.items()}
    {'sum': 8.0, 'mean': 3.0}
    """
    of: dict[str, list[float]] = {}
    for function, ratio in ratios:
        of.setdefault(function, []).append(ratio)
    means = {function: statistics.geometric_mean(each) for function, each in of.items()}
    if of.keys() >= HEADLINE:
        means["all six"] = statistics.geometric_mean([ratio for name in sorted(HEADLINE) for ratio in of[name]])
    return means


def table(results: Sequence[Result]) -> Table:
    """Return the results for the terminal: a line a case, and the best peer's name below its figure."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = Table(box=SIMPLE_HEAD, pad_edge=False, expand=False)
    out.add_column("case", min_width=22)
    out.add_column("ours", justify="right", no_wrap=True)
    out.add_column("× best peer", no_wrap=True)
    out.add_column("× floor", justify="right", no_wrap=True)
    out.add_column("copy_", justify="right", no_wrap=True)
    out.add_column("ok", no_wrap=True)
    for result in results:
        peer, floor = result.best_peer, result.floor
        out.add_row(
            result.case.name,
            in_words(result.ours.median),
            f"{escape(str(peer.ratio))}\n[dim]{escape(peer.name)}[/]" if peer else "–",
            f"{floor.ratio.median:.3g}" if floor else "–",
            f"{result.bandwidth:.0%}" if result.bandwidth is not None else "–",
            marks(result, results),
        )
    return out


def _numbers(results: Sequence[Result]) -> dict[str, int]:
    texts = dict.fromkeys(verdict.target.text for result in results for verdict in result.verdicts)
    return {text: number for number, text in enumerate(texts, 1)}


def marks(result: Result, results: Sequence[Result]) -> str:
    """A tick or a cross for each target of a row, with the target's number in the legend."""
    numbers = _numbers(results)
    return " ".join(
        f"[green]✓{numbers[verdict.target.text]}[/]" if verdict.holds else f"[red]✗{numbers[verdict.target.text]}[/]"
        for verdict in result.verdicts
    )


def legend(results: Sequence[Result]) -> Table | None:
    """What the numbers beside ticks and crosses stand for, and how many rows meet each target; None without targets."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    numbers = _numbers(results)
    if not numbers:
        return None
    verdicts = [verdict for result in results for verdict in result.verdicts]
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("ok", justify="right")
    out.add_column("target")
    for heading in ("rows", "met", "missed"):
        out.add_column(heading, justify="right")
    for text, number in numbers.items():
        of = [verdict for verdict in verdicts if verdict.target.text == text]
        met, allowance = sum(verdict.holds for verdict in of), of[0].target.allowance
        target = f"{escape(text)} [dim]({allowance})[/]" if allowance else escape(text)
        missed = f"[red]{len(of) - met}[/]" if met < len(of) else "[green]0[/]"
        out.add_row(str(number), target, str(len(of)), str(met), missed)
    return out


def _as_text(verdict: Verdict) -> str:
    return f"{'pass' if verdict.holds else 'MISS'}: {verdict.target.text}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
