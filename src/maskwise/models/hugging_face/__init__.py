"""Hugging Face models, served through their attention interface. Nothing imports transformers before it is used."""

from __future__ import annotations

from maskwise.models.hugging_face.adapter import HuggingFaceAdapter as HuggingFaceAdapter

__all__ = ["HuggingFaceAdapter"]
