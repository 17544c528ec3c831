"""Attention that does no work for what is dropped."""

from __future__ import annotations

from maskwise.ops.attention.attention import attention as attention
from maskwise.ops.attention.bias import AlibiBias as AlibiBias
from maskwise.ops.attention.bias import RelativeBias as RelativeBias
from maskwise.ops.attention.packed import attend as attend

__all__ = ["AlibiBias", "RelativeBias", "attend", "attention"]
