"""Running totals over what is kept: a dropped position repeats the running value."""

from __future__ import annotations

from maskwise.ops.scan.api import cummax as cummax
from maskwise.ops.scan.api import cummin as cummin
from maskwise.ops.scan.api import cumprod as cumprod
from maskwise.ops.scan.api import cumsum as cumsum
from maskwise.ops.scan.api import logcumsumexp as logcumsumexp

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]
