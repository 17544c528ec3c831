"""``nn.TransformerEncoderLayer`` on kept tokens only, norm first or last."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maskwise.models.attention import PackedMask
from maskwise.models.report import tell
from maskwise.models.torch_modules.forward_adapter import ForwardAdapter, not_torchs_own
from maskwise.models.torch_modules.masks import hooked, packed_mask
from maskwise.models.torch_modules.multihead import attention_reason, self_attention

__all__ = ["adapter", "layer_reason", "run_layer"]

RELU = 1
"""What torch's layer calls a relu among its activations."""
TOKENWISE = (nn.LayerNorm, nn.RMSNorm, nn.Identity)


def layer_reason(module: nn.TransformerEncoderLayer) -> str:
    """Why a layer cannot run packed, or nothing."""
    if reason := not_torchs_own(module, nn.TransformerEncoderLayer):
        return reason
    for norm in (module.norm1, module.norm2):
        if not isinstance(norm, TOKENWISE):
            return f"{type(norm).__name__} may mix tokens; {', '.join(each.__name__ for each in TOKENWISE)} do not"
    return attention_reason(module.self_attn)


def run_layer(
    layer: nn.TransformerEncoderLayer,
    x: Tensor,  # (N, D)
    mask: PackedMask,
) -> Tensor:
    """One layer on packed tokens."""
    if layer.norm_first:
        x = x + layer.dropout1(self_attention(layer.self_attn, layer.norm1(x), mask))
        return x + _feed_forward(layer, layer.norm2(x))
    x = layer.norm1(x + layer.dropout1(self_attention(layer.self_attn, x, mask)))
    out: Tensor = layer.norm2(x + _feed_forward(layer, x))
    return out


def _feed_forward(layer: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    if type(layer)._ff_block is not nn.TransformerEncoderLayer._ff_block:
        # A subclass has its own, as a layer that mw.compress has left units out of.
        return layer._ff_block(x)
    hidden = layer.linear1(x)
    if layer.activation_relu_or_gelu == RELU and not torch.is_grad_enabled() and not hooked(layer.linear1):
        # In place: the largest tensor of the layer, which nobody else has seen.
        hidden = layer.dropout(hidden.relu_())
    else:
        hidden = layer.dropout(layer.activation(hidden))
    out: Tensor = layer.dropout2(layer.linear2(hidden))
    return out


def forward(
    self: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """What torch's forward does, on kept tokens where it can."""
    batch_first = self.self_attn.batch_first
    mask = packed_mask(src, batch_first, src_key_padding_mask, src_mask, is_causal)
    if hooked(self.self_attn):
        mask = "self_attn has hooks, which a packed run would not call"
    tell(self, src, src_key_padding_mask, mask if isinstance(mask, str) else None)
    if isinstance(mask, str):
        return nn.TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal)
    x = src if batch_first else src.transpose(0, 1)
    out = mask.packing.unpack(run_layer(self, mask.packing.pack(x), mask))
    return out if batch_first else out.transpose(0, 1)


adapter = ForwardAdapter(nn.TransformerEncoderLayer, layer_reason, forward)
