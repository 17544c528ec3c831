"""Masked reductions."""

from __future__ import annotations

from maskwise.ops.reduce.exponentials import logsumexp, norm
from maskwise.ops.reduce.extrema import amax, amin, argmax, argmin
from maskwise.ops.reduce.logical import all, any, count
from maskwise.ops.reduce.moments import std, var
from maskwise.ops.reduce.sums import mean, prod, sum

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "count", "logsumexp", "mean", "norm", "prod", "std", "sum", "var",
]  # fmt: skip
