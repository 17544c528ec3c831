"""Masked variance and standard deviation."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import torch
from torch import Tensor

from maskwise.ops.arguments import Dim, MaskLike, number
from maskwise.ops.primitives import accumulate_dtype, count, expand_reduced, replace_empty, where_kept
from maskwise.ops.reduce.reduction import (
    backward_of,
    define_backward,
    need_floating,
    reduction,
    save,
    works,
)

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
        keepdim: whether to retain reduced dims with size 1.
        correction: what is subtracted from the number of kept values before it divides; 1 for a sample, 0 for all.
        empty: the result of a slice with nothing kept, instead of NaN.

    Returns:
        The variances: x's shape without the reduced dims. NaN where no more are kept than the correction.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is not floating.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    need_floating("var", x, "mw.var(x.float(), mask)")
    then = None if empty is None else replace_empty("var", x, mask, dim, keepdim, empty)
    out: Tensor = _var(x, mask, dim, keepdim, float(number("var", "correction", correction)), then=then)
    return out


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
        keepdim: whether to retain reduced dims with size 1.
        correction: what is subtracted from the number of kept values before it divides; 1 for a sample, 0 for all.
        empty: the result of a slice with nothing kept, instead of NaN.

    Returns:
        The standard deviations: x's shape without the reduced dims. NaN where no more are kept than the correction.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is not floating.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    need_floating("std", x, "mw.std(x.float(), mask)")
    then = None if empty is None else replace_empty("std", x, mask, dim, keepdim, empty)
    out: Tensor = _std(x, mask, dim, keepdim, float(number("std", "correction", correction)), then=then)
    return out


def square_dtype(x: Tensor) -> torch.dtype:
    """What squares are taken in: beyond 1e19 they leave the range of float32, and torch takes float64 too."""
    # Other devices have no float64, or a slow one.
    return torch.float64 if x.device.type == "cpu" else accumulate_dtype(x)


def var_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The variance of what is kept; NaN where nothing is."""
    return _unrounded_var(x, mask, dim, keepdim, correction).to(x.dtype)


def _unrounded_var(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The variance before it is rounded to x's dtype."""
    values = where_kept(x, mask, 0.0).to(square_dtype(x))
    centred = torch.where(mask, values - values.sum(dim, keepdim=True) / count(x, mask, dim, True), 0.0)
    kept = count(x, mask, dim, keepdim)
    out = centred.square().sum(dim, keepdim=keepdim) / (kept - correction).clamp(min=0)
    return torch.where(kept > 0, out, nan) if correction < 0 else out


def std_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The standard deviation of what is kept; NaN where nothing is."""
    squared = _unrounded_var(x, mask, dim, keepdim, correction)
    # The gradient of the root is infinite at 0, where torch takes 0.
    return torch.where(squared == 0, squared, torch.where(squared == 0, 1.0, squared).sqrt()).to(x.dtype)


def var_gradient(
    grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float, root: bool
) -> Tensor:
    """2 (x - mean) / (n - correction); for the standard deviation (``root``) over 2 std, or 0 where that is 0."""
    kept = count(x, mask, dim, True)
    freedom = (kept - correction).clamp(min=0)
    values = where_kept(x, mask, 0.0).to(square_dtype(x))
    centred = torch.where(mask, values - values.sum(dim, keepdim=True) / kept, 0.0)
    scale = expand_reduced(grad, x.shape, dim, keepdim).to(square_dtype(x)) * (2.0 / freedom)
    if root:
        std = (centred.square().sum(dim, keepdim=True) / freedom).sqrt()
        scale = torch.where(std == 0, 0.0, scale / (2.0 * std))
    return torch.where(mask, scale * centred, 0.0).to(x.dtype)


_backward = define_backward("var", var_gradient, out=False, settings=", float correction, bool root")
_var = reduction(
    "var",
    var_reference,
    settings=", float correction",
    work=works(calls=11, copies=4, gradient_copies=4),
    backward=backward_of(var_reference, _backward, False),
    setup_context=save(out=False),
)
#: The same as a step of another function: no log records it.
var_step = replace(_var, is_step=True)
_std = reduction(
    "std",
    std_reference,
    settings=", float correction",
    work=works(calls=15, copies=4, gradient_copies=4),
    backward=backward_of(std_reference, _backward, True),
    setup_context=save(out=False),
)
