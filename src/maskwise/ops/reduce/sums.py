"""Masked sum, product and mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.arguments import Dim, MaskLike, to_dtype
from maskwise.ops.backends import FLOATING, why_not_served
from maskwise.ops.operation import ALONG, define, kept_mask
from maskwise.ops.primitives import (
    accumulate_dtype,
    count,
    expand_reduced,
    expands_by_kernel,
    fill_dropped,
    masked_sum,
    replace_empty,
    save_mask,
    sum_gradient,
    total_dtype,
    where_kept,
)
from maskwise.ops.reduce.reduction import (
    GPU,
    backward_of,
    define_backward,
    need_floating,
    reduction,
    works,
)

__all__ = ["mean", "prod", "sum"]

_HALVES = (torch.float16, torch.bfloat16)


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
        keepdim: whether to retain reduced dims with size 1.
        dtype: x is cast to it first. Integers and bools sum to int64 otherwise, as in torch.
        empty: the result of a slice with nothing kept, instead of 0.

    Returns:
        The sums: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    if dtype is not None:
        x = to_dtype("sum", x, dtype)
    then: Callable[[Tensor], Tensor] | None = None
    if empty is not None:
        then = replace_empty("sum", x, mask, dim, keepdim, empty, dtype)
    elif dtype is not None:
        # Integers sum to int64, and are cast to the dtype after: modular arithmetic gives the same result.
        then = partial(Tensor.to, dtype=dtype)
    out: Tensor = _sum(x, mask, dim, keepdim, then=then)
    return out


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
        keepdim: whether to retain reduced dims with size 1.
        dtype: x is cast to it first. Integers and bools multiply to int64 otherwise, as in torch.
        empty: the result of a slice with nothing kept, instead of 1.

    Returns:
        The products: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    if dtype is not None:
        x = to_dtype("prod", x, dtype)
    then: Callable[[Tensor], Tensor] | None = None
    if empty is not None:
        then = replace_empty("prod", x, mask, dim, keepdim, empty, dtype)
    elif dtype is not None:
        # Integers multiply to int64, and are cast to the dtype after: modular arithmetic gives the same result.
        then = partial(Tensor.to, dtype=dtype)
    out: Tensor = _prod(x, mask, dim, keepdim, then=then)
    return out


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
        keepdim: whether to retain reduced dims with size 1.
        dtype: x is cast to it first; integers have no mean without it, as in torch.
        empty: the result of a slice with nothing kept, instead of NaN.

    Returns:
        The means: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is not floating or complex.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    if dtype is not None:
        x = to_dtype("mean", x, dtype)
    need_floating("mean", x, "mw.mean(x, mask, dtype=torch.float32)", or_complex=True)
    then = None if empty is None else replace_empty("mean", x, mask, dim, keepdim, empty)
    out: Tensor = _mean(x, mask, dim, keepdim, then=then)
    return out


def prod_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The product of what is kept; 1 where nothing is."""
    out = where_kept(x, mask, 1.0)
    if not x.dim():
        return out.prod()
    # torch takes one dim at a time; in between, half precision must not round.
    if len(dim) > 1:
        out = out.to(accumulate_dtype(x))
    for d in reversed(dim):
        out = out.prod(d, keepdim=keepdim)
    return out.to(x.dtype) if len(dim) > 1 and x.dtype.is_floating_point else out


def mean_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The mean of what is kept; NaN where nothing is."""
    values = where_kept(x, mask, 0.0)
    if x.dtype in _HALVES:
        return (values.sum(dim, keepdim=keepdim, dtype=torch.float32) / count(x, mask, dim, keepdim)).to(x.dtype)
    return values.sum(dim, keepdim=keepdim) / count(x, mask, dim, keepdim)


# -- sum and mean ------------------------------------------------------------------------------------------------------
_sum, _sum_forward = masked_sum, masked_sum.route("bare")


def mean_gradient(grad: Tensor, mask: Tensor, shape: list[int], dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of the mean in plain torch operations."""
    kept = count(grad.new_empty(()).expand(shape), mask, dim, keepdim)
    return sum_gradient(_share(grad, kept), mask, shape, dim, keepdim)


def _share(grad: Tensor, kept: Tensor) -> Tensor:
    return (grad.to(accumulate_dtype(grad)) / kept).to(grad.dtype)


define(
    "mean_backward",
    f"(Tensor grad, Tensor mask, SymInt[] shape, int[] dim, bool keepdim{ALONG} -> Tensor",
    reference=mean_gradient,
    fake=lambda grad, mask, shape, dim, keepdim: grad.new_empty(shape),
    gpu=FLOATING,
    gpu_from=f"{GPU}:mean_backward",
)


def mean_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """Expand the gradient as the sum does, an equal share to each that was kept."""
    (operand,) = ctx.saved_tensors
    if expands_by_kernel(grad):
        settings = (ctx.shape, ctx.dim, ctx.keepdim, ctx.along)
        return torch.ops.maskwise.mean_backward(grad, operand, *settings), None, None, None
    mask = kept_mask(operand, ctx.along, ctx.shape)
    if ctx.along == 0 and mask.shape == ctx.shape and why_not_served("sum", mask.device.type, torch.bool) is None:
        # torch's sum of bools is a hundred times slower than reading them.
        kept = _sum_forward(mask, mask, ctx.dim, ctx.keepdim)
    else:
        kept = count(grad.new_empty(()).expand(ctx.shape), mask, ctx.dim, ctx.keepdim)
    expanded = expand_reduced(_share(grad, kept), ctx.shape, ctx.dim, ctx.keepdim)
    return fill_dropped(expanded, mask), None, None, None


_mean = reduction(
    "mean",
    mean_reference,
    work=works(calls=4, copies=1, gradient_calls=6),
    backward=mean_backward,
    setup_context=save_mask,
)
#: The same as a step of another function: no log records it.
mean_step = replace(_mean, is_step=True)


# -- prod --------------------------------------------------------------------------------------------------------------
def prod_gradient(grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of an element is the product of all others, by division unless it is 0."""
    zero = mask & (x == 0)
    zeros = expand_reduced(count(x, zero, dim, keepdim).expand(out.shape), x.shape, dim, keepdim)
    values = where_kept(x, mask & ~zero, 1.0).to(accumulate_dtype(x))
    nonzero = values
    for d in reversed(dim):
        nonzero = nonzero.prod(d, keepdim=True)
    others = torch.where(zero, nonzero, nonzero / values)
    alone = (zeros == 0) | (zero & (zeros == 1))
    return torch.where(mask, torch.where(alone, others, 0.0) * expand_reduced(grad, x.shape, dim, keepdim), 0.0).to(
        x.dtype
    )


_prod_backward = define_backward("prod", prod_gradient)
_prod = reduction(
    "prod",
    prod_reference,
    result=total_dtype,
    work=works(calls=2, copies=1, gradient_calls=12),
    backward=backward_of(prod_reference, _prod_backward),
)
