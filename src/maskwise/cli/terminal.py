"""What the commands share: the progress bar, and the pictures that ``--plot`` writes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["check_picture", "progress", "show_picture"]

SUFFIXES = (".png", ".svg")


def progress() -> Progress:
    """A progress bar that cleans up after itself, also on Ctrl-C.

    It goes to standard error, so that standard output can be piped.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def check_picture(plot: Path | None, open_: bool = False) -> None:
    """Refuse what cannot be drawn, before anything is computed: minutes of work must not end in a usage error."""
    if plot is None:
        if open_:
            raise typer.BadParameter("--open shows the picture that --plot draws: add --plot picture.png.")
        return
    if plot.suffix not in SUFFIXES:
        raise typer.BadParameter(
            f"--plot writes {' or '.join(SUFFIXES)}, not {plot.name!r}: --plot {plot.stem or 'picture'}.png."
        )
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'maskwise[plot]'.")


def show_picture(plot: Path | None, open_: bool) -> None:
    """Open a picture with what the system opens pictures with."""
    if plot is not None and open_:
        typer.launch(str(plot))
