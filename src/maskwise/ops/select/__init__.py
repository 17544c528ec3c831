"""Compute only what is kept: apply and pack."""

from __future__ import annotations

from maskwise.ops.select.packed import Packed as Packed
from maskwise.ops.select.packed import pack as pack
from maskwise.ops.select.rowwise import apply as apply
from maskwise.ops.select.rowwise import apply_ as apply_

__all__ = ["Packed", "apply", "apply_", "pack"]
