"""Every public masked function, with what holds for it. The law suites and the docs are made from this table.

A function is put under all the laws by adding its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maskwise.ops import order, reduce

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
        Function("sort", order.sort, family="order", kind="rowwise", empty=0.0, gradient=2),
        Function("argsort", order.argsort, family="order", kind="rowwise", empty=-1.0, gradient=0),
        Function("topk", order.topk, family="order", kind="rowwise", empty=float("-inf"), gradient=2),
        Function("median", order.median, family="order", kind="reduction", empty=float("nan"), gradient=2),
        Function("quantile", order.quantile, family="order", kind="reduction", empty=float("nan"), gradient=2),
    )
}
