"""The runs as a picture: accuracy and density along the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maskwise.benchmarks.atomic import atomic_path
from maskwise.benchmarks.plot import COLOURS, INK
from maskwise.cli.digits.training import Run

__all__ = ["draw"]


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Draw validation accuracy above density, one line a run; PNG or SVG by the suffix. The legend has the tests'."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MultipleLocator, NullLocator, PercentFormatter

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for i, run in enumerate(runs):
        steps, densities, accuracies = zip(*run.history, strict=True)
        # The first is what the others are measured against; more runs than colours are told apart by dashes.
        style = {"color": INK, "linewidth": 2.2} if i == 0 else {"color": COLOURS[(i - 1) % len(COLOURS)]}
        dashes = "-" if i <= len(COLOURS) else "--"
        label = f"{run.name}: {run.accuracy:.1%} of test images at {run.density:.1%}"
        above.plot(steps, accuracies, dashes, label=label, **style)
        below.plot(steps, densities, dashes, **style)
    dense = runs[0].validation
    above.axhline(dense - 0.02, color="#999999", linewidth=0.8, linestyle=":")
    above.annotate(
        "dense − 2 points",
        (runs[0].history[-1][0], dense - 0.02),
        xytext=(0, -10),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#666666",
    )
    # What matters happens near the top; the first steps may lie below.
    above.set_ylim(max(0.0, dense - 0.2), min(1.0, dense + 0.02))
    above.yaxis.set_major_locator(MultipleLocator(0.05))
    above.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    above.set_ylabel("accuracy on 450 validation images", fontsize=9)
    below.set_yscale("log")
    below.yaxis.set_major_locator(FixedLocator([0.05, 0.1, 0.2, 0.5, 1.0]))
    below.yaxis.set_minor_locator(NullLocator())
    below.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    below.set_ylabel("weights that are not 0", fontsize=9)
    below.set_xlabel("step", fontsize=9)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle("Digits with 5 % of the weights, by every gate", fontsize=12, color=INK)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150)
