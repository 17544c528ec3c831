"""Layers with dead units: a smaller dense layer, a gather of its live inputs and a scatter of its live outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskwise.models.compress.surgery import assign, conv_arguments
from maskwise.nn.linear import indices_unless_all

__all__ = ["LiveConv2d", "LiveLinear", "without_dead_units"]


class _LiveUnits(nn.Module):
    """The smaller layer, the indices of its inputs and its outputs, and the bias of all outputs."""

    small: nn.Linear | nn.Conv2d
    bias: nn.Parameter | None
    inputs: Tensor | None  # int64
    outputs: Tensor | None  # int64
    dim: int

    def __init__(
        self, small: nn.Linear | nn.Conv2d, sizes: tuple[int, int], live: tuple[int | None, int | None], bias: bool
    ) -> None:
        super().__init__()
        self.small = small
        self.in_units, self.out_units = sizes
        weight = small.weight
        for name, count in zip(("inputs", "outputs"), live, strict=True):
            self.register_buffer(name, None if count is None else torch.arange(count, device=weight.device))
        zeros = torch.zeros(self.out_units, device=weight.device, dtype=weight.dtype)
        self.register_parameter("bias", nn.Parameter(zeros) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        """The outputs of all units; that of a dead one is its bias."""
        if self.inputs is not None:
            input = input.index_select(self.dim, self.inputs)
        out: Tensor = self.small(input)
        if self.outputs is not None:
            shape = list(out.shape)
            shape[self.dim] = self.out_units
            out = out.new_zeros(shape).index_copy(self.dim, self.outputs, out)
        if self.bias is None:
            return out
        return out + self.bias.to(out.dtype).reshape(-1, *[1] * (-self.dim - 1))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Reject indices that are out of bounds."""
        errors = rest[-1]
        for name, size in (("inputs", self.in_units), ("outputs", self.out_units)):
            found = state_dict.get(f"{prefix}{name}")
            if found is not None and found.numel() and not (int(found.min()) >= 0 and int(found.max()) < size):
                errors.append(f"{prefix}{name} must be in [0, {size})")
                return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """The live and the total units."""
        counts = [
            f"{size if live is None else live.numel()} of {size}"
            for live, size in ((self.inputs, self.in_units), (self.outputs, self.out_units))
        ]
        return f"inputs={counts[0]}, outputs={counts[1]}"


class LiveLinear(_LiveUnits):
    """``torch.nn.Linear`` without its dead inputs and outputs.

    >>> layer = LiveLinear(3, 4, live_inputs=2, live_outputs=1)
    >>> layer(torch.ones(5, 3)).shape, layer.small
    (torch.Size([5, 4]), Linear(in_features=2, out_features=1, bias=False))

    Args:
        in_features: the size of each input.
        out_features: the size of each output.
        live_inputs: how many inputs are read; None for all. The buffer ``inputs`` holds their indices.
        live_outputs: how many outputs are computed; None for all. The buffer ``outputs`` holds their indices.
        bias: whether there is a bias, of all outputs.
        device: of the parameters.
        dtype: of the parameters.
    """

    dim = -1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        live_inputs: int | None = None,
        live_outputs: int | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        reads = in_features if live_inputs is None else live_inputs
        makes = out_features if live_outputs is None else live_outputs
        small = nn.Linear(reads, makes, False, device, dtype)
        super().__init__(small, (in_features, out_features), (live_inputs, live_outputs), bias)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        if self.outputs is None and self.inputs is not None:
            # Without a scatter, the bias is fused into the product.
            return F.linear(input.index_select(-1, self.inputs), self.small.weight, self.bias)
        return super().forward(input)


class LiveConv2d(_LiveUnits):
    """``torch.nn.Conv2d`` without its dead channels; ``groups`` is always 1.

    >>> layer = LiveConv2d(3, 4, 3, live_inputs=2, padding=1)
    >>> layer(torch.ones(1, 3, 5, 5)).shape
    torch.Size([1, 4, 5, 5])

    Args:
        in_channels: the channels of the input.
        out_channels: the channels of the output.
        kernel_size: the size of the kernel.
        live_inputs: how many channels are read; None for all.
        live_outputs: how many channels are computed; None for all.
        bias: whether there is a bias, of all channels.
        kwargs: stride, padding, dilation, padding_mode, device and dtype, as in torch.
    """

    dim = -3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        live_inputs: int | None = None,
        live_outputs: int | None = None,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        reads = in_channels if live_inputs is None else live_inputs
        makes = out_channels if live_outputs is None else live_outputs
        small = nn.Conv2d(reads, makes, kernel_size, bias=False, **kwargs)
        super().__init__(small, (in_channels, out_channels), (live_inputs, live_outputs), bias)


@torch.no_grad()
def without_dead_units(layer: nn.Linear | nn.Conv2d) -> LiveLinear | LiveConv2d | None:
    """The layer without its dead inputs and outputs, or None if all are live."""
    nonzero = layer.weight.detach() != 0
    inputs, outputs = _live_indices(nonzero.transpose(0, 1)), _live_indices(nonzero)
    if inputs is None and outputs is None:
        return None
    sizes: dict[str, Any] = {
        "live_inputs": None if inputs is None else inputs.numel(),
        "live_outputs": None if outputs is None else outputs.numel(),
        "device": layer.weight.device,
        "dtype": layer.weight.dtype,
    }
    live: LiveLinear | LiveConv2d
    if isinstance(layer, nn.Linear):
        live = LiveLinear(layer.in_features, layer.out_features, bias=layer.bias is not None, **sizes)
    else:
        arguments = conv_arguments(layer)
        del arguments["groups"]
        live = LiveConv2d(**arguments, **sizes)
    weight = layer.weight
    for dim, indices, buffer in ((1, inputs, live.inputs), (0, outputs, live.outputs)):
        if indices is not None and buffer is not None:
            buffer.copy_(indices)
            weight = weight.index_select(dim, indices)
    assign(live.small.weight, weight, layer.weight)
    if layer.bias is not None and live.bias is not None:
        assign(live.bias, layer.bias, layer.bias)
    return live.train(layer.training)


def _live_indices(nonzero: Tensor) -> Tensor | None:
    """The indices along dim 0 with a nonzero weight, or None for all; at least one, since a layer needs a unit."""
    live = nonzero.flatten(1).any(1)
    if live.numel() and not bool(live.any()):
        live[0] = True
    return indices_unless_all(live)
