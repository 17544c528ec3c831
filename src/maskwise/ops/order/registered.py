"""Sort, argsort, topk, median and quantile as registered ops: schema, fake, gradient, work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.operation import Operation
from maskwise.ops.order import reference
from maskwise.ops.register import define, register
from maskwise.plan import capability, planner
from maskwise.plan.capability import FLOATING, INTEGRAL
from maskwise.plan.cost import Work
from maskwise.tracing import is_tracing

__all__ = ["argsort", "median", "quantile", "sort", "topk"]

_ops = torch.ops.maskwise
#: Up to this many elements a gradient is cheaper by torch's own gather than by an op with autograd around it.
_SMALL = 1 << 15


def order_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel orders what is kept, once; plain torch sorts twice, and moves the indices as often."""
    read, written = elements * (size + 1), elements * (size + 8)
    backward = elements * size if grad else 0
    if route == "plain":
        return Work(calls=30 if grad else 8, streamed=40 * read, fresh=6 * written + backward)
    return Work(calls=1, streamed=4 * read, fresh=written + backward)


def select_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel reads what is kept once and writes almost nothing; plain torch sorts twice."""
    read = elements * (size + 1)
    backward = elements * size if grad else 0
    if route == "plain":
        return Work(calls=50 if grad else 20, streamed=40 * read, fresh=6 * elements * (size + 8) + backward)
    return Work(calls=1, streamed=2 * read, fresh=backward)


# -- sort, argsort, topk ---------------------------------------------------------------------------------------------
def put_back(grad: Tensor, indices: Tensor, dim: list[int], size: int) -> Tensor:
    """The gradient of x: that of each result at its index; zero where no index points, and none is -1."""
    shape = [size if d == dim[0] else n for d, n in enumerate(grad.shape)]
    part = torch.where(indices >= 0, grad, 0.0)
    # Each place gets one value at most, so that the order of additions does not matter.
    return grad.new_zeros(shape).scatter_add(dim[0], indices.clamp_min(0), part)


def fake_put_back(grad: Tensor, indices: Tensor, dim: list[int], size: int) -> Tensor:
    """The gradient of x without its data."""
    return grad.new_empty([size if d == dim[0] else n for d, n in enumerate(grad.shape)])


define(
    "order_scatter",
    "(Tensor grad, Tensor indices, int[] dim, SymInt size) -> Tensor",
    reference=put_back,
    fake=fake_put_back,
)


def remember_indices(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the gradient needs: the indices."""
    x, _, ctx.dim, *rest = inputs
    ctx.size = x.shape[ctx.dim[0]] if x.dim() else 1
    ctx.others = len(rest)
    ctx.save_for_backward(output[1])


def order_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    """Put each gradient back to where its value came from."""
    (indices,) = ctx.saved_tensors
    back = put_back if torch.is_grad_enabled() else _ops.order_scatter.default
    return back(grad, indices, ctx.dim, ctx.size), None, None, *[None] * ctx.others


def fake_sort(x: Tensor, mask: Tensor, dim: list[int], descending: bool) -> tuple[Tensor, Tensor]:
    """Sort without its data."""
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)


def fake_argsort(x: Tensor, mask: Tensor, dim: list[int], descending: bool) -> Tensor:
    """Argsort without its data."""
    return x.new_empty(x.shape, dtype=torch.int64)


