"""What `mw.compress` raises."""

from __future__ import annotations

from maskwise.errors import MaskwiseError

__all__ = ["CompressionError", "FoldedLayerError", "MissingSafetensorsError"]


class CompressionError(MaskwiseError, RuntimeError):
    """A compressed model does not do what the model does; the model itself is unchanged."""


class FoldedLayerError(CompressionError, AttributeError):
    """A layer without the units that only its neighbour reads is used from elsewhere."""


class MissingSafetensorsError(MaskwiseError, ImportError):
    """Files of compressed models are safetensors, and that package is not installed."""
