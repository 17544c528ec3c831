"""Masked sort, argsort and topk."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.errors import DtypeError, OutOfRangeError, say
from maskwise.ops.arguments import MaskLike, dims_of, need_dense, need_ordered
from maskwise.ops.backends import FLOATING, INTEGRAL
from maskwise.ops.operation import ALONG, define, dropped_rows, register
from maskwise.ops.order import reference
from maskwise.plan.cost import Work

__all__ = ["argsort", "sort", "topk"]

_ops = torch.ops.maskwise


class Ordered(NamedTuple):
    """Sorted values, and their indices along the dim; -1 where nothing is left."""

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
    """Sort what the mask keeps; zeros with index -1 follow for dropped elements.

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
        ``(values, indices)``, both of x's shape: along ``dim`` first the kept elements, sorted, with their indices;
        then value 0 and index -1 for each dropped element. Gradients go to kept elements.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is complex or one of uint16, uint32 and uint64, or ``dim`` is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    check_one("sort", x, dim)
    out: Ordered = _sort(x, mask, dim, bool(descending), then=Ordered._make)
    return out


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
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    check_one("argsort", x, dim)
    indices: Tensor = _argsort(x.detach() if isinstance(x, Tensor) else x, mask, dim, bool(descending))
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
        dim: the dim to select along.
        largest: the largest, or else the smallest. A kept NaN is the greatest, as in torch.
        sorted: accepted as in torch; the best always comes first.

    Returns:
        ``(values, indices)``, of x's shape with size k at ``dim``. Of equal values the one of the lower index wins.
        Where fewer than k are kept: index -1, and the value -inf (the minimum of an integer dtype) or, with
        ``largest=False``, +inf (the maximum). Gradients go to the selected elements.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is complex, bool or one of uint16, uint32 and uint64, or
            ``dim`` or ``k`` is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x, or k is negative or above the size of the dim.
        ArgumentError: x or the mask is sparse.
    """
    check_one("topk", x, dim, bools=False)
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise DtypeError(say("topk", "k", must="be an int", got=type(k).__name__, hint="k=int(k)"))
    need_dense("topk", "x", x)
    if isinstance(x, Tensor):
        size = x.shape[dim] if -x.dim() <= dim < x.dim() else 1
        if not 0 <= k <= size:
            # An invalid dim takes precedence.
            dims_of("topk", x, dim)
            raise OutOfRangeError(
                say("topk", "k", must=f"be in [0, {size}], the size of dim {dim}", got=k, hint=f"k=min(k, {size})")
            )
    out: Ordered = _topk(x, mask, dim, k, bool(largest), then=Ordered._make)
    return out


# -- registration ------------------------------------------------------------------------------------------------------
def order_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel sorts kept elements once; plain torch sorts twice, and gathers the indices as often."""
    read, written = elements * (size + 1), elements * (size + 8)
    backward = elements * size if grad else 0
    if route == "plain":
        return Work(calls=30 if grad else 8, streamed=40 * read, fresh=6 * written + backward)
    return Work(calls=1, streamed=4 * read, fresh=written + backward)


def scatter_gradient(grad: Tensor, indices: Tensor, dim: list[int], size: int) -> Tensor:
    """The gradient of x: each gradient scattered to its index, except where that is -1; zero elsewhere."""
    shape = [size if d == dim[0] else n for d, n in enumerate(grad.shape)]
    part = torch.where(indices >= 0, grad, 0.0)
    # Each index gets at most one value, so the result is deterministic.
    return grad.new_zeros(shape).scatter_add(dim[0], indices.clamp_min(0), part)


def fake_scatter_gradient(grad: Tensor, indices: Tensor, dim: list[int], size: int) -> Tensor:
    """The fake of scatter_gradient."""
    return grad.new_empty([size if d == dim[0] else n for d, n in enumerate(grad.shape)])


define(
    "order_scatter",
    "(Tensor grad, Tensor indices, int[] dim, SymInt size) -> Tensor",
    reference=scatter_gradient,
    fake=fake_scatter_gradient,
)


def save_indices(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the indices for the gradient."""
    x, _, ctx.dim, *rest = inputs
    ctx.size = x.shape[ctx.dim[0]] if x.dim() else 1
    ctx.others = len(rest)
    ctx.save_for_backward(output[1])


def order_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    """Scatter each gradient to the index of its value."""
    (indices,) = ctx.saved_tensors
    scatter = scatter_gradient if torch.is_grad_enabled() else _ops.order_scatter.default
    return scatter(grad, indices, ctx.dim, ctx.size), None, None, *[None] * ctx.others


def fake_sort(x: Tensor, mask: Tensor, dim: list[int], descending: bool) -> tuple[Tensor, Tensor]:
    """The fake of sort."""
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)


def fake_argsort(x: Tensor, mask: Tensor, dim: list[int], descending: bool) -> Tensor:
    """The fake of argsort."""
    return x.new_empty(x.shape, dtype=torch.int64)


def fake_topk(x: Tensor, mask: Tensor, dim: list[int], k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The fake of topk."""
    shape = [k if d == dim[0] else n for d, n in enumerate(x.shape)]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


_sort = register(
    "sort",
    f"(Tensor x, Tensor mask, int[] dim, bool descending{ALONG} -> (Tensor, Tensor)",
    reference=reference.sort,
    fake=fake_sort,
    setup_context=save_indices,
    backward=order_backward,
    work=order_work,
    skips=dropped_rows,
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
)

_argsort = register(
    "argsort",
    f"(Tensor x, Tensor mask, int[] dim, bool descending{ALONG} -> Tensor",
    reference=reference.argsort,
    fake=fake_argsort,
    work=lambda route, elements, size, grad: order_work(route, elements, size, False),
    skips=dropped_rows,
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
)

_topk = register(
    "topk",
    f"(Tensor x, Tensor mask, int[] dim, SymInt k, bool largest{ALONG} -> (Tensor, Tensor)",
    reference=reference.topk,
    fake=fake_topk,
    setup_context=save_indices,
    backward=order_backward,
    work=order_work,
    skips=dropped_rows,
    cpu=(*FLOATING, *INTEGRAL),
)
