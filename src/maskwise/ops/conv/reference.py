"""Convolutions of what is valid in plain torch operations: the ground truth of the tests, and the dense route."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.ops.conv.arguments import Geometry, Options
from maskwise.ops.primitives import fill_dropped

__all__ = ["convolution", "dense", "input_gradient"]

_RUN: dict[tuple[int, bool], Any] = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
}


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Torch's own convolution."""
    run, o = _RUN[options.dims, options.is_transposed], options
    if o.is_transposed:
        out: Tensor = run(x, weight, bias, o.stride, o.padding, o.output_padding, o.groups, o.dilation)
    else:
        out = run(x, weight, bias, o.stride, o.padding, o.dilation, o.groups)
    return out


def dense(
    x: Tensor,  # (batch, channels, *positions), or without a batch
    weight: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,  # bool, (batch, *positions)
    wanted: Tensor | None,  # bool, (batch, *positions of the result)
    other: float | Tensor | None,
    options: Options,
) -> Tensor:
    """The convolution of x with zeros where it is not valid, and ``other`` where it is not wanted."""
    channel = -options.dims - 1
    if valid is not None:
        x = fill_dropped(x, valid.unsqueeze(channel))
    out = convolution(x, weight, bias, options)
    if wanted is None:
        return out
    kept = wanted.unsqueeze(channel)
    if isinstance(other, Tensor):
        return torch.where(kept, out, other.to(out.dtype))
    return fill_dropped(out, kept, float(other or 0.0))


def input_gradient(grad: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The transposed convolution of all coarse positions, (batch, channels, *fine): the gradient of a convolution."""
    out = F.conv_transpose2d(grad, weight, None, geometry.stride, 0, 0, geometry.groups, geometry.dilation)
    for d in (-2, -1):
        # Paddings before and after may differ, and the last positions may be out of reach.
        missing = geometry.before[d] + geometry.fine[d] - out.shape[d]
        if missing > 0:
            out = F.pad(out, (0, missing) if d == -1 else (0, 0, 0, missing))
        out = out.narrow(d, geometry.before[d], geometry.fine[d])
    return out
