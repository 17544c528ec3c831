"""A value where x is dropped."""

from __future__ import annotations

from maskwise.ops.fill.api import fill as fill

__all__ = ["fill"]
