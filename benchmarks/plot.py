"""The results as a picture. The only module that imports matplotlib (``pip install 'maskwise[plot]'``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Provenance
from benchmarks.run import Result, SideResult
from maskwise.plan.calibration import atomic_path
from maskwise.plan.measure import in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_plot"]

# Colours that stay apart for colour-blind readers (Okabe and Ito), in the order in which sides first appear.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#999999", "#D55E00", "#F0E442")
BAR = 0.8
NOTES = {"leaky": " (leaks NaN)", "floor": " (floor)"}
INK = "#222222"


def write_plot(path: Path, results: Sequence[Result], provenance: Provenance) -> None:
    """Draw how many times longer than ours every side takes, one group of bars a case; PNG or SVG by the suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator, NullFormatter

    names = {side.name: side.name + NOTES.get(side.kind, "") for result in results for side in _bars(result)}
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    lines = sum(len(_bars(result)) for result in results)
    figure = Figure(figsize=(10, 1.9 + 0.2 * lines + 0.22 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    position, ticks = 0.0, []
    for result in results:
        bars = _bars(result)
        ticks.append((position + (len(bars) - 1) / 2, f"{result.case.name}\nours {in_words(result.ours.median)}"))
        for side in bars:
            _draw_bar(axes, position, side, colours[side.name])
            position += 1
        position += 1.1

    axes.axvline(1, color=INK, linewidth=1, zorder=3)
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.01)
    axes.invert_yaxis()
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    # Marks at 1, 2 and 5: ratios within one power of ten would have a single one otherwise.
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_xlabel("time of the other side ÷ time of Maskwise (log scale; right of 1×, ours is faster)", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(
        handles=[Patch(color=colours[name], label=label) for name, label in names.items()],
        loc="outside lower center",
        ncols=min(4, len(names)),
        frameon=False,
        fontsize=8,
    )
    m = provenance.machine
    quick = " · shrunken inputs: these times say nothing" if provenance.quick else ""
    where = m["gpu"] if "gpu" in m else f"{m['cpu']}, {m['threads']} threads, {m['simd']}"
    figure.suptitle("What the same masked work costs elsewhere", fontsize=12, color=INK)
    axes.set_title(
        f"{where} · torch {m['torch']} · {provenance.date[:10]}{quick}",
        fontsize=8,
        color="#666666",
    )
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150)


def _draw_bar(axes: Axes, position: float, side: SideResult, colour: str) -> None:
    # Bars grow from 1×, to the right where ours is faster and to the left where it is not.
    ratio = side.ratio
    axes.barh(position, ratio.median - 1, BAR, left=1, color=colour)
    axes.plot([ratio.q1, ratio.q3], [position, position], color=INK, linewidth=1)
    faster = ratio.median >= 1
    axes.annotate(
        f"{ratio.median:.3g}×",
        (max(ratio.q3, 1) if faster else min(ratio.q1, 1), position),
        xytext=(4 if faster else -4, 0),
        textcoords="offset points",
        ha="left" if faster else "right",
        va="center",
        fontsize=7,
        color=INK,
    )


def _bars(result: Result) -> list[SideResult]:
    return [side for side in result.sides if side.kind not in ("ours", "memory")]
