"""The progress bar of the command line. It lives on standard error, so that standard output can be piped."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress"]


def progress() -> Progress:
    """Return a progress bar that cleans up after itself, also on Ctrl-C."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
