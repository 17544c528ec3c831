"""Masked median and quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.ops.arguments import Dim, MaskLike
from maskwise.ops.backends import FLOATING, INTEGRAL, provide
from maskwise.ops.operation import ALONG, Operation, define, dropped_rows, kernel_routes
from maskwise.ops.order import reference
from maskwise.ops.order.reference import INTERPOLATIONS
from maskwise.ops.order.sorting import check_one
from maskwise.ops.primitives import replace_empty
from maskwise.ops.torch_private import is_tracing
from maskwise.plan.cost import Work

__all__ = ["median", "quantile"]

_ops = torch.ops.maskwise


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
        keepdim: whether to retain reduced dims with size 1.
        empty: the result of a slice with nothing kept, instead of NaN (for integers: the minimum of the dtype).

    Returns:
        The medians: x's shape without the reduced dims. Values only, even with a dim, since there are no indices into
        several dims. A kept NaN makes the median NaN. The gradient goes to the element that is the median.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is complex, bool or one of uint16, uint32 and uint64.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    check_one("median", x, -1, bools=False)
    then = None if empty is None else replace_empty("median", x, mask, dim, keepdim, empty)
    out: Tensor = _median(x, mask, dim, bool(keepdim), then=then)
    return out


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
        q: a number in [0, 1], or several as a sequence or a 1-D tensor, which adds a leading dim to the result.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether to retain reduced dims with size 1.
        interpolation: between two values: "linear", "lower", "higher", "midpoint" or "nearest".
        empty: the result of a slice with nothing kept, instead of NaN.

    Returns:
        The quantiles: x's shape without the reduced dims, after the dim of q if it has one. A kept NaN makes a
        quantile NaN, as in torch. Gradients go to the one or two elements that a quantile is computed from.

    Raises:
        ShapeError: the mask does not broadcast to x, or q has more than one dim.
        DtypeError: the mask is not bool, x is not floating, or q is neither a number, numbers nor a floating tensor.
        ArgumentError: q is not in [0, 1] or requires grad, the interpolation does not exist, a dim is repeated, or x or
            the mask is sparse.
        DeviceError: the mask or q is on another device.
        OutOfRangeError: a dim is out of range for x.
    """
    if isinstance(x, Tensor) and not x.dtype.is_floating_point:
        raise DtypeError(say("quantile", "x", must="be floating", got=x.dtype, hint="x.float() or mw.median"))
    if interpolation not in INTERPOLATIONS:
        must = f"be one of {', '.join(map(repr, INTERPOLATIONS))}"
        raise ArgumentError(
            say("quantile", "interpolation", must=must, got=repr(interpolation), hint='interpolation="linear"')
        )
    ranks = quantiles_of(x, q)
    then = None if empty is None else replace_empty("quantile", x, mask, dim, keepdim, empty)
    out: Tensor = _quantile(x, mask, dim, ranks, bool(keepdim), INTERPOLATIONS.index(interpolation), then=then)
    return out


#: In which dtype torch computes the ranks of a float32 q: float32, where 0.1 * 10 is 1; from 2.14 on float64, where it
#: is a little more, on devices that have it.
_DOUBLE_RANKS = torch.__version__ >= "2.14"


def quantiles_of(x: Tensor, q: Any) -> Tensor:
    """Q as the kernels require it: float32 or float64, 0-d or 1-D, contiguous, in [0, 1]."""
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
        raise ArgumentError(say("quantile", "q", must="not require grad", got="one that does", hint="q.detach()"))
    # Only where reading q causes no host-device sync and no graph break; elsewhere such a q gives NaN, as in torch.
    if type(q) is Tensor and q.device.type == "cpu" and not is_tracing():
        wrong = [number for number in q.reshape(-1).tolist() if not 0 <= number <= 1]
        if wrong:
            raise ArgumentError(say("quantile", "q", must="be in [0, 1]", got=wrong[0], hint="q=percent / 100"))
    wide = _DOUBLE_RANKS and q.device.type != "mps"
    return q.to(torch.float64 if wide else torch.promote_types(q.dtype, torch.float32)).contiguous()


