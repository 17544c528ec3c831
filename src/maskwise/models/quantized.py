"""Quantized layers in models that are unpadded: a token's range must be its own.

Layers that quantize their inputs by one range for a whole batch let tokens change each other's numbers, padding
included; those with a range for each token do not. Which of the two a layer does is tried on the layer itself. Rounding
to int8 makes small differences large, so for the comparison of a whole model float layers stand in for quantized ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskwise.models.adapter import QuantizesBatch
from maskwise.nn.binding import bind

__all__ = ["QuantizedLayers", "is_quantized", "mixes_tokens", "own_forward", "replace_quantized", "stands_in"]

STAND_IN = "_maskwise_stand_in"
"""The attribute of a quantized layer that holds the float weight used in its place, during a comparison."""
ROUNDED = {torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}
TOLERANCE = 1e-2
"""Relative to the largest output of a layer. 16-bit rounding moves it by less, a shared range by all of it."""
LARGER = 100.0
"""How much larger than the others one token is. In int8 with one range for all, the others become 0."""


def is_quantized(layer: nn.Module) -> bool:
    """Whether a layer has rounded weights: of torch.ao, with a weight of torchao, or with int8 tensors of its own.

    >>> from torch import nn
    >>> layer = nn.Linear(2, 2)
    >>> rounded = nn.Module()
    >>> rounded.register_buffer("weight", layer.weight.to(torch.int8))
    >>> is_quantized(layer), is_quantized(rounded)
    (False, True)
    """
    if type(layer).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
        return True
    if layer._modules:
        return False
    return any(_is_rounded(each) for each in (*layer._parameters.values(), *layer._buffers.values()))


def _is_rounded(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.dim() < 2:
        return False
    if tensor.dtype in ROUNDED:
        return True
    # A subclass that wraps its numbers, as torchao's do.
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return False
    names, _ = tensor.__tensor_flatten__()
    return any(_is_rounded(getattr(tensor, each)) for each in names)


@dataclass
class QuantizedLayers:
    """Which layers of a model were quantized when it was compared, so that others are noticed at a call.

    Attributes:
        paths: those layers; None before the comparison.
        slots: where the layers are, with what they were. Not copied and pickled with the model.
    """

    paths: frozenset[str] | None = None
    slots: list[tuple[nn.Module, str, type, type]] | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.paths, self.slots = values["paths"], None

    def record(self, model: nn.Module) -> None:
        """Take the model as it is."""
        self.paths, self.slots = _paths(model), _slots(model)

    def is_changed(self, model: nn.Module) -> bool:
        """Whether a layer was quantized, or swapped back, since `record`."""
        if self.slots is not None:
            for parent, name, kind, weight in self.slots:
                layer: Any = parent._modules.get(name)
                own = None if layer is None else layer._parameters.get("weight")
                if type(layer) is not kind or type(own) is not weight:
                    break
            else:
                return False
        self.slots = _slots(model)
        return _paths(model) != self.paths


def _paths(model: nn.Module) -> frozenset[str]:
    return frozenset(path for path, layer in model.named_modules() if is_quantized(layer))


def _slots(model: nn.Module) -> list[tuple[nn.Module, str, type, type]]:
    return [
        (parent, name, type(layer), type(layer._parameters.get("weight")))
        for parent in model.modules()
        for name, layer in parent._modules.items()
        if layer is not None and getattr(getattr(layer, "weight", None), "ndim", 2) >= 2 and not layer._modules
    ]


# -- a layer -----------------------------------------------------------------------------------------------------------
def mixes_tokens(layer: nn.Module, x: Tensor) -> bool:
    """Whether one large token changes what a layer gives for the others.

    Args:
        layer: a layer of one input.
        x: what it is called with, (..., features).
    """
    rows = x.reshape(-1, x.shape[-1])
    for dim in range(max(1, x.dim() - 1)):
        shape = [1] * (x.dim() - 1)
        shape[dim] = -1
        alone, beside = (each.reshape(*shape, x.shape[-1]) for each in (rows, torch.cat([rows, LARGER * rows[:1]])))
        wanted = layer(alone).reshape(len(rows), -1)
        found = layer(beside).reshape(len(rows) + 1, -1)[:-1]
        size = wanted.abs().amax().clamp_min(1e-12)
        if not bool((wanted - found).abs().amax() <= TOLERANCE * size):
            return True
    return False


def _reason(path: str, layer: nn.Module) -> QuantizesBatch:
    kind = type(layer).__name__
    return QuantizesBatch(
        f"{path}, a {kind}, quantizes its inputs by one range for the whole batch, which is set by the largest of all "
        "tokens; a range per token is supported"
    )


# -- a model -----------------------------------------------------------------------------------------------------------
def replace_quantized(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """Try every quantized layer that a call uses, and put a float layer with random weights in the place of each.

    The caller restores the attributes of the layers.

    Args:
        model: the model.
        run: calls it with a small batch.

    Returns:
        Why the model cannot be unpadded, or None.
    """
    layers = {layer: path for path, layer in model.named_modules() if is_quantized(layer)}
    if not layers:
        return None
    calls = _calls(list(layers), run)
    generator = torch.Generator().manual_seed(0)
    for layer, (x, out) in calls.items():
        # A lookup of rounded rows has no inputs to quantize.
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        if not isinstance(out, Tensor) or out.shape[:-1] != x.shape[:-1]:
            return f"{layers[layer]}, a {type(layer).__name__}, is quantized and gives no row for each of its rows"
        if mixes_tokens(layer, x):
            return _reason(layers[layer], layer)
        weight = torch.randn(out.shape[-1], x.shape[-1], generator=generator) / math.sqrt(x.shape[-1])
        vars(layer)[STAND_IN] = weight.to(x.device, x.dtype)
        bind(layer, "forward", _float_forward)
    return None


def stands_in(model: nn.Module) -> Iterator[str]:
    """The names of parameters that no layer uses, because a float layer stands in for theirs."""
    for path, layer in model.named_modules():
        if STAND_IN in vars(layer):
            yield from (f"{path}.{name}" if path else name for name, _ in layer.named_parameters())


def own_forward(layer: nn.Module) -> Callable[..., Any]:
    """What a layer computes without anything that is bound to it, as a function of the layer and its input."""
    return _float_forward if STAND_IN in vars(layer) else type(layer).forward


def _float_forward(self: nn.Module, x: Tensor) -> Tensor:
    return functional.linear(x, vars(self)[STAND_IN])


def _calls(layers: list[nn.Module], run: Callable[[], Any]) -> dict[nn.Module, tuple[Any, Any]]:
    """The first input and output of each layer that is called."""
    found: dict[nn.Module, tuple[Any, Any]] = {}

    def look(layer: nn.Module, inputs: Any, output: Any) -> None:
        found.setdefault(layer, (inputs[0] if inputs else None, output))

    handles = [layer.register_forward_hook(look) for layer in layers]
    try:
        run()
    except Exception:
        # The comparison that follows reports it.
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return found
