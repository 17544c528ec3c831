"""Order among what is kept: sort, argsort, topk, median, quantile."""

from __future__ import annotations

from maskwise.ops.order.api import argsort as argsort
from maskwise.ops.order.api import median as median
from maskwise.ops.order.api import quantile as quantile
from maskwise.ops.order.api import sort as sort
from maskwise.ops.order.api import topk as topk

__all__ = ["argsort", "median", "quantile", "sort", "topk"]
