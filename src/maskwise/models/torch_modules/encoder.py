"""``nn.TransformerEncoder``: packed once, run through every layer, unpacked once."""

from __future__ import annotations

from torch import Tensor, nn

from maskwise.models.attention import PackedMask
from maskwise.models.binding import is_bound
from maskwise.models.report import Padded, tell
from maskwise.models.torch_modules import layer as layers
from maskwise.models.torch_modules.forward_adapter import ForwardAdapter, Parts, not_torchs_own
from maskwise.models.torch_modules.masks import packed_mask

__all__ = ["adapter"]


def encoder_reason(module: nn.TransformerEncoder) -> str:
    """Why an encoder cannot run packed, or nothing."""
    if reason := not_torchs_own(module, nn.TransformerEncoder):
        return reason
    if module.norm is not None and (reason := layers.norm_reason(module.norm)):
        return type(reason)(f"norm: {reason}")
    for index, layer in enumerate(module.layers):
        if not isinstance(layer, nn.TransformerEncoderLayer):
            return f"layers.{index} is a {type(layer).__name__}, not a nn.TransformerEncoderLayer"
        if reason := layers.layer_reason(layer):
            return type(reason)(f"layers.{index}: {reason}")
    return "" if len(module.layers) else "it has no layers"


def forward(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """What torch's forward does, on kept tokens where it can."""
    batch_first = self.layers[0].self_attn.batch_first
    packed = packed_mask(src, batch_first, src_key_padding_mask, mask, is_causal)
    if isinstance(packed, PackedMask) and not all(is_bound(part, "forward", forward) for part, forward in parts(self)):
        packed = Padded("its layers have changed since mw.unpad", "mw.unpad(maskwise.models.repad(model))")
    tell(self, src, src_key_padding_mask, *(packed if isinstance(packed, Padded) else (None,)))
    if isinstance(packed, Padded):
        return nn.TransformerEncoder.forward(self, src, mask, src_key_padding_mask, is_causal)
    x = packed.packing.pack(src if batch_first else src.transpose(0, 1))
    for layer in self.layers:
        x = layer(x, src_mask=packed, is_causal=packed.is_causal, src_key_padding_mask=None)
    if self.norm is not None:
        x = self.norm(x)
    out = packed.packing.unpack(x)
    return out if batch_first else out.transpose(0, 1)


def parts(encoder: nn.TransformerEncoder) -> Parts:
    """What an encoder calls with packed tokens and a packed mask."""
    for layer in encoder.layers:
        yield layer, layers.inner_forward
        yield from layers.parts(layer)


adapter = ForwardAdapter(nn.TransformerEncoder, encoder_reason, forward, parts)
