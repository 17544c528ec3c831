"""Reductions over what is kept."""

from __future__ import annotations

from maskwise.ops.reduce.api import sum as sum

__all__ = ["sum"]
