"""The gradients of the reductions in plain torch operations: once differentiable, for where no backward kernel serves.

``grad`` and ``out`` have the shape of the result. What is dropped gets exactly 0, whatever the others hold.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.reduce.reference import counts, dropped, spread, wide, widest

__all__ = ["again", "extremum", "logsumexp", "norm", "prod", "var"]


def again(reference: Callable[..., Tensor], grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The gradient as a differentiable function of ``x`` and ``grad``: torch differentiates the reference."""
    with torch.enable_grad():
        out = reference(x, *rest)
        (of_x,) = torch.autograd.grad(out, x, grad, create_graph=True, materialize_grads=True)
    return of_x


def prod(grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Everything's gradient is the product of all others; found by division, unless it is by 0."""
    zero = mask & (x == 0)
    zeros = spread(counts(x, zero, dim, keepdim).expand(out.shape), x.shape, dim, keepdim)
    values = dropped(x, mask & ~zero, 1.0).to(wide(x))
    nonzero = values
    for d in reversed(dim):
        nonzero = nonzero.prod(d, keepdim=True)
    others = torch.where(zero, nonzero, nonzero / values)
    alone = (zeros == 0) | (zero & (zeros == 1))
    return torch.where(mask, torch.where(alone, others, 0.0) * spread(grad, x.shape, dim, keepdim), 0.0).to(x.dtype)


def var(grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float, root: bool) -> Tensor:
    """2 (x - mean) / (n - correction); for the standard deviation (``root``) over 2 std, or 0 where that is 0."""
    kept = counts(x, mask, dim, True)
    freedom = (kept - correction).clamp(min=0)
    values = dropped(x, mask, 0.0).to(widest(x))
    centred = torch.where(mask, values - values.sum(dim, keepdim=True) / kept, 0.0)
    scale = spread(grad, x.shape, dim, keepdim).to(widest(x)) * (2.0 / freedom)
    if root:
        std = (centred.square().sum(dim, keepdim=True) / freedom).sqrt()
        scale = torch.where(std == 0, 0.0, scale / (2.0 * std))
    return torch.where(mask, scale * centred, 0.0).to(x.dtype)


def extremum(
    grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, greatest: bool
) -> Tensor:
    """An equal part to all that equal the extremum, be it the greatest or the least."""
    equal = mask & (x == spread(out, x.shape, dim, keepdim))
    share = grad.to(wide(x)) / counts(x, equal, dim, keepdim)
    # A NaN equals nothing: the slice has no one to give to, and like torch's its gradient is NaN.
    return torch.where(mask & (equal | out_is_nan(out, x, dim, keepdim)), spread(share, x.shape, dim, keepdim), 0.0).to(
        x.dtype
    )


def out_is_nan(out: Tensor, x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Where the slice of each position reduced to NaN."""
    return spread(out != out, x.shape, dim, keepdim)


def logsumexp(grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The softmax."""
    values = dropped(x, mask, -inf).to(wide(x))
    share = (values - spread(out, x.shape, dim, keepdim)).exp()
    return torch.where(mask, share * spread(grad, x.shape, dim, keepdim), 0.0).to(x.dtype)


def norm(grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, ord: float) -> Tensor:
    """sign(x) (|x| / norm) ^ (ord - 1); of the infinities an equal part to all that reach them; 0 where x is."""
    values = dropped(x, mask, 0.0).to(wide(x))
    length = spread(out.to(wide(x)), x.shape, dim, keepdim)
    grads = spread(grad.to(wide(x)), x.shape, dim, keepdim)
    if ord == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if ord in (inf, -inf):
        equal = mask & (values.abs() == length)
        of_x = values.sgn() * grads / counts(x, equal, dim, True)
        reached = mask & (equal | (length != length))
    elif ord == 1:
        of_x, reached = values.sgn() * grads, mask
    elif ord == 2:
        of_x, reached = values / length * grads, mask & (length != 0)
    else:
        of_x = values.sgn() * (values.abs() / length).pow(ord - 1) * grads
        reached = mask & (length != 0) & (values != 0)
    return torch.where(reached, of_x, 0.0).to(x.dtype)
