"""Convolutions with a gate on their weight, which leave dead channels out; and convolutions of regions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maskwise.errors import ArgumentError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import check_channels
from maskwise.nn.gates import Gate
from maskwise.nn.gates.gate import gate_for
from maskwise.nn.linear import indices_unless_all
from maskwise.nn.weight_cache import WeightCache
from maskwise.ops.arguments import MaskLike
from maskwise.ops.conv import Options, conv1d, conv2d, wanted_by_default
from maskwise.plan import dispatch
from maskwise.plan.cost import Rates, Work
from maskwise.plan.dispatch import NOT_APPLICABLE, Decision, Facts, Plan, Route, Skips
from maskwise.plan.explain import record

__all__ = ["MaskedConv2d", "RegionConv1d", "RegionConv2d"]

_OP = "MaskedConv2d"
# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_cached, _forced, _is_any_forced = dispatch.cache.get, dispatch.forced, dispatch.is_any_forced
_is_any_observing = dispatch.is_any_observing


class MaskedConv2d(nn.Conv2d):
    """``torch.nn.Conv2d`` with a gate on its weight: same arguments, same parameters, one more module.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.MaskedConv2d(4, 8, 3, padding=1, gate=mw.nn.gates.TopK(0.25))
    >>> list(layer.state_dict()), layer.mask.density
    (['weight', 'bias', 'gate.kept'], 0.25)
    >>> layer(torch.ones(1, 4, 5, 5)).shape
    torch.Size([1, 8, 5, 5])

    Where the weight does not require grad, the effective weight is cached until weight or gate change, and channels of
    which nothing is kept are left out where that pays. Everything else is as in `MaskedLinear`.

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
        self._cache: WeightCache[_Channels] = WeightCache()

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
        check_channels(_OP, input, self.in_channels, weight)
        found = self._cache.get(weight, gate, bias, lambda: _channels_of(gate(weight), self.groups))
        if found is None:
            out: Tensor = self._conv_forward(input, gate(weight), bias)
            return out
        small = None if found.small is None else found.small.shape
        key = (_OP, input.shape, input.dtype, input.device, weight.shape, small, self.stride,
               _is_any_forced() and _forced())  # fmt: skip
        decision: Decision | None = _cached(key)
        if decision is None:
            decision = dispatch.cache[key] = self._decide(input, found)
        if _is_any_observing() and (planned := _report(decision.plan, found, weight, gate)):
            return planned  # type: ignore[return-value]
        return decision.run(self, found, input, bias)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Invalidate what is cached of weight and gate; needed only after few values were written through ``.data``."""
        self._cache.invalidate()

    def _decide(self, x: Tensor, found: _Channels) -> Decision:
        # Close enough for a prediction: padding and kernel change the output's size by little.
        pixels = x.numel() // max(x.shape[-3], 1)
        pooled = pixels / (self.stride[0] * self.stride[1])
        outputs, inputs = (0, 0) if found.small is None else (found.small.shape[0], found.small.shape[1])
        moved = 0.0 if found.inputs is None else inputs * pixels
        moved += 0.0 if found.outputs is None else (outputs + self.out_channels) * pooled
        live = None if found.small is None else found.small.numel()
        detail = _Convolution(pooled, found.weight.numel(), live, moved)
        facts = Facts(_OP, tuple(found.weight.shape), x.dtype, x.device.type, detail=detail)
        return dispatch.decide(facts, _ROUTES)


# -- what is derived from an effective weight --------------------------------------------------------------------------
@dataclass(frozen=True)
class _Channels:
    """The effective weight, and the part of it whose channels are not all dead."""

    weight: Tensor  # (out, in / groups, height, width)
    small: Tensor | None
    outputs: Tensor | None
    inputs: Tensor | None


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


# -- routes ------------------------------------------------------------------------------------------------------------
# Microseconds: a multiply-add of a convolution, moving one number, and what more calls cost; only ratios matter.
MULTIPLY = 0.014e-3
MOVE = 0.6e-3
CALLS = 40.0


class _Convolution(NamedTuple):
    """What routes read."""

    #: How many pixels the output has, over the batch.
    pixels: float
    weights: int
    #: The weights of channels that are not all dead, where some are.
    live: int | None
    #: How many numbers move where dead channels are left out.
    moved: float


def _serves_units(facts: Facts) -> str | None:
    return NOT_APPLICABLE if facts.detail.live is None else None


def _units_work(facts: Facts) -> Work:
    live = facts.detail.live or 0
    return Work(calls=3, streamed=facts.dtype.itemsize * live, flops=round(2 * facts.detail.pixels * live))


def _units_cost(facts: Facts, work: Work, rates: Rates) -> float:
    detail: _Convolution = facts.detail
    return (detail.live or 0) * detail.pixels * MULTIPLY + detail.moved * MOVE + CALLS


def _plain_work(facts: Facts) -> Work:
    weights = facts.detail.weights
    return Work(calls=1, streamed=facts.dtype.itemsize * weights, flops=round(2 * facts.detail.pixels * weights))


def _plain_cost(facts: Facts, work: Work, rates: Rates) -> float:
    return float(facts.detail.weights * facts.detail.pixels * MULTIPLY)


def _run_units(layer: MaskedConv2d, found: _Channels, x: Tensor, bias: Tensor | None) -> Tensor:
    assert found.small is not None
    if found.inputs is not None:
        x = x.index_select(-3, found.inputs)
    # Torch's own, which sees to padding modes; it carries no types.
    live: Tensor = layer._conv_forward(x, found.small, bias if found.outputs is None else None)
    if found.outputs is None:
        return live
    shape = (*live.shape[:-3], layer.out_channels, *live.shape[-2:])
    out = live.new_zeros(shape).index_copy(-3, found.outputs, live)
    # What a dead channel has is its bias.
    return out if bias is None else out + bias.to(out.dtype)[:, None, None]


def _run_plain(layer: MaskedConv2d, found: _Channels, x: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = layer._conv_forward(x, found.weight, bias)
    return out


_ROUTES = (
    Route(
        "units",
        _run_units,
        _serves_units,
        _units_work,
        cost=_units_cost,
        reason="dead channels are left out",
        skips=Skips.READING,
    ),
    Route("plain", _run_plain, work=_plain_work, cost=_plain_cost, reason="no channels, or too few, are dead"),
)


def _report(plan: Plan, found: _Channels, weight: Tensor, gate: Gate) -> Plan | None:
    skipped = weight.numel() - found.small.numel() if found.small is not None and plan.route == "units" else 0
    return record(plan, weight, gate.bits(weight), skipped=skipped)


# -- regions -----------------------------------------------------------------------------------------------------------
def _need_zeros(op: str, padding_mode: str) -> None:
    if padding_mode != "zeros":
        must, hint = "be 'zeros', as what is not valid counts", "F.pad(input, ..., mode=padding_mode) first"
        raise ArgumentError(say(op, "padding_mode", must=must, got=repr(padding_mode), hint=hint))


class RegionConv1d(nn.Conv1d):
    """``torch.nn.Conv1d`` of regions: same arguments, parameters and keys, and masks when it is called.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.RegionConv1d(2, 4, 3, padding=1)
    >>> mask = mw.Mask.from_lengths([3], max_len=8)
    >>> layer(torch.randn(1, 2, 8), mask).shape
    torch.Size([1, 4, 8])

    ``forward(input, mask=None, outputs=None, other=None)`` is `mw.conv1d` with the layer's parameters: ``mask`` says
    which positions of the input are valid, ``outputs`` which of the result are wanted.

    Args:
        args: torch's, in its order: in_channels, out_channels, kernel_size and more.
        kwargs: stride, padding, dilation, groups, bias, device and dtype, as in torch.

    Raises:
        ArgumentError: ``padding_mode`` is not ``"zeros"``: padding counts as zero, as what is not valid does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _need_zeros(type(self).__name__, self.padding_mode)

    def forward(
        self,
        input: Tensor,
        mask: MaskLike | None = None,
        outputs: MaskLike | None = None,
        other: float | Tensor | None = None,
    ) -> Tensor:
        """The convolution of what is valid, where it is wanted.

        Args:
            input: (B, C, L), or (C, L).
            mask: a Mask or a bool tensor of (B, L), which positions are valid; True means keep.
            outputs: which positions of the result are wanted, as in `mw.conv1d`.
            other: a number or a tensor for what is not wanted; 0 by default.

        Raises:
            ShapeError: shapes do not fit each other.
            DtypeError: dtypes differ, or a mask is not bool.
            DeviceError: devices differ.
            ArgumentError: a tensor is nested or sparse.
        """
        return conv1d(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            mask=mask,
            outputs=outputs,
            other=other,
        )

    def outputs(self, mask: MaskLike) -> Mask:
        """The mask of the result, for the layers that follow: what is wanted by default.

        >>> import maskwise as mw
        >>> layer = mw.nn.RegionConv1d(2, 4, 3, stride=2, padding=1)
        >>> layer.outputs(mw.Mask.from_lengths([3], max_len=8)).shape
        torch.Size([1, 4])

        Args:
            mask: a Mask or a bool tensor of (..., L); True means keep.

        Raises:
            ShapeError: it has fewer dims, is not bool, or is smaller than the kernel.
        """
        options = Options("RegionConv1d.outputs", 1, self.stride, self.padding, self.dilation, self.groups)
        return Mask(wanted_by_default(options, mask, self.kernel_size))


