"""Every public masked function, with what holds for it. The law suites and the docs are made from this table.

A function is put under all the laws by adding its line here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maskwise.ops import reduce, softmax

__all__ = ["FUNCTIONS", "Function"]


@dataclass(frozen=True)
class Function:
    """A public function and its promises."""

    name: str
    call: Callable[..., Any]
    family: str
    #: How it treats dims: a "reduction" removes them.
    kind: str
    #: What a slice with nothing kept gives (law 3).
    empty: float
    #: How often it can be differentiated: 0 not at all, 2 twice (and so, for smooth functions, any number of times).
    gradient: int


FUNCTIONS: dict[str, Function] = {
    function.name: function
    for function in (
        Function("sum", reduce.sum, family="reduce", kind="reduction", empty=0.0, gradient=2),
        Function("softmax", softmax.softmax, family="softmax", kind="rowwise", empty=0.0, gradient=2),
        Function("log_softmax", softmax.log_softmax, family="softmax", kind="rowwise", empty=-math.inf, gradient=2),
        Function("softmin", softmax.softmin, family="softmax", kind="rowwise", empty=0.0, gradient=2),
        Function("normalize", softmax.normalize, family="softmax", kind="rowwise", empty=0.0, gradient=2),
        Function("standardize", softmax.standardize, family="softmax", kind="rowwise", empty=0.0, gradient=2),
    )
}
