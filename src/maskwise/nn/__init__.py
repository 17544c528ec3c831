"""Layers with a mask: norms and pools that padding does not spoil, and weights of which only some are kept."""

from __future__ import annotations

from maskwise.nn import gates as gates
from maskwise.nn import schedule as schedule
from maskwise.nn.attaching import attach as attach
from maskwise.nn.attaching import detach as detach
from maskwise.nn.conv import MaskedConv2d as MaskedConv2d
from maskwise.nn.conv import RegionConv1d as RegionConv1d
from maskwise.nn.conv import RegionConv2d as RegionConv2d
from maskwise.nn.kept_head import full_head as full_head
from maskwise.nn.kept_head import kept_head as kept_head
from maskwise.nn.linear import MaskedLinear as MaskedLinear
from maskwise.nn.norm import MaskedBatchNorm1d as MaskedBatchNorm1d
from maskwise.nn.norm import MaskedBatchNorm2d as MaskedBatchNorm2d
from maskwise.nn.norm import MaskedBatchNorm3d as MaskedBatchNorm3d
from maskwise.nn.norm import MaskedGroupNorm as MaskedGroupNorm
from maskwise.nn.norm import MaskedInstanceNorm1d as MaskedInstanceNorm1d
from maskwise.nn.norm import MaskedLayerNorm as MaskedLayerNorm
from maskwise.nn.pool import MaskedAttentionPool as MaskedAttentionPool
from maskwise.nn.pool import MaskedMaxPool as MaskedMaxPool
from maskwise.nn.pool import MaskedMeanPool as MaskedMeanPool
from maskwise.nn.pruning import prune as prune
from maskwise.nn.pruning import report as report
from maskwise.nn.pruning import reselect as reselect
from maskwise.nn.regions import Incremental as Incremental
from maskwise.nn.regions import RegionAvgPool2d as RegionAvgPool2d
from maskwise.nn.regions import RegionMaxPool2d as RegionMaxPool2d
from maskwise.nn.regions import Regions as Regions
from maskwise.nn.rewire import SET as SET
from maskwise.nn.rewire import RigL as RigL
from maskwise.nn.sequential import masked as masked
from maskwise.nn.sparse_linear import SparseLinear as SparseLinear
from maskwise.nn.sync_norm import SyncMaskedBatchNorm1d as SyncMaskedBatchNorm1d
from maskwise.nn.sync_norm import SyncMaskedBatchNorm2d as SyncMaskedBatchNorm2d
from maskwise.nn.sync_norm import SyncMaskedBatchNorm3d as SyncMaskedBatchNorm3d
from maskwise.nn.sync_norm import convert_sync_masked as convert_sync_masked

__all__ = [
    "SET",
    "Incremental",
    "MaskedAttentionPool",
    "MaskedBatchNorm1d",
    "MaskedBatchNorm2d",
    "MaskedBatchNorm3d",
    "MaskedConv2d",
    "MaskedGroupNorm",
    "MaskedInstanceNorm1d",
    "MaskedLayerNorm",
    "MaskedLinear",
    "MaskedMaxPool",
    "MaskedMeanPool",
    "RegionAvgPool2d",
    "RegionConv1d",
    "RegionConv2d",
    "RegionMaxPool2d",
    "Regions",
    "RigL",
    "SparseLinear",
    "SyncMaskedBatchNorm1d",
    "SyncMaskedBatchNorm2d",
    "SyncMaskedBatchNorm3d",
    "attach",
    "convert_sync_masked",
    "detach",
    "full_head",
    "gates",
    "kept_head",
    "masked",
    "prune",
    "report",
    "reselect",
    "schedule",
]
