"""What prints as a table: the log of `mw.explain`, and reports of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Tabular"]


class Tabular:
    """A value that has a rich table, and so can be printed, by rich or without it."""

    def table(self) -> Table:
        """The value as a rich table."""
        raise NotImplementedError(f"{type(self).__name__} must override table(). Hint: return rich.table.Table(...).")

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()
