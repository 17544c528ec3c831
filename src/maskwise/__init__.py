"""Maskwise: mask-aware computing for PyTorch. What is masked out costs nothing and never leaks."""

from __future__ import annotations

from maskwise.errors import MaskwiseError as MaskwiseError
from maskwise.mask import Mask as Mask
from maskwise.ops.reduce import sum as sum
from maskwise.ops.softmax import log_softmax as log_softmax
from maskwise.ops.softmax import normalize as normalize
from maskwise.ops.softmax import softmax as softmax
from maskwise.ops.softmax import softmin as softmin
from maskwise.ops.softmax import standardize as standardize
from maskwise.plan import explain as explain

__version__ = "0.1.0"

__all__ = [
    "Mask",
    "MaskwiseError",
    "__version__",
    "explain",
    "log_softmax",
    "normalize",
    "softmax",
    "softmin",
    "standardize",
    "sum",
]
