"""The reductions in plain torch operations: the ground truth of the tests, and the route where no kernel serves.

Each is leak-proof, forward and backward, and differentiable by torch itself, transforms included. ``mask`` is a bool
tensor that broadcasts to x, ``dim`` a list of dims that are not negative.
"""

from __future__ import annotations

from math import inf, nan
from math import prod as product

import torch
from torch import Tensor

from maskwise.tracing import is_tracing, is_transformed

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "counts", "dropped", "logsumexp", "mean", "norm", "prod", "std",
    "sum", "var", "wide",
]  # fmt: skip


_HALVES = (torch.float16, torch.bfloat16)


def dropped(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """X with ``value`` where it is dropped. Unlike a product with the mask, it lets no NaN through."""
    # A Python scalar of x's own kind: any other would make torch promote, and copy, x.
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return torch.where(mask, x, float(value))
    if x.dtype is torch.bool:
        # ONNX Runtime has no choice between bools, and torch.jit none between a tensor of them and a Python one.
        return x | ~mask if value else x & mask
    return torch.where(mask, x, int(value))


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which x is accumulated: float32 for half precision, otherwise its own."""
    return torch.float32 if x.dtype in _HALVES else x.dtype


def counts(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """How many are kept: int64, broadcastable to the result. A broadcast mask is not expanded."""
    if mask.shape == x.shape:
        return mask.sum(dim, keepdim=keepdim)
    mask = mask.reshape((1,) * (x.dim() - mask.dim()) + mask.shape)
    # A list, because torch.compile cannot hand a generator to a function of C.
    repeated = product([x.shape[d] for d in dim if x.dim() and mask.shape[d] == 1])
    kept = mask.sum(dim, keepdim=keepdim)
    return kept if repeated == 1 else kept * repeated


def nothing_to_reduce(x: Tensor, dim: list[int]) -> bool:
    """Whether the reduced slices have no elements, which torch refuses for functions without an identity."""
    return product([x.shape[d] for d in dim if x.dim()]) == 0


def full(x: Tensor, dim: list[int], keepdim: bool, value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A result that is ``value`` everywhere."""
    sizes = [1 if d in dim else size for d, size in enumerate(x.shape) if keepdim or d not in dim]
    return x.new_full(sizes, value, dtype=dtype)


def spread(out: Tensor, shape: torch.Size, dim: list[int], keepdim: bool) -> Tensor:
    """A reduced tensor, expanded (not copied) to x's shape."""
    if not keepdim:
        for d in dim if shape else []:
            out = out.unsqueeze(d)
    return out.expand(shape)


def may_hold(x: Tensor, out: Tensor, value: float) -> bool:
    """Whether a gradient is asked for and ``out`` may hold ``value``; the data are read only where it costs nothing."""
    if not x.dtype.is_floating_point:
        return False
    asked = x.requires_grad and torch.is_grad_enabled()
    if is_tracing():
        return asked
    if is_transformed():
        return True
    return asked and (x.device.type != "cpu" or bool((out == value).any()))


# -- totals ------------------------------------------------------------------------------------------------------------
def sum(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The sum of what is kept; 0 where nothing is."""
    # torch reads an empty list of dims as "all", which for x of no dims is what is meant.
    return dropped(x, mask, 0.0).sum(dim, keepdim=keepdim)


def prod(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The product of what is kept; 1 where nothing is."""
    out = dropped(x, mask, 1.0)
    if not x.dim():
        return out.prod()
    # torch takes one dim at a time; in between, half precision must not round.
    if len(dim) > 1:
        out = out.to(wide(x))
    for d in reversed(dim):
        out = out.prod(d, keepdim=keepdim)
    return out.to(x.dtype) if len(dim) > 1 and x.dtype.is_floating_point else out


def mean(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The mean of what is kept; NaN where nothing is."""
    values = dropped(x, mask, 0.0)
    if x.dtype in _HALVES:
        return (values.sum(dim, keepdim=keepdim, dtype=torch.float32) / counts(x, mask, dim, keepdim)).to(x.dtype)
    return values.sum(dim, keepdim=keepdim) / counts(x, mask, dim, keepdim)


def any(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Whether something that is kept is true; False where nothing is kept."""
    return dropped(x, mask, 0.0).any(dim, keepdim=keepdim)


def all(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Whether everything that is kept is true; True where nothing is kept."""
    return dropped(x, mask, 1.0).all(dim, keepdim=keepdim)


# -- moments -----------------------------------------------------------------------------------------------------------
def widest(x: Tensor) -> torch.dtype:
    """What squares are taken in: beyond 1e19 they leave the range of float32, and torch takes float64 too."""
    # Other devices have no float64, or a slow one.
    return torch.float64 if x.device.type == "cpu" else wide(x)


def var(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The variance of what is kept; NaN where nothing is."""
    return spread_of(x, mask, dim, keepdim, correction).to(x.dtype)


def spread_of(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The variance before it is rounded to x's dtype."""
    values = dropped(x, mask, 0.0).to(widest(x))
    centred = torch.where(mask, values - values.sum(dim, keepdim=True) / counts(x, mask, dim, True), 0.0)
    kept = counts(x, mask, dim, keepdim)
    out = centred.square().sum(dim, keepdim=keepdim) / (kept - correction).clamp(min=0)
    return torch.where(kept > 0, out, nan) if correction < 0 else out


def std(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The standard deviation of what is kept; NaN where nothing is."""
    squared = spread_of(x, mask, dim, keepdim, correction)
    # The gradient of the root is infinite at 0, where torch takes 0.
    return torch.where(squared == 0, squared, torch.where(squared == 0, 1.0, squared).sqrt()).to(x.dtype)


# -- extrema -----------------------------------------------------------------------------------------------------------
def amax(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The greatest of what is kept; -inf (of integers: the least there is) where nothing is."""
    return extremum(x, mask, dim, keepdim, lowest(x.dtype), torch.amax)


def amin(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The least of what is kept; +inf (of integers: the greatest there is) where nothing is."""
    return extremum(x, mask, dim, keepdim, highest(x.dtype), torch.amin)


def lowest(dtype: torch.dtype) -> float:
    """What no value of the dtype is below."""
    return -inf if dtype.is_floating_point else False if dtype is torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float:
    """What no value of the dtype is above."""
    return inf if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).max


def extremum(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, least: float, reduce: object) -> Tensor:
    """The extremum of what is kept, whose gradient goes to all that equal it in equal parts."""
    if nothing_to_reduce(x, dim):
        return full(x, dim, keepdim, least)
    out: Tensor = reduce(dropped(x, mask, least), dim, keepdim=keepdim)  # type: ignore[operator]
    if not may_hold(x, out, least):
        return out
    # Where all that is kept equals what stands in for the dropped, only the kept may share the gradient.
    alike = mask & (spread(out.detach(), x.shape, dim, keepdim) == least)
    share = torch.where(alike, x, 0.0).sum(dim, keepdim=keepdim) / alike.sum(dim, keepdim=keepdim)
    return torch.where(share.detach() == least, share, out)


def argmax(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Where the first of the greatest kept values is; -1 where nothing is kept."""
    return position(x, mask, dim, keepdim, amax(x, mask, dim, keepdim))


def argmin(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Where the first of the least kept values is; -1 where nothing is kept."""
    return position(x, mask, dim, keepdim, amin(x, mask, dim, keepdim))


def position(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, best: Tensor) -> Tensor:
    """The first kept position that holds ``best``, or a NaN; one dim, or all of them as one."""
    if nothing_to_reduce(x, dim):
        return full(x, dim, keepdim, -1, torch.int64)
    # A NaN equals nothing, itself included.
    hit = mask & ((x == spread(best, x.shape, dim, keepdim)) | (x != x))
    if len(dim) == x.dim():
        first, found = hit.flatten().to(torch.uint8).argmax(), hit.any()
        if keepdim:
            first, found = first.reshape((1,) * x.dim()), found.reshape((1,) * x.dim())
    else:
        first, found = hit.to(torch.uint8).argmax(dim[0], keepdim=keepdim), hit.any(dim[0], keepdim=keepdim)
    return torch.where(found, first, -1)


# -- exponentials and norms --------------------------------------------------------------------------------------------
def logsumexp(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The logarithm of the sum of the exponentials of what is kept; -inf where nothing is."""
    values = dropped(x, mask, -inf).to(wide(x))
    out = torch.logsumexp(values, dim, keepdim=keepdim)
    if may_hold(x, out, -inf):
        # torch's gradient of a slice that is all -inf is NaN, which must not reach a second derivative.
        something = counts(x, mask, dim, keepdim) > 0
        values = torch.where(spread(something.expand(out.shape), x.shape, dim, keepdim), values, 0.0)
        out = torch.where(something, torch.logsumexp(values, dim, keepdim=keepdim), -inf)
    return out.to(x.dtype)


def norm(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, ord: float) -> Tensor:
    """The vector norm of what is kept; 0 where nothing is."""
    if nothing_to_reduce(x, dim):
        return full(x, dim, keepdim, 0.0, x.real.dtype if x.is_complex() else x.dtype)
    values = dropped(x, mask, 0.0 if ord >= 0 else inf)
    if ord == 0:
        # torch cuts this norm off its graph; here its gradient is zero.
        nonzero = values != 0
        return values.masked_fill(nonzero, 1.0).masked_fill(~nonzero, 0.0).sum(dim, keepdim=keepdim).real
    out: Tensor = torch.linalg.vector_norm(values, ord, dim if x.dim() else None, keepdim)
    return out if ord >= 0 else torch.where(counts(x, mask, dim, keepdim) > 0, out, 0.0)
