"""MPNet: its attention adds a learned bias for the distance of two tokens, and does not go through the interface."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from maskwise.models.attention import PackedMask
from maskwise.models.hugging_face.frames import packing_of

__all__ = ["knows", "patch", "unpatch"]


def knows(base: Any) -> bool:
    """Whether this is an MPNet."""
    return type(base).__name__ == "MPNetModel"


def patch(base: Any) -> None:
    """Let the encoder make its bias for columns, and the attention take it by sequence."""
    base.encoder.compute_position_bias = partial(position_bias, base.encoder)
    for layer in base.encoder.layer:
        layer.attention.attn.forward = partial(attention, layer.attention.attn)


def unpatch(base: Any) -> None:
    """Undo `patch`, as far as it came."""
    vars(base.encoder).pop("compute_position_bias", None)
    for layer in base.encoder.layer:
        vars(layer.attention.attn).pop("forward", None)


def position_bias(self: Any, x: Tensor, position_ids: Any = None, num_buckets: int = 32) -> Tensor:
    """The bias between all columns, (1, H, L, L), however many tokens are packed."""
    packing = packing_of()
    like = x if packing is None else x.new_empty((1, packing.keep.shape[1], 0))
    bias: Tensor = type(self).compute_position_bias(self, like, position_ids, num_buckets)
    return bias


def attention(
    self: Any,
    hidden_states: Tensor,  # (1, N, D)
    attention_mask: Any = None,
    position_bias: Tensor | None = None,  # (1, H, L, L)
    output_attentions: bool = False,
    **kwargs: Any,
) -> Any:
    """The attention block on packed tokens; on padded ones, the model's own."""
    if not isinstance(attention_mask, PackedMask):
        return type(self).forward(self, hidden_states, attention_mask, position_bias, output_attentions, **kwargs)
    x = hidden_states[0]
    q, k, v = (project(x).view(x.shape[0], self.num_attention_heads, -1) for project in (self.q, self.k, self.v))
    bias = None if position_bias is None else position_bias[0]
    out = attention_mask.attend(q, k, v, dropout_p=self.dropout.p if self.training else 0.0, bias=bias)
    return (self.o(out.flatten(1))[None],)
