"""Whole networks on regions of their maps."""

from __future__ import annotations

from maskwise.nn.regions.incremental import Incremental as Incremental
from maskwise.nn.regions.network import Regions as Regions
from maskwise.nn.regions.pool import RegionAvgPool2d as RegionAvgPool2d
from maskwise.nn.regions.pool import RegionMaxPool2d as RegionMaxPool2d

__all__ = ["Incremental", "RegionAvgPool2d", "RegionMaxPool2d", "Regions"]
