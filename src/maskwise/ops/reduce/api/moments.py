"""Variance and standard deviation of what is kept."""

from __future__ import annotations

from torch import Tensor

from maskwise.ops.arguments import Dim, MaskLike, number
from maskwise.ops.reduce import registered
from maskwise.ops.reduce.api.shared import need_floating, replace_empty

__all__ = ["std", "var"]


def var(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    correction: float = 1,
    empty: float | None = None,
) -> Tensor:
    """Variance of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.var(x, mask, dim=1)
    tensor([0.5000,    nan])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        correction: what is subtracted from the number of kept values before it divides; 1 for a sample, 0 for all.
        empty: what a slice with nothing kept gives, instead of NaN.

    Returns:
        The variances: x's shape without the reduced dims. NaN where no more are kept than the correction.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is not floating.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    need_floating("var", x, "mw.var(x.float(), mask)")
    out: Tensor = registered.var(x, mask, dim, keepdim, float(number("var", "correction", correction)))
    return out if empty is None else replace_empty("var", out, x, mask, dim, keepdim, empty)


def std(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    correction: float = 1,
    empty: float | None = None,
) -> Tensor:
    """Standard deviation of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.std(x, mask, dim=1)
    tensor([0.7071,    nan])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        correction: what is subtracted from the number of kept values before it divides; 1 for a sample, 0 for all.
        empty: what a slice with nothing kept gives, instead of NaN.

    Returns:
        The standard deviations: x's shape without the reduced dims. NaN where no more are kept than the correction.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is not floating.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    need_floating("std", x, "mw.std(x.float(), mask)")
    out: Tensor = registered.std(x, mask, dim, keepdim, float(number("std", "correction", correction)))
    return out if empty is None else replace_empty("std", out, x, mask, dim, keepdim, empty)
