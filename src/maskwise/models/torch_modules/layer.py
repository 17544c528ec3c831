"""``nn.TransformerEncoderLayer`` on kept tokens only, norm first or last."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskwise.models.adapter import MixesTokens
from maskwise.models.attention import PackedMask
from maskwise.models.report import Padded, tell
from maskwise.models.torch_modules import multihead
from maskwise.models.torch_modules.forward_adapter import ForwardAdapter, Parts, not_torchs_own
from maskwise.models.torch_modules.masks import hooked, packed_mask

__all__ = ["adapter", "inner_forward", "layer_reason", "norm_reason", "parts"]

TOKENWISE = (nn.LayerNorm, nn.RMSNorm, nn.Identity)
PLAIN = (nn.Linear, nn.Dropout)


def layer_reason(module: nn.TransformerEncoderLayer) -> str:
    """Why a layer cannot run packed, or nothing."""
    if reason := not_torchs_own(module, nn.TransformerEncoderLayer):
        return reason
    if type(module)._sa_block is not nn.TransformerEncoderLayer._sa_block:
        return f"{type(module).__name__} has an attention block of its own"
    for norm in (module.norm1, module.norm2):
        if reason := norm_reason(norm):
            return reason
    if reason := multihead.attention_reason(module.self_attn):
        return reason
    plain = all(
        type(getattr(module, name)) in PLAIN for name in ("linear1", "linear2", "dropout", "dropout1", "dropout2")
    )
    if plain and module.activation in (functional.relu, functional.gelu):
        return ""
    return mixing_reason(module, "its feed-forward block", module._ff_block) or mixing_reason(
        module, "dropout1", module.dropout1
    )


def norm_reason(norm: nn.Module) -> str:
    """Why a norm cannot run packed, or nothing."""
    kind = next((each for each in TOKENWISE if type(norm).forward is each.forward), None)
    if kind is None:
        names = ", ".join(each.__name__ for each in TOKENWISE)
        return MixesTokens(f"{type(norm).__name__} may mix tokens; {names} do not")
    if kind is not nn.Identity and len(norm.normalized_shape) > 1:  # type: ignore[arg-type]
        shape = list(norm.normalized_shape)  # type: ignore[arg-type]
        return MixesTokens(f"{type(norm).__name__}({shape}) normalizes more than a token")
    return ""


def mixing_reason(module: nn.TransformerEncoderLayer, name: str, part: Callable[[Tensor], Tensor]) -> str:
    """Why a part that is not torch's own cannot run packed, from what it makes of tokens beside others; or nothing."""
    weight = module.self_attn.out_proj.weight
    if weight.is_meta:
        return f"{name} is not torch's own, and there are no weights to try it with"
    x = torch.linspace(-2, 2, 3 * 7 * weight.shape[0], dtype=weight.dtype, device=weight.device).cos().view(3, 7, -1)
    other = x.clone()
    other[:, 1:] += 1
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            alone, among, beside = part(x.flatten(0, 1)), part(x).flatten(0, 1), part(other)
    except RuntimeError as error:
        return f"{name} raised {error}"
    finally:
        for each, training in modes.items():
            each.training = training
    close = torch.allclose(alone, among, 1e-4, 1e-5) and torch.allclose(
        among.view_as(beside)[:, 0], beside[:, 0], 1e-4, 1e-5
    )
    return "" if close else MixesTokens(f"{name} reads more than one token")


def run_layer(
    layer: nn.TransformerEncoderLayer,
    x: Tensor,  # (N, D)
    mask: PackedMask,
) -> Tensor:
    """One layer on packed tokens. Its modules are called as torch calls them, in the same order, so that hooks fire."""
    if layer.norm_first:
        x = x + _attention(layer, layer.norm1(x), mask)
        return x + _feed_forward(layer, layer.norm2(x))
    x = layer.norm1(x + _attention(layer, x, mask))
    out: Tensor = layer.norm2(x + _feed_forward(layer, x))
    return out


def _attention(layer: nn.TransformerEncoderLayer, x: Tensor, mask: PackedMask) -> Tensor:
    mixed = layer.self_attn(
        x, x, x, attn_mask=mask, key_padding_mask=None, need_weights=False, is_causal=mask.is_causal
    )[0]
    out: Tensor = layer.dropout1(mixed)
    return out


def _feed_forward(layer: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    if type(layer)._ff_block is not nn.TransformerEncoderLayer._ff_block:
        # A subclass has its own, as a layer that mw.compress has left units out of.
        return layer._ff_block(x)
    hidden = layer.linear1(x)
    if layer.activation is functional.relu and not torch.is_grad_enabled() and not hooked(layer.linear1):
        # In place: the largest tensor of the layer, which nobody else has seen.
        hidden = layer.dropout(hidden.relu_())
    else:
        hidden = layer.dropout(layer.activation(hidden))
    out: Tensor = layer.dropout2(layer.linear2(hidden))
    return out


def inner_forward(
    self: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | PackedMask | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """What torch's forward does; on packed tokens where its encoder has packed them."""
    if isinstance(src_mask, PackedMask):
        return run_layer(self, src, src_mask)
    return nn.TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal)


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
    tell(self, src, src_key_padding_mask, *(mask if isinstance(mask, Padded) else (None,)))
    if isinstance(mask, Padded):
        return inner_forward(self, src, src_mask, src_key_padding_mask, is_causal)
    x = src if batch_first else src.transpose(0, 1)
    out = mask.packing.unpack(run_layer(self, mask.packing.pack(x), mask))
    return out if batch_first else out.transpose(0, 1)


def parts(layer: nn.TransformerEncoderLayer) -> Parts:
    """What a layer calls with packed tokens and a packed mask."""
    yield layer.self_attn, multihead.inner_forward


adapter = ForwardAdapter(nn.TransformerEncoderLayer, layer_reason, forward, parts)