# -- registration ------------------------------------------------------------------------------------------------------
# The results are small, so the gradient is torch's own, of a gather at the indices that a kernel found. These ops have
# no autograd.
def result_shape(x: Tensor, dim: list[int], q: Tensor, keepdim: bool) -> list[Any]:
    """The sizes of the result."""
    return [*q.shape, *[1 if d in dim else n for d, n in enumerate(x.shape) if keepdim or d not in dim]]


def fake_quantile(x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int) -> Tensor:
    """The fake of quantile."""
    return x.new_empty(result_shape(x, dim, q, keepdim))


def fake_quantile_indices(
    x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fake of quantile_indices."""
    shape = result_shape(x, dim, q, keepdim)
    lower, upper = x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.int64)
    return lower, upper, x.new_empty(shape, dtype=torch.float64)


def fake_median(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The fake of median."""
    return fake_quantile(x, mask, dim, x.new_empty(()), keepdim, 1)


def fake_median_indices(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The fake of median_indices."""
    return fake_quantile_indices(x, mask, dim, x.new_empty(()), keepdim, 1)[0]


def take_flat(x: Tensor, indices: Tensor) -> Tensor:
    """The elements of x at flat indices; any value at -1, and for an empty x."""
    if x.numel() == 0:
        return x.sum() + torch.zeros_like(indices, dtype=x.dtype)
    return x.take(indices.clamp_min(0))


def median_with_gradient(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The medians, gathered at the indices that the kernel found."""
    indices = _ops.median_places.default(x.detach(), mask, dim, keepdim, along)
    return take_flat(x, indices).masked_fill(indices < 0, reference.nothing(x.dtype))


def quantile_with_gradient(
    x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int, along: int = 0
) -> Tensor:
    """The quantiles, interpolated between the elements that the kernel found."""
    lower, upper, weight = _ops.quantile_places.default(x.detach(), mask, dim, q, keepdim, interpolation, along)
    out = take_flat(x, lower)
    if reference.INTERPOLATIONS[interpolation] in {"linear", "midpoint"}:
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.lerp(out.to(wide), take_flat(x, upper).to(wide), weight.to(wide)).to(x.dtype)
    return out.masked_fill(lower < 0, reference.nothing(x.dtype))


_MEDIAN = f"(Tensor x, Tensor mask, int[] dim, bool keepdim{ALONG} -> "
_QUANTILE = f"(Tensor x, Tensor mask, int[] dim, Tensor q, bool keepdim, int interpolation{ALONG} -> "
define("median_fused", _MEDIAN + "Tensor", reference=reference.median, fake=fake_median)
define("median_places", _MEDIAN + "Tensor", reference=reference.median_indices, fake=fake_median_indices)
define("quantile_fused", _QUANTILE + "Tensor", reference=reference.quantile, fake=fake_quantile)
define(
    "quantile_places",
    _QUANTILE + "(Tensor, Tensor, Tensor)",
    reference=reference.quantile_indices,
    fake=fake_quantile_indices,
)


def select_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel reads x once and writes almost nothing; plain torch sorts twice."""
    read = elements * (size + 1)
    backward = elements * size if grad else 0
    if route == "plain":
        return Work(calls=50 if grad else 20, streamed=40 * read, fresh=6 * elements * (size + 8) + backward)
    return Work(calls=1, streamed=2 * read, fresh=backward)


provide("median", "cpu", (*FLOATING, *INTEGRAL))
provide("quantile", "cpu", FLOATING)
_median = Operation(
    "median",
    kernel_routes(
        "median",
        reference.median,
        _ops.median_fused.default,
        median_with_gradient,
        select_work,
        skips=dropped_rows,
        intervals=True,
    ),
)
_quantile = Operation(
    "quantile",
    kernel_routes(
        "quantile",
        reference.quantile,
        _ops.quantile_fused.default,
        quantile_with_gradient,
        select_work,
        skips=dropped_rows,
        intervals=True,
    ),
)
