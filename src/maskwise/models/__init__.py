"""Whole models without padding: ``mw.unpad(model)`` and ``mw.models.repad(model)``, and how to serve a new kind."""

from __future__ import annotations

from maskwise.models.adapter import Adapter as Adapter
from maskwise.models.adapter import UnsupportedModelError as UnsupportedModelError
from maskwise.models.adapter import adapters as adapters
from maskwise.models.adapter import register as register
from maskwise.models.adapter import unregister as unregister
from maskwise.models.attention import PackedMask as PackedMask
from maskwise.models.hugging_face import HuggingFaceAdapter
from maskwise.models.packing import Packing as Packing
from maskwise.models.torch_modules import ADAPTERS
from maskwise.models.unpadding import repad as repad
from maskwise.models.unpadding import unpad as unpad

__all__ = [
    "Adapter",
    "PackedMask",
    "Packing",
    "UnsupportedModelError",
    "adapters",
    "register",
    "repad",
    "unpad",
    "unregister",
]

for _adapter in (*ADAPTERS, HuggingFaceAdapter()):
    register(_adapter)