class RegionConv2d(nn.Conv2d):
    """``torch.nn.Conv2d`` of regions: same arguments, parameters and keys, and masks when it is called.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.RegionConv2d(2, 4, 3, padding=1)
    >>> mask = mw.Mask.full((6, 6))
    >>> layer(torch.randn(1, 2, 6, 6), mask).shape
    torch.Size([1, 4, 6, 6])

    ``forward(input, mask=None, outputs=None, other=None)`` is `mw.conv2d` with the layer's parameters: ``mask`` says
    which positions of the input are valid, ``outputs`` which of the result are wanted.

    Args:
        args: torch's, in its order: in_channels, out_channels, kernel_size and more.
        kwargs: stride, padding, dilation, groups, bias, device and dtype, as in torch.

    Raises:
        ArgumentError: ``padding_mode`` is not ``"zeros"``: padding counts as zero, as what is not valid does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _need_zeros(type(self).__name__, self.padding_mode)

    def forward(
        self,
        input: Tensor,
        mask: MaskLike | None = None,
        outputs: MaskLike | None = None,
        other: float | Tensor | None = None,
    ) -> Tensor:
        """The convolution of what is valid, where it is wanted.

        Args:
            input: (B, C, H, W), or (C, H, W).
            mask: a Mask or a bool tensor of (B, H, W), which positions are valid; True means keep.
            outputs: which positions of the result are wanted, as in `mw.conv2d`.
            other: a number or a tensor for what is not wanted; 0 by default.

        Raises:
            ShapeError: shapes do not fit each other.
            DtypeError: dtypes differ, or a mask is not bool.
            DeviceError: devices differ.
            ArgumentError: a tensor is nested or sparse.
        """
        return conv2d(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            mask=mask,
            outputs=outputs,
            other=other,
        )

    def outputs(self, mask: MaskLike) -> Mask:
        """The mask of the result, for the layers that follow: what is wanted by default.

        >>> import maskwise as mw
        >>> layer = mw.nn.RegionConv2d(2, 4, 3, stride=2, padding=1)
        >>> layer.outputs(mw.Mask.full((6, 6))).shape
        torch.Size([3, 3])

        Args:
            mask: a Mask or a bool tensor of (..., H, W); True means keep.

        Raises:
            ShapeError: it has fewer dims, is not bool, or is smaller than the kernel.
        """
        options = Options("RegionConv2d.outputs", 2, self.stride, self.padding, self.dilation, self.groups)
        return Mask(wanted_by_default(options, mask, self.kernel_size))
