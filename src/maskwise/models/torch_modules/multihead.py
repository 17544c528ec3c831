"""``nn.MultiheadAttention``: self-attention over kept tokens only."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from maskwise.models.attention import PackedMask
from maskwise.models.report import Padded, tell
from maskwise.models.torch_modules.forward_adapter import ForwardAdapter, not_torchs_own
from maskwise.models.torch_modules.masks import packed_mask
from maskwise.ops.torch_private import is_tracing, is_transformed

__all__ = ["adapter", "attention_reason", "inner_forward"]


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
    query: Tensor,  # (N, D)
    key: Tensor,  # (N, D), the same values
    value: Tensor,  # (N, D), the same values
    mask: PackedMask,
) -> Tensor:
    """The attention block on packed tokens, projections included: (N, D)."""
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if query is key and key is value:
        projected = functional.linear(query, weight, bias).chunk(3, -1)
    else:
        # A backward hook wants the gradient of each.
        biases = (None, None, None) if bias is None else bias.chunk(3)
        each = zip((query, key, value), weight.chunk(3), biases, strict=True)
        projected = tuple(functional.linear(x, rows, shift) for x, rows, shift in each)
    q, k, v = (x.view(-1, module.num_heads, module.head_dim) for x in projected)
    out = mask.attend(q, k, v, dropout_p=module.dropout if module.training else 0.0)
    # As torch does, whose attention reads these parameters and does not call the module.
    return functional.linear(out.flatten(1), module.out_proj.weight, module.out_proj.bias)


def inner_forward(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | PackedMask | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What torch's forward does; on packed tokens where its layer has packed them."""
    if isinstance(attn_mask, PackedMask):
        return self_attention(self, query, key, value, attn_mask), None
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
    if not is_one(query, key, value):
        mask: PackedMask | Padded = Padded("query, key and value are not one tensor: this is not self-attention")
    else:
        mask = packed_mask(query, self.batch_first, key_padding_mask, attn_mask, is_causal)
        if need_weights and isinstance(mask, PackedMask):
            mask = Padded("the attention weights are requested", "need_weights=False")
    tell(self, query, key_padding_mask, *(mask if isinstance(mask, Padded) else (None,)))
    if isinstance(mask, Padded):
        return inner_forward(
            self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
    given = {id(x): x if self.batch_first else x.transpose(0, 1) for x in (query, key, value)}
    packed = {place: mask.packing.pack(x) for place, x in given.items()}
    out = mask.packing.unpack(self_attention(self, packed[id(query)], packed[id(key)], packed[id(value)], mask))
    return (out if self.batch_first else out.transpose(0, 1)), None


def is_one(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all three are one tensor, also where a backward hook stands between: it makes three views of one."""
    if query is key and key is value:
        return True
    given = (query, key, value)
    if is_tracing() or is_transformed() or any(type(x) is not Tensor or x.is_nested for x in given):
        return False
    places = {(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in given}
    return len(places) == 1


adapter = ForwardAdapter(nn.MultiheadAttention, attention_reason, forward)
