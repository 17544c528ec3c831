"""Masked scans: running sums, products and extrema."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.arguments import MaskLike, need_ordered, to_dtype
from maskwise.ops.backends import FLOATING, INTEGRAL
from maskwise.ops.operation import ALONG, Describe, Operation, as_bits, define, dropped_rows, kept_mask, register
from maskwise.ops.primitives import empty_dense
from maskwise.ops.scan import reference
from maskwise.plan.cost import Work

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]


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
        The running sums, of x's shape; 0 before the first kept element.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    out: Tensor = run(_cumsum, x, mask, dim, dtype)
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
        The running products, of x's shape; 1 before the first kept element. The gradient handles zeros.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    out: Tensor = run(_cumprod, x, mask, dim, dtype)
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
        ``torch.return_types.cummax``: the running maxima (``values``) and their indices (``indices``, always kept
        positions; the latest of ties, as in torch). Before the first kept element the value is -inf, the minimum of an
        integer dtype, or False, and the index -1. A kept NaN counts as the maximum, as in torch.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, dim is not an int, or x is complex or one of uint16, uint32 and uint64.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    need_ordered("cummax", x)
    out: torch.return_types.cummax = run(_cummax, x, mask, dim, then=torch.return_types.cummax)
    return out


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
        ``torch.return_types.cummin``: the running minima (``values``) and their indices (``indices``, always kept
        positions; the latest of ties, as in torch). Before the first kept element the value is +inf, the maximum of an
        integer dtype, or True, and the index -1. A kept NaN counts as the minimum, as in torch.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, dim is not an int, or x is complex or one of uint16, uint32 and uint64.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    need_ordered("cummin", x)
    out: torch.return_types.cummin = run(_cummin, x, mask, dim, then=torch.return_types.cummin)
    return out


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
        The logarithms of the running sums, of x's shape; -inf before the first kept element.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, dim is not an int, or x is not floating.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    if isinstance(x, Tensor) and not x.dtype.is_floating_point:
        hint = "x.float()" if not x.dtype.is_complex else "x.abs()"
        raise DtypeError(say("logcumsumexp", "x", must="be floating", got=x.dtype, hint=hint))
    out: Tensor = run(_logcumsumexp, x, mask, dim)
    return out


def run(
    scan: Operation,
    x: Tensor,
    mask: MaskLike,
    dim: int,
    dtype: torch.dtype | None = None,
    then: Callable[[Any], Any] | None = None,
) -> Any:
    """Check dim and dtype, and run a scan."""
    if not isinstance(dim, int):
        raise DtypeError(say(scan.name, "dim", must="be an int", got=type(dim).__name__, hint="dim=-1"))
    if dtype is None:
        return scan(x, mask, dim, then=then)
    # Integers scan to int64, and are cast to the dtype after: modular arithmetic gives the same result.
    return scan(to_dtype(scan.name, x, dtype), mask, dim, then=partial(Tensor.to, dtype=dtype))


#: Where the Triton kernels are.
GPU = "maskwise.ops.scan.gpu"
ALL = (*FLOATING, *INTEGRAL, torch.bool)
VALUES = f"(Tensor x, Tensor mask, int[] dim{ALONG} -> Tensor"
VALUES_AND_INDICES = f"(Tensor x, Tensor mask, int[] dim{ALONG} -> (Tensor, Tensor)"


# -- results without data ----------------------------------------------------------------------------------------------
def fake_total(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The fake of a running sum or product: integers and bools give int64, as in torch."""
    return empty_dense(x, x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)


def fake_extreme(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor]:
    """The fake of a running extremum and its indices."""
    return empty_dense(x, x.dtype), empty_dense(x, torch.int64)


# -- gradients ---------------------------------------------------------------------------------------------------------
# Each is written once in plain torch, as the reference and for the double backward, and defined as an op of its own,
# whose kernel runs otherwise.
def reversed_cumsum(grad: Tensor, dim: int) -> Tensor:
    """The reversed cumsum."""
    return grad.flip(dim).cumsum(dim).flip(dim)


