"""Masked extrema and their positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.arguments import Dim, MaskLike, dims_of, need_ordered, number
from maskwise.ops.backends import FLOATING, INTEGRAL
from maskwise.ops.primitives import (
    accumulate_dtype,
    count,
    expand_reduced,
    highest,
    lowest,
    replace_empty,
    where_kept,
)
from maskwise.ops.reduce.reduction import (
    backward_of,
    define_backward,
    full,
    may_hold,
    nothing_to_reduce,
    reduction,
    works,
)

__all__ = ["amax", "amin", "argmax", "argmin", "max", "min"]


def amax(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    empty: float | None = None,
) -> Tensor:
    """The maximum of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.amax(x, mask, dim=1)
    tensor([2., -inf])

    Args:
        x: any shape; floating, integer or bool.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether to retain reduced dims with size 1.
        empty: the result of a slice with nothing kept, instead of -inf (for integers: the minimum of the dtype).

    Returns:
        The maxima, or NaN where one is kept: x's shape without the reduced dims. The gradient is split evenly among
        ties.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is complex or one of uint16, uint32 and uint64.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    need_ordered("amax", x, or_bool=True)
    then = None if empty is None else replace_empty("amax", x, mask, dim, keepdim, empty)
    out: Tensor = _amax(x, mask, dim, keepdim, then=then)
    return out


def amin(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    empty: float | None = None,
) -> Tensor:
    """The minimum of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.amin(x, mask, dim=1)
    tensor([1., inf])

    Args:
        x: any shape; floating, integer or bool.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether to retain reduced dims with size 1.
        empty: the result of a slice with nothing kept, instead of inf (for integers: the maximum of the dtype).

    Returns:
        The minima, or NaN where one is kept: x's shape without the reduced dims. The gradient is split evenly among
        ties.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is complex or one of uint16, uint32 and uint64.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    need_ordered("amin", x, or_bool=True)
    then = None if empty is None else replace_empty("amin", x, mask, dim, keepdim, empty)
    out: Tensor = _amin(x, mask, dim, keepdim, then=then)
    return out


def argmax(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int | None = None,
    *,
    keepdim: bool = False,
    empty: int | None = None,
) -> Tensor:
    """The index of the maximum of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.argmax(x, mask, dim=1)
    tensor([ 1, -1])
    >>> mw.argmax(x, mask)
    tensor(1)

    Args:
        x: any shape; floating or integer.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim to look along; None for the position in the flattened x.
        keepdim: whether to retain reduced dims with size 1.
        empty: the result of a slice with nothing kept, instead of -1.

    Returns:
        int64: the index of the first maximum, always a kept position; a kept NaN counts as the maximum.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is complex, bool or one of uint16, uint32 and uint64, or
            dim is neither an int nor None.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    need_ordered("argmax", x, or_bool=False)
    need_one_dim("argmax", dim)
    then = None if empty is None else replace_empty("argmax", x, mask, dim, keepdim, empty)
    out: Tensor = _argmax(x, mask, dim, keepdim, then=then)
    return out


