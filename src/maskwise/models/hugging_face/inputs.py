"""The inputs of a Hugging Face model: whether a call can be packed, and its arguments when it is."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.packing import Packing

__all__ = ["arguments", "pack_arguments", "padded_reason", "padding_aware_embeddings"]


@cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


def _kind(module: nn.Module) -> Any:
    return type(module)


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = _signature(_kind(module)).bind_partial(module, *args, **kwargs).arguments
    named = {name: value for name, value in bound.items() if name not in {"self", "kwargs"}}
    return {**named, **bound.get("kwargs", {})}


def takes(module: nn.Module, name: str) -> bool:
    """Whether the module's forward has an argument of this name."""
    return name in _signature(_kind(module)).parameters


def padded_reason(module: nn.Module, named: dict[str, Any], *, causal: bool, first_kept: bool) -> str | None:
    """Why this call must run padded, or None when it can be packed.

    Args:
        module: the base model.
        named: its arguments.
        causal: whether it is a decoder, which may be asked for a cache.
        first_kept: whether the first token of each row must be real, because this model cannot watch it.
    """
    config: Any = module.config
    mask, tokens = named.get("attention_mask"), named.get("input_ids")
    if tokens is None:
        tokens = named.get("inputs_embeds")
    if torch._C._get_tracing_state() is not None:
        return "a graph that is being traced has no sizes that depend on data"
    if not isinstance(mask, Tensor):
        return "no attention_mask was given"
    if not isinstance(tokens, Tensor) or mask.dim() != 2 or mask.shape != tokens.shape[:2]:
        return "attention_mask is not one flag for each token of the input"
    if named.get("past_key_values") is not None:
        return "the call continues from a cache"
    use_cache = named.get("use_cache")
    if causal and (getattr(config, "use_cache", False) if use_cache is None else use_cache):
        return "a cache is asked for (use_cache=False runs packed)"
    if named.get("output_attentions") or (named.get("output_attentions") is None and config.output_attentions):
        return "the attention weights are asked for"
    batch, length = mask.shape
    for name, value in named.items():
        if isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.shape[:2] not in _fitting(mask)):
            return f"{name} is not laid out as (batch {batch}, length {length})"
    if bool(mask.all()):
        return "nothing is dropped"
    if not bool(mask.any()):
        return "nothing is kept"
    if first_kept and not causal and not bool(mask[:, 0].all()):
        return "a row drops its first token, which heads read, and this model computes it from other padded tokens"
    return None


def _fitting(mask: Tensor) -> tuple[torch.Size, torch.Size]:
    return mask.shape, torch.Size((1, mask.shape[1]))


def pack_arguments(
    module: nn.Module, named: dict[str, Any], packing: Packing, embeddings: str | None
) -> dict[str, Any]:
    """The arguments of the packed call: one sequence of all kept tokens, each with the position that it had."""
    shape = packing.keep.shape
    if named.get("position_ids") is None:
        named = {**named, "position_ids": _positions(module, named, packing, embeddings)}
    packed = {}
    for name, value in named.items():
        if name == "attention_mask":
            # All ones, not None: without a mask transformers looks for packed sequences in the position ids.
            packed[name] = value.new_ones((1, packing.tokens))
        elif isinstance(value, Tensor):
            packed[name] = packing.pack(value.expand(*shape, *value.shape[2:]))[None]
        else:
            packed[name] = value
    return packed


def padding_aware_embeddings(module: nn.Module) -> str | None:
    """The path of the embeddings that number only tokens which are not padding, as RoBERTa's; None without such."""
    for path, child in module.named_modules():
        if hasattr(child, "position_embeddings") and hasattr(child, "padding_idx") and _numbering(child):
            return str(path)
    return None


def _numbering(embeddings: nn.Module) -> Any:
    name = "create_position_ids_from_input_ids"
    return getattr(embeddings, name, None) or getattr(sys.modules[type(embeddings).__module__], name, None)


def _positions(module: nn.Module, named: dict[str, Any], packing: Packing, path: str | None) -> Tensor:
    """The position ids that the padded model would make, (B, L)."""
    columns = torch.arange(packing.keep.shape[1], device=packing.keep.device).expand(packing.keep.shape)
    if path is None:
        return columns
    embeddings = module.get_submodule(path)
    padding: int = embeddings.padding_idx  # type: ignore[assignment]
    if named.get("input_ids") is None:
        return columns + padding + 1
    positions: Tensor = _numbering(embeddings)(named["input_ids"], padding)
    return positions
