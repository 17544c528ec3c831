"""Pooling of regions: windows are reduced over what is valid in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import check_dims, check_tensor
from maskwise.ops.arguments import MaskLike
from maskwise.ops.conv import Geometry, line_up, seen_through
from maskwise.ops.primitives import fill_dropped

__all__ = ["RegionAvgPool2d", "RegionMaxPool2d", "reduce_windows"]

_SHAPES = ("(B, C, H, W)", "(C, H, W)")


def reduce_windows(
    run: Callable[[Tensor], Tensor], is_max: bool, x: Tensor, valid: Tensor, *, is_sum: bool = False
) -> Tensor:
    """Pool what is valid of each window, by torch's own pooling; 0 where nothing is.

    Args:
        run: the pooling of a map: the largest, the mean, or with ``is_sum`` the sum by a fixed divisor.
        is_max: whether it is the largest.
        x: (B, C, H, W), or (C, H, W).
        valid: bool, (B, H, W), or (H, W).
        is_sum: whether a sum of what is valid is not divided by how much that is.
    """
    kept = valid.unsqueeze(-3)
    share = run(kept.to(x.dtype))
    some = share > 0
    out = run(fill_dropped(x, kept, float("-inf") if is_max else 0.0))
    if not is_max and not is_sum:
        out = out / torch.where(some, share, 1.0)
    return fill_dropped(out, some)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _geometry(layer: nn.MaxPool2d | nn.AvgPool2d, sizes: tuple[int, int], result: tuple[int, int]) -> Geometry:
    dilation = _pair(getattr(layer, "dilation", 1))
    kernel, stride = _pair(layer.kernel_size), _pair(layer.stride or layer.kernel_size)
    return Geometry(kernel, stride, _pair(layer.padding), dilation, 1, sizes, result)


def _forward(
    layer: nn.MaxPool2d | nn.AvgPool2d,
    run: Callable[[Tensor], Tensor],
    input: Tensor,
    mask: MaskLike | None,
    outputs: MaskLike | None,
) -> Tensor:
    """Pool what a mask keeps, and fill what is not wanted."""
    op, sizes = type(layer).__name__, (input.shape[-2], input.shape[-1])
    check_dims(op, input, *_SHAPES)
    _check_sizes(op, "input", layer, sizes)
    if not input.is_floating_point():
        raise DtypeError(say(op, "input", must="be floating", got=input.dtype, hint="input.float()"))
    valid = line_up(op, "mask", mask, input, sizes, 2)
    is_sum = bool(getattr(layer, "divisor_override", None))
    is_max = isinstance(layer, nn.MaxPool2d)
    out = run(input) if valid is None else reduce_windows(run, is_max, input, valid, is_sum=is_sum)
    result = (out.shape[-2], out.shape[-1])
    wanted = line_up(op, "outputs", outputs, input, result, 2)
    if wanted is None and valid is not None:
        wanted = seen_through(valid, _geometry(layer, sizes, result), 2, False)
    return out if wanted is None else fill_dropped(out, wanted.unsqueeze(-3))


def _check_sizes(op: str, name: str, layer: nn.MaxPool2d | nn.AvgPool2d, sizes: tuple[int, int]) -> None:
    """Raise unless a window fits into a map with its padding."""
    geometry = _geometry(layer, sizes, sizes)
    if any(n < 1 or n + 2 * b < span + 1 for n, b, span in zip(sizes, geometry.before, geometry.span, strict=True)):
        must, hint = f"be at least as large as a window of {geometry.kernel}", "padding=kernel_size // 2"
        raise ShapeError(say(op, name, must=must, got=sizes, hint=hint))


def _mask_of_result(layer: nn.MaxPool2d | nn.AvgPool2d, mask: MaskLike) -> Mask:
    op = f"{type(layer).__name__}.outputs"
    if not isinstance(mask, (Mask, Tensor)) or mask.dtype is not torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DtypeError(say(op, "mask", must="be a Mask or a bool tensor", got=got, hint="mask != 0"))
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    if bits.dim() < 2:
        raise ShapeError(say(op, "mask", must="be (..., H, W)", got=tuple(bits.shape), hint="mask[None]"))
    _check_sizes(op, "mask", layer, (bits.shape[-2], bits.shape[-1]))
    plane = torch.zeros(1, *bits.shape[-2:], device=bits.device)
    out = F.max_pool2d(
        plane, layer.kernel_size, layer.stride, layer.padding, getattr(layer, "dilation", 1), layer.ceil_mode
    )
    sizes, result = (bits.shape[-2], bits.shape[-1]), (out.shape[-2], out.shape[-1])
    return Mask(seen_through(bits, _geometry(layer, sizes, result), 2, False))


class RegionMaxPool2d(nn.MaxPool2d):
    """``torch.nn.MaxPool2d`` of regions: same arguments, and masks when it is called.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[[[-1.0, float("nan")], [-2.0, -3.0]]]])
    >>> mw.nn.RegionMaxPool2d(2)(x, torch.tensor([[True, False], [True, True]]))
    tensor([[[[-1.]]]])

    ``forward(input, mask=None, outputs=None)``: ``mask`` says which positions of the input are valid, ``outputs`` which
    of the result are wanted; the others are 0. By default, those are wanted whose centre is valid, as in `mw.conv2d`.
    A window in which nothing is valid gives 0.

    Args:
        args: torch's, in its order: kernel_size, stride, padding, dilation and more.
        kwargs: the same by name.

    Raises:
        ArgumentError: ``return_indices`` is set.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.return_indices:
            raise ArgumentError(
                say(type(self).__name__, "return_indices", must="be False", got=True, hint="return_indices=False")
            )

    def forward(self, input: Tensor, mask: MaskLike | None = None, outputs: MaskLike | None = None) -> Tensor:
        """The largest valid value of each window.

        Args:
            input: (B, C, H, W), or (C, H, W).
            mask: a Mask or a bool tensor of (B, H, W), which positions are valid; True means keep.
            outputs: which positions of the result are wanted.

        Raises:
            ShapeError: shapes do not fit each other.
            DtypeError: the input is not floating, or a mask is not bool.
            DeviceError: devices differ.
        """
        check_tensor(type(self).__name__, input)
        return _forward(self, super().forward, input, mask, outputs)

    def outputs(self, mask: MaskLike) -> Mask:
        """The mask of the result, for the layers that follow: what is wanted by default.

        Raises:
            ShapeError: the mask is smaller than a window, or has fewer than two dims.
            DtypeError: it is not bool.
        """
        return _mask_of_result(self, mask)


