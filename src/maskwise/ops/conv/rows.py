"""Depthwise convolutions by rows: loops over the runs of what is wanted, which read what is valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from maskwise.ops.backends import FLOATING, INTERPRETED, provide
from maskwise.ops.conv.arguments import Geometry
from maskwise.ops.flops import count_kept
from maskwise.ops.operation import define

__all__ = ["convolve", "serves", "weight_gradient"]


def serves(geometry: Geometry, inputs: int, outputs: int, is_transposed: bool, channels_last: bool) -> str | None:
    """Why rows do not serve a convolution, or None."""
    if not geometry.groups == inputs == outputs:
        return "rows are for depthwise convolutions"
    if is_transposed and geometry.stride != (1, 1):
        return "rows of transposed convolutions have no stride"
    if geometry.stride[1] != 1 and not channels_last:
        return "rows have no stride unless channels are last"
    return None


# -- the ops -----------------------------------------------------------------------------------------------------------
def _padded(x: Tensor, valid: Tensor | None, geometry: list[int], coarse: tuple[int, ...] | list[int]) -> Tensor:
    """X with zeros where it is not valid, and around it, as far as the taps of coarse positions reach."""
    kh, kw, sh, sw, top, left, dh, dw = geometry
    x = x if valid is None else torch.where(valid[:, None], x, 0.0)
    bottom = (coarse[0] - 1) * sh + dh * (kh - 1) + 1 - top - x.shape[2]
    right = (coarse[1] - 1) * sw + dw * (kw - 1) + 1 - left - x.shape[3]
    return F.pad(x, (left, right, top, bottom))


def _rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    wanted: Tensor | None,
    other: Tensor,
    geometry: list[int],
    coarse: list[int],
    channels_last: bool,
) -> Tensor:
    padded = _padded(x, valid, geometry, coarse)
    out = F.conv2d(padded, weight, bias, geometry[2:4], 0, geometry[6:8], x.shape[1])
    out = out if wanted is None else torch.where(wanted[:, None], out, other)
    return out.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _rows_weight(
    x: Tensor, grad: Tensor, valid: Tensor | None, wanted: Tensor | None, geometry: list[int], channels_last: bool
) -> tuple[Tensor, Tensor]:
    grad = grad if wanted is None else torch.where(wanted[:, None], grad, 0.0)
    padded = _padded(x, valid, geometry, grad.shape[2:])
    shape = (x.shape[1], 1, *geometry[:2])
    weight = conv2d_weight(  # type: ignore[no-untyped-call]
        padded, shape, grad, geometry[2:4], 0, geometry[6:8], x.shape[1]
    )
    return weight, grad.sum((0, 2, 3))


def _flops(
    x: Tensor, weight: Tensor, bias: Tensor | None, valid: Tensor | None, wanted: Tensor | None, other: Tensor,
    geometry: Sequence[int], coarse: Sequence[int], channels_last: bool, **_: Any,
) -> int:  # fmt: skip
    """One window for each output that is wanted."""
    batch, channels = x.shape[:2]
    outputs = count_kept(wanted, (batch, *coarse))
    return 2 * channels * outputs * geometry[0] * geometry[1]


def _weight_flops(
    x: Tensor, grad: Tensor, valid: Tensor | None, wanted: Tensor | None, geometry: Sequence[int], *_: Any, **__: Any
) -> int:
    """As many as forward."""
    batch, channels, *coarse = grad.shape
    outputs = count_kept(wanted, (batch, *coarse))
    return 2 * channels * outputs * geometry[0] * geometry[1]


define(
    "conv_rows",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? valid, Tensor? wanted, Tensor other, int[] geometry, "
    "int[] coarse, bool channels_last) -> Tensor",
    reference=_rows,
    fake=lambda x, weight, bias, valid, wanted, other, geometry, coarse, last: torch.empty(
        (*x.shape[:2], *coarse),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last if last else torch.contiguous_format,
    ),
    flops=_flops,
)
define(
    "conv_rows_weight",
    "(Tensor x, Tensor grad, Tensor? valid, Tensor? wanted, int[] geometry, bool channels_last) -> (Tensor, Tensor)",
    reference=_rows_weight,
    fake=lambda x, grad, valid, wanted, geometry, last: (
        x.new_empty(x.shape[1], 1, *geometry[:2]),
        x.new_empty(x.shape[1]),
    ),
    flops=_weight_flops,
)
if not INTERPRETED:
    provide("conv_rows", "cpu", FLOATING)
_convolve = torch.ops.maskwise.conv_rows.default
_weight_gradient = torch.ops.maskwise.conv_rows_weight.default


# -- convolutions ------------------------------------------------------------------------------------------------------
def _numbers(geometry: Geometry) -> list[int]:
    return [*geometry.kernel, *geometry.stride, *geometry.before, *geometry.dilation]


def _as_laid(x: Tensor, channels_last: bool) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def convolve(
    x: Tensor,  # (batch, channels, height, width)
    weight: Tensor,  # (channels, 1, *kernel)
    bias: Tensor | None,
    valid: Tensor | None,  # bool, (batch, height, width)
    wanted: Tensor | None,  # bool, of the result
    other: Tensor,
    geometry: Geometry,
    is_transposed: bool,
    channels_last: bool,
) -> Tensor:
    """The depthwise convolution of what is wanted; ``other`` elsewhere."""
    numbers, coarse, kernel = _numbers(geometry), geometry.coarse, weight.contiguous()
    if is_transposed:
        # Without a stride, that is a convolution with mirrored taps, which reads coarse positions.
        numbers[4:6] = [span - before for span, before in zip(geometry.span, geometry.before, strict=True)]
        kernel, coarse = weight.flip(-2, -1).contiguous(), geometry.fine
    fill = other if other.dim() == 0 else other.new_zeros(())
    out: Tensor = _convolve(
        _as_laid(x, channels_last), kernel, bias, valid, wanted, fill, numbers, list(coarse), channels_last
    )
    return out if other.dim() == 0 or wanted is None else torch.where(wanted[:, None], out, other)


def weight_gradient(
    fine: Tensor,  # (batch, channels, *fine)
    coarse: Tensor,  # (batch, channels, *coarse)
    fine_bits: Tensor | None,  # bool, (batch, *fine)
    coarse_bits: Tensor | None,  # bool, (batch, *coarse)
    geometry: Geometry,
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of the weight, and the sum of what is kept of the coarse positions."""
    found: tuple[Tensor, Tensor] = _weight_gradient(
        _as_laid(fine, channels_last),
        _as_laid(coarse, channels_last),
        fine_bits,
        coarse_bits,
        _numbers(geometry),
        channels_last,
    )
    return found
