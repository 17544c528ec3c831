"""``nn.TransformerEncoder``: packed once, run through every layer, unpacked once."""

from __future__ import annotations

from torch import Tensor, nn

from maskwise.models.report import tell
from maskwise.models.torch_modules.forward_adapter import ForwardAdapter, not_torchs_own
from maskwise.models.torch_modules.layer import TOKENWISE, layer_reason, run_layer
from maskwise.models.torch_modules.masks import hooked, packed_mask

__all__ = ["adapter"]


def encoder_reason(module: nn.TransformerEncoder) -> str:
    """Why an encoder cannot run packed, or nothing."""
    if reason := not_torchs_own(module, nn.TransformerEncoder):
        return reason
    if module.norm is not None and not isinstance(module.norm, TOKENWISE):
        return f"its norm, a {type(module.norm).__name__}, may mix tokens"
    for index, layer in enumerate(module.layers):
        if not isinstance(layer, nn.TransformerEncoderLayer):
            return f"layers.{index} is a {type(layer).__name__}, not a nn.TransformerEncoderLayer"
        if reason := layer_reason(layer):
            return f"layers.{index}: {reason}"
    return "" if len(module.layers) else "it has no layers"


def forward(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """What torch's forward does, on kept tokens where it can."""
    layers: list[nn.TransformerEncoderLayer] = list(self.layers)
    batch_first = layers[0].self_attn.batch_first
    packed = packed_mask(src, batch_first, src_key_padding_mask, mask, is_causal)
    if hooked(*layers, *(layer.self_attn for layer in layers)):
        packed = "a layer has hooks, which a packed run would not call"
    tell(self, src, src_key_padding_mask, packed if isinstance(packed, str) else None)
    if isinstance(packed, str):
        return nn.TransformerEncoder.forward(self, src, mask, src_key_padding_mask, is_causal)
    x = packed.packing.pack(src if batch_first else src.transpose(0, 1))
    for layer in layers:
        x = run_layer(layer, x, packed)
    if self.norm is not None:
        x = self.norm(x)
    out = packed.packing.unpack(x)
    return out if batch_first else out.transpose(0, 1)


adapter = ForwardAdapter(nn.TransformerEncoder, encoder_reason, forward)
