"""Convolutions of tiles that read their map in place, with a weight that is packed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.ops.backends import INTERPRETED, provide, why_not_served
from maskwise.ops.conv import tiles
from maskwise.ops.conv.arguments import Geometry
from maskwise.ops.operation import define

__all__ = ["convolve", "pack", "serves"]

#: Output channels of a panel, as in csrc/conv_direct.h.
_PANEL = 32


#: Input channels from which on a tap is a loop rather than a look-up.
_LEAST_CHANNELS = 8


def serves(
    geometry: Geometry, is_transposed: bool, channels: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why it does not serve a convolution, or None."""
    if is_transposed or geometry.groups != 1:
        return "it is for convolutions without groups that are not transposed"
    if channels < _LEAST_CHANNELS:
        return "it has too few channels"
    return why_not_served("conv_direct", device.type, dtype)


def pack(weight: Tensor) -> Tensor:
    """A weight, (out, in, *kernel), in panels of outputs: (panels, taps, in, 32).

    >>> pack(torch.ones(40, 8, 3, 3)).shape
    torch.Size([2, 9, 8, 32])
    """
    outputs, inputs = weight.shape[:2]
    flat = weight.detach().permute(2, 3, 1, 0).reshape(-1, inputs, outputs)
    flat = F.pad(flat, (0, -outputs % _PANEL))
    return flat.reshape(*flat.shape[:2], -1, _PANEL).permute(2, 0, 1, 3).contiguous()


def _unpacked(packed: Tensor, kernel: Sequence[int], outputs: int) -> Tensor:
    flat = packed.permute(1, 2, 0, 3).flatten(2)[..., :outputs]
    return flat.reshape(*kernel, *flat.shape[1:]).permute(3, 2, 0, 1)


# -- the op ------------------------------------------------------------------------------------------------------------
def _direct(
    x: Tensor,
    bits: Tensor | None,
    found: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reads: list[int],
    size: list[int],
    geometry: list[int],
    outputs: int,
) -> Tensor:
    window = [(n - 1) * s + d * (k - 1) + 1 for n, k, s, d in zip(size, *_pairs(geometry), strict=True)]
    windows = tiles.gather(x, bits, found, [*reads[:4], *window])
    out = F.conv2d(windows, _unpacked(weight, geometry[:2], outputs), bias, geometry[2:4], 0, geometry[4:6])
    return out.contiguous(memory_format=torch.channels_last)


def _pairs(geometry: Sequence[int]) -> tuple[Sequence[int], ...]:
    return geometry[:2], geometry[2:4], geometry[4:6]


def _flops(
    x: Tensor, bits: Any, found: Tensor, weight: Tensor, bias: Any, reads: Any, size: Sequence[int],
    geometry: Sequence[int], outputs: int, **_: Any,
) -> int:  # fmt: skip
    taps = geometry[0] * geometry[1]
    return 2 * found.shape[0] * size[0] * size[1] * taps * x.shape[1] * outputs


define(
    "conv_direct",
    "(Tensor x, Tensor? bits, Tensor tiles, Tensor weight, Tensor? bias, int[] reads, int[] size, int[] geometry, "
    "int outputs) -> Tensor",
    reference=_direct,
    fake=lambda x, bits, found, weight, bias, reads, size, geometry, outputs: x.new_empty(
        found.shape[0], *size, outputs
    ).permute(0, 3, 1, 2),
    flops=_flops,
)
if not INTERPRETED:
    provide("conv_direct", "cpu", (torch.float32,))
_convolve = torch.ops.maskwise.conv_direct.default


def convolve(
    x: Tensor,  # (batch, channels, height, width), of which the channels are contiguous
    valid: Tensor | None,  # bool, (batch, height, width)
    found: Tensor,  # int32, (n, 3)
    packed: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    tiling: tiles.Tiling,
    outputs: int,
) -> Tensor:
    """The convolution of tiles: (n, channels, *size), channels last.

    Args:
        x: a map.
        valid: which positions of it count.
        found: the tiles.
        packed: the weight, by `pack`.
        bias: (outputs,), or None.
        geometry: of the convolution.
        tiling: of the tiles.
        outputs: channels of the result.
    """
    numbers = [*geometry.kernel, *geometry.stride, *geometry.dilation]
    out: Tensor = _convolve(x, valid, found, packed, bias, tiling.reads, list(tiling.size), numbers, outputs)
    return out
