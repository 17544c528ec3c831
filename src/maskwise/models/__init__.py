"""Models: without padding (``mw.unpad``), with kept weights only (``mw.compress``), and audited (``mw.audit``)."""

from __future__ import annotations

from maskwise.models.adapter import Adapter as Adapter
from maskwise.models.adapter import UnsupportedModelError as UnsupportedModelError
from maskwise.models.adapter import adapters as adapters
from maskwise.models.adapter import register as register
from maskwise.models.adapter import unregister as unregister
from maskwise.models.audit import Audit as Audit
from maskwise.models.audit import Denominator as Denominator
from maskwise.models.audit import Leak as Leak
from maskwise.models.audit import LightningAudit as LightningAudit
from maskwise.models.audit import Optimization as Optimization
from maskwise.models.audit import Rewrite as Rewrite
from maskwise.models.audit import TrainerAudit as TrainerAudit
from maskwise.models.audit import Waste as Waste
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
    "Audit",
    "CompressionError",
    "CompressionReport",
    "Denominator",
    "FoldedLayerError",
    "Leak",
    "LightningAudit",
    "Optimization",
    "PackedMask",
    "Packing",
    "PaddedRunWarning",
    "Rewrite",
    "TrainerAudit",
    "UnpadReport",
    "UnsupportedModelError",
    "Waste",
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