def argmin(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int | None = None,
    *,
    keepdim: bool = False,
    empty: int | None = None,
) -> Tensor:
    """The index of the minimum of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.argmin(x, mask, dim=1)
    tensor([ 0, -1])
    >>> mw.argmin(x, mask)
    tensor(0)

    Args:
        x: any shape; floating or integer.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim to look along; None for the position in the flattened x.
        keepdim: whether to retain reduced dims with size 1.
        empty: the result of a slice with nothing kept, instead of -1.

    Returns:
        int64: the index of the first minimum, always a kept position; a kept NaN counts as the minimum.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is complex, bool or one of uint16, uint32 and uint64, or
            dim is neither an int nor None.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    need_ordered("argmin", x, or_bool=False)
    need_one_dim("argmin", dim)
    then = None if empty is None else replace_empty("argmin", x, mask, dim, keepdim, empty)
    out: Tensor = _argmin(x, mask, dim, keepdim, then=then)
    return out


@overload
def max(
    x: Tensor, mask: MaskLike, dim: None = None, keepdim: bool = False, *, empty: float | None = None
) -> Tensor: ...
@overload
def max(
    x: Tensor, mask: MaskLike, dim: int, keepdim: bool = False, *, empty: float | None = None
) -> torch.return_types.max: ...
def max(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int | None = None,
    keepdim: bool = False,
    *,
    empty: float | None = None,
) -> Tensor | torch.return_types.max:
    """The maximum of what the mask keeps; along a dim the values and their indices, as torch.max returns them.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.max(x, mask)
    tensor(2.)
    >>> values, indices = mw.max(x, mask, dim=1)
    >>> values, indices
    (tensor([2., -inf]), tensor([ 1, -1]))

    Args:
        x: any shape; floating or integer, and without a dim also bool.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim to reduce; None for all. `mw.amax` takes several.
        keepdim: whether to retain the reduced dim with size 1.
        empty: the value of a slice with nothing kept, instead of -inf (for integers: the minimum of the dtype).

    Returns:
        Without a dim the maximum, as `mw.amax`; with one ``torch.return_types.max``: the maxima (``values``) and
        the index of the first of each (``indices``, always a kept position, or -1 where nothing is kept). A kept NaN
        counts as the maximum. The gradient of values goes to the elements at the indices; without a dim it is split
        evenly among ties.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is complex or one of uint16, uint32 and uint64 (or with a dim bool), or dim
            is neither an int nor None.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    need_ordered("max", x, or_bool=dim is None)
    if isinstance(dim, (tuple, list)):
        hint = f"mw.amax(x, mask, {dim}), whose result has no indices"
        raise DtypeError(say("max", "dim", must="be an int or None", got=dim, hint=hint))
    if dim is None:
        then = None if empty is None else replace_empty("max", x, mask, dim, keepdim, empty)
        out: Tensor = _max(x, mask, None, keepdim, then=then)
        return out
    nothing = lowest if empty is None else lambda dtype: number("max", "empty", empty)
    pairs = _at_indices("max", x, dim, keepdim, nothing, torch.return_types.max)
    pair: torch.return_types.max = _max_along(x, mask, dim, True, then=pairs)
    return pair


@overload
def min(
    x: Tensor, mask: MaskLike, dim: None = None, keepdim: bool = False, *, empty: float | None = None
) -> Tensor: ...
@overload
def min(
    x: Tensor, mask: MaskLike, dim: int, keepdim: bool = False, *, empty: float | None = None
) -> torch.return_types.min: ...
def min(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int | None = None,
    keepdim: bool = False,
    *,
    empty: float | None = None,
) -> Tensor | torch.return_types.min:
    """The minimum of what the mask keeps; along a dim the values and their indices, as torch.min returns them.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.min(x, mask)
    tensor(1.)
    >>> values, indices = mw.min(x, mask, dim=1)
    >>> values, indices
    (tensor([1., inf]), tensor([ 0, -1]))

    Args:
        x: any shape; floating or integer, and without a dim also bool.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim to reduce; None for all. `mw.amin` takes several.
        keepdim: whether to retain the reduced dim with size 1.
        empty: the value of a slice with nothing kept, instead of inf (for integers: the maximum of the dtype).

    Returns:
        Without a dim the minimum, as `mw.amin`; with one ``torch.return_types.min``: the minima (``values``) and
        the index of the first of each (``indices``, always a kept position, or -1 where nothing is kept). A kept NaN
        counts as the minimum. The gradient of values goes to the elements at the indices; without a dim it is split
        evenly among ties.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is complex or one of uint16, uint32 and uint64 (or with a dim bool), or dim
            is neither an int nor None.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    need_ordered("min", x, or_bool=dim is None)
    if isinstance(dim, (tuple, list)):
        hint = f"mw.amin(x, mask, {dim}), whose result has no indices"
        raise DtypeError(say("min", "dim", must="be an int or None", got=dim, hint=hint))
    if dim is None:
        then = None if empty is None else replace_empty("min", x, mask, dim, keepdim, empty)
        out: Tensor = _min(x, mask, None, keepdim, then=then)
        return out
    nothing = highest if empty is None else lambda dtype: number("min", "empty", empty)
    pairs = _at_indices("min", x, dim, keepdim, nothing, torch.return_types.min)
    pair: torch.return_types.min = _min_along(x, mask, dim, True, then=pairs)
    return pair


def _at_indices(
    op: str, x: Tensor, dim: int, keepdim: bool, nothing: Callable[[torch.dtype], float], pair: Callable[[Any], Any]
) -> Callable[[Tensor], Any]:
    """A function that makes a pair of values and indices out of indices; their dim has size 1."""

    def values_and_indices(indices: Tensor) -> Any:
        (d,) = dims_of(op, x, dim) or (0,)
        fill = nothing(x.dtype)
        if x.dim() and not x.shape[d]:
            values = full(x, [d], True, fill)
        else:
            # An empty slice reads its first element, and neither returns it nor has a gradient.
            values = torch.where(indices < 0, fill, x.gather(d, indices.clamp(min=0)))
        found = (values, indices) if keepdim else (values.squeeze(d), indices.squeeze(d))
        return pair(found)

    return values_and_indices


def need_one_dim(op: str, dim: object) -> None:
    """Raise unless dim is one dim or None: an index into several dims is not a single number."""
    if isinstance(dim, (tuple, list)):
        hint = "x.flatten(start, end) first, or dim=None for the position in the flattened x"
        raise DtypeError(say(op, "dim", must="be an int or None", got=dim, hint=hint))


def amax_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The greatest of what is kept; -inf (of integers: the least there is) where nothing is."""
    return extremum(x, mask, dim, keepdim, lowest(x.dtype), torch.amax)


