"""Maskwise: mask-aware computing for PyTorch. What is masked out costs nothing and never leaks."""

from __future__ import annotations

from maskwise.errors import MaskwiseError as MaskwiseError
from maskwise.mask import Mask as Mask
from maskwise.ops.reduce import sum as sum
from maskwise.ops.select import Packed as Packed
from maskwise.ops.select import apply as apply
from maskwise.ops.select import apply_ as apply_
from maskwise.ops.select import pack as pack
from maskwise.plan import explain as explain

__version__ = "0.1.0"

__all__ = ["Mask", "MaskwiseError", "Packed", "__version__", "apply", "apply_", "explain", "pack", "sum"]
