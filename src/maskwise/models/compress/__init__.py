"""``mw.compress``: make a model with dropped weights faster; and files of compressed models."""

from __future__ import annotations

from maskwise.models.compress.api import compress
from maskwise.models.compress.example import CompressionError
from maskwise.models.compress.files import MissingSafetensorsError, load_compressed, save_compressed
from maskwise.models.compress.guards import FoldedLayerError
from maskwise.models.compress.live_units import LiveConv2d, LiveLinear
from maskwise.models.compress.report import CompressionReport, LayerReport, Measured

__all__ = [
    "CompressionError",
    "CompressionReport",
    "FoldedLayerError",
    "LayerReport",
    "LiveConv2d",
    "LiveLinear",
    "Measured",
    "MissingSafetensorsError",
    "compress",
    "load_compressed",
    "save_compressed",
]
