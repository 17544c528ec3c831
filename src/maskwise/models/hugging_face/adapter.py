"""The adapter of Hugging Face models: encoders, and decoders that score without a cache."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import nn

from maskwise.models.hugging_face import deberta, mpnet
from maskwise.models.hugging_face.forwards import Settings, cover, uncover
from maskwise.models.hugging_face.inputs import padding_aware_embeddings, takes
from maskwise.models.hugging_face.interface import ORIGINALS, PREFIX, register_for
from maskwise.models.hugging_face.probe import probe

__all__ = ["HuggingFaceAdapter"]

SPECIAL = (mpnet, deberta)
"""Families whose attention does not go through the interface: each module patches what its family needs."""


def base_of(model: Any) -> Any:
    """The model without its head."""
    return model.base_model


def special(base: Any) -> Any:
    """The module that knows this family, or None."""
    return next((family for family in SPECIAL if family.knows(base)), None)


class HuggingFaceAdapter:
    """Serves a ``transformers.PreTrainedModel`` whose attention goes through ``transformers.AttentionInterface``.

    The kept tokens become one sequence of all of them, each with the position that it had; a registered attention
    function lets each see only its own sequence. Nothing else in such a model looks at more than one token; that this
    is so is tried, on a small batch, before the model is touched for good.
    """

    name = "transformers"

    def serves(self, module: nn.Module) -> tuple[bool, str]:
        """Any with attention_mask and position_ids whose attention goes through the interface."""
        transformers: Any = sys.modules.get("transformers.modeling_utils")
        # A model of transformers cannot be here before transformers is.
        if transformers is None or not isinstance(module, transformers.PreTrainedModel):
            return False, ""
        base = base_of(module)
        if getattr(base.config, "is_encoder_decoder", False):
            return False, "an encoder-decoder attends across two sequences"
        for argument in ("input_ids", "attention_mask", "position_ids"):
            if not takes(base, argument):
                return False, f"{type(base).__name__}.forward takes no {argument}"
        implementation = base.config._attn_implementation or "eager"
        if implementation not in ORIGINALS:
            return False, f"its attention is {implementation!r}; model.set_attn_implementation('sdpa') can be served"
        if special(base) is None and not hasattr(sys.modules[type(base).__module__], "ALL_ATTENTION_FUNCTIONS"):
            return False, "its attention does not go through transformers.AttentionInterface"
        return True, ""

    def install(self, module: nn.Module) -> None:
        """Register the attention, cover the forwards, and try it."""
        base = base_of(module)
        name = register_for(base.config._attn_implementation or "eager")
        base.config._attn_implementation = name
        causal = any(getattr(child, "is_causal", False) for child in base.modules())
        if (family := special(base)) is not None:
            family.patch(base)
        try:
            settings = Settings(name, causal, padding_aware_embeddings(base), watches_first=True)
            cover(module, base, settings)
            if not probe(base, causal=causal):
                uncover(module)
                cover(module, base, replace(settings, watches_first=False))
        except BaseException:
            self.undo(module)
            raise

    def undo(self, module: nn.Module) -> None:
        """Uncover the forwards, and give the attention its name back."""
        base = base_of(module)
        uncover(module)
        base.config._attn_implementation = base.config._attn_implementation.removeprefix(PREFIX)
        if (family := special(base)) is not None:
            family.unpatch(base)
