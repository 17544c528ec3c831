"""What was found out about calls, so that a repeated one costs a look-up."""

from __future__ import annotations

from typing import Any, TypeVar

from maskwise.plan import planner

__all__ = ["Remembered"]

Found = TypeVar("Found")


class Remembered(dict[tuple[Any, ...], Found]):
    """A dict from the static facts of a call (shapes, dtypes, devices, settings) to what was decided about it.

    It is emptied when plans stop being right (see `planner.forget`), and when it has grown beyond its limit: whoever
    calls with ever new shapes pays for planning, never in memory.

    >>> recipes = Remembered[str](limit=2)
    >>> recipes[(3, 4)] = "plain"
    >>> recipes.get((3, 4))
    'plain'
    >>> recipes[(5, 6)], recipes[(7, 8)] = "bare", "bare"
    >>> list(recipes)
    [(7, 8)]
    >>> planner.forget()
    >>> len(recipes)
    0
    """

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self._limit = limit
        planner.on_forget(self.clear)

    def __setitem__(self, facts: tuple[Any, ...], found: Found) -> None:
        if len(self) >= self._limit:
            self.clear()
        super().__setitem__(facts, found)
