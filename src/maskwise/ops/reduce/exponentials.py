"""Masked logsumexp and vector norms."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.arguments import Dim, MaskLike, to_dtype
from maskwise.ops.primitives import accumulate_dtype, count, expand_reduced, replace_empty, where_kept
from maskwise.ops.reduce.reduction import (
    backward_of,
    define_backward,
    full,
    may_hold,
    need_floating,
    nothing_to_reduce,
    reduction,
    works,
)

__all__ = ["logsumexp", "norm"]


def logsumexp(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    empty: float | None = None,
) -> Tensor:
    """Logarithm of the sum of the exponentials of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.logsumexp(x, mask, dim=1)
    tensor([2.3133,   -inf])

    Args:
        x: any shape; floating, or integer, which is cast to the default dtype as in torch.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether to retain reduced dims with size 1.
        empty: the result of a slice with nothing kept, instead of -inf.

    Returns:
        The logarithms: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is complex.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    if isinstance(x, Tensor) and not x.dtype.is_floating_point and not x.dtype.is_complex:
        x = x.to(torch.get_default_dtype())
    need_floating("logsumexp", x, "mw.logsumexp(x.abs(), mask)")
    then = None if empty is None else replace_empty("logsumexp", x, mask, dim, keepdim, empty)
    out: Tensor = _logsumexp(x, mask, dim, keepdim, then=then)
    return out


def norm(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    ord: float = 2,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    empty: float | None = None,
) -> Tensor:
    """Vector norm of what the mask keeps, as torch.linalg.vector_norm.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.norm(x, mask, dim=1)
    tensor([2.2361, 0.0000])
    >>> mw.norm(x, mask, float("inf"), dim=1)
    tensor([2., 0.])

    Args:
        x: any shape; floating or complex.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        ord: any number: 2 for the root of the squares, 1 for the sum of magnitudes, inf and -inf for the extreme
            magnitudes, 0 for the number of nonzeros.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether to retain reduced dims with size 1.
        dtype: x is cast to it first.
        empty: the result of a slice with nothing kept, instead of 0.

    Returns:
        The norms: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating or complex, or ord is not a number.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    if dtype is not None:
        x = to_dtype("norm", x, dtype)
    need_floating("norm", x, "mw.norm(x, mask, dtype=torch.float32)", or_complex=True)
    if not isinstance(ord, (int, float)) or isinstance(ord, bool):
        hint = "a vector norm has no 'fro' or 'nuc'; ord=2 is the root of the squares"
        raise DtypeError(say("norm", "ord", must="be a number", got=repr(ord), hint=hint))
    then = None if empty is None else replace_empty("norm", x, mask, dim, keepdim, empty)
    out: Tensor = _norm(x, mask, dim, keepdim, float(ord), then=then)
    return out


def logsumexp_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The logarithm of the sum of the exponentials of what is kept; -inf where nothing is."""
    values = where_kept(x, mask, -inf).to(accumulate_dtype(x))
    out = torch.logsumexp(values, dim, keepdim=keepdim)
    if may_hold(x, out, -inf):
        # torch's gradient of a slice that is all -inf is NaN, which must not reach a second derivative.
        something = count(x, mask, dim, keepdim) > 0
        values = torch.where(expand_reduced(something.expand(out.shape), x.shape, dim, keepdim), values, 0.0)
        out = torch.where(something, torch.logsumexp(values, dim, keepdim=keepdim), -inf)
    return out.to(x.dtype)


def norm_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, ord: float) -> Tensor:
    """The vector norm of what is kept; 0 where nothing is."""
    if nothing_to_reduce(x, dim):
        return full(x, dim, keepdim, 0.0, x.real.dtype if x.is_complex() else x.dtype)
    values = where_kept(x, mask, 0.0 if ord >= 0 else inf)
    if ord == 0:
        # torch cuts this norm off its graph; here its gradient is zero.
        nonzero = values != 0
        return values.masked_fill(nonzero, 1.0).masked_fill(~nonzero, 0.0).sum(dim, keepdim=keepdim).real
    out: Tensor = torch.linalg.vector_norm(values, ord, dim if x.dim() else None, keepdim)
    return out if ord >= 0 else torch.where(count(x, mask, dim, keepdim) > 0, out, 0.0)


def logsumexp_gradient(grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of logsumexp: the softmax."""
    values = where_kept(x, mask, -inf).to(accumulate_dtype(x))
    share = (values - expand_reduced(out, x.shape, dim, keepdim)).exp()
    return torch.where(mask, share * expand_reduced(grad, x.shape, dim, keepdim), 0.0).to(x.dtype)


def norm_gradient(
    grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, ord: float
) -> Tensor:
    """sign(x) (|x| / norm) ^ (ord - 1), and 0 where x is 0; for ord inf and -inf split evenly among ties."""
    values = where_kept(x, mask, 0.0).to(accumulate_dtype(x))
    length = expand_reduced(out.to(accumulate_dtype(x)), x.shape, dim, keepdim)
    grads = expand_reduced(grad.to(accumulate_dtype(x)), x.shape, dim, keepdim)
    if ord == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if ord in (inf, -inf):
        equal = mask & (values.abs() == length)
        grad_x = values.sgn() * grads / count(x, equal, dim, True)
        reached = mask & (equal | (length != length))
    elif ord == 1:
        grad_x, reached = values.sgn() * grads, mask
    elif ord == 2:
        grad_x, reached = values / length * grads, mask & (length != 0)
    else:
        grad_x = values.sgn() * (values.abs() / length).pow(ord - 1) * grads
        reached = mask & (length != 0) & (values != 0)
    return torch.where(reached, grad_x, 0.0).to(x.dtype)


_logsumexp = reduction(
    "logsumexp",
    logsumexp_reference,
    work=works(calls=6, copies=3, gradient_copies=3),
    backward=backward_of(logsumexp_reference, define_backward("logsumexp", logsumexp_gradient)),
)
_norm = reduction(
    "norm",
    norm_reference,
    settings=", float ord",
    work=works(calls=3, copies=1, gradient_copies=2),
    backward=backward_of(norm_reference, define_backward("norm", norm_gradient, settings=", float ord")),
)
