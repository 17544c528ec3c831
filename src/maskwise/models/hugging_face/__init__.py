"""Hugging Face models, served through their attention interface. Nothing imports transformers before it is used.

``attn_implementation="maskwise"`` is known to transformers once this is imported.
"""

from __future__ import annotations

from maskwise.models.hugging_face.adapter import HuggingFaceAdapter as HuggingFaceAdapter
from maskwise.models.hugging_face.interface import register_when_imported
from maskwise.models.hugging_face.tokenwise import TokenwiseAdapter as TokenwiseAdapter

__all__ = ["HuggingFaceAdapter", "TokenwiseAdapter"]

register_when_imported()
