"""Attention that does no work for what is dropped."""

from __future__ import annotations

from maskwise.ops.attention.api import attention as attention
from maskwise.ops.attention.sequences import attend as attend

__all__ = ["attend", "attention"]
