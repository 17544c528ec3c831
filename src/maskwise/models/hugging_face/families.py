"""Families of Hugging Face models of which a packed call replaces methods: attention, positions, biases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.hugging_face.attention import NO_BIAS
from maskwise.models.hugging_face.calls import packing_of, running
from maskwise.models.hugging_face.layout import flat, folded, takes
from maskwise.models.packing import PackedMask, Packing
from maskwise.nn.binding import bind, unbind
from maskwise.ops.attention import RelativeBias

__all__ = ["Family", "families_of", "is_eager", "patch", "unpatch"]

Methods = Iterable[tuple[nn.Module, str, Callable[..., Any]]]


@dataclass(frozen=True)
class Family:
    """Models that are served by replacing methods of their own.

    Attributes:
        serves: whether a model is one of them.
        methods: what is replaced: modules, the names of their methods, and the function that wraps each.
        eager: whether a query that finds no key reads dropped ones, for any attention in the config.
        attends: whether their attention does not go through transformers' interface.
    """

    serves: Callable[[Any], bool]
    methods: Callable[[Any], Methods]
    eager: bool = False
    attends: bool = False


def families_of(base: Any) -> list[Family]:
    """The families that a model belongs to."""
    return [family for family in FAMILIES if family.serves(base)]


def is_eager(base: Any) -> bool:
    """Whether a query that finds no key reads dropped ones, for any attention in the config."""
    return any(family.eager for family in families_of(base))


def patch(base: Any) -> None:
    """Replace the methods."""
    for family in families_of(base):
        for module, name, function in family.methods(base):
            bind(module, name, function)


def unpatch(base: Any) -> None:
    """Undo `patch`, as far as it came."""
    for family in families_of(base):
        for module, name, _ in family.methods(base):
            unbind(module, name)


def _is_named(names: frozenset[str], base: Any) -> bool:
    return not names.isdisjoint(kind.__name__ for kind in type(base).__mro__)


# Models without position_ids that have a module of positions: BART, Marian, Pegasus, M2M100 and their like.
def _has_positions(base: Any) -> bool:
    return not takes(base, "position_ids") and isinstance(getattr(base, "embed_positions", None), nn.Module)


def _position_methods(base: Any) -> Methods:
    yield base.embed_positions, "forward", padded_positions


def padded_positions(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The embedded positions of the padded batch, of kept tokens; the module counts them as it does."""
    frame = running()
    layout = None if frame is None else frame.layout
    forward = type(self).forward
    if frame is None or layout is None:
        return forward(self, *args, **kwargs)
    shape = layout.packing.keep.shape

    def padded(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and tuple(value[:2]) == (layout.rows, layout.width):
            return torch.Size((*shape, *value[2:]))
        if not isinstance(value, Tensor):
            return value
        if value.shape == (layout.width,) and not value.is_floating_point():
            return torch.arange(shape[1], device=value.device)
        if not layout.holds(value):
            return value
        # What stands in dropped places may decide how kept ones are numbered.
        return frame.ids if frame.ids is not None and not value.is_floating_point() else layout.unfold(value)

    out = forward(self, *map(padded, args), **{name: padded(value) for name, value in kwargs.items()})
    return layout.fold(out.expand(*shape, out.shape[-1]))


# T5 and its like: a learned bias for the distance of two tokens, which the first layer makes for all.
def _relative_methods(base: Any) -> Methods:
    for module in base.modules():
        if hasattr(module, "has_relative_attention_bias") and takes(module, "position_bias"):
            yield module, "forward", relative_attention
        elif type(module).__name__ == "UMT5Attention":
            yield module, "forward", umt5_attention


def _has_relative_attention(base: Any) -> bool:
    return next(iter(_relative_methods(base)), None) is not None


def relative_attention(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The attention block, on packed tokens with a bias that knows its structure."""
    mask = kwargs.get("mask", args[0] if args else None)
    if isinstance(mask, PackedMask) and kwargs.get("position_bias") is None:
        kwargs["position_bias"] = _bias_by_distance(self, mask) if self.has_relative_attention_bias else NO_BIAS
    return type(self).forward(self, hidden_states, *args, **kwargs)


def umt5_attention(
    self: Any,
    hidden_states: Tensor,  # (rows, width, D)
    encoder_hidden_states: Tensor | None = None,  # (rows, key width, D)
    past_key_values: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """The attention block on packed tokens, which would make a bias of all pairs in every layer."""
    if not isinstance(attention_mask, PackedMask):
        given = hidden_states, encoder_hidden_states, past_key_values, attention_mask
        return type(self).forward(self, *given, **kwargs)
    source, keys = hidden_states, attention_mask.packing
    if encoder_hidden_states is not None:
        assert attention_mask.keys is not None
        source, keys = encoder_hidden_states, attention_mask.keys
    q = self.q(flat(hidden_states, attention_mask.packing.tokens))
    k, v = (project(flat(source, keys.tokens)) for project in (self.k, self.v))
    q, k, v = (x.unflatten(-1, (self.n_heads, self.key_value_proj_dim)) for x in (q, k, v))
    out = attention_mask.attend(
        q,
        k,
        v,
        dropout_p=self.dropout if self.training else 0.0,
        scale=self.scaling,
        bias=_bias_by_distance(self, attention_mask) if self.has_relative_attention_bias else None,
    )
    return folded(self.o(out.flatten(1)), *hidden_states.shape[:2]), None


def _bias_by_distance(attention: Any, mask: PackedMask) -> RelativeBias:
    """The bias of one query that is as far from the first key as from the last: one value for each distance."""
    length = mask.packing.keep.shape[1]
    device = attention.relative_attention_bias.weight.device
    by_distance: Tensor = attention.compute_bias(1, 2 * length - 1, device=device, past_seen_tokens=length - 1)
    return RelativeBias(by_distance[0, :, 0].mT, bucket=partial(torch.add, other=length - 1))


# MPNet: its attention adds a learned bias for the distance of two tokens.
def _mpnet_methods(base: Any) -> Methods:
    yield base.encoder, "compute_position_bias", mpnet_position_bias
    for layer in base.encoder.layer:
        yield layer.attention.attn, "forward", mpnet_attention


def mpnet_position_bias(self: Any, x: Tensor, position_ids: Any = None, num_buckets: int = 32) -> Tensor:
    """The bias between all columns, (1, H, L, L), however many tokens are packed."""
    packing = packing_of()
    like = x if packing is None else x.new_empty((1, packing.keep.shape[1], 0))
    bias: Tensor = type(self).compute_position_bias(self, like, position_ids, num_buckets)
    return bias


def mpnet_attention(
    self: Any,
    hidden_states: Tensor,  # (rows, width, D)
    attention_mask: Any = None,
    position_bias: Tensor | None = None,  # (1, H, L, L)
    output_attentions: bool = False,
    **kwargs: Any,
) -> Any:
    """The attention block on packed tokens; on padded ones, the model's own."""
    if not isinstance(attention_mask, PackedMask):
        return type(self).forward(self, hidden_states, attention_mask, position_bias, output_attentions, **kwargs)
    x = flat(hidden_states, attention_mask.packing.tokens)
    q, k, v = (project(x).view(x.shape[0], self.num_attention_heads, -1) for project in (self.q, self.k, self.v))
    bias = None if position_bias is None else position_bias[0]
    out = attention_mask.attend(q, k, v, dropout_p=self.dropout.p if self.training else 0.0, bias=bias)
    return (folded(self.o(out.flatten(1)), *hidden_states.shape[:2]),)


# DeBERTa: its attention mixes contents and distances as only its own code does. So the attention itself runs padded,
# and everything around it (most of the work: feed-forward, norms, output projections, embeddings) on kept tokens only.
@dataclass(frozen=True, eq=False)
class PaddedMask:
    """The model's own (B, 1, L, L) mask, carried through layers whose tokens are packed."""

    packing: Packing
    mask: Tensor


def _deberta_methods(base: Any) -> Methods:
    encoder = base.encoder
    yield encoder, "get_attention_mask", deberta_attention_mask
    yield encoder, "get_rel_pos", deberta_relative_positions
    for layer in encoder.layer:
        yield layer.attention.self, "forward", deberta_attention
    if getattr(encoder, "conv", None) is not None:
        yield encoder.conv, "forward", deberta_convolution


def deberta_attention_mask(self: Any, attention_mask: Tensor) -> Any:
    """What layers get as their mask."""
    packing = packing_of()
    if packing is None:
        return type(self).get_attention_mask(self, attention_mask)
    padded = type(self).get_attention_mask(self, _keys(packing).to(attention_mask.dtype))
    return PaddedMask(packing, padded)


def deberta_relative_positions(
    self: Any, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None
) -> Any:
    """The distances between all columns."""
    packing = packing_of()
    like = hidden_states if packing is None else hidden_states.new_empty((*packing.keep.shape, 0))
    return type(self).get_rel_pos(self, like, query_states, relative_pos)


def deberta_attention(self: Any, hidden_states: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own attention, in the padded layout."""
    if not isinstance(attention_mask, PaddedMask):
        return type(self).forward(self, hidden_states, attention_mask, *args, **kwargs)
    packing = attention_mask.packing
    padded = packing.unpack(flat(hidden_states, packing.tokens))
    out, weights = type(self).forward(self, padded, attention_mask.mask, *args, **kwargs)
    return folded(packing.pack(out), *hidden_states.shape[:2]), weights


def deberta_convolution(self: Any, hidden_states: Tensor, residual_states: Tensor, input_mask: Tensor) -> Tensor:
    """The model's own convolution, in the padded layout: it reads neighbours, which are zero where padded."""
    packing = packing_of()
    if packing is None:
        out: Tensor = type(self).forward(self, hidden_states, residual_states, input_mask)
        return out
    padded = (packing.unpack(flat(each, packing.tokens)) for each in (hidden_states, residual_states))
    out = type(self).forward(self, *padded, _keys(packing).to(input_mask.dtype))
    return folded(packing.pack(out), *hidden_states.shape[:2])


def _keys(packing: Packing) -> Tensor:
    """What attention may read: what is computed, without the first tokens that are queries only."""
    keys = packing.keep
    if packing.watched:
        keys = keys.clone()
        keys[sorted(packing.watched), 0] = False
    return keys


MPNET, DEBERTA = frozenset({"MPNetModel"}), frozenset({"DebertaModel", "DebertaV2Model"})
FAMILIES = (
    Family(partial(_is_named, MPNET), _mpnet_methods, eager=True, attends=True),
    Family(partial(_is_named, DEBERTA), _deberta_methods, attends=True),
    Family(_has_positions, _position_methods),
    Family(_has_relative_attention, _relative_methods, eager=True),
)
