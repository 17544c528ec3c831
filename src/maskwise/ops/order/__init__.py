"""The order of what is kept."""

from __future__ import annotations

from maskwise.ops.order.ranks import median, quantile
from maskwise.ops.order.sorting import argsort, sort, topk

__all__ = ["argsort", "median", "quantile", "sort", "topk"]
