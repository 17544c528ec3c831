"""Losses over what is kept."""

from __future__ import annotations

from maskwise.ops.loss.loss import loss as loss

__all__ = ["loss"]
