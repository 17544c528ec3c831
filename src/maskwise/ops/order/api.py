"""Sort, argsort, topk, median and quantile, as users call them: check the arguments, plan, run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import Dim, MaskLike, dims_of, need_dense, need_ordered
from maskwise.ops.order import registered
from maskwise.ops.order.reference import INTERPOLATIONS
from maskwise.tracing import is_tracing

__all__ = ["Ordered", "argsort", "median", "quantile", "sort", "topk"]


class Ordered(NamedTuple):
    """Values in order, and the index along the dim that each came from; -1 where nothing was left."""

    values: Tensor
    indices: Tensor


def check_one(op: str, x: Tensor, dim: int, *, bools: bool = True) -> None:
    """Raise unless ``dim`` is one dim and x has values that can be ordered."""
    if not isinstance(dim, int):
        raise DtypeError(say(op, "dim", must="be an int", got=repr(dim), hint="dim=-1, or x.flatten() for all"))
    need_ordered(op, x, or_bool=bools, or_unsigned=op == "argsort")


def sort(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int = -1,
    descending: bool = False,
    *,
    stable: bool = False,
) -> Ordered:
    """Sort what the mask keeps; the rest leaves zeros with index -1 behind it.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[3.0, float("nan"), 1.0, 2.0]])
    >>> values, indices = mw.sort(x, torch.tensor([True, False, True, True]))
    >>> values, indices
    (tensor([[1., 2., 3., 0.]]), tensor([[ 2,  3,  0, -1]]))

    Args:
        x: any shape; floating, integer or bool.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim to sort along.
        descending: whether the greatest comes first. A kept NaN is the greatest, as in torch.
        stable: accepted as in torch; equal values always keep their order.

    Returns:
        ``(values, indices)``, both of x's shape: along ``dim`` first what is kept, in order, with its indices; then,
        for each dropped element, value 0 and index -1. Gradients go to what is kept.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is complex or one of uint16, uint32 and uint64, or ``dim`` is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    check_one("sort", x, dim)
    return Ordered(*registered.sort(x, mask, dim, bool(descending)))


def argsort(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int = -1,
    descending: bool = False,
    stable: bool = False,
) -> Tensor:
    """The indices that sort what the mask keeps, then -1 for each dropped element.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[3.0, float("nan"), 1.0, 2.0]])
    >>> mw.argsort(x, torch.tensor([True, False, True, True]))
    tensor([[ 2,  3,  0, -1]])

    Args:
        x: any shape; floating, integer or bool.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim to sort along.
        descending: whether the greatest comes first. A kept NaN is the greatest, as in torch.
        stable: accepted as in torch; equal values always keep their order.

    Returns:
        The indices, int64, of x's shape.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is complex, or ``dim`` is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    check_one("argsort", x, dim)
    indices: Tensor = registered.argsort(x.detach() if isinstance(x, Tensor) else x, mask, dim, bool(descending))
    return indices


def topk(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    k: int,
    dim: int = -1,
    *,
    largest: bool = True,
    sorted: bool = True,
) -> Ordered:
    """The k largest, or smallest, of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[3.0, 9.0, 1.0, 2.0], [7.0, 8.0, 9.0, 5.0]])
    >>> mask = torch.tensor([[True, False, True, True], [True, False, False, False]])
    >>> values, indices = mw.topk(x, mask, 2)
    >>> values, indices
    (tensor([[3., 2.],
            [7., -inf]]), tensor([[ 0,  3],
            [ 0, -1]]))

    Args:
        x: any shape; floating or integer.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        k: how many, at most the size of ``dim``.
        dim: the dim to look along.
        largest: the largest, or else the smallest. A kept NaN is the greatest, as in torch.
        sorted: accepted as in torch; the best always comes first.

    Returns:
        ``(values, indices)``, of x's shape with size k at ``dim``. Of equal values the one of the lower index wins.
        Where fewer than k are kept: index -1, and the value that loses against every other, which is -inf (the least
        integer) or, with ``largest=False``, +inf (the greatest). Gradients go to what was taken.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is complex, bool or one of uint16, uint32 and uint64, or
            ``dim`` or ``k`` is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have, or a k that is negative or above its size.
        ArgumentError: x or the mask is sparse.
    """
    check_one("topk", x, dim, bools=False)
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise DtypeError(say("topk", "k", must="be an int", got=type(k).__name__, hint="k=int(k)"))
    need_dense("topk", "x", x)
    if isinstance(x, Tensor):
        size = x.shape[dim] if -x.dim() <= dim < x.dim() else 1
        if not 0 <= k <= size:
            # A dim that x does not have is the greater mistake.
            dims_of("topk", x, dim)
            raise OutOfRangeError(
                say("topk", "k", must=f"be in [0, {size}], the size of dim {dim}", got=k, hint=f"k=min(k, {size})")
            )
    return Ordered(*registered.topk(x, mask, dim, k, bool(largest)))


def median(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    keepdim: bool = False,
    *,
    empty: float | None = None,
) -> Tensor:
    """The median of what the mask keeps: the lower of the two in the middle where there are two, as in torch.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[3.0, 9.0, 1.0, 2.0], [7.0, 8.0, 9.0, 5.0]])
    >>> mask = torch.tensor([[True, False, True, True], [False, False, False, False]])
    >>> mw.median(x, mask, dim=1)
    tensor([2., nan])
    >>> mw.median(x, mask)
    tensor(2.)

    Args:
        x: any shape; floating or integer.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        empty: what a slice with nothing kept gives, instead of NaN (of integers: the least there is).

    Returns:
        The medians: x's shape without the reduced dims. Values only, with a dim too: the indices of several dims would
        mean nothing. A kept NaN makes the median NaN. The gradient goes to the element that is the median.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is complex, bool or one of uint16, uint32 and uint64.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    check_one("median", x, -1, bools=False)
    out: Tensor = registered.median(x, mask, dim, bool(keepdim))
    return out if empty is None else replace_empty("median", out, x, mask, dim, keepdim, empty)


