"""The reductions that users call: check the arguments, plan, run."""

from __future__ import annotations

from maskwise.ops.reduce.api.exponentials import logsumexp as logsumexp, norm as norm
from maskwise.ops.reduce.api.extrema import amax as amax, amin as amin, argmax as argmax, argmin as argmin
from maskwise.ops.reduce.api.moments import std as std, var as var
from maskwise.ops.reduce.api.totals import mean as mean, prod as prod, sum as sum
from maskwise.ops.reduce.api.truth import all as all, any as any, count as count

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "count", "logsumexp", "mean", "norm", "prod", "std", "sum", "var",
]  # fmt: skip
