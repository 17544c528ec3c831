"""From the masks of torch's modules (True or -inf = drop) to a packing, or the reason why there is none."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from maskwise.models.attention import PackedMask
from maskwise.models.packing import Packing
from maskwise.models.report import Padded
from maskwise.ops.torch_private import is_tracing, is_transformed

__all__ = ["hooked", "packed_mask"]


def hooked(module: nn.Module) -> bool:
    """Whether a hook may have seen what the module returns."""
    return bool(
        module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or hooks._global_forward_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )


def packed_mask(
    x: Tensor,  # (B, L, D) or (L, B, D)
    batch_first: bool,
    key_padding: Tensor | None,  # (B, L), True or -inf = drop
    attn_mask: Tensor | None,  # (L, L) or (B * H, L, L), True or -inf = drop
    is_causal: bool | None,
) -> PackedMask | Padded:
    """What the masks say, for packed tokens; or why the call must run padded."""
    if key_padding is None:
        return Padded("no padding mask was given")
    if not isinstance(x, Tensor) or x.is_nested or not isinstance(key_padding, Tensor):
        return Padded("the input is not a padded batch")
    if is_tracing():
        reason = "a graph that is being compiled, traced or exported has no sizes that depend on data"
        return Padded(reason, "torch.compiler.disable keeps the module out of a graph, maskwise.models.repad pads it")
    if is_transformed():
        reason = "torch.func transforms and forward-mode AD allow no sizes that depend on data"
        return Padded(reason, "call it outside of the transform, or maskwise.models.repad it")
    if x.dim() != 3:
        return Padded("the input is one sequence and no batch", "give it a batch of one, x[None]")
    sizes = tuple(x.shape[:2]) if batch_first else (x.shape[1], x.shape[0])
    if key_padding.shape != sizes:
        return Padded(f"the padding mask is {tuple(key_padding.shape)}, not {sizes}")
    if key_padding.dtype is torch.bool:
        keep = ~key_padding
    else:
        keep = key_padding == 0
        if not bool((keep | (key_padding == -torch.inf)).all()):
            return Padded("the padding mask adds numbers other than 0 and -inf", "a bool padding mask, True = ignore")
    if bool(keep.all()):
        return Padded("nothing is dropped")
    if not bool(keep.any()):
        return Padded("nothing is kept")
    packing = Packing.of(keep)
    if attn_mask is None:
        return PackedMask(packing, is_causal=bool(is_causal))
    if attn_mask.dim() == 2 and _is_causal(attn_mask):
        return PackedMask(packing, is_causal=True)
    batch, length = sizes
    heads = attn_mask.shape[:-2]
    if attn_mask.shape[-2:] != (length, length) or len(heads) > 1 or any(size % batch for size in heads):
        # Torch's own forward says what is wrong with it.
        return Padded(f"the attention mask is {tuple(attn_mask.shape)}")
    return PackedMask(packing, seen=_seen(packing, attn_mask))


def _is_causal(mask: Tensor) -> bool:
    drop = mask if mask.dtype is torch.bool else mask == -torch.inf
    future = torch.ones_like(drop).triu(1)
    return bool((drop == future).all()) and (mask.dtype is torch.bool or bool((mask[~future] == 0).all()))


def _seen(packing: Packing, mask: Tensor) -> list[Tensor | None]:
    """The part of the mask that each row needs, (H, n, n) or (n, n), in the convention of torch's attention."""
    batch, length = packing.keep.shape
    seen = ~mask if mask.dtype is torch.bool else mask
    # One mask for all rows, or H for each.
    rows = seen.expand(batch, length, length) if seen.dim() == 2 else seen.view(batch, -1, length, length)
    columns = [packing.columns[row.start : row.stop] for row in packing.rows]
    return [rows[index][..., each, :][..., each] for index, each in enumerate(columns)]
