"""MPNet: its attention adds a learned bias for the distance of two tokens, and does not go through the interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from maskwise.models.attention import PackedMask
from maskwise.models.binding import bind, unbind
from maskwise.models.hugging_face.frames import packing_of
from maskwise.models.hugging_face.layout import flat, folded

__all__ = ["knows", "patch", "unpatch"]


def knows(base: Any) -> bool:
    """Whether this is an MPNet."""
    return any(kind.__name__ == "MPNetModel" for kind in type(base).__mro__)


def patch(base: Any) -> None:
    """Let the encoder make its bias for columns, and the attention take it by sequence."""
    bind(base.encoder, "compute_position_bias", position_bias)
    for layer in base.encoder.layer:
        bind(layer.attention.attn, "forward", attention)


def unpatch(base: Any) -> None:
    """Undo `patch`, as far as it came."""
    unbind(base.encoder, "compute_position_bias")
    for layer in base.encoder.layer:
        unbind(layer.attention.attn, "forward")


def position_bias(self: Any, x: Tensor, position_ids: Any = None, num_buckets: int = 32) -> Tensor:
    """The bias between all columns, (1, H, L, L), however many tokens are packed."""
    packing = packing_of()
    like = x if packing is None else x.new_empty((1, packing.keep.shape[1], 0))
    bias: Tensor = type(self).compute_position_bias(self, like, position_ids, num_buckets)
    return bias


def attention(
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
