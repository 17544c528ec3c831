"""What is kept: the `Mask` type, its structures and its algebra."""

from __future__ import annotations

from maskwise.mask.facts import Facts
from maskwise.mask.mask import Mask

__all__ = ["Facts", "Mask"]
