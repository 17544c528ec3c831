"""Torch's encoder layers read the weights of their linear layers themselves in evaluation, unless told not to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["restore_fast_paths", "turn_off_fast_paths", "why_dense", "without_nested_tensors"]

_WHY_DENSE = (
    "torch's encoder reads its weight itself where it leaves padding out, and gives 0 there; "
    "nn.TransformerEncoder(..., enable_nested_tensor=False) calls it"
)


def turn_off_fast_paths(model: nn.Module) -> None:
    """Make encoder layers call their linear layers where those are no torch.nn.Linear any more.

    >>> layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    >>> layer.linear1 = nn.Sequential(layer.linear1)
    >>> turn_off_fast_paths(layer)
    >>> bool(layer.activation_relu_or_gelu)
    False
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not _is_plain(module):
            # The one condition of the fast path that nothing else depends on.
            module.activation_relu_or_gelu = 0


def why_dense(model: nn.Module) -> dict[nn.Module, str]:
    """The linear layers that must stay torch.nn.Linear, and why: encoders with nested tensors have no other path.

    >>> layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    >>> len(why_dense(nn.TransformerEncoder(layer, 1)))
    2
    """
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            for layer in module.layers:
                found[layer.linear1] = found[layer.linear2] = _WHY_DENSE
    return found


@contextmanager
def without_nested_tensors(model: nn.Module) -> Iterator[None]:
    """Let encoders call their layers in a way that hooks can watch: with hooks, layers take no nested tensors."""
    nested = [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False)
    ]
    for module in nested:
        module.use_nested_tensor = False
    try:
        yield
    finally:
        for module in nested:
            module.use_nested_tensor = True


def restore_fast_paths(model: nn.Module, like: nn.Module) -> None:
    """Let encoder layers do as those of another model of the same modules do."""
    for name, theirs in like.named_modules():
        mine = model.get_submodule(name) if isinstance(theirs, nn.TransformerEncoderLayer) else None
        if isinstance(theirs, nn.TransformerEncoderLayer) and isinstance(mine, nn.TransformerEncoderLayer):
            mine.activation_relu_or_gelu = theirs.activation_relu_or_gelu


def _is_plain(layer: nn.TransformerEncoderLayer) -> bool:
    return all(isinstance(each, nn.Linear) for each in (layer.linear1, layer.linear2))
