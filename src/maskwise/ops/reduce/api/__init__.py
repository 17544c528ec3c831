"""The reductions that users call: check the arguments, plan, run."""

from __future__ import annotations

from maskwise.ops.reduce.api.exponentials import logsumexp as logsumexp
from maskwise.ops.reduce.api.exponentials import norm as norm
from maskwise.ops.reduce.api.extrema import amax as amax
from maskwise.ops.reduce.api.extrema import amin as amin
from maskwise.ops.reduce.api.extrema import argmax as argmax
from maskwise.ops.reduce.api.extrema import argmin as argmin
from maskwise.ops.reduce.api.moments import std as std
from maskwise.ops.reduce.api.moments import var as var
from maskwise.ops.reduce.api.totals import mean as mean
from maskwise.ops.reduce.api.totals import prod as prod
from maskwise.ops.reduce.api.totals import sum as sum
from maskwise.ops.reduce.api.truth import all as all
from maskwise.ops.reduce.api.truth import any as any
from maskwise.ops.reduce.api.truth import count as count

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "count", "logsumexp", "mean", "norm", "prod", "std", "sum", "var",
]  # fmt: skip
