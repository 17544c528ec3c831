"""DeBERTa: its attention mixes contents and distances in a way that only its own code knows.

So the attention itself runs padded, and everything around it (most of the work: feed-forward, norms, projections of the
output, embeddings) on kept tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from maskwise.models.binding import bind, unbind
from maskwise.models.hugging_face.frames import packing_of
from maskwise.models.hugging_face.layout import flat, folded
from maskwise.models.packing import Packing

__all__ = ["knows", "patch", "unpatch"]


@dataclass(frozen=True, eq=False)
class PaddedMask:
    """The model's own (B, 1, L, L) mask, carried through layers whose tokens are packed."""

    packing: Packing
    mask: Tensor


def knows(base: Any) -> bool:
    """Whether this is a DeBERTa of either version."""
    return any(kind.__name__ in {"DebertaModel", "DebertaV2Model"} for kind in type(base).__mro__)


def patch(base: Any) -> None:
    """Let the encoder make masks and distances for the padded layout, and the attention unpack for its own."""
    encoder = base.encoder
    bind(encoder, "get_attention_mask", attention_mask)
    bind(encoder, "get_rel_pos", relative_positions)
    for layer in encoder.layer:
        bind(layer.attention.self, "forward", attention)
    if getattr(encoder, "conv", None) is not None:
        bind(encoder.conv, "forward", convolution)


def unpatch(base: Any) -> None:
    """Undo `patch`, as far as it came."""
    encoder = base.encoder
    for name in ("get_attention_mask", "get_rel_pos"):
        unbind(encoder, name)
    for layer in encoder.layer:
        unbind(layer.attention.self, "forward")
    if getattr(encoder, "conv", None) is not None:
        unbind(encoder.conv, "forward")


def attention_mask(self: Any, attention_mask: Tensor) -> Any:
    """What layers are handed as their mask."""
    packing = packing_of()
    if packing is None:
        return type(self).get_attention_mask(self, attention_mask)
    padded = type(self).get_attention_mask(self, _keys(packing).to(attention_mask.dtype))
    return PaddedMask(packing, padded)


def relative_positions(self: Any, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None) -> Any:
    """The distances between all columns."""
    packing = packing_of()
    like = hidden_states if packing is None else hidden_states.new_empty((*packing.keep.shape, 0))
    return type(self).get_rel_pos(self, like, query_states, relative_pos)


def attention(self: Any, hidden_states: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own attention, in the padded layout."""
    if not isinstance(attention_mask, PaddedMask):
        return type(self).forward(self, hidden_states, attention_mask, *args, **kwargs)
    packing = attention_mask.packing
    padded = packing.unpack(flat(hidden_states, packing.tokens))
    out, weights = type(self).forward(self, padded, attention_mask.mask, *args, **kwargs)
    return folded(packing.pack(out), *hidden_states.shape[:2]), weights


def convolution(self: Any, hidden_states: Tensor, residual_states: Tensor, input_mask: Tensor) -> Tensor:
    """The model's own convolution, in the padded layout: it reads neighbours, which are zero where padded."""
    packing = packing_of()
    if packing is None:
        out: Tensor = type(self).forward(self, hidden_states, residual_states, input_mask)
        return out
    padded = (packing.unpack(flat(each, packing.tokens)) for each in (hidden_states, residual_states))
    out = type(self).forward(self, *padded, _keys(packing).to(input_mask.dtype))
    return folded(packing.pack(out), *hidden_states.shape[:2])


def _keys(packing: Packing) -> Tensor:
    """What may be seen: what is computed, without the first tokens that are only watched."""
    keys = packing.keep
    if packing.watched:
        keys = keys.clone()
        keys[sorted(packing.watched), 0] = False
    return keys
