"""Whole networks on regions of their maps."""

from __future__ import annotations

from maskwise.nn.regions.incremental import Incremental as Incremental

__all__ = ["Incremental"]
