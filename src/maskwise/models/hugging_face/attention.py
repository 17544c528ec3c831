"""Attention in packed calls of Hugging Face models, through transformers' interfaces."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.adapter import UnsupportedModelError
from maskwise.models.hugging_face.calls import PREFIX, layout_of, packing_of
from maskwise.models.hugging_face.layout import flat, folded
from maskwise.models.packing import PackedMask, Packing
from maskwise.ops.attention.bias import StructuredBias

__all__ = ["NO_BIAS", "ORIGINALS", "attention", "of_home", "register_for"]


# -- the attention function and the mask function that transformers calls by name --------------------------------------
ORIGINALS = ("sdpa", "eager")
NO_BIAS = object()
"""What a layer hands on where it would make a bias of zeros for all pairs."""


def register_for(original: str) -> str:
    """Register both functions, once for each original, and return the name under which a config refers to them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = PREFIX + original
    AttentionInterface.register(name, partial(attention, original))
    AttentionMaskInterface.register(name, partial(mask, original))
    return name


def of_home(module: nn.Module, name: str) -> Any:
    """What the file that defines a module's class, or one that it extends, calls by this name; None without such."""
    homes = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return next((found for home in homes if (found := getattr(home, name, None)) is not None), None)


def attention(
    original: str,
    module: nn.Module,
    query: Tensor,  # (rows, H, width, D)
    key: Tensor,  # (rows, Hkv, width, D)
    value: Tensor,  # (rows, Hkv, width, D)
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend within each sequence where the mask is a packed one; else as the original does."""
    if not isinstance(attention_mask, PackedMask):
        if packing_of() is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} takes its mask from elsewhere than transformers' mask interface. "
                "Hint: mw.models.repad(model)."
            )
        padded = _original_attention(original, module)
        result: tuple[Tensor, Tensor | None] = padded(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    bias = kwargs.get("position_bias")
    if not (bias is None or bias is NO_BIAS or isinstance(bias, StructuredBias)):
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a bias of its own to the scores of all pairs. Hint: mw.models.repad(model)."
        )
    rows, _, width, _ = query.shape
    keys = attention_mask.packing if attention_mask.keys is None else attention_mask.keys
    q = flat(query.transpose(1, 2), attention_mask.packing.tokens)
    k, v = (flat(each.transpose(1, 2), keys.tokens) for each in (key, value))
    # torch's own attention has neither: a model that asks it for a soft cap raises, and for sinks has none.
    is_eager = original == "eager"
    out = attention_mask.attend(
        q,
        k,
        v,
        dropout_p=dropout,
        scale=scaling,
        bias=bias if isinstance(bias, StructuredBias) else None,
        softcap=kwargs.get("softcap") if is_eager else None,
        sinks=kwargs.get("s_aux") if is_eager else None,
    )
    return folded(out, rows, width), None


def mask(original: str, **kwargs: Any) -> Any:
    """A `PackedMask` while a packed call runs; else what the original builds."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    layout = layout_of()
    if layout is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[original](**kwargs)
    if layout.keys is not None and kwargs.get("attention_mask") is layout.key_mask:
        return PackedMask(layout.packing, keys=layout.keys)
    return _packed_mask(layout.packing, kwargs["mask_function"])


def _packed_mask(packing: Packing, sees: Callable[..., Tensor]) -> PackedMask:
    """What a mask function of transformers, ``sees(batch, head, query, key)``, means for packed tokens."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if sees is bidirectional_mask_function:
        return PackedMask(packing)
    if sees is causal_mask_function:
        return PackedMask(packing, is_causal=True)
    columns = packing.columns
    seen: list[Tensor | None] = []
    for index, row in enumerate(packing.rows):
        batch, head = (columns.new_full((1, 1, 1, 1), each) for each in (index, 0))
        queries = columns[row.start : row.stop].view(1, 1, -1, 1)
        keys = columns[row.first_key : row.stop].view(1, 1, 1, -1)
        bits = torch.as_tensor(sees(batch, head, queries, keys), device=columns.device)
        bits = bits.expand(1, 1, queries.shape[2], keys.shape[3])[0]
        # A window that is wider than the sequence hides nothing, and no mask is faster than one that is all True.
        seen.append(None if bool(bits.all()) else bits)
    return PackedMask(packing, seen=None if all(each is None for each in seen) else seen)


def _original_attention(original: str, module: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # A model's own table may override the general one, and its eager function is in no table at all.
    table = of_home(module, "ALL_ATTENTION_FUNCTIONS") or ALL_ATTENTION_FUNCTIONS
    found: Callable[..., Any] = table.get_interface(original, of_home(module, "eager_attention_forward"))
    return found
