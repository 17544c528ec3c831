"""The reductions as registered ops: schema, fake, gradient, work."""

from __future__ import annotations

from maskwise.ops.reduce.registered.exponentials import logsumexp as logsumexp, norm as norm
from maskwise.ops.reduce.registered.extrema import (
    amax as amax,
    amin as amin,
    argmax as argmax,
    argmin as argmin,
)
from maskwise.ops.reduce.registered.moments import std as std, var as var
from maskwise.ops.reduce.registered.totals import all as all, any as any, mean as mean, prod as prod, sum as sum

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "mean", "norm", "prod", "std", "sum", "var",
]  # fmt: skip