class RegionAvgPool2d(nn.AvgPool2d):
    """``torch.nn.AvgPool2d`` of regions: the mean of what is valid in each window.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[[[1.0, float("nan")], [2.0, 6.0]]]])
    >>> mw.nn.RegionAvgPool2d(2)(x, torch.tensor([[True, False], [True, True]]))
    tensor([[[[3.]]]])

    ``forward(input, mask=None, outputs=None)`` takes masks as `RegionMaxPool2d` does. With a mask, a window is divided
    by how many valid positions it has, or by ``divisor_override``; without one, it is torch's own.

    Args:
        args: torch's, in its order: kernel_size, stride, padding and more.
        kwargs: the same by name.
    """

    def forward(self, input: Tensor, mask: MaskLike | None = None, outputs: MaskLike | None = None) -> Tensor:
        """The mean of the valid values of each window.

        Args:
            input: (B, C, H, W), or (C, H, W).
            mask: a Mask or a bool tensor of (B, H, W), which positions are valid; True means keep.
            outputs: which positions of the result are wanted.

        Raises:
            ShapeError: shapes do not fit each other.
            DtypeError: the input is not floating, or a mask is not bool.
            DeviceError: devices differ.
        """
        check_tensor(type(self).__name__, input)
        return _forward(self, super().forward, input, mask, outputs)

    def outputs(self, mask: MaskLike) -> Mask:
        """The mask of the result, for the layers that follow: what is wanted by default.

        Raises:
            ShapeError: the mask is smaller than a window, or has fewer than two dims.
            DtypeError: it is not bool.
        """
        return _mask_of_result(self, mask)
