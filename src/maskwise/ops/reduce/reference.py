"""The reductions in plain torch operations: the ground truth of the tests, and the fallback without a kernel.

Each is leak-proof, forward and backward, and differentiable by torch itself, transforms included. ``mask`` is a bool
tensor that broadcasts to x, ``dim`` a list of dims that are not negative.
"""

from __future__ import annotations

from math import inf, nan
from math import prod as product

import torch
from torch import Tensor

from maskwise.ops.primitives import accumulate_dtype, count, expand_reduced, highest, lowest, where_kept
from maskwise.ops.torch_private import is_tracing, is_transformed

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "mean", "norm", "prod", "square_dtype", "std", "var",
]  # fmt: skip


_HALVES = (torch.float16, torch.bfloat16)


def nothing_to_reduce(x: Tensor, dim: list[int]) -> bool:
    """Whether the reduced slices have no elements, for which torch raises in functions without an identity."""
    return product([x.shape[d] for d in dim if x.dim()]) == 0


def full(x: Tensor, dim: list[int], keepdim: bool, value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A result filled with ``value``."""
    sizes = [1 if d in dim else size for d, size in enumerate(x.shape) if keepdim or d not in dim]
    return x.new_full(sizes, value, dtype=dtype)


def may_hold(x: Tensor, out: Tensor, value: float) -> bool:
    """Whether a gradient is required and ``out`` may contain ``value``; reads data on the CPU only, to avoid a sync."""
    if not x.dtype.is_floating_point:
        return False
    required = x.requires_grad and torch.is_grad_enabled()
    if is_tracing():
        return required
    if is_transformed():
        return True
    return required and (x.device.type != "cpu" or bool((out == value).any()))


# -- totals ------------------------------------------------------------------------------------------------------------
def prod(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The product of kept elements; 1 for an empty slice."""
    out = where_kept(x, mask, 1.0)
    if not x.dim():
        return out.prod()
    # torch reduces one dim per call; half precision must not round in between.
    if len(dim) > 1:
        out = out.to(accumulate_dtype(x))
    for d in reversed(dim):
        out = out.prod(d, keepdim=keepdim)
    return out.to(x.dtype) if len(dim) > 1 and x.dtype.is_floating_point else out


def mean(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The mean of kept elements; NaN for an empty slice."""
    values = where_kept(x, mask, 0.0)
    if x.dtype in _HALVES:
        return (values.sum(dim, keepdim=keepdim, dtype=torch.float32) / count(x, mask, dim, keepdim)).to(x.dtype)
    return values.sum(dim, keepdim=keepdim) / count(x, mask, dim, keepdim)


def any(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Whether any kept element is true; False for an empty slice."""
    return where_kept(x, mask, 0.0).any(dim, keepdim=keepdim)


def all(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Whether all kept elements are true; True for an empty slice."""
    return where_kept(x, mask, 1.0).all(dim, keepdim=keepdim)


# -- moments -----------------------------------------------------------------------------------------------------------
def square_dtype(x: Tensor) -> torch.dtype:
    """The dtype of squares: beyond 1e19 they overflow float32, so float64 on the CPU, as in torch."""
    # Other devices have no float64, or a slow one.
    return torch.float64 if x.device.type == "cpu" else accumulate_dtype(x)


def var(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The variance of kept elements; NaN for an empty slice."""
    return _unrounded_var(x, mask, dim, keepdim, correction).to(x.dtype)


def _unrounded_var(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The variance before it is rounded to x's dtype."""
    values = where_kept(x, mask, 0.0).to(square_dtype(x))
    centred = torch.where(mask, values - values.sum(dim, keepdim=True) / count(x, mask, dim, True), 0.0)
    kept = count(x, mask, dim, keepdim)
    out = centred.square().sum(dim, keepdim=keepdim) / (kept - correction).clamp(min=0)
    return torch.where(kept > 0, out, nan) if correction < 0 else out


def std(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The standard deviation of kept elements; NaN for an empty slice."""
    squared = _unrounded_var(x, mask, dim, keepdim, correction)
    # The gradient of the root is infinite at 0, where torch takes 0.
    return torch.where(squared == 0, squared, torch.where(squared == 0, 1.0, squared).sqrt()).to(x.dtype)


# -- extrema -----------------------------------------------------------------------------------------------------------
def amax(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The maximum of kept elements; -inf (for integers: the minimum of the dtype) for an empty slice."""
    return extremum(x, mask, dim, keepdim, lowest(x.dtype), torch.amax)


def amin(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The minimum of kept elements; +inf (for integers: the maximum of the dtype) for an empty slice."""
    return extremum(x, mask, dim, keepdim, highest(x.dtype), torch.amin)


def extremum(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, least: float, reduce: object) -> Tensor:
    """The extremum of kept elements, whose gradient is split evenly among ties."""
    if nothing_to_reduce(x, dim):
        return full(x, dim, keepdim, least)
    out: Tensor = reduce(where_kept(x, mask, least), dim, keepdim=keepdim)  # type: ignore[operator]
    if not may_hold(x, out, least):
        return out
    # Where all kept elements equal the fill value, dropped ones must not take a part of the gradient.
    ties = mask & (expand_reduced(out.detach(), x.shape, dim, keepdim) == least)
    share = torch.where(ties, x, 0.0).sum(dim, keepdim=keepdim) / ties.sum(dim, keepdim=keepdim)
    return torch.where(share.detach() == least, share, out)


def argmax(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The index of the first kept maximum; -1 for an empty slice."""
    return position(x, mask, dim, keepdim, amax(x, mask, dim, keepdim))


def argmin(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The index of the first kept minimum; -1 for an empty slice."""
    return position(x, mask, dim, keepdim, amin(x, mask, dim, keepdim))


def position(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, best: Tensor) -> Tensor:
    """The index of the first kept element equal to ``best``, or NaN; along one dim, or in the flattened x."""
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


# -- exponentials and norms --------------------------------------------------------------------------------------------
def logsumexp(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The logsumexp of kept elements; -inf for an empty slice."""
    values = where_kept(x, mask, -inf).to(accumulate_dtype(x))
    out = torch.logsumexp(values, dim, keepdim=keepdim)
    if may_hold(x, out, -inf):
        # torch's gradient of an all -inf slice is NaN, which must not reach a double backward.
        something = count(x, mask, dim, keepdim) > 0
        values = torch.where(expand_reduced(something.expand(out.shape), x.shape, dim, keepdim), values, 0.0)
        out = torch.where(something, torch.logsumexp(values, dim, keepdim=keepdim), -inf)
    return out.to(x.dtype)


def norm(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, ord: float) -> Tensor:
    """The vector norm of kept elements; 0 for an empty slice."""
    if nothing_to_reduce(x, dim):
        return full(x, dim, keepdim, 0.0, x.real.dtype if x.is_complex() else x.dtype)
    values = where_kept(x, mask, 0.0 if ord >= 0 else inf)
    if ord == 0:
        # torch detaches this norm from the graph; here its gradient is zero.
        nonzero = values != 0
        return values.masked_fill(nonzero, 1.0).masked_fill(~nonzero, 0.0).sum(dim, keepdim=keepdim).real
    out: Tensor = torch.linalg.vector_norm(values, ord, dim if x.dim() else None, keepdim)
    return out if ord >= 0 else torch.where(count(x, mask, dim, keepdim) > 0, out, 0.0)
