"""Train a small network on scikit-learn's digits to 95 % sparsity, with every gate of Maskwise.

    pip install 'maskwise[examples]'
    python examples/train_digits.py                  # about a minute: a table, and train_digits.png
    python examples/train_digits.py --quick          # does everything run?

The recipes, one short class per gate, are in `examples/digits/recipes.py`.
"""

from __future__ import annotations

import argparse
import json as json_module
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from digits.recipes import RECIPES
from digits.training import Run, load, missing, train

__all__ = ["POINTS", "main"]

POINTS = 0.02
"""How much accuracy may be lost."""
SUFFIXES = (".png", ".svg")
# Colours that stay apart for colour-blind readers (Okabe and Ito).
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#999999", "#D55E00", "#F0E442")
INK = "#222222"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with every gate, print how well, and return the exit code: 0, or 2 if something is not installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny network")
    parser.add_argument("--plot", type=Path, default=Path("train_digits.png"), help="the file to write the plot to")
    parser.add_argument("--open", action="store_true", help="open the picture")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    # Before anything is trained: a minute of work must not end in a usage error.
    if (reason := missing()) is not None:
        print(reason, file=sys.stderr)
        return 2
    if options.plot.suffix not in SUFFIXES:
        parser.error(f"--plot writes {' or '.join(SUFFIXES)}, not {options.plot.name!r}.")
    steps, hidden = (20, 64) if options.quick else (2500, 320)
    digits, runs = load(), []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        everything = bar.add_task("training", total=len(RECIPES) * steps)
        for recipe in RECIPES:
            bar.update(everything, description=f"training: {recipe.name}")
            runs.append(train(recipe, digits, steps, hidden, lambda: bar.advance(everything)))
    draw(options.plot, runs)
    if options.json:
        found = {
            each.name: {"density": each.density, "accuracy": each.accuracy, "validation": each.validation}
            for each in runs
        }
        print(json_module.dumps(found))
    else:
        show(Console(), runs, options.quick, options.plot)
    if options.open:
        webbrowser.open(options.plot.absolute().as_uri())
    return 0


def show(console: Console, runs: list[Run], quick: bool, plot: Path) -> None:
    """Print the table."""
    dense = runs[0].accuracy
    title = "Digits, by every gate" + (": a few steps only, these figures say nothing" if quick else "")
    table = Table(title=title)
    for heading in ("gate", "sparsity", "validation", "test", "against dense"):
        table.add_column(heading, justify="left" if heading == "gate" else "right")
    for each in runs:
        lost = each.accuracy - dense
        colour = "green" if lost >= -POINTS else "red"
        against = "" if each is runs[0] else f"[{colour}]{100 * lost:+.1f} points[/]"
        table.add_row(each.name, f"{1 - each.density:.1%}", f"{each.validation:.1%}", f"{each.accuracy:.1%}", against)
    console.print(table)
    console.print("What recipes leave to choose was chosen on the validation images; the test images were not used.")
    console.print(f"The picture is in [bold]{plot}[/].", highlight=False)


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
        # The first is what the others are measured against; more runs than colours differ by dashes.
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
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
