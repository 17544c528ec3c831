"""What `mw.compress` raises."""

from __future__ import annotations

from maskwise.errors import MaskwiseError

__all__ = ["CompressionError", "MissingSafetensorsError"]


class CompressionError(MaskwiseError, RuntimeError):
    """A compressed model does not do what the model does; the model itself is unchanged."""


class MissingSafetensorsError(MaskwiseError, ImportError):
    """Files of compressed models are safetensors, and that package is not installed."""
