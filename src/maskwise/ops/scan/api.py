"""The scans that users call: check the arguments, plan, run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.arguments import MaskLike, need_ordered, to_dtype
from maskwise.ops.operation import Operation
from maskwise.ops.scan import registered

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]

Pair = TypeVar("Pair")


def cumsum(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum what the mask keeps, up to each position; a dropped position repeats the running sum.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([1.0, float("nan"), 3.0, 4.0])
    >>> mw.cumsum(x, torch.tensor([True, False, True, True]), dim=0)
    tensor([1., 1., 4., 8.])

    Args:
        x: any shape; floating, integer, bool or complex.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the sum runs.
        dtype: x is cast to it first. Integers and bools sum to int64 otherwise, as in torch.

    Returns:
        The running sums, of x's shape; 0 before anything is kept.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    out: Tensor = run(registered.cumsum, x, mask, dim, dtype)
    return out


def cumprod(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply what the mask keeps, up to each position; a dropped position repeats the running product.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([2.0, float("nan"), 3.0, 4.0])
    >>> mw.cumprod(x, torch.tensor([True, False, True, True]), dim=0)
    tensor([ 2.,  2.,  6., 24.])

    Args:
        x: any shape; floating, integer, bool or complex.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the product runs.
        dtype: x is cast to it first. Integers and bools multiply to int64 otherwise, as in torch.

    Returns:
        The running products, of x's shape; 1 before anything is kept. The gradient is right with zeros among the kept.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    out: Tensor = run(registered.cumprod, x, mask, dim, dtype)
    return out


def cummax(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
) -> torch.return_types.cummax:
    """Find the largest of what the mask keeps, up to each position; a dropped position repeats the running maximum.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([1.0, 2.0, 9.0, 3.0])
    >>> values, indices = mw.cummax(x, torch.tensor([False, True, False, True]), dim=0)
    >>> values
    tensor([-inf, 2., 2., 3.])
    >>> indices
    tensor([-1,  1,  1,  3])

    Args:
        x: any shape; floating, integer or bool.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the maximum runs.

    Returns:
        ``torch.return_types.cummax``: the running maxima (``values``) and where they stand (``indices``, always kept
        positions; the latest of equals, as in torch). Before anything is kept the value is -inf, the lowest of an
        integer dtype, or False, and the index -1. A kept NaN is above everything, as in torch.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, dim is not an int, or x is complex or one of uint16, uint32 and uint64.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    need_ordered("cummax", x)
    return named(torch.return_types.cummax, run(registered.cummax, x, mask, dim))


def cummin(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
) -> torch.return_types.cummin:
    """Find the smallest of what the mask keeps, up to each position; a dropped position repeats the running minimum.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([9.0, 2.0, 0.0, 1.0])
    >>> values, indices = mw.cummin(x, torch.tensor([False, True, False, True]), dim=0)
    >>> values
    tensor([inf, 2., 2., 1.])
    >>> indices
    tensor([-1,  1,  1,  3])

    Args:
        x: any shape; floating, integer or bool.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the minimum runs.

    Returns:
        ``torch.return_types.cummin``: the running minima (``values``) and where they stand (``indices``, always kept
        positions; the latest of equals, as in torch). Before anything is kept the value is +inf, the highest of an
        integer dtype, or True, and the index -1. A kept NaN is below everything, as in torch.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, dim is not an int, or x is complex or one of uint16, uint32 and uint64.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    need_ordered("cummin", x)
    return named(torch.return_types.cummin, run(registered.cummin, x, mask, dim))


def logcumsumexp(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
) -> Tensor:
    """Sum the exponentials of what the mask keeps, up to each position, and take the logarithm; it never overflows.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([5.0, 0.0, float("nan"), 0.0])
    >>> mw.logcumsumexp(x, torch.tensor([False, True, False, True]), dim=0)
    tensor([  -inf, 0.0000, 0.0000, 0.6931])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the sum runs.

    Returns:
        The logarithms of the running sums, of x's shape; -inf before anything is kept.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, dim is not an int, or x is not floating.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    if isinstance(x, Tensor) and not x.dtype.is_floating_point:
        hint = "x.float()" if not x.dtype.is_complex else "x.abs()"
        raise DtypeError(say("logcumsumexp", "x", must="be floating", got=x.dtype, hint=hint))
    out: Tensor = run(registered.logcumsumexp, x, mask, dim)
    return out


def run(scan: Operation, x: Tensor, mask: MaskLike, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Run a scan, once it is known that dim is one dim."""
    if not isinstance(dim, int):
        raise DtypeError(say(scan.name, "dim", must="be an int", got=type(dim).__name__, hint="dim=-1"))
    if dtype is None:
        return scan(x, mask, dim)
    # Integers scan to int64, and from there to the dtype that was asked for: modulo arithmetic is the same either way.
    return scan(to_dtype(scan.name, x, dtype), mask, dim).to(dtype)


def named(kind: Callable[[tuple[Tensor, Tensor]], Pair], found: tuple[Tensor, Tensor]) -> Pair:
    """Values and indices as the named tuple that torch returns."""
    return kind(found)
