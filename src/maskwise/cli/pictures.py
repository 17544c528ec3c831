"""Pictures of the command line: where they may go, and how they are shown."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import typer

__all__ = ["check_picture", "show_picture"]

SUFFIXES = (".png", ".svg")


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
