"""Masked scans."""

from __future__ import annotations

from maskwise.ops.scan.scans import *