def amin_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The least of what is kept; +inf (of integers: the greatest there is) where nothing is."""
    return extremum(x, mask, dim, keepdim, highest(x.dtype), torch.amin)


def extremum(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, least: float, reduce: object) -> Tensor:
    """The extremum of what is kept, whose gradient goes to all that equal it in equal parts."""
    if nothing_to_reduce(x, dim):
        return full(x, dim, keepdim, least)
    out: Tensor = reduce(where_kept(x, mask, least), dim, keepdim=keepdim)  # type: ignore[operator]
    if not may_hold(x, out, least):
        return out
    # Where all that is kept equals what stands in for the dropped, only the kept may share the gradient.
    alike = mask & (expand_reduced(out.detach(), x.shape, dim, keepdim) == least)
    share = torch.where(alike, x, 0.0).sum(dim, keepdim=keepdim) / alike.sum(dim, keepdim=keepdim)
    return torch.where(share.detach() == least, share, out)


def argmax_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Where the first of the greatest kept values is; -1 where nothing is kept."""
    return position(x, mask, dim, keepdim, amax_reference(x, mask, dim, keepdim))


def argmin_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Where the first of the least kept values is; -1 where nothing is kept."""
    return position(x, mask, dim, keepdim, amin_reference(x, mask, dim, keepdim))


def position(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, best: Tensor) -> Tensor:
    """The first kept position that holds ``best``, or a NaN; one dim, or all of them as one."""
    if nothing_to_reduce(x, dim):
        return full(x, dim, keepdim, -1, torch.int64)
    # A NaN equals nothing, itself included.
    hit = mask & ((x == expand_reduced(best, x.shape, dim, keepdim)) | (x != x))
    if len(dim) == x.dim():
        first, found = hit.flatten().to(torch.uint8).argmax(), hit.any()
        if keepdim:
            first, found = first.reshape((1,) * x.dim()), found.reshape((1,) * x.dim())
    else:
        first, found = hit.to(torch.uint8).argmax(dim[0], keepdim=keepdim), hit.any(dim[0], keepdim=keepdim)
    return torch.where(found, first, -1)


def extremum_gradient(
    grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, greatest: bool
) -> Tensor:
    """The gradient of amax or amin, split evenly among ties."""
    equal = mask & (x == expand_reduced(out, x.shape, dim, keepdim))
    share = grad.to(accumulate_dtype(x)) / count(x, equal, dim, keepdim)
    # A NaN equals nothing, so no element ties with it; the gradient of the slice is NaN, as in torch.
    reached = mask & (equal | expand_reduced(out != out, x.shape, dim, keepdim))
    return torch.where(reached, expand_reduced(share, x.shape, dim, keepdim), 0.0).to(x.dtype)


_backward = define_backward("extremum", extremum_gradient, settings=", bool greatest")
_amax = reduction(
    "amax",
    amax_reference,
    dtypes=(*FLOATING, *INTEGRAL, torch.bool),
    work=works(calls=5, copies=1, gradient_copies=2),
    backward=backward_of(amax_reference, _backward, True),
)
_amin = reduction(
    "amin",
    amin_reference,
    dtypes=(*FLOATING, *INTEGRAL, torch.bool),
    work=works(calls=5, copies=1, gradient_copies=2),
    backward=backward_of(amin_reference, _backward, False),
)
_argmax = reduction(
    "argmax",
    argmax_reference,
    result=lambda dtype: torch.int64,
    dtypes=(*FLOATING, *INTEGRAL),
    work=works(calls=8, copies=2),
)
_argmin = reduction(
    "argmin",
    argmin_reference,
    result=lambda dtype: torch.int64,
    dtypes=(*FLOATING, *INTEGRAL),
    work=works(calls=8, copies=2),
)
#: The same ops and the same routes, under the names that errors and plans report.
_max, _max_along = replace(_amax, name="max"), replace(_argmax, name="max")
_min, _min_along = replace(_amin, name="min"), replace(_argmin, name="min")
