"""One mistake that a user can make: the call, the error that it must raise, and what the hint must say."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import maskwise

HOME = Path(maskwise.__file__).parent


@dataclass(frozen=True)
class Row:
    """A call that must raise."""

    called: str  # the public name that the user calls, and whose docstring must tell of the error
    call: Callable[[], Any]
    error: type[BaseException]
    hint: str  # a part of what stands behind "Hint: "

    def __str__(self) -> str:
        return f"{self.called} - {self.hint}"


@cache
def raised(row: Row) -> BaseException:
    """What the call of a row raises; run once."""
    try:
        row.call()
    except BaseException as error:
        return error
    raise AssertionError(f"{row}: nothing was raised")


def hint_of(error: BaseException) -> str:
    """What stands behind "Hint:" in a message; of the command line's usage errors the whole, which is one sentence."""
    if type(error).__name__ == "BadParameter":
        return str(error)
    message = str(error.args[0]) if error.args else ""
    return message.partition("Hint: ")[2]


def places_of(error: BaseException) -> Iterator[tuple[str, int]]:
    """The file and the line of the package in which an error, and what it was raised from, was raised."""
    seen: BaseException | None = error
    while seen is not None:
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(seen.__traceback__)]
        if frames and frames[-1][0].startswith(str(HOME)):
            yield Path(frames[-1][0]).relative_to(HOME).as_posix(), frames[-1][1]
        seen = seen.__cause__ or seen.__context__
