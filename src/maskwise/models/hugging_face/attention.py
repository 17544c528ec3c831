"""Attention in packed calls of Hugging Face models: through transformers' interfaces, or in families without them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.adapter import UnsupportedModelError
from maskwise.models.hugging_face.calls import PREFIX, packing_of
from maskwise.models.hugging_face.layout import flat, folded
from maskwise.models.packing import PackedMask, Packing
from maskwise.nn.binding import bind, unbind

__all__ = ["ORIGINALS", "Family", "attention", "family_of", "of_home", "register_for"]


# -- the attention function and the mask function that transformers calls by name --------------------------------------
ORIGINALS = ("sdpa", "eager")
UNSERVED = ("position_bias", "softcap", "s_aux")
"""What a layer may request of its attention beyond scaled dot products; a packed call does not do these."""


def register_for(original: str) -> str:
    """Register both functions, once for each original, and return the name under which a config refers to them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = PREFIX + original
    AttentionInterface.register(name, partial(attention, original))
    AttentionMaskInterface.register(name, partial(mask, original))
    return name


def of_home(module: nn.Module, name: str) -> Any:
    """What the file that defines a module's class, or one that it extends, calls by this name; None without such."""
    homes = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return next((found for home in homes if (found := getattr(home, name, None)) is not None), None)


def attention(
    original: str,
    module: nn.Module,
    query: Tensor,  # (rows, H, width, D)
    key: Tensor,  # (rows, Hkv, width, D)
    value: Tensor,  # (rows, Hkv, width, D)
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend within each sequence where the mask is a packed one; else as the original does."""
    if not isinstance(attention_mask, PackedMask):
        if packing_of() is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} takes its mask from elsewhere than transformers' mask interface. "
                "Hint: mw.models.repad(model)."
            )
        padded = _original_attention(original, module)
        result: tuple[Tensor, Tensor | None] = padded(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    if requested := [each for each in UNSERVED if kwargs.get(each) is not None]:
        raise UnsupportedModelError(
            f"{type(module).__name__} requests {', '.join(requested)} of its attention. Hint: mw.models.repad(model)."
        )
    rows, _, width, _ = query.shape
    q, k, v = (flat(each.transpose(1, 2), attention_mask.packing.tokens) for each in (query, key, value))
    out = attention_mask.attend(q, k, v, dropout_p=dropout, scale=scaling)
    return folded(out, rows, width), None


def mask(original: str, **kwargs: Any) -> Any:
    """A `PackedMask` while a packed call runs; else what the original builds."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    packing = packing_of()
    if packing is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[original](**kwargs)
    return _packed_mask(packing, kwargs["mask_function"])


def _packed_mask(packing: Packing, sees: Callable[..., Tensor]) -> PackedMask:
    """What a mask function of transformers, ``sees(batch, head, query, key)``, means for packed tokens."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if sees is bidirectional_mask_function:
        return PackedMask(packing)
    if sees is causal_mask_function:
        return PackedMask(packing, is_causal=True)
    columns = packing.columns
    seen: list[Tensor | None] = []
    for index, row in enumerate(packing.rows):
        batch, head = (columns.new_full((1, 1, 1, 1), each) for each in (index, 0))
        queries = columns[row.start : row.stop].view(1, 1, -1, 1)
        keys = columns[row.first_key : row.stop].view(1, 1, 1, -1)
        bits = torch.as_tensor(sees(batch, head, queries, keys), device=columns.device)
        bits = bits.expand(1, 1, queries.shape[2], keys.shape[3])[0]
        # A window that is wider than the sequence hides nothing, and no mask is faster than one that is all True.
        seen.append(None if bool(bits.all()) else bits)
    return PackedMask(packing, seen=None if all(each is None for each in seen) else seen)


def _original_attention(original: str, module: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # A model's own table may override the general one, and its eager function is in no table at all.
    table = of_home(module, "ALL_ATTENTION_FUNCTIONS") or ALL_ATTENTION_FUNCTIONS
    found: Callable[..., Any] = table.get_interface(original, of_home(module, "eager_attention_forward"))
    return found


# -- families whose attention does not go through the interface --------------------------------------------------------
@dataclass(frozen=True)
class Family:
    """Models that are served by replacing methods of their own attention.

    Attributes:
        names: their classes.
        methods: what is replaced: modules, the names of their methods, and the function that wraps each.
        eager: whether a query that finds no key reads dropped ones, for any attention in the config.
    """

    names: frozenset[str]
    methods: Callable[[Any], Iterable[tuple[nn.Module, str, Callable[..., Any]]]]
    eager: bool = False

    def patch(self, base: Any) -> None:
        """Replace the methods."""
        for module, name, function in self.methods(base):
            bind(module, name, function)

    def unpatch(self, base: Any) -> None:
        """Undo `patch`, as far as it came."""
        for module, name, _ in self.methods(base):
            unbind(module, name)


def family_of(base: Any) -> Family | None:
    """The family that a model belongs to, or None where it uses the interface."""
    names = {kind.__name__ for kind in type(base).__mro__}
    return next((family for family in FAMILIES if names & family.names), None)


# MPNet: its attention adds a learned bias for the distance of two tokens.
def _mpnet_methods(base: Any) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
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


def _deberta_methods(base: Any) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
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


FAMILIES = (
    Family(frozenset({"MPNetModel"}), _mpnet_methods, eager=True),
    Family(frozenset({"DebertaModel", "DebertaV2Model"}), _deberta_methods),
)
