"""Maskwise: mask-aware computing for PyTorch. What is masked out costs nothing and never leaks."""

from __future__ import annotations

from maskwise.errors import MaskwiseError as MaskwiseError
from maskwise.mask import Mask as Mask
from maskwise.ops.fill import fill as fill
from maskwise.ops.reduce import sum as sum
from maskwise.ops.scan import cummax as cummax
from maskwise.ops.scan import cummin as cummin
from maskwise.ops.scan import cumprod as cumprod
from maskwise.ops.scan import cumsum as cumsum
from maskwise.ops.scan import logcumsumexp as logcumsumexp
from maskwise.plan import explain as explain

__version__ = "0.1.0"

__all__ = [
    "Mask",
    "MaskwiseError",
    "__version__",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "explain",
    "fill",
    "logcumsumexp",
    "sum",
]