def fake_topk(x: Tensor, mask: Tensor, dim: list[int], k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Topk without its data."""
    shape = [k if d == dim[0] else n for d, n in enumerate(x.shape)]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def taken(x: Tensor, dim: int, indices: Tensor, value: float) -> Tensor:
    """The elements of x at the indices, ``value`` where an index is -1; differentiable by torch itself."""
    return x.gather(dim, indices.clamp_min(0)).masked_fill(indices < 0, value)


def sort_with_gradient(x: Tensor, mask: Tensor, dim: list[int], descending: bool) -> Any:
    """Sort by the kernel; the gradient by torch's gather where x is small, else by a kernel."""
    if x.numel() > _SMALL or is_tracing():
        return _ops.sort_fused.default(x, mask, dim, descending)
    indices = _ops.argsort_fused_forward.default(x.detach(), mask, dim, descending)
    return taken(x, dim[0], indices, 0.0), indices


def topk_with_gradient(x: Tensor, mask: Tensor, dim: list[int], k: int, largest: bool) -> Any:
    """Topk by the kernel; the gradient by torch's gather where x is small, else by a kernel."""
    if x.numel() > _SMALL or is_tracing():
        return _ops.topk_fused.default(x, mask, dim, k, largest)
    _, indices = _ops.topk_fused_forward.default(x.detach(), mask, dim, k, largest)
    return taken(x, dim[0], indices, reference.worst(x.dtype, largest)), indices


sort = replace(
    register(
        "sort",
        "(Tensor x, Tensor mask, int[] dim, bool descending) -> (Tensor, Tensor)",
        reference=reference.sort,
        fake=fake_sort,
        setup_context=remember_indices,
        backward=order_backward,
        work=order_work,
        cpu=(*FLOATING, *INTEGRAL, torch.bool),
    ),
    fused=sort_with_gradient,
)

argsort = register(
    "argsort",
    "(Tensor x, Tensor mask, int[] dim, bool descending) -> Tensor",
    reference=reference.argsort,
    fake=fake_argsort,
    work=lambda route, elements, size, grad: order_work(route, elements, size, False),
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
)

topk = replace(
    register(
        "topk",
        "(Tensor x, Tensor mask, int[] dim, SymInt k, bool largest) -> (Tensor, Tensor)",
        reference=reference.topk,
        fake=fake_topk,
        setup_context=remember_indices,
        backward=order_backward,
        work=order_work,
        cpu=(*FLOATING, *INTEGRAL),
    ),
    fused=topk_with_gradient,
)


# -- median, quantile ------------------------------------------------------------------------------------------------
# Their results are few, so the gradient is torch's own, of a gather at the places that a kernel found. These ops come
# without autograd.
def result_shape(x: Tensor, dim: list[int], q: Tensor, keepdim: bool) -> list[Any]:
    """The sizes of the result."""
    return [*q.shape, *[1 if d in dim else n for d, n in enumerate(x.shape) if keepdim or d not in dim]]


def fake_quantile(x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int) -> Tensor:
    """Quantiles without their data."""
    return x.new_empty(result_shape(x, dim, q, keepdim))


def fake_quantile_places(
    x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The places of quantiles without their data."""
    shape = result_shape(x, dim, q, keepdim)
    lower, upper = x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.int64)
    return lower, upper, x.new_empty(shape, dtype=torch.float64)


def fake_median(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Medians without their data."""
    return fake_quantile(x, mask, dim, x.new_empty(()), keepdim, 1)


def fake_median_places(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The places of medians without their data."""
    return fake_quantile_places(x, mask, dim, x.new_empty(()), keepdim, 1)[0]


def at_places(x: Tensor, places: Tensor) -> Tensor:
    """The elements of x at flat places; anything at -1. An x of no elements has no places."""
    if x.numel() == 0:
        return x.sum() + torch.zeros_like(places, dtype=x.dtype)
    return x.take(places.clamp_min(0))


def median_with_gradient(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The medians, taken from where the kernel found them."""
    places = _ops.median_places.default(x.detach(), mask, dim, keepdim)
    return at_places(x, places).masked_fill(places < 0, reference.nothing(x.dtype))


def quantile_with_gradient(
    x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int
) -> Tensor:
    """The quantiles, between the elements that the kernel found."""
    lower, upper, weight = _ops.quantile_places.default(x.detach(), mask, dim, q, keepdim, interpolation)
    out = at_places(x, lower)
    if reference.INTERPOLATIONS[interpolation] in {"linear", "midpoint"}:
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.lerp(out.to(wide), at_places(x, upper).to(wide), weight.to(wide)).to(x.dtype)
    return out.masked_fill(lower < 0, reference.nothing(x.dtype))


_MEDIAN = "(Tensor x, Tensor mask, int[] dim, bool keepdim) -> "
_QUANTILE = "(Tensor x, Tensor mask, int[] dim, Tensor q, bool keepdim, int interpolation) -> "
define("median_fused", _MEDIAN + "Tensor", reference=reference.median, fake=fake_median)
define("median_places", _MEDIAN + "Tensor", reference=reference.median_places, fake=fake_median_places)
define("quantile_fused", _QUANTILE + "Tensor", reference=reference.quantile, fake=fake_quantile)
define(
    "quantile_places",
    _QUANTILE + "(Tensor, Tensor, Tensor)",
    reference=reference.quantile_places,
    fake=fake_quantile_places,
)
for _name, _dtypes in (("median", (*FLOATING, *INTEGRAL)), ("quantile", FLOATING)):
    planner.describe(_name, select_work)
    capability.provide(_name, "cpu", _dtypes)

median = Operation("median", reference.median, bare=_ops.median_fused.default, fused=median_with_gradient)
quantile = Operation("quantile", reference.quantile, bare=_ops.quantile_fused.default, fused=quantile_with_gradient)
