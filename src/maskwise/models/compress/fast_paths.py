"""Torch's encoder layers read the weights of their linear layers themselves in evaluation, unless told not to."""

from __future__ import annotations

from torch import nn

__all__ = ["restore_fast_paths", "turn_off_fast_paths"]


def turn_off_fast_paths(model: nn.Module) -> None:
    """Make encoder layers call their linear layers where those are no torch.nn.Linear any more.

    >>> layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    >>> layer.linear1 = nn.Sequential(layer.linear1)
    >>> turn_off_fast_paths(layer)
    >>> bool(layer.activation_relu_or_gelu)
    False
    """
    changed = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not _is_plain(module):
            # The one condition of the fast path that nothing else depends on.
            module.activation_relu_or_gelu = 0
            changed.add(module)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(layer in changed for layer in module.layers):
            module.use_nested_tensor = False


def restore_fast_paths(model: nn.Module, like: nn.Module) -> None:
    """Let encoder layers do as those of another model of the same modules do."""
    for name, theirs in like.named_modules():
        if isinstance(theirs, nn.TransformerEncoderLayer | nn.TransformerEncoder):
            mine = model.get_submodule(name)
            for attribute in ("activation_relu_or_gelu", "use_nested_tensor"):
                if attribute in vars(theirs):
                    setattr(mine, attribute, getattr(theirs, attribute))


def _is_plain(layer: nn.TransformerEncoderLayer) -> bool:
    return all(isinstance(each, nn.Linear) for each in (layer.linear1, layer.linear2))
