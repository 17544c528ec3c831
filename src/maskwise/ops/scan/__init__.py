"""Masked scans."""

from __future__ import annotations

from maskwise.ops.scan.scans import cummax, cummin, cumprod, cumsum, logcumsumexp

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]
