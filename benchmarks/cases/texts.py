"""SentenceTransformer with MiniLM's weights; MiniLM itself and the texts are those of ``maskwise demo``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from maskwise.cli.demo import minilm_path, no_minilm

__all__ = ["no_sentence_transformers", "sentence_encoder"]


def no_sentence_transformers() -> str | None:
    """Say why SentenceTransformer cannot run here, or None when it can."""
    if find_spec("sentence_transformers") is None:
        return "needs sentence_transformers: pip install sentence-transformers"
    return no_minilm()


def sentence_encoder() -> Any:
    """MiniLM as a SentenceTransformer, loaded anew."""
    path = minilm_path()
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(path, device="cpu")
