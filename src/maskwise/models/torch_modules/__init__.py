"""The adapters of torch's own modules."""

from __future__ import annotations

from maskwise.models.torch_modules.encoder import EncoderAdapter as EncoderAdapter
from maskwise.models.torch_modules.layer import LayerAdapter as LayerAdapter
from maskwise.models.torch_modules.multihead import MultiheadAdapter as MultiheadAdapter

__all__ = ["EncoderAdapter", "LayerAdapter", "MultiheadAdapter"]
