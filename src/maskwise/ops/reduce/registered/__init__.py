"""The reductions as registered ops: schema, fake, gradient, work."""

from __future__ import annotations

from maskwise.ops.reduce.registered.exponentials import logsumexp as logsumexp
from maskwise.ops.reduce.registered.exponentials import norm as norm
from maskwise.ops.reduce.registered.extrema import (
    amax as amax,
)
from maskwise.ops.reduce.registered.extrema import (
    amin as amin,
)
from maskwise.ops.reduce.registered.extrema import (
    argmax as argmax,
)
from maskwise.ops.reduce.registered.extrema import (
    argmin as argmin,
)
from maskwise.ops.reduce.registered.moments import std as std
from maskwise.ops.reduce.registered.moments import var as var
from maskwise.ops.reduce.registered.totals import all as all
from maskwise.ops.reduce.registered.totals import any as any
from maskwise.ops.reduce.registered.totals import mean as mean
from maskwise.ops.reduce.registered.totals import prod as prod
from maskwise.ops.reduce.registered.totals import sum as sum

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "mean", "norm", "prod", "std", "sum", "var",
]  # fmt: skip
