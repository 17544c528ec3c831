"""The adapter of Hugging Face models: encoders, and decoders that score without a cache."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from maskwise.models.adapter import UnsupportedModelError
from maskwise.models.hugging_face.attention import ORIGINALS, of_home, register_for
from maskwise.models.hugging_face.calls import PREFIX, STATE, State, packed_parts, state_of
from maskwise.models.hugging_face.families import families_of, is_eager, patch, unpatch
from maskwise.models.hugging_face.forwards import cover, uncover
from maskwise.models.hugging_face.layout import not_taken, padding_aware_embeddings, takes
from maskwise.models.hugging_face.probe import check, mixing_module, shared_capacity

__all__ = ["HuggingFaceAdapter"]


def implementation(config: Any) -> str:
    """The attention that a config names, or that is behind ours."""
    return (config._attn_implementation or "eager").removeprefix(PREFIX)


class HuggingFaceAdapter:
    """Serves a ``transformers.PreTrainedModel`` whose attention goes through ``transformers.AttentionInterface``.

    The kept tokens become rows of one long sequence, each with the position that it had; a registered attention
    function lets each see only its own sequence. That nothing else in the model looks at more than one token is
    checked on a small batch before the model is changed for good.
    """

    name = "transformers"

    def serves(self, module: nn.Module) -> tuple[bool, str]:
        """Any with attention_mask and position_ids whose attention goes through the interface."""
        if not is_pretrained(module):
            return False, ""
        base: Any = module.base_model
        if is_pair(base):
            # Its encoder and its decoder are served, each by itself.
            return False, ""
        for argument in ("input_ids", "attention_mask"):
            if not takes(base, argument):
                return False, not_taken(base, argument)
        if any(self.serves(each)[0] for each in base.modules() if each is not base and is_pretrained(each)):
            # Which has its own reasons.
            return False, ""
        if (name := implementation(base.config)) not in ORIGINALS:
            return False, f"its attention is {name!r}; model.set_attn_implementation('sdpa') is supported"
        if not _attends(base) and of_home(base, "ALL_ATTENTION_FUNCTIONS") is None:
            return False, "its attention does not go through transformers.AttentionInterface"
        return True, ""

    def install(self, module: nn.Module) -> None:
        """Register the attention, cover the forwards, and compare."""
        base: Any = module.base_model
        if STATE in vars(base):
            # Unpadded by itself before, or the trunk of another head too.
            self.enclose(module)
            return
        for config in _configs(base):
            if (original := implementation(config)) in ORIGINALS:
                config._attn_implementation = {"": register_for(original)}
        patch(base)
        try:
            cover(base, _state(base))
            if (reason := shared_capacity(base)) is None:
                reason = _why_mixing(base) if base.device.type == "meta" else check(base)
            if reason is not None:
                raise UnsupportedModelError(reason)
            if module is not base:
                self.enclose(module)
        except BaseException:
            _restore(base)
            self.undo(module)
            raise

    def enclose(self, module: Any) -> bool:
        """Watch what a model reads that holds served ones, its labels for one; whether there is something to watch."""
        if not is_pretrained(module):
            return False
        parts = packed_parts(module)
        if is_pair(module):
            _check_stacks(module)
        if not parts and takes(module, "input_ids") and takes(module, "attention_mask"):
            raise UnsupportedModelError("no module that takes its attention_mask is supported")
        if not parts:
            return False
        cover(module, State(state_of(parts[0]).implementation, base=False))
        try:
            reason = None if module.device.type == "meta" else check(module)
            if reason is not None:
                raise UnsupportedModelError(reason)
        except BaseException:
            uncover(module)
            raise
        return True

    def undo(self, module: nn.Module) -> None:
        """Uncover the forwards, and give the attention its name back."""
        for each in packed_parts(module):
            _restore(each)
        for each in module.modules():
            uncover(each)


def is_pretrained(module: nn.Module) -> bool:
    """Whether this is a model of transformers, which cannot be here before transformers is."""
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _why_mixing(base: Any) -> str | None:
    """Why a model without weights cannot be served: a module in it mixes tokens; None without one."""
    inner = tuple(f"{path}." for path, each in base.named_modules() if path and is_pretrained(each))
    return None if _attends(base) else mixing_module(base, inner)


def is_pair(model: nn.Module) -> bool:
    """Whether this is an encoder and a decoder, which attends to the encoder's output."""
    return takes(model, "decoder_input_ids")


def _check_stacks(pair: Any) -> None:
    """Raise where not all parts of an encoder-decoder that read text run packed: another adapter may serve more."""
    if (reason := shared_capacity(pair)) is not None:
        raise UnsupportedModelError(reason)
    for path, child in pair.named_children():
        if is_pretrained(child) and takes(child, "input_ids") and not packed_parts(child):
            raise UnsupportedModelError(f"its {path} does not run packed")


def _attends(base: nn.Module) -> bool:
    """Whether a model's attention is replaced, since it does not go through the interface."""
    return any(family.attends for family in families_of(base))


def _state(base: Any) -> State:
    ropes = {kind for each in base.modules() for kind in _names(getattr(each, "rope_type", None))}
    windows = any(getattr(base.config, each, None) for each in ("sliding_window", "local_attention", "layer_types"))
    eager = implementation(base.config) == "eager" or is_eager(base)
    return State(
        base.config._attn_implementation,
        base=True,
        causal=any(getattr(child, "is_causal", False) for child in base.modules()),
        embeddings=padding_aware_embeddings(base),
        limit=getattr(base.config, "max_position_embeddings", None),
        # Frequencies that depend on the last position, dropped or not, find it in a place of its own.
        spare=int(any("dynamic" in each or each == "longrope" for each in ropes)),
        eager=eager,
        empty_windows=eager and windows,
    )


def _restore(base: nn.Module) -> None:
    """Give the attention of a model its name back, and its modules their methods."""
    for config in _configs(base):
        config._attn_implementation = {"": implementation(config)}
    unpatch(base)


def _configs(base: nn.Module) -> list[Any]:
    """The configs that a model and its layers read: not always the same object."""
    found = (getattr(each, "config", None) for each in base.modules())
    return list({id(each): each for each in found if hasattr(each, "_attn_implementation")}.values())


def _names(rope_type: Any) -> list[str]:
    return list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type] if rope_type else []
