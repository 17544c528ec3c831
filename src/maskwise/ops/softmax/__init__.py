"""Masked softmax and normalization: functions that map slices to slices."""

from __future__ import annotations

from maskwise.ops.softmax.normalize import normalize, standardize
from maskwise.ops.softmax.softmax import log_softmax, softmax, softmin

__all__ = ["log_softmax", "normalize", "softmax", "softmin", "standardize"]
