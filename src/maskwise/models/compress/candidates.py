"""The exact forms that a layer could take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.compress.live_units import LiveConv2d, LiveLinear
from maskwise.nn import SparseLinear
from maskwise.nn.linear_forms import indices_unless_all
from maskwise.ops.linear import BLOCKS, Block
from maskwise.plan import planner

__all__ = ["Layer", "candidates", "conv_arguments", "rebuilt"]

#: Above this share of kept weights no kernel beats the dense product, and none is tried.
TOO_DENSE = 0.75
#: Blocks may hold this many values for each one that is kept; the others are stored as zeros.
COVER = 1.25


@dataclass(frozen=True)
class Layer:
    """A linear layer or a convolution: its module, and what is kept of its weight."""

    module: nn.Linear | nn.Conv2d
    live: Tensor  # bool, of the weight's shape

    @classmethod
    def of(cls, module: nn.Linear | nn.Conv2d, bits: Tensor | None = None) -> Layer:
        """The layer; what is not 0 is kept, and what a gate keeps, unless the weight is not 0 elsewhere too."""
        nonzero = module.weight.detach() != 0
        fits = bits is not None and bits.shape == nonzero.shape and not bool((nonzero & ~bits).any())
        return cls(module, bits if fits and bits is not None else nonzero)

    @property
    def kept(self) -> int:
        """How many weights are kept."""
        return int(self.live.sum())

    @property
    def density(self) -> float:
        """The share of weights that is kept; 1 for none at all."""
        return self.kept / self.live.numel() if self.live.numel() else 1.0


def candidates(layer: Layer, x: Tensor) -> tuple[dict[str, nn.Module], list[str]]:
    """The forms other than dense that this layer could take for such an input, and why others are out."""
    if isinstance(layer.module, nn.Conv2d):
        return _of_conv(layer)
    found: dict[str, nn.Module] = {}
    refused: list[str] = []
    with torch.no_grad():
        live = _live_linear(layer.module)
        if live is not None:
            found["live units"] = live
        if not planner.has_kernel("linear", layer.module.weight.dtype, x.device.type):
            refused.append(f"there is no sparse kernel for {layer.module.weight.dtype} on {x.device.type}")
        elif layer.density > TOO_DENSE:
            refused.append("too much for a sparse kernel")
        else:
            for block in BLOCKS:
                cover = _cover(layer.live, block)
                if int(cover.sum()) <= COVER * layer.kept:
                    name = "sparse" if block == (1, 1) else f"sparse {block[0]}x{block[1]}"
                    found[name] = _sparse(layer.module, cover, block)
    return found, refused


def _of_conv(layer: Layer) -> tuple[dict[str, nn.Module], list[str]]:
    conv = layer.module
    assert isinstance(conv, nn.Conv2d)
    if conv.groups != 1:
        return {}, ["groups tie its channels together"]
    with torch.no_grad():
        live = _live_conv(conv)
    if live is None:
        return {}, ["no whole channel is dead, and there is no sparse convolution"]
    return {"live units": live}, []


def _cover(live: Tensor, block: Block) -> Tensor:
    """The mask of all blocks of which something is kept."""
    if block == (1, 1):
        return live
    height, width = block
    down, along = -live.shape[0] % height, -live.shape[1] % width
    full = nn.functional.pad(live, (0, along, 0, down))
    cut = full.reshape(full.shape[0] // height, height, full.shape[1] // width, width)
    whole = cut.any(3, keepdim=True).any(1, keepdim=True).expand_as(cut).reshape(full.shape)
    return whole[: live.shape[0], : live.shape[1]]


def _sparse(linear: nn.Linear, bits: Tensor, block: Block) -> SparseLinear:
    layer = SparseLinear.from_linear(linear, bits, block=block)
    layer.values.requires_grad_(linear.weight.requires_grad)
    if layer.bias is not None:
        layer.bias.requires_grad_(linear.bias.requires_grad)
    return layer


def _units(weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Which inputs and which outputs live, or None for all; at least one of each, so that there is a layer."""
    nonzero = weight.detach() != 0
    inputs, outputs = nonzero.transpose(0, 1).flatten(1).any(1), nonzero.flatten(1).any(1)
    for units in (inputs, outputs):
        if units.numel() and not bool(units.any()):
            units[0] = True
    return indices_unless_all(inputs), indices_unless_all(outputs)


def _live_linear(linear: nn.Linear) -> LiveLinear | None:
    inputs, outputs = _units(linear.weight)
    if inputs is None and outputs is None:
        return None
    reads, makes = (None if each is None else each.numel() for each in (inputs, outputs))
    weight = linear.weight
    made = LiveLinear(
        linear.in_features, linear.out_features, reads, makes, linear.bias is not None, weight.device, weight.dtype
    )
    _fill(made, linear, inputs, outputs)
    return made


def _live_conv(conv: nn.Conv2d) -> LiveConv2d | None:
    inputs, outputs = _units(conv.weight)
    if inputs is None and outputs is None:
        return None
    arguments = conv_arguments(conv)
    del arguments["in_channels"], arguments["out_channels"], arguments["groups"]
    reads, makes = (None if each is None else each.numel() for each in (inputs, outputs))
    made = LiveConv2d(
        conv.in_channels,
        conv.out_channels,
        live_inputs=reads,
        live_outputs=makes,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
        **arguments,
    )
    _fill(made, conv, inputs, outputs)
    return made


def _fill(
    made: LiveLinear | LiveConv2d, layer: nn.Linear | nn.Conv2d, inputs: Tensor | None, outputs: Tensor | None
) -> None:
    weight = layer.weight.detach()
    if inputs is not None:
        assert made.inputs is not None
        made.inputs.copy_(inputs)
        weight = weight.index_select(1, inputs)
    if outputs is not None:
        assert made.outputs is not None
        made.outputs.copy_(outputs)
        weight = weight.index_select(0, outputs)
    small = made.small.weight
    assert isinstance(small, nn.Parameter)
    small.copy_(weight)
    small.requires_grad_(layer.weight.requires_grad)
    if layer.bias is not None:
        assert made.bias is not None
        made.bias.copy_(layer.bias)
        made.bias.requires_grad_(layer.bias.requires_grad)
    made.train(layer.training)


def conv_arguments(conv: nn.Conv2d) -> dict[str, Any]:
    """The arguments that make a convolution like this one."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {**{name: getattr(conv, name) for name in names}, "bias": conv.bias is not None}


def rebuilt(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor | None) -> nn.Linear | nn.Conv2d:
    """A layer like this one, of another size."""
    where: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    made: nn.Linear | nn.Conv2d
    if isinstance(layer, nn.Linear):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, **where)
    else:
        sizes = {"in_channels": weight.shape[1], "out_channels": weight.shape[0], "bias": bias is not None}
        made = nn.Conv2d(**{**conv_arguments(layer), **sizes}, **where)
    with torch.no_grad():
        made.weight.copy_(weight)
        if bias is not None:
            assert made.bias is not None
            made.bias.copy_(bias)
    for parameter in made.parameters():
        parameter.requires_grad_(layer.weight.requires_grad)
    return made.train(layer.training)
