"""Linear layers of Hugging Face models that compute the kept tokens of a running call, and give 0 for the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.hugging_face.calls import original
from maskwise.models.packing import Packing, on_kept_tokens
from maskwise.models.quantized import is_quantized, own_forward
from maskwise.nn.binding import bind, is_bound, unbind

__all__ = [
    "DECODER",
    "INPUT",
    "SEQUENCE",
    "Tokens",
    "computing",
    "hold",
    "is_computing",
    "kept_tokens",
    "linear_forward",
    "release",
    "sequences_of",
]

SEQUENCE = "_maskwise_sequence"
"""The attribute of a layer that names the sequence of which it reads one row for each token."""
INPUT, DECODER = "input", "decoder"


@dataclass(frozen=True, eq=False)
class Tokens:
    """The kept tokens of a running call, by the sequence that they are of."""

    packings: dict[str, Packing] = field(default_factory=dict)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[Tokens] = []


_stack = _Stack()


@contextmanager
def computing(tokens: Tokens) -> Iterator[None]:
    """Let layers that are held compute these tokens only."""
    _stack.calls.append(tokens)
    try:
        yield
    finally:
        _stack.calls.pop()


def is_computing() -> bool:
    """Whether a call runs in this thread of which layers are held."""
    return bool(_stack.calls)


def kept_tokens(named: dict[str, Any]) -> Tokens:
    """The kept tokens of each sequence, with the first and the last column, which heads and generation read as well."""
    found = {}
    for sequence, name in ((INPUT, "attention_mask"), (DECODER, "decoder_attention_mask")):
        mask = named.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            keep = mask != 0
            keep[:, [0, -1]] = True
            found[sequence] = Packing.of(keep)
    return Tokens(found)


def linear_forward(self: Any, x: Tensor) -> Tensor:
    """A linear layer on the kept tokens of the running call; 0 for the others."""
    packing = _stack.calls[-1].packings.get(vars(self)[SEQUENCE]) if _stack.calls else None
    forward = own_forward(self)
    if packing is None or x.dim() < 3 or x.shape[:2] != packing.keep.shape:
        out: Tensor = forward(self, x)
        return out
    with on_kept_tokens(packing):
        return packing.unpack(forward(self, packing.pack(x)))


def hold(model: nn.Module, sequences: dict[str, str]) -> None:
    """Let layers compute the kept tokens of a sequence: by path, each with the sequence that it reads."""
    release(model)
    for path, sequence in sequences.items():
        layer = model.get_submodule(path)
        vars(layer)[SEQUENCE] = sequence
        bind(layer, "forward", linear_forward)


def release(model: nn.Module) -> None:
    """Undo `hold`."""
    for layer in _layers(model):
        if vars(layer).pop(SEQUENCE, None) is not None and is_bound(layer, "forward", linear_forward):
            unbind(layer, "forward")


def _layers(model: nn.Module) -> list[nn.Module]:
    """The linear layers that may be packed: those of torch and of transformers, and quantized ones."""
    return [
        each for each in model.modules() if type(each) is nn.Linear or _is_of_transformers(each) or is_quantized(each)
    ]


def _is_of_transformers(layer: nn.Module) -> bool:
    kind = type(layer)
    is_linear = isinstance(layer, nn.Linear) or kind.__name__ == "Conv1D"
    return is_linear and kind.__module__.startswith(("transformers.models.", "transformers.pytorch_utils"))


def _is_free(layer: nn.Module) -> bool:
    """Whether nothing is in the place of a layer's forward, but for a float layer in place of a quantized one."""
    return "forward" not in vars(layer) or own_forward(layer) is not type(layer).forward


def sequences_of(
    module: Any, named: dict[str, Any], keeps: tuple[Tensor, Tensor], without: tuple[nn.Module, ...] = ()
) -> dict[str, str]:
    """The layers that read one row for each token, in all that they read, and of which sequence: by path.

    Args:
        module: the model.
        named: a call whose sequences have lengths that nothing else has.
        keeps: which tokens of the input and of the decoder are kept.
        without: parts of the model whose layers are left alone.
    """
    seen: dict[nn.Module, set[str]] = {}
    sizes = {tuple(keeps[1].shape): DECODER, tuple(keeps[0].shape): INPUT}

    def look(layer: nn.Module, inputs: Any) -> None:
        x = inputs[0]
        found = sizes.get(tuple(x.shape[:2])) if x.dim() >= 3 else None
        seen.setdefault(layer, set()).add(found or "")

    others = {each for part in without for each in part.modules()}
    # What else is in the place of a forward, as `mw.nn.kept_head` puts there, stays.
    layers = {each for each in _layers(module) if each not in others and _is_free(each)}
    handles = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        with torch.no_grad(), computing(Tokens()):
            original(module, **named)
    finally:
        for handle in handles:
            handle.remove()
    paths = {layer: path for path, layer in module.named_modules()}
    return {paths[layer]: next(iter(each)) for layer, each in seen.items() if len(each) == 1 and "" not in each}
