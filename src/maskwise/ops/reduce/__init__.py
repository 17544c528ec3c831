"""Reductions over what is kept."""

from __future__ import annotations

from maskwise.ops.reduce.api import (
    all as all,
    amax as amax,
    amin as amin,
    any as any,
    argmax as argmax,
    argmin as argmin,
    count as count,
    logsumexp as logsumexp,
    mean as mean,
    norm as norm,
    prod as prod,
    std as std,
    sum as sum,
    var as var,
)

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "count", "logsumexp", "mean", "norm", "prod", "std", "sum", "var",
]  # fmt: skip
