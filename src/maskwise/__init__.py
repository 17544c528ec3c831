"""Maskwise: mask-aware computing for PyTorch. What is masked out costs nothing and never leaks."""

from __future__ import annotations

from maskwise.errors import MaskwiseError as MaskwiseError
from maskwise.mask import Mask as Mask
from maskwise.ops.reduce import all as all
from maskwise.ops.reduce import amax as amax
from maskwise.ops.reduce import amin as amin
from maskwise.ops.reduce import any as any
from maskwise.ops.reduce import argmax as argmax
from maskwise.ops.reduce import argmin as argmin
from maskwise.ops.reduce import count as count
from maskwise.ops.reduce import logsumexp as logsumexp
from maskwise.ops.reduce import mean as mean
from maskwise.ops.reduce import norm as norm
from maskwise.ops.reduce import prod as prod
from maskwise.ops.reduce import std as std
from maskwise.ops.reduce import sum as sum
from maskwise.ops.reduce import var as var
from maskwise.plan import explain as explain

__version__ = "0.1.0"

__all__ = [
    "Mask",
    "MaskwiseError",
    "__version__",
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "count",
    "explain",
    "logsumexp",
    "mean",
    "norm",
    "prod",
    "std",
    "sum",
    "var",
]
