"""The table of public masked functions and their properties, from which the law suites and the docs are generated.

Adding a function here puts it under all the laws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from typing import Any

from maskwise.ops import fill, loss, order, reduce, scan, softmax

__all__ = ["FUNCTIONS", "Function"]


@dataclass(frozen=True)
class Function:
    """A public function and its properties."""

    name: str
    call: Callable[..., Any]
    family: str
    #: How it treats dims: a "reduction" removes them; a "position" removes one or all, and returns an index; a
    #: "rowwise" function works along one dim and keeps it; an "elementwise" one has none.
    kind: str
    #: The result of an empty slice (law 3).
    empty: float
    #: Differentiability: 0 for none, 2 for a double backward (and so, for smooth functions, any order).
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
        Function("median", order.median, family="order", kind="reduction", empty=nan, gradient=2),
        Function("quantile", order.quantile, family="order", kind="reduction", empty=nan, gradient=2),
        Function("sort", order.sort, family="order", kind="rowwise", empty=0.0, gradient=2),
        Function("argsort", order.argsort, family="order", kind="rowwise", empty=-1, gradient=0),
        Function("topk", order.topk, family="order", kind="rowwise", empty=-inf, gradient=2),
        Function("softmax", softmax.softmax, family="softmax", kind="rowwise", empty=0.0, gradient=2),
        Function("log_softmax", softmax.log_softmax, family="softmax", kind="rowwise", empty=-inf, gradient=2),
        Function("softmin", softmax.softmin, family="softmax", kind="rowwise", empty=0.0, gradient=2),
        Function("normalize", softmax.normalize, family="softmax", kind="rowwise", empty=0.0, gradient=2),
        Function("standardize", softmax.standardize, family="softmax", kind="rowwise", empty=0.0, gradient=2),
        Function("cumsum", scan.cumsum, family="scan", kind="rowwise", empty=0.0, gradient=2),
        Function("cumprod", scan.cumprod, family="scan", kind="rowwise", empty=1.0, gradient=2),
        Function("cummax", scan.cummax, family="scan", kind="rowwise", empty=-inf, gradient=2),
        Function("cummin", scan.cummin, family="scan", kind="rowwise", empty=inf, gradient=2),
        Function("logcumsumexp", scan.logcumsumexp, family="scan", kind="rowwise", empty=-inf, gradient=2),
        Function("fill", fill.fill, family="fill", kind="elementwise", empty=0.0, gradient=2),
        Function("loss", loss.loss, family="loss", kind="elementwise", empty=0.0, gradient=2),
    )
}
