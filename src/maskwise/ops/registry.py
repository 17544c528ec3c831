"""Every public masked function, with what holds for it. The law suites and the docs are made from this table.

A function is put under all the laws by adding its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from typing import Any

from maskwise.ops import reduce

__all__ = ["FUNCTIONS", "Function"]


@dataclass(frozen=True)
class Function:
    """A public function and its promises."""

    name: str
    call: Callable[..., Any]
    family: str
    #: How it treats dims: a "reduction" removes them, a "position" too, one or all of them, and tells where.
    kind: str
    #: What a slice with nothing kept gives (law 3).
    empty: float
    #: How often it can be differentiated: 0 not at all, 2 twice (and so, for smooth functions, any number of times).
    gradient: int


FUNCTIONS: dict[str, Function] = {
    function.name: function
    for function in (
        Function("sum", reduce.sum, family="reduce", kind="reduction", empty=0.0, gradient=2),
        Function("prod", reduce.prod, family="reduce", kind="reduction", empty=1.0, gradient=2),
        Function("mean", reduce.mean, family="reduce", kind="reduction", empty=nan, gradient=2),
        Function("var", reduce.var, family="reduce", kind="reduction", empty=nan, gradient=2),
        Function("std", reduce.std, family="reduce", kind="reduction", empty=nan, gradient=2),
        Function("norm", reduce.norm, family="reduce", kind="reduction", empty=0.0, gradient=2),
        Function("amax", reduce.amax, family="reduce", kind="reduction", empty=-inf, gradient=2),
        Function("amin", reduce.amin, family="reduce", kind="reduction", empty=inf, gradient=2),
        Function("argmax", reduce.argmax, family="reduce", kind="position", empty=-1, gradient=0),
        Function("argmin", reduce.argmin, family="reduce", kind="position", empty=-1, gradient=0),
        Function("logsumexp", reduce.logsumexp, family="reduce", kind="reduction", empty=-inf, gradient=2),
        Function("any", reduce.any, family="reduce", kind="reduction", empty=False, gradient=0),
        Function("all", reduce.all, family="reduce", kind="reduction", empty=True, gradient=0),
    )
}
