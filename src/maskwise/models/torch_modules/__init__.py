"""The adapters of torch's own modules."""

from __future__ import annotations

from maskwise.models.torch_modules import encoder, layer, multihead

__all__ = ["ADAPTERS"]

ADAPTERS = (multihead.adapter, layer.adapter, encoder.adapter)
"""In the order of registration: the outermost, which is asked first, comes last."""
