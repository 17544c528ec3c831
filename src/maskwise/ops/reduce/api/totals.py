"""Sum, product and mean of what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.ops.arguments import Dim, MaskLike, to_dtype
from maskwise.ops.reduce import registered
from maskwise.ops.reduce.api.shared import need_floating, replace_empty

__all__ = ["mean", "prod", "sum"]


def sum(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    empty: float | None = None,
) -> Tensor:
    """Sum what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.sum(x, mask, dim=1)
    tensor([3., 0.])
    >>> mw.sum(x, mask, dim=1, empty=-1.0)
    tensor([ 3., -1.])

    Args:
        x: any shape; floating, integer, bool or complex.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        dtype: x is cast to it first. Integers and bools sum to int64 otherwise, as in torch.
        empty: what a slice with nothing kept gives, instead of 0.

    Returns:
        The sums: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    if dtype is not None:
        x = to_dtype("sum", x, dtype)
    out: Tensor = registered.sum(x, mask, dim, keepdim)
    # Integers sum to int64, and from there to the dtype that was asked for: modulo arithmetic is the same either way.
    out = out if dtype is None else out.to(dtype)
    return out if empty is None else replace_empty("sum", out, x, mask, dim, keepdim, empty)


def prod(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    empty: float | None = None,
) -> Tensor:
    """Multiply what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.prod(x, mask, dim=1)
    tensor([2., 1.])

    Args:
        x: any shape; floating, integer, bool or complex.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        dtype: x is cast to it first. Integers and bools multiply to int64 otherwise, as in torch.
        empty: what a slice with nothing kept gives, instead of 1.

    Returns:
        The products: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    if dtype is not None:
        x = to_dtype("prod", x, dtype)
    out: Tensor = registered.prod(x, mask, dim, keepdim)
    out = out if dtype is None else out.to(dtype)
    return out if empty is None else replace_empty("prod", out, x, mask, dim, keepdim, empty)


def mean(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    empty: float | None = None,
) -> Tensor:
    """Average what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.mean(x, mask, dim=1)
    tensor([1.5000,    nan])
    >>> mw.mean(x, mask, dim=1, empty=0.0)
    tensor([1.5000, 0.0000])

    Args:
        x: any shape; floating or complex.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        dtype: x is cast to it first; integers have no mean of their own, as in torch.
        empty: what a slice with nothing kept gives, instead of NaN.

    Returns:
        The means: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is not floating or complex.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    if dtype is not None:
        x = to_dtype("mean", x, dtype)
    need_floating("mean", x, "mw.mean(x, mask, dtype=torch.float32)", or_complex=True)
    out: Tensor = registered.mean(x, mask, dim, keepdim)
    return out if empty is None else replace_empty("mean", out, x, mask, dim, keepdim, empty)
