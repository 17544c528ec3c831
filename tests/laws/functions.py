"""Every public function of a mask, with what holds for it: the law suites and docs/functions.md are made from this.

The names are those of ``maskwise.__init__``; the rest is the entry of a function in the ``LAWS`` of its family, in
``tests/ops/<family>/law_cases.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import maskwise as mw
from tests.laws.slices import laws_of

__all__ = ["FUNCTIONS", "NO_LAW", "Function"]

#: Takes a mask and no x; or is among the subjects: runs the op of another function under torch's other name, or takes
#: more tensors than x.
NO_LAW = ("count", "where", "mul", "max", "min", "linear_cross_entropy")
FAMILIES = {path.parent.name for path in (Path(__file__).parents[1] / "ops").glob("*/law_cases.py")}


@dataclass(frozen=True)
class Function:
    """A public function and its promises; see `tests.laws.slices.Law`."""

    name: str
    call: Callable[..., Any]
    family: str
    kind: str
    empty: float
    gradient: int
    unsigned: bool
    kernel: bool


def _functions() -> Iterator[Function]:
    for name, home in mw._HOME_OF.items():
        family = home.rpartition(".")[2]
        if family in FAMILIES and name not in NO_LAW:
            law = laws_of(family).get(name)
            assert law is not None, f"mw.{name} is under no law: give it an entry in tests/ops/{family}/law_cases.py"
            of_law = {key: value for key, value in vars(law).items() if key != "body"}
            yield Function(name, getattr(mw, name), family, **of_law)


FUNCTIONS: dict[str, Function] = {function.name: function for function in _functions()}
