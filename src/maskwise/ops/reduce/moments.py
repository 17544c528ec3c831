"""Masked variance and standard deviation."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.ops.arguments import Dim, MaskLike, number
from maskwise.ops.primitives import count, expand_reduced, replace_empty, where_kept
from maskwise.ops.reduce import reference
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


def var_gradient(
    grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float, root: bool
) -> Tensor:
    """2 (x - mean) / (n - correction); for the standard deviation (``root``) over 2 std, or 0 where that is 0."""
    kept = count(x, mask, dim, True)
    freedom = (kept - correction).clamp(min=0)
    values = where_kept(x, mask, 0.0).to(reference.square_dtype(x))
    centred = torch.where(mask, values - values.sum(dim, keepdim=True) / kept, 0.0)
    scale = expand_reduced(grad, x.shape, dim, keepdim).to(reference.square_dtype(x)) * (2.0 / freedom)
    if root:
        std = (centred.square().sum(dim, keepdim=True) / freedom).sqrt()
        scale = torch.where(std == 0, 0.0, scale / (2.0 * std))
    return torch.where(mask, scale * centred, 0.0).to(x.dtype)


_backward = define_backward("var", var_gradient, out=False, settings=", float correction, bool root")
_var = reduction(
    "var",
    reference.var,
    settings=", float correction",
    work=works(calls=11, copies=4, gradient_copies=4),
    backward=backward_of(reference.var, _backward, False),
    setup_context=save(out=False),
)
_std = reduction(
    "std",
    reference.std,
    settings=", float correction",
    work=works(calls=15, copies=4, gradient_copies=4),
    backward=backward_of(reference.std, _backward, True),
    setup_context=save(out=False),
)
