"""The packed prefill of decoders: keys and values of kept tokens are written to the padded layout of a cache.

A call that returns a cache computes kept tokens only, and hands each layer's keys and values to the caller's own cache
as the padded call would: (B, H, L, D), with 0 where a token is dropped. What reads the cache afterwards, generation for
one, goes on as it does without `mw.unpad`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from maskwise.models.adapter import UnsupportedModelError
from maskwise.models.hugging_face.layout import Layout, flat, tokens_of
from maskwise.models.routes import Padded

__all__ = ["cached", "fills_cache", "new_cache", "packed_cache", "padding_of", "prefill_reason"]


def fills_cache(module: Any, named: dict[str, Any], *, labelled: bool, by_caller: bool = True) -> bool:
    """Whether a call of a decoder returns a cache.

    One that no argument requests is left out where nothing reads it: in training, and beside a loss.

    Args:
        module: the decoder.
        named: the arguments of its call.
        labelled: whether the call computes a loss.
        by_caller: whether ``use_cache`` is the caller's; a model around this one may have read it from its config.
    """
    requested = named.get("use_cache")
    if requested is not None and (by_caller or not requested):
        return bool(requested)
    # A model around this one may hand it an empty cache to fill.
    by_default = named.get("past_key_values") is not None or getattr(module.config, "use_cache", False)
    return bool(by_default and not (labelled or module.training))


def prefill_reason(named: dict[str, Any], *, prefills: bool) -> Padded | None:
    """Why a call that fills a cache must run padded, or None.

    Args:
        named: its arguments.
        prefills: whether the model's cache came out the same in a comparison.
    """
    if not prefills:
        change = "use_cache=False, or model.config.use_cache = False"
        return Padded("it returns a cache that does not hold keys and values for each token", change)
    # Generation hands its own cache to the prefill.
    if named.get("past_key_values") is not None and not bool(named["attention_mask"][:, -1].all()):
        reason = "it returns a cache, and generation goes on from a last token that is dropped"
        return Padded(reason, "padding on the left, or use_cache=False where nothing is generated")
    return None


def padding_of(module: Any, named: dict[str, Any]) -> Tensor | None:
    """The (B, L) mask from which generation made masks of pairs, as it does for a cache of fixed size.

    Args:
        module: a decoder.
        named: the arguments of a call that begins to fill a cache.

    Returns:
        None where there are no such masks, or where they hold more than that.
    """
    cache: Any = named.get("past_key_values")
    given, tokens = named.get("attention_mask"), tokens_of(named)
    masks: dict[str, Any] = given if isinstance(given, dict) else {"": given}
    if not getattr(cache, "is_compileable", False) or not isinstance(tokens, Tensor) or int(cache.get_seq_length()):
        return None
    first, length = next(iter(masks.values()), None), tokens.shape[1]
    if not isinstance(first, Tensor) or first.dim() != 4 or first.shape[:3] != (tokens.shape[0], 1, length):
        return None
    from transformers.masking_utils import create_masks_for_generate

    seen = first[:, 0, :, :length].diagonal(0, 1, 2)
    keep = (seen if seen.dtype is torch.bool else seen == 0).long()
    made = create_masks_for_generate(
        config=module.config,
        inputs_embeds=torch.empty((*tokens.shape[:2], 0), dtype=module.dtype, device=tokens.device),
        attention_mask=keep,
        past_key_values=cache,
        position_ids=named.get("position_ids"),
    )
    made = made if isinstance(made, dict) else {"": made}
    if made.keys() != masks.keys():
        return None
    is_same = all(isinstance(each, Tensor) and torch.equal(each, masks[kind]) for kind, each in made.items())
    return keep if is_same else None


def new_cache(module: Any) -> Any:
    """The cache that a decoder makes for itself."""
    from transformers import DynamicCache

    return DynamicCache(config=module.config)


def packed_cache(cache: Any, layout: Layout) -> Any:
    """What layers of a packed call take for an empty cache; it fills the one that is given."""
    return _class()(cache, layout)


@cache
def _class() -> Any:
    from transformers import Cache

    class PackedCache(Cache):  # type: ignore[misc]
        """Writes packed keys and values to a cache of the padded layout, and gives them back packed."""

        def __init__(self, cache: Any, layout: Layout) -> None:
            # Not that of Cache, which makes layers: those of the other one are filled.
            self.cache, self.layout = cache, layout

        @property
        def layers(self) -> Any:
            return self.cache.layers

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            padded = (self._padded(each) for each in (key_states, value_states))
            self.cache.update(*padded, layer_idx, *args, **kwargs)
            return key_states, value_states

        def _padded(self, x: Tensor) -> Tensor:
            """(rows, H, width, D) to (B, H, L, D)."""
            packing = self.layout.packing
            return packing.unpack(flat(x.transpose(1, 2), packing.tokens)).transpose(1, 2)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return query_length, 0

        def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
            return False

        @property
        def is_compileable(self) -> bool:
            return False

        def _state(self, *args: Any, **kwargs: Any) -> Any:
            raise UnsupportedModelError("its cache holds states of sequences, not of tokens")

        update_conv_state = update_recurrent_state = update_indexer = _state

    return PackedCache


def cached(cache: Any, keep: Tensor) -> dict[str, Tensor]:
    """The keys and values of kept tokens in a cache, (N, H, D) each, by layer."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            x = getattr(layer, name, None)
            if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[0] != keep.shape[0]:
                return {}
            # A window holds the last tokens alone.
            found[f"{name}.{index}"] = x.transpose(1, 2)[keep[:, -x.shape[2] :]]
    return found
