"""Losses over what is kept."""

from __future__ import annotations

from maskwise.ops.loss.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from maskwise.ops.loss.loss import loss as loss

__all__ = ["linear_cross_entropy", "loss"]
