"""The results as a picture. The only module that imports matplotlib (``pip install 'maskwise[plot]'``)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import keeping
from benchmarks.cases.kept import IDIOM, UNMASKED
from benchmarks.report import Provenance
from benchmarks.run import Result, SideResult
from maskwise.plan.calibration import atomic_path
from maskwise.plan.measure import in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["write_plot"]

# Colours that stay apart for colour-blind readers (Okabe and Ito), in the order in which sides first appear.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#999999", "#D55E00", "#F0E442")
BAR = 0.8
NOTES = {"leaky": " (leaks NaN)", "floor": " (floor)"}
INK, SOFT = "#222222", "#666666"

#: The curves of the picture, and what they are called there; where none was measured, the first ones that were.
DRAWN = {
    "sum lengths 4096x4096 dim=-1": "sum along rows\nmw.sum(x, mask, dim=-1), 4096 × 4096",
    "sum lengths 64x512x256 dim=1": "sum over dim 1\nmw.sum(x, mask[..., None], dim=1), 64 × 512 × 256",
    "softmax lengths 4096x4096 dim=-1": "softmax\nmw.softmax(x, mask, dim=-1), 4096 × 4096",
    "cross_entropy rows 8192x30522 forward+backward": (
        "cross entropy, forward + backward\nmw.loss(F.cross_entropy, x, y, mask), 8192 × 30522"
    ),
}
OURS, GREY, ORANGE = COLOURS[0], "#777777", "#D55E00"
HIGHEST = 4.0
"""A curve that is this many times above the others is cut off, and its time written beside it."""


def write_plot(path: Path, results: Sequence[Result], provenance: Provenance) -> None:
    """Draw the results; PNG or SVG by the suffix. Curves where all are of `kept`, else bars."""
    over_kept = keeping.curves(results) if len(keeping.kept(results)) == len(results) else {}
    figure = _curves(over_kept, provenance) if over_kept else _all_bars(results, provenance)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150)


# -- bars: what the others cost ----------------------------------------------------------------------------------------
def _all_bars(results: Sequence[Result], provenance: Provenance) -> Figure:
    """How many times longer than ours every side takes, one group of bars a case."""
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
    figure.suptitle("What the same masked work costs elsewhere", fontsize=12, color=INK)
    axes.set_title(_where(provenance), fontsize=8, color=SOFT)
    return figure


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


# -- curves: time over what is kept ------------------------------------------------------------------------------------
def _curves(found: dict[str, list[Result]], provenance: Provenance) -> Figure:
    """Time over the kept fraction in units of the unmasked op, one small chart a work: ours and the idiom."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = [name for name in DRAWN if name in found] or list(found)[: len(DRAWN)]
    columns = min(2, len(chosen))
    lines = -(-len(chosen) // columns)
    figure = Figure(figsize=(5 * columns, 0.9 + 2.9 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr]
    charts = list(figure.subplots(lines, columns, squeeze=False).flat)
    for name, axes in zip(chosen, charts, strict=False):
        _draw_curve(axes, DRAWN.get(name, name), found[name])
    for axes in charts[len(chosen) :]:
        axes.remove()
    figure.suptitle("You pay for what you keep: time over the kept fraction", fontsize=13, color=INK, fontweight="bold")
    figure.supxlabel(f"medians of interleaved rounds · {_where(provenance)}", fontsize=7.5, color=SOFT)
    return figure


def _draw_curve(axes: Axes, title: str, results: Sequence[Result]) -> None:
    name, _, code = title.partition("\n")
    axes.set_title(name, loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=18 if code else 6)
    _label(axes, code, 1, SOFT, above=True, size=7.5, left=0, family="monospace")
    percent = [100 * (result.case.density or 0.0) for result in results]
    # Both within a round: the rows of a curve are timed minutes apart, and a machine changes in minutes.
    ours = [1 / result.side(UNMASKED).ratio.median for result in results]
    idiom = [result.side(IDIOM).ratio.median * time for result, time in zip(results, ours, strict=True)]
    height = 1.3 * max(*ours, 1.0)
    is_shown = max(idiom) <= HIGHEST * height
    height = max(height, 1.2 * max(idiom)) if is_shown else height
    axes.set_ylim(0, height)
    axes.set_xlim(0, 100)

    axes.plot([0, 100], [1, 1], color=GREY, linewidth=1.8)
    # Below the line where the idiom's is right above.
    is_free = not is_shown or idiom[0] - 1 > 0.2 * height
    _label(axes, f"unmasked torch op, {in_words(results[-1].side(UNMASKED).median)}", 1 / height, GREY, above=is_free)
    others = "where / masked_fill + torch op"
    if is_shown:
        axes.plot(percent, idiom, color=ORANGE, linewidth=1.8, marker="o", markersize=3)
        # Above what of the line the label is over.
        highest = max((time for at, time in zip(percent, idiom, strict=True) if at <= 50), default=idiom[0])
        _label(axes, others, highest / height, ORANGE, above=True)
    else:
        axes.plot([0, 100], [height * 0.985] * 2, color=ORANGE, linewidth=1.8, linestyle=(0, (4, 3)))
        _label(axes, f"{others}: off the chart, ↑ {statistics.median(idiom):.0f}×", 0.985, ORANGE, above=False)
    axes.plot(percent, ours, color=OURS, linewidth=2.6, marker="o", markersize=4.5, clip_on=False, zorder=4)
    axes.fill_between(percent, ours, color=OURS, alpha=0.1, linewidth=0)
    middle = len(percent) // 2
    place = {"xytext": (-5, 6), "textcoords": "offset points", "ha": "right"}
    axes.annotate("Maskwise", (percent[middle], ours[middle]), fontsize=9, color=OURS, fontweight="bold", **place)

    axes.set_xticks([0, 25, 50, 75, 100], ["0 %", "25 %", "50 % kept", "75 %", "100 %"], fontsize=8)
    axes.tick_params(axis="x", color="#bbbbbb")
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×" if value else "0")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _label(
    axes: Axes, text: str, height: float, colour: str, *, above: bool, size: float = 8, left: float = 0.02, **font: str
) -> None:
    axes.annotate(
        text,
        (left, height),
        xytext=(0, 4 if above else -4),
        xycoords="axes fraction",
        textcoords="offset points",
        va="bottom" if above else "top",
        fontsize=size,
        color=colour,
        **font,
    )


def _where(provenance: Provenance) -> str:
    m = provenance.machine
    quick = " · shrunken inputs: these times say nothing" if provenance.quick else ""
    where = m["gpu"] if "gpu" in m else f"{m['cpu']}, {m['threads']} threads, {m['simd']}"
    return f"{where} · torch {m['torch']} · {provenance.date[:10]}{quick}"
