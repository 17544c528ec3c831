"""Layers that padding spoils, with a mask: torch's own, whose statistics count only what is kept."""

from __future__ import annotations

from maskwise.nn.batch_norm import MaskedBatchNorm1d as MaskedBatchNorm1d
from maskwise.nn.batch_norm import MaskedBatchNorm2d as MaskedBatchNorm2d
from maskwise.nn.instance_norm import MaskedInstanceNorm1d as MaskedInstanceNorm1d
from maskwise.nn.layer_norm import MaskedLayerNorm as MaskedLayerNorm
from maskwise.nn.pool import MaskedAttentionPool as MaskedAttentionPool
from maskwise.nn.pool import MaskedMaxPool as MaskedMaxPool
from maskwise.nn.pool import MaskedMeanPool as MaskedMeanPool
from maskwise.nn.rewire import SET as SET
from maskwise.nn.rewire import RigL as RigL
from maskwise.nn.sparse_linear import SparseLinear as SparseLinear

__all__ = [
    "SET",
    "MaskedAttentionPool",
    "MaskedBatchNorm1d",
    "MaskedBatchNorm2d",
    "MaskedInstanceNorm1d",
    "MaskedLayerNorm",
    "MaskedMaxPool",
    "MaskedMeanPool",
    "RigL",
    "SparseLinear",
]
