"""Models: without padding (``mw.unpad``), and with only the weights that are kept (``mw.compress``)."""

from __future__ import annotations

from maskwise.models.adapter import Adapter as Adapter
from maskwise.models.adapter import UnsupportedModelError as UnsupportedModelError
from maskwise.models.adapter import adapters as adapters
from maskwise.models.adapter import register as register
from maskwise.models.adapter import unregister as unregister
from maskwise.models.compress import CompressionError as CompressionError
from maskwise.models.compress import CompressionReport as CompressionReport
from maskwise.models.compress import FoldedLayerError as FoldedLayerError
from maskwise.models.compress import load_compressed as load_compressed
from maskwise.models.compress import save_compressed as save_compressed
from maskwise.models.hugging_face import HuggingFaceAdapter, TokenwiseAdapter
from maskwise.models.packing import PackedMask as PackedMask
from maskwise.models.packing import Packing as Packing
from maskwise.models.routes import PaddedRunWarning as PaddedRunWarning
from maskwise.models.torch_modules import ADAPTERS
from maskwise.models.unpadding import UnpadReport as UnpadReport
from maskwise.models.unpadding import repad as repad
from maskwise.models.unpadding import report as report
from maskwise.models.unpadding import unpad as unpad

__all__ = [
    "Adapter",
    "CompressionError",
    "CompressionReport",
    "FoldedLayerError",
    "PackedMask",
    "Packing",
    "PaddedRunWarning",
    "UnpadReport",
    "UnsupportedModelError",
    "adapters",
    "load_compressed",
    "register",
    "repad",
    "report",
    "save_compressed",
    "unpad",
    "unregister",
]

for _adapter in (*ADAPTERS, TokenwiseAdapter(), HuggingFaceAdapter()):
    register(_adapter)
