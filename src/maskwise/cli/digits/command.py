"""``maskwise demo --train``: train with every gate, with a progress bar, a table and a picture."""

from __future__ import annotations

import json as json_module
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from maskwise.cli.digits.data import load, missing
from maskwise.cli.digits.recipes import RECIPES
from maskwise.cli.digits.training import Run, train
from maskwise.cli.pictures import check_picture, show_picture
from maskwise.cli.progress import progress

__all__ = ["POINTS", "run"]

POINTS = 0.02
"""How much accuracy may be lost."""


def run(*, quick: bool = False, plot: Path | None = None, open_: bool = False, json: bool = False) -> int:
    """Train with every gate, show how well, and return the exit code: 0, or 2 if something is not installed."""
    if (reason := missing()) is not None:
        typer.echo(reason, err=True)
        return 2
    check_picture(plot, open_)
    steps, hidden = (20, 64) if quick else (2500, 320)
    digits, runs = load(), []
    with progress() as bar:
        everything = bar.add_task("training", total=len(RECIPES) * steps)
        for recipe in RECIPES:
            bar.update(everything, description=f"training: {recipe.name}")
            runs.append(train(recipe, digits, steps, hidden, lambda: bar.advance(everything)))
    if plot is not None:
        from maskwise.cli.digits.picture import draw

        draw(plot, runs)
    if json:
        told = {
            each.name: {"density": each.density, "accuracy": each.accuracy, "validation": each.validation}
            for each in runs
        }
        typer.echo(json_module.dumps(told))
    else:
        _show(Console(), runs, quick, plot)
    show_picture(plot, open_)
    return 0


def _show(console: Console, runs: list[Run], quick: bool, plot: Path | None) -> None:
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
    if plot is not None:
        console.print(f"The picture is in [bold]{plot}[/].", highlight=False)
