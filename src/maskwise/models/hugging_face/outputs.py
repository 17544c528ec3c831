"""The outputs of a packed call: which of them have an entry for each token, and the way back to the padded layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from maskwise.models.hugging_face.layout import Layout

__all__ = ["FLAT", "OTHER", "TOKENS", "kind_of", "leaves", "unpacked"]

TOKENS, FLAT, OTHER = "tokens", "flat", "other"
"""(rows, width, ...), which becomes (B, L, ...); (rows * width, ...), which becomes (B * L, ...); and the others."""


def leaves(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output with its path, such as ``hidden_states.2``."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, (dict, tuple, list)):
        for name, value in output.items() if isinstance(output, dict) else enumerate(output):
            yield from leaves(value, f"{path}.{name}" if path else str(name))


def _map(output: Any, function: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """The output with a function of every tensor in its place."""
    if isinstance(output, Tensor):
        return function(path, output)
    if isinstance(output, dict):
        for name in list(output):
            output[name] = _map(output[name], function, f"{path}.{name}" if path else str(name))
        return output
    if isinstance(output, (tuple, list)):
        found = [_map(each, function, f"{path}.{index}" if path else str(index)) for index, each in enumerate(output)]
        # Fields of a named tuple are arguments of their own.
        return type(output)(*found) if hasattr(output, "_fields") else type(output)(found)
    return output


def kind_of(padded: Tensor, packed: Tensor, layout: Layout) -> str | None:
    """How an output lies, from the shapes that it has padded and packed; None if that cannot be unpacked."""
    batch, length = layout.packing.keep.shape
    if padded.dim() >= 2 and padded.shape[:2] == (batch, length) and layout.holds(packed):
        return TOKENS
    if padded.dim() >= 2 and padded.shape[0] == batch * length and packed.shape[:1] == (layout.size,):
        return FLAT
    return OTHER if padded.shape == packed.shape else None


def unpacked(output: Any, layout: Layout, kinds: dict[str, str]) -> Any:
    """The output in the padded layout.

    Args:
        output: what the packed call gave.
        layout: where its tokens lie.
        kinds: how each tensor lies, by its path; one that is not named counts as by token if it looks so.
    """

    def unpack(path: str, value: Tensor) -> Tensor:
        kind = kinds.get(path)
        if kind == FLAT:
            return layout.packing.unpack(value[: layout.tokens]).flatten(0, 1)
        by_token = kind == TOKENS or (kind is None and value.dim() == 3)
        return layout.unfold(value) if by_token and layout.holds(value) else value

    return _map(output, unpack)
