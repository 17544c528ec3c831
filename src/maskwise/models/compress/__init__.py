"""``mw.compress``: what is dropped of a model's weights becomes speed; and files of what comes out."""

from __future__ import annotations

from maskwise.models.compress.api import compress as compress
from maskwise.models.compress.files import load_compressed as load_compressed
from maskwise.models.compress.files import save_compressed as save_compressed
from maskwise.models.compress.live_units import LiveConv2d as LiveConv2d
from maskwise.models.compress.live_units import LiveLinear as LiveLinear
from maskwise.models.compress.problems import CompressionError as CompressionError
from maskwise.models.compress.problems import FoldedLayerError as FoldedLayerError
from maskwise.models.compress.problems import MissingSafetensorsError as MissingSafetensorsError
from maskwise.models.compress.report import CompressionReport as CompressionReport
from maskwise.models.compress.report import LayerReport as LayerReport
from maskwise.models.compress.report import Measured as Measured

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