def cumsum_backward_reference(grad: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The reversed cumsum at kept elements; exactly zero elsewhere, even where the gradient is NaN."""
    return torch.where(mask, reversed_cumsum(grad, dim[0]), 0.0)


def extreme_backward_reference(grad: Tensor, indices: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """Scatter-add each gradient to the index of its value, which is kept; index -1 has none."""
    sent = torch.where(indices >= 0, grad, 0.0)
    return torch.zeros_like(sent).scatter_add(dim[0], indices.clamp_min(0), sent)


def differentiate_reference(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradient of a reference by autograd, as a function of (grad, x, mask, out, dim)."""

    def backward(grad: Tensor, x: Tensor, mask: Tensor, out: Tensor, dim: list[int]) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(scan(leaf, mask, dim), leaf, grad)
        return gradient

    return backward


def save_mask(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the gradient of a running sum needs."""
    _, mask, ctx.dim = inputs
    ctx.save_for_backward(mask)


def save_indices(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the gradient of a running extremum needs."""
    _, mask, ctx.dim = inputs
    ctx.save_for_backward(output[1], mask)
    ctx.mark_non_differentiable(output[1])


def save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the gradient of a running product or logsumexp needs."""
    x, mask, ctx.dim = inputs
    ctx.save_for_backward(x, mask, output)


def cumsum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """The gradient of the running sum."""
    (mask,) = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return torch.ops.maskwise.cumsum_backward(grad, mask, ctx.dim, ctx.along), None, None
    return cumsum_backward_reference(grad, as_bits(kept_mask(mask, ctx.along, grad.shape)), ctx.dim), None, None


def extreme_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    """The gradient of a running extremum."""
    indices, mask = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return torch.ops.maskwise.cumextreme_backward(grad, indices, mask, ctx.dim, ctx.along), None, None
    return extreme_backward_reference(grad, indices, mask, ctx.dim), None, None


def backward_of(name: str, scan: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None, None]]:
    """The gradient of a scan that is not linear in x."""
    kernel = getattr(torch.ops.maskwise, f"{name}_backward")

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, mask, out = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return kernel(grad, x, mask, out, ctx.dim, ctx.along), None, None
        bits = as_bits(kept_mask(mask, ctx.along, x.shape))
        (gradient,) = torch.autograd.grad(scan(x, bits, ctx.dim), x, grad, create_graph=True)
        return gradient, None, None

    return backward


def fake_like_grad(grad: Tensor, *saved: Any) -> Tensor:
    """The fake of the gradient of a linear scan."""
    return empty_dense(grad, grad.dtype)


def fake_like_x(grad: Tensor, x: Tensor, *saved: Any) -> Tensor:
    """The fake of the gradient of any other scan."""
    return empty_dense(x, x.dtype)


define(
    "cumsum_backward",
    f"(Tensor x, Tensor mask, int[] dim{ALONG} -> Tensor",
    reference=cumsum_backward_reference,
    fake=fake_like_grad,
    gpu=FLOATING,
    gpu_from=f"{GPU}:cumsum_backward",
)
define(
    "cumextreme_backward",
    f"(Tensor x, Tensor indices, Tensor mask, int[] dim{ALONG} -> Tensor",
    reference=extreme_backward_reference,
    fake=fake_like_grad,
    gpu=FLOATING,
    gpu_from=f"{GPU}:cumextreme_backward",
)
for _name, _scan in (("cumprod", reference.cumprod), ("logcumsumexp", reference.logcumsumexp)):
    define(
        f"{_name}_backward",
        f"(Tensor grad, Tensor x, Tensor mask, Tensor out, int[] dim{ALONG} -> Tensor",
        reference=differentiate_reference(_scan),
        fake=fake_like_x,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{_name}_backward",
    )


# -- work --------------------------------------------------------------------------------------------------------------
def work_of(*, calls: int, gradient_calls: int, results: int, arithmetic: int) -> Describe:
    """The work of a scan: the plain route also writes and reads a copy of x, and is not vectorized.

    ``calls`` are those of the plain route, ``gradient_calls`` the further calls of its gradient; ``results`` are bytes
    of the results per byte of x; ``arithmetic`` is the compute time of torch's scan per element, as the bytes that
    could be streamed in that time.
    """

    def work(route: str, elements: int, size: int, grad: bool) -> Work:
        read = elements * (size + 1)
        fresh = elements * size * (results + grad)
        if route == "plain":
            streamed = (2 if grad else 1) * (read + elements * arithmetic)
            return Work(calls + gradient_calls * grad, streamed, fresh=2 * fresh)
        return Work(calls=1, streamed=read, fresh=fresh)

    return work


_cumsum = register(
    "cumsum",
    VALUES,
    reference=reference.cumsum,
    fake=fake_total,
    setup_context=save_mask,
    backward=cumsum_backward,
    work=work_of(calls=2, gradient_calls=0, results=1, arithmetic=20),
    cpu=ALL,
    gpu=ALL,
    skips=dropped_rows,
    gpu_from=f"{GPU}:cumsum",
    fuses=True,
)
_cumprod = register(
    "cumprod",
    VALUES,
    reference=reference.cumprod,
    fake=fake_total,
    setup_context=save_all,
    backward=backward_of("cumprod", reference.cumprod),
    work=work_of(calls=2, gradient_calls=6, results=1, arithmetic=20),
    cpu=ALL,
    gpu=ALL,
    skips=dropped_rows,
    gpu_from=f"{GPU}:cumprod",
    fuses=True,
)
_cummax = register(
    "cummax",
    VALUES_AND_INDICES,
    reference=reference.cummax,
    fake=fake_extreme,
    setup_context=save_indices,
    backward=extreme_backward,
    work=work_of(calls=10, gradient_calls=5, results=3, arithmetic=200),
    cpu=ALL,
    gpu=ALL,
    skips=dropped_rows,
    gpu_from=f"{GPU}:cummax",
    fuses=True,
)
_cummin = register(
    "cummin",
    VALUES_AND_INDICES,
    reference=reference.cummin,
    fake=fake_extreme,
    setup_context=save_indices,
    backward=extreme_backward,
    work=work_of(calls=10, gradient_calls=5, results=3, arithmetic=200),
    cpu=ALL,
    gpu=ALL,
    skips=dropped_rows,
    gpu_from=f"{GPU}:cummin",
    fuses=True,
)
_logcumsumexp = register(
    "logcumsumexp",
    VALUES,
    reference=reference.logcumsumexp,
    fake=fake_total,
    setup_context=save_all,
    backward=backward_of("logcumsumexp", reference.logcumsumexp),
    work=work_of(calls=12, gradient_calls=20, results=1, arithmetic=600),
    cpu=FLOATING,
    gpu=FLOATING,
    skips=dropped_rows,
    gpu_from=f"{GPU}:logcumsumexp",
    fuses=True,
)
