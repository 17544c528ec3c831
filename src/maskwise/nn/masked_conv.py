"""A convolution with a gate on its weight, which leaves dead channels out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.mask import Mask
from maskwise.nn.gates import Gate
from maskwise.nn.layer_gate import gate_for
from maskwise.nn.layer_input import check_channels
from maskwise.nn.linear_forms import indices_unless_all
from maskwise.nn.remembered import Remembered
from maskwise.ops.arguments import MaskLike
from maskwise.plan.dispatch import Plan, Skips, is_observed
from maskwise.plan.explain import record

__all__ = ["MaskedConv2d"]

# Nanoseconds, as in `linear_forms`: a multiply-add of a convolution, the moving of one number, a few more calls.
MULTIPLY = 0.014
MOVE = 0.6
CALLS = 40_000.0


@dataclass(frozen=True)
class _Channels:
    """The effective weight, and the part of it whose channels are not all dead."""

    weight: Tensor  # (out, in / groups, height, width)
    small: Tensor | None
    outputs: Tensor | None
    inputs: Tensor | None


class MaskedConv2d(nn.Conv2d):
    """``torch.nn.Conv2d`` with a gate on its weight: same arguments, same parameters, one more module.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.MaskedConv2d(4, 8, 3, padding=1, gate=mw.nn.gates.TopK(0.25))
    >>> list(layer.state_dict()), layer.mask.density
    (['weight', 'bias', 'gate.kept'], 0.25)
    >>> layer(torch.ones(1, 4, 5, 5)).shape
    torch.Size([1, 8, 5, 5])

    Where no gradient of the weight is asked for, the effective weight is made once and kept until weight or gate
    change, and channels of which nothing is kept are left out where that pays. Everything else is as in `MaskedLinear`.

    Args:
        in_channels: the channels of the input.
        out_channels: the channels of the output.
        kernel_size: the size of the kernel; this and the other arguments are torch's.
        gate: a gate, or a mask that broadcasts to (out_channels, in_channels / groups, height, width): one of output
            channels is ``mask[:, None, None, None]``. By default, everything is kept.
        kwargs: stride, padding, dilation, groups, bias, padding_mode, device and dtype, as in torch.

    Raises:
        DtypeError: ``gate`` is neither a gate nor a mask.
        ShapeError: the gate does not fit the weight; the hint says what would.
        ArgumentError: the gate belongs to another weight.
    """

    gate: Gate

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *args: Any,
        gate: Gate | MaskLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, *args, **kwargs)
        self.gate = gate_for(type(self).__name__, gate, self.weight)
        self._forms: Remembered[_Channels] = Remembered()

    @property
    def mask(self) -> Mask:
        """What the gate keeps at the moment, of the weight's shape."""
        return self.gate.mask(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of (N, C, H, W), or (C, H, W), with the effective weight.

        Raises:
            ShapeError: the input has another number of dims, or of channels.
            DtypeError: the input is not a tensor, or not of the layer's dtype.
            DeviceError: the input is on another device.
        """
        weight, gate, bias = self.weight, self.gate, self.bias
        check_channels("MaskedConv2d", input, self.in_channels, weight)
        found = self._forms.get(weight, gate, bias, lambda: _channels_of(gate(weight), self.groups))
        if found is None:
            return self._convolve(input, gate(weight), bias)
        small = found.small
        pays = small is not None and self._pays(input, found.weight, small, found)
        if is_observed():
            route, reason, skips, computed = "dense", "no channels, or too few, are dead", Skips.NOTHING, weight.numel()
            if small is not None and pays:
                route, reason, skips, computed = "units", "dead channels are left out", Skips.READING, small.numel()
            plan = Plan(type(self).__name__, route, reason, 0.0, skips=skips)
            if planned := record(plan, weight, gate.bits(weight), skipped=weight.numel() - computed):
                return planned  # type: ignore[return-value]
        if small is None or not pays:
            return self._convolve(input, found.weight, bias)
        if found.inputs is not None:
            input = input.index_select(-3, found.inputs)
        if found.outputs is None:
            return self._convolve(input, small, bias)
        out = self._convolve(input, small, None)
        shape = (*out.shape[:-3], self.out_channels, *out.shape[-2:])
        room = out.new_zeros(shape).index_copy(-3, found.outputs, out)
        # What a dead channel has is its bias.
        return room if bias is None else room + bias.to(room.dtype)[:, None, None]

    def _convolve(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Torch's own, which sees to padding modes; it carries no types.
        out: Tensor = self._conv_forward(input, weight, bias)
        return out

    def forget(self) -> None:
        """Make again what is kept of weight and gate; needed only after few values were written through ``.data``."""
        self._forms.forget()

    def _pays(self, x: Tensor, weight: Tensor, small: Tensor, found: _Channels) -> bool:
        if x.dim() < 3:
            return False
        pixels = x.numel() // max(x.shape[-3], 1)
        strides = self.stride[0] * self.stride[1]
        # Close enough for a prediction: padding and kernel change the output's size by little.
        made = pixels / strides
        saved = (weight.numel() - small.numel()) * made * MULTIPLY
        moved = 0.0 if found.inputs is None else small.shape[1] * pixels
        moved += 0.0 if found.outputs is None else (small.shape[0] + weight.shape[0]) * made
        return saved > moved * MOVE + CALLS


@torch.no_grad()
def _channels_of(effective: Tensor, groups: int) -> _Channels:
    """The effective weight and its live part. Groups tie channels together, so nothing is left out of them."""
    effective = effective.detach()
    if groups != 1:
        return _Channels(effective, None, None, None)
    live = effective != 0
    outputs, inputs = (
        indices_unless_all(live.flatten(1).any(1)),
        indices_unless_all(live.transpose(0, 1).flatten(1).any(1)),
    )
    if outputs is None and inputs is None:
        return _Channels(effective, None, None, None)
    small = effective if outputs is None else effective.index_select(0, outputs)
    small = small if inputs is None else small.index_select(1, inputs)
    # With nothing kept at all there is nothing to convolve, which not every backend takes; one dead channel it is.
    if not small.numel():
        return _Channels(effective, None, None, None)
    return _Channels(effective, small.contiguous(), outputs, inputs)
