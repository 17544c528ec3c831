"""mw.conv1d, mw.conv2d and their transposed forms: they read what is valid, and compute what is wanted."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from maskwise.ops.arguments import MaskLike
from maskwise.ops.conv.arguments import Ints, Options
from maskwise.ops.conv.call import convolve

__all__ = ["conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"]


def conv1d(
    x: Tensor,  # (B, C, L)
    weight: Tensor,  # (out, C / groups, kernel)
    bias: Tensor | None = None,  # (out,)
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    mask: MaskLike | None = None,
    outputs: MaskLike | None = None,
    other: float | Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.conv1d`` of valid input positions, computed at wanted output positions only.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[[1.0, 2.0, float("nan")]]])
    >>> mw.conv1d(x, torch.ones(1, 1, 3), padding=1, mask=mw.Mask.from_lengths([2], max_len=3))
    tensor([[[3., 3., 0.]]])

    Args:
        x: (B, C, L), or (C, L).
        weight: (out, C / groups, kernel).
        bias: (out,), or None.
        stride: as in torch.
        padding: as in torch, ``"same"`` and ``"valid"`` included.
        dilation: as in torch.
        groups: as in torch.
        mask: a Mask or a bool tensor of (B, L), (B, 1, L) or (L,), which positions of x are valid; True means keep. The
            others count as zero. By default, all are valid.
        outputs: which positions of the result are wanted, in the same form. By default, those whose position under the
            central tap is valid; where that lies in the padding, the nearest one decides.
        other: the value of unwanted positions: a number, or a tensor that broadcasts to the result; 0 by default.

    Returns:
        (B, out, L_out), or without B. Gradients go to x where it is valid, and to weight, bias and ``other``; they are
        exactly 0 elsewhere, and depend on wanted positions only.

    Raises:
        ShapeError: shapes do not fit each other.
        DtypeError: dtypes differ, x is not floating, a mask is not bool, or ``other`` is no number or tensor.
        DeviceError: devices differ.
        ArgumentError: a number is invalid or does not fit the dtype, or a tensor is nested or sparse.
    """
    return convolve(_options("conv1d", 1, stride, padding, dilation, groups), x, weight, bias, mask, outputs, other)


def conv2d(
    x: Tensor,  # (B, C, H, W)
    weight: Tensor,  # (out, C / groups, *kernel)
    bias: Tensor | None = None,  # (out,)
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    mask: MaskLike | None = None,
    outputs: MaskLike | None = None,
    other: float | Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.conv2d`` of valid input positions, computed at wanted output positions only.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[[[1.0, float("nan")], [2.0, 3.0]]]])
    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> mw.conv2d(x, torch.ones(1, 1, 3, 3), padding=1, mask=mask)
    tensor([[[[6., 0.],
              [6., 6.]]]])
    >>> mw.conv2d(x, torch.ones(1, 1, 3, 3), padding=1, mask=mask, outputs=~mask, other=-1.0)
    tensor([[[[-1.,  6.],
              [-1., -1.]]]])

    Args:
        x: (B, C, H, W), or (C, H, W).
        weight: (out, C / groups, *kernel).
        bias: (out,), or None.
        stride: as in torch.
        padding: as in torch, ``"same"`` and ``"valid"`` included.
        dilation: as in torch.
        groups: as in torch.
        mask: a Mask or a bool tensor of (B, H, W), (B, 1, H, W) or (H, W), which positions of x are valid; True means
            keep. The others count as zero. By default, all are valid.
        outputs: which positions of the result are wanted, in the same form. By default, those whose position under the
            central tap is valid; where that lies in the padding, the nearest one decides.
        other: the value of unwanted positions: a number, or a tensor that broadcasts to the result; 0 by default.

    Returns:
        (B, out, H_out, W_out), or without B. Gradients go to x where it is valid, and to weight, bias and ``other``;
        they are exactly 0 elsewhere, and depend on wanted positions only.

    Raises:
        ShapeError: shapes do not fit each other.
        DtypeError: dtypes differ, x is not floating, a mask is not bool, or ``other`` is no number or tensor.
        DeviceError: devices differ.
        ArgumentError: a number is invalid or does not fit the dtype, or a tensor is nested or sparse.
    """
    return convolve(_options("conv2d", 2, stride, padding, dilation, groups), x, weight, bias, mask, outputs, other)


def conv_transpose1d(
    x: Tensor,  # (B, C, L)
    weight: Tensor,  # (C, out / groups, kernel)
    bias: Tensor | None = None,  # (out,)
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    mask: MaskLike | None = None,
    outputs: MaskLike | None = None,
    other: float | Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.conv_transpose1d`` of valid input positions, computed at wanted output positions only.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[[1.0, 2.0, float("nan")]]])
    >>> mw.conv_transpose1d(x, torch.ones(1, 1, 2), stride=2, mask=mw.Mask.from_lengths([2], max_len=3))
    tensor([[[1., 1., 2., 2., 0., 0.]]])

    Args:
        x: (B, C, L), or (C, L).
        weight: (C, out / groups, kernel).
        bias: (out,), or None.
        stride: as in torch.
        padding: as in torch.
        output_padding: as in torch.
        groups: as in torch.
        dilation: as in torch.
        mask: a Mask or a bool tensor of (B, L), (B, 1, L) or (L,), which positions of x are valid; True means keep. The
            others count as zero. By default, all are valid.
        outputs: which positions of the result are wanted. By default, those that valid positions are expanded to: each
            to as many as the stride says.
        other: the value of unwanted positions: a number, or a tensor that broadcasts to the result; 0 by default.

    Returns:
        (B, out, L_out), or without B; with gradients as those of `conv1d`.

    Raises:
        ShapeError: shapes do not fit each other.
        DtypeError: dtypes differ, x is not floating, a mask is not bool, or ``other`` is no number or tensor.
        DeviceError: devices differ.
        ArgumentError: a number is invalid or does not fit the dtype, or a tensor is nested or sparse.
    """
    options = _options("conv_transpose1d", 1, stride, padding, dilation, groups, output_padding)
    return convolve(options, x, weight, bias, mask, outputs, other)


