"""What ``import maskwise`` adds to ``import torch``, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from benchmarks.case import Case, Side, within

__all__ = ["cases"]


def _import(statement: str) -> Callable[[Case], Callable[[], None]]:
    def run() -> None:
        subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True)

    return lambda case: run


def cases() -> tuple[Case, ...]:
    """Return the one case of this family."""
    sides = (
        Side("import maskwise", _import("import torch; import maskwise"), "ours"),
        Side("import torch", _import("import torch"), "floor"),
    )
    return (
        Case(
            "startup",
            "import",
            "maskwise after torch",
            lambda case: case,
            sides,
            targets=(within(0.060, "import torch"),),
        ),
    )