def quantile(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    q: float | Sequence[float] | Tensor,  # one number, or (Q,)
    dim: Dim = None,
    *,
    keepdim: bool = False,
    interpolation: str = "linear",
    empty: float | None = None,
) -> Tensor:
    """The quantiles of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[3.0, 9.0, 1.0, 2.0], [7.0, 8.0, 9.0, 5.0]])
    >>> mask = torch.tensor([[True, False, True, True], [False, False, False, False]])
    >>> mw.quantile(x, mask, 0.25, dim=1)
    tensor([1.5000, nan])
    >>> mw.quantile(x, mask, [0.0, 0.5, 1.0], dim=1, empty=0.0)
    tensor([[1., 0.],
            [2., 0.],
            [3., 0.]])

    Args:
        x: any shape and size; floating, half precisions included.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        q: a number in [0, 1], or several as a sequence or a tensor of one dim; their results stack in front.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        interpolation: how to go between two values: "linear", "lower", "higher", "midpoint" or "nearest".
        empty: what a slice with nothing kept gives, instead of NaN.

    Returns:
        The quantiles: x's shape without the reduced dims, behind the dim of q if it has one. A kept NaN makes a
        quantile NaN, as in torch. Gradients go to the one or two elements that a quantile is made of.

    Raises:
        ShapeError: the mask does not broadcast to x, or q has more than one dim.
        DtypeError: the mask is not bool, x is not floating, or q is neither a number, numbers nor a floating tensor.
        ArgumentError: q is not in [0, 1] or asks for a gradient, an interpolation that there is not, a dim is named
            twice, or x or the mask is sparse.
        DeviceError: the mask or q is on another device.
        OutOfRangeError: a dim that x does not have.
    """
    if isinstance(x, Tensor) and not x.dtype.is_floating_point:
        raise DtypeError(say("quantile", "x", must="be floating", got=x.dtype, hint="x.float() or mw.median"))
    if interpolation not in INTERPOLATIONS:
        must = f"be one of {', '.join(map(repr, INTERPOLATIONS))}"
        raise ArgumentError(
            say("quantile", "interpolation", must=must, got=repr(interpolation), hint='interpolation="linear"')
        )
    ranks = quantiles_of(x, q)
    out: Tensor = registered.quantile(x, mask, dim, ranks, bool(keepdim), INTERPOLATIONS.index(interpolation))
    return out if empty is None else replace_empty("quantile", out, x, mask, dim, keepdim, empty)


def quantiles_of(x: Tensor, q: Any) -> Tensor:
    """Q as the kernels take it: float32 or float64, of no dims or one, contiguous, in [0, 1]."""
    device = x.device if isinstance(x, Tensor) else None
    if not isinstance(q, Tensor):
        several = isinstance(q, Sequence) and not isinstance(q, str)
        numbers = list(q) if several else [q]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                must = "be a number, a sequence of numbers or a floating tensor"
                raise DtypeError(
                    say("quantile", "q", must=must, got=type(number).__name__, hint="q=0.5, or q=[0.25, 0.75]")
                )
            if not 0 <= number <= 1:
                raise ArgumentError(say("quantile", "q", must="be in [0, 1]", got=number, hint="q=percent / 100"))
        if several:
            return torch.tensor(numbers, dtype=torch.float64, device=device)
        return torch.scalar_tensor(q, dtype=torch.float64, device=device)
    if not q.dtype.is_floating_point:
        raise DtypeError(say("quantile", "q", must="be a floating tensor", got=q.dtype, hint="q.float()"))
    if q.dim() > 1:
        raise ShapeError(say("quantile", "q", must="have one dim or none", got=tuple(q.shape), hint="q.flatten()"))
    if device is not None and q.device != device:
        raise DeviceError(say("quantile", "q", must=f"be on x's device {device}", got=q.device, hint="q.to(x.device)"))
    if q.requires_grad:
        raise ArgumentError(say("quantile", "q", must="not ask for a gradient", got="one that does", hint="q.detach()"))
    # Only where to look does not make a device wait, nor break a graph; elsewhere such a q gives NaN, as torch does.
    if type(q) is Tensor and q.device.type == "cpu" and not is_tracing():
        wrong = [number for number in q.reshape(-1).tolist() if not 0 <= number <= 1]
        if wrong:
            raise ArgumentError(say("quantile", "q", must="be in [0, 1]", got=wrong[0], hint="q=percent / 100"))
    return q.to(torch.promote_types(q.dtype, torch.float32)).contiguous()


def replace_empty(op: str, out: Tensor, x: Tensor, mask: MaskLike, dim: Dim, keepdim: bool, empty: float) -> Tensor:
    """``out`` with ``empty`` where a slice kept nothing. The gradient of such a slice is zero."""
    if not isinstance(empty, (int, float, complex, Tensor)):
        raise DtypeError(say(op, "empty", must="be a number or None", got=type(empty).__name__, hint="empty=0.0"))
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    dims = dims_of(op, x, dim)
    kept = bits.expand(x.shape)
    return torch.where(kept.any(dims, keepdim=keepdim) if dims else kept, out, empty)
