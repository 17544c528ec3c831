"""Selection of kept rows: apply and pack."""

from __future__ import annotations

from maskwise.ops.select.apply import apply, apply_
from maskwise.ops.select.packed import Packed, pack

__all__ = ["Packed", "apply", "apply_", "pack"]
