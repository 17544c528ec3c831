"""``nn.MultiheadAttention``: self-attention over kept tokens only."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from maskwise.models.attention import PackedMask
from maskwise.models.report import tell, warn_once
from maskwise.models.torch_modules.forward_adapter import ForwardAdapter, not_torchs_own
from maskwise.models.torch_modules.masks import packed_mask

__all__ = ["adapter", "attention_reason", "self_attention"]


def attention_reason(module: nn.MultiheadAttention) -> str:
    """Why an attention module cannot run packed, or nothing."""
    if reason := not_torchs_own(module, nn.MultiheadAttention):
        return reason
    if not module._qkv_same_embed_dim:
        return "its keys or values have a size of their own"
    if module.bias_k is not None or module.add_zero_attn:
        return "it appends a key to each sequence (add_bias_kv or add_zero_attn)"
    return ""


def self_attention(
    module: nn.MultiheadAttention,
    x: Tensor,  # (N, D)
    mask: PackedMask,
) -> Tensor:
    """The attention block on packed tokens, projections included: (N, D)."""
    qkv = functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    q, k, v = qkv.view(x.shape[0], 3, module.num_heads, module.head_dim).unbind(1)
    out = mask.attend(q, k, v, dropout_p=module.dropout if module.training else 0.0)
    projected: Tensor = module.out_proj(out.flatten(1))
    return projected


def forward(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What torch's forward does, on kept tokens where it can."""
    if query is not key or key is not value:
        mask: PackedMask | str = "query, key and value are not one tensor: this is not self-attention"
    else:
        mask = packed_mask(query, self.batch_first, key_padding_mask, attn_mask, is_causal)
        if need_weights and not isinstance(mask, str):
            mask = "the attention weights are requested"
            warn_once(self, mask, "need_weights=False")
    tell(self, query, key_padding_mask, mask if isinstance(mask, str) else None)
    if isinstance(mask, str):
        return nn.MultiheadAttention.forward(
            self,
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
    x = query if self.batch_first else query.transpose(0, 1)
    out = mask.packing.unpack(self_attention(self, mask.packing.pack(x), mask))
    return (out if self.batch_first else out.transpose(0, 1)), None


adapter = ForwardAdapter(nn.MultiheadAttention, attention_reason, forward)