def conv_transpose2d(
    x: Tensor,  # (B, C, H, W)
    weight: Tensor,  # (C, out / groups, *kernel)
    bias: Tensor | None = None,  # (out,)
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    mask: MaskLike | None = None,
    outputs: MaskLike | None = None,
    other: float | Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.conv_transpose2d`` of valid input positions, computed at wanted output positions only.

    >>> import torch, maskwise as mw
    >>> x, mask = torch.tensor([[[[1.0, float("nan")]]]]), torch.tensor([[True, False]])
    >>> mw.conv_transpose2d(x, torch.ones(1, 1, 2, 2), stride=2, mask=mask)
    tensor([[[[1., 1., 0., 0.],
              [1., 1., 0., 0.]]]])

    Args:
        x: (B, C, H, W), or (C, H, W).
        weight: (C, out / groups, *kernel).
        bias: (out,), or None.
        stride: as in torch.
        padding: as in torch.
        output_padding: as in torch.
        groups: as in torch.
        dilation: as in torch.
        mask: a Mask or a bool tensor of (B, H, W), (B, 1, H, W) or (H, W), which positions of x are valid; True means
            keep. The others count as zero. By default, all are valid.
        outputs: which positions of the result are wanted. By default, those that valid positions are expanded to: each
            to as many as the stride says.
        other: the value of unwanted positions: a number, or a tensor that broadcasts to the result; 0 by default.

    Returns:
        (B, out, H_out, W_out), or without B; with gradients as those of `conv2d`.

    Raises:
        ShapeError: shapes do not fit each other.
        DtypeError: dtypes differ, x is not floating, a mask is not bool, or ``other`` is no number or tensor.
        DeviceError: devices differ.
        ArgumentError: a number is invalid or does not fit the dtype, or a tensor is nested or sparse.
    """
    options = _options("conv_transpose2d", 2, stride, padding, dilation, groups, output_padding)
    return convolve(options, x, weight, bias, mask, outputs, other)


def _options(
    op: str, dims: int, stride: Any, padding: Any, dilation: Any, groups: int, output_padding: Any = None
) -> Options:
    """The arguments, hashable."""
    stride, padding, dilation, output_padding = (
        tuple(v) if type(v) is list else v for v in (stride, padding, dilation, output_padding)
    )
    return Options(op, dims, stride, padding, dilation, groups, output_padding)
