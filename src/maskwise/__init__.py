"""Maskwise: mask-aware computing for PyTorch. What is masked out costs nothing and never leaks."""

from __future__ import annotations

from maskwise.errors import MaskwiseError as MaskwiseError
from maskwise.mask import Mask as Mask
from maskwise.ops.loss import loss as loss
from maskwise.ops.reduce import sum as sum
from maskwise.plan import explain as explain

__version__ = "0.1.0"

__all__ = ["Mask", "MaskwiseError", "__version__", "explain", "loss", "sum"]
