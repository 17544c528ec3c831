"""From the masks of torch's modules (True or -inf = drop) to a packing, or the reason why there is none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maskwise.models.attention import PackedMask
from maskwise.models.packing import Packing

__all__ = ["hooked", "packed_mask"]


def hooked(*modules: nn.Module) -> bool:
    """Whether someone listens to a module that a packed run would not call."""
    return any(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks for module in modules)


def packed_mask(
    x: Tensor,  # (B, L, D) or (L, B, D)
    batch_first: bool,
    key_padding: Tensor | None,  # (B, L), True or -inf = drop
    attn_mask: Tensor | None,  # (L, L), True or -inf = drop
    is_causal: bool | None,
) -> PackedMask | str:
    """What the masks say, for packed tokens; or why the call must run padded."""
    if torch.compiler.is_compiling():
        return "a graph that is being compiled has no sizes that depend on data"
    if key_padding is None:
        return "no padding mask was given"
    if not isinstance(x, Tensor) or x.is_nested or x.dim() != 3:
        return "the input is not a batch of sequences"
    sizes = tuple(x.shape[:2]) if batch_first else (x.shape[1], x.shape[0])
    if key_padding.shape != sizes:
        return f"the padding mask is {tuple(key_padding.shape)}, not {sizes}"
    if key_padding.dtype is torch.bool:
        keep = ~key_padding
    else:
        keep = key_padding == 0
        if not bool((keep | (key_padding == -torch.inf)).all()):
            return "the padding mask adds numbers other than 0 and -inf"
    if bool(keep.all()):
        return "nothing is dropped"
    if not bool(keep.any()):
        return "nothing is kept"
    packing = Packing.of(keep)
    if attn_mask is None:
        return PackedMask(packing, is_causal=bool(is_causal))
    if attn_mask.dim() != 2:
        return "the attention mask differs between rows or heads"
    if _is_causal(attn_mask):
        return PackedMask(packing, is_causal=True)
    return PackedMask(packing, seen=_seen(packing, attn_mask))


def _is_causal(mask: Tensor) -> bool:
    drop = mask if mask.dtype is torch.bool else mask == -torch.inf
    future = torch.ones_like(drop).triu(1)
    return bool((drop == future).all()) and (mask.dtype is torch.bool or bool((mask[~future] == 0).all()))


def _seen(packing: Packing, mask: Tensor) -> list[Tensor | None]:
    """The part of the (L, L) mask that each row needs, in the convention of torch's attention: True = keep."""
    seen = ~mask if mask.dtype is torch.bool else mask
    columns = [packing.columns[row.start : row.stop] for row in packing.rows]
    return [seen[each][:, each] for each in columns]
