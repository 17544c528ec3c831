"""Maskwise: mask-aware computing for PyTorch. What is masked out costs nothing and never leaks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from maskwise.errors import MaskwiseError as MaskwiseError
from maskwise.mask import Mask as Mask
from maskwise.plan.dispatch import force as force
from maskwise.plan.dispatch import plan as plan
from maskwise.plan.explain import explain as explain

if TYPE_CHECKING:
    from maskwise import models as models
    from maskwise import nn as nn
    from maskwise.data import TokenBudgetSampler as TokenBudgetSampler
    from maskwise.models import unpad as unpad
    from maskwise.models.compress import compress as compress
    from maskwise.ops.attention import attention as attention
    from maskwise.ops.fill import fill as fill
    from maskwise.ops.linear import linear as linear
    from maskwise.ops.loss import loss as loss
    from maskwise.ops.order import argsort as argsort
    from maskwise.ops.order import median as median
    from maskwise.ops.order import quantile as quantile
    from maskwise.ops.order import sort as sort
    from maskwise.ops.order import topk as topk
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
    from maskwise.ops.scan import cummax as cummax
    from maskwise.ops.scan import cummin as cummin
    from maskwise.ops.scan import cumprod as cumprod
    from maskwise.ops.scan import cumsum as cumsum
    from maskwise.ops.scan import logcumsumexp as logcumsumexp
    from maskwise.ops.select import Packed as Packed
    from maskwise.ops.select import apply as apply
    from maskwise.ops.select import apply_ as apply_
    from maskwise.ops.select import pack as pack
    from maskwise.ops.softmax import log_softmax as log_softmax
    from maskwise.ops.softmax import normalize as normalize
    from maskwise.ops.softmax import softmax as softmax
    from maskwise.ops.softmax import softmin as softmin
    from maskwise.ops.softmax import standardize as standardize

__version__ = "0.2.0"

__all__ = [
    "Mask",
    "MaskwiseError",
    "Packed",
    "TokenBudgetSampler",
    "__version__",
    "all",
    "amax",
    "amin",
    "any",
    "apply",
    "apply_",
    "argmax",
    "argmin",
    "argsort",
    "attention",
    "compress",
    "count",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "explain",
    "fill",
    "force",
    "linear",
    "log_softmax",
    "logcumsumexp",
    "logsumexp",
    "loss",
    "mean",
    "median",
    "models",
    "nn",
    "norm",
    "normalize",
    "pack",
    "plan",
    "prod",
    "quantile",
    "softmax",
    "softmin",
    "sort",
    "standardize",
    "std",
    "sum",
    "topk",
    "unpad",
    "var",
]

# Lazy: registering the ops takes longer than everything else here. The first use of a function imports all of them,
# because it may happen while a graph is traced, and the op registry must not change during the trace.
_HOMES = {
    "maskwise.data": "TokenBudgetSampler",
    "maskwise.models": "unpad",
    "maskwise.models.compress": "compress",
    "maskwise.ops.attention": "attention",
    "maskwise.ops.fill": "fill",
    "maskwise.ops.linear": "linear",
    "maskwise.ops.loss": "loss",
    "maskwise.ops.order": "argsort median quantile sort topk",
    "maskwise.ops.reduce": "all amax amin any argmax argmin count logsumexp mean norm prod std sum var",
    "maskwise.ops.scan": "cummax cummin cumprod cumsum logcumsumexp",
    "maskwise.ops.select": "Packed apply apply_ pack",
    "maskwise.ops.softmax": "log_softmax normalize softmax softmin standardize",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# Public subpackages.
_PACKAGES = ("models", "nn")


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _HOME_OF and name not in _PACKAGES:
        from difflib import get_close_matches

        near = get_close_matches(name, __all__, 1)
        hint = f"maskwise.{near[0]}" if near else "dir(maskwise)"
        raise AttributeError(f"module 'maskwise' has no attribute {name!r}. Hint: {hint}.")
    for home, names in _HOMES.items():
        module = import_module(home)
        globals().update({each: getattr(module, each) for each in names.split()})
    globals().update({each: import_module(f"maskwise.{each}") for each in _PACKAGES})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
