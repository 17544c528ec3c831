"""The reductions on a GPU: each op is one launch, a gradient one or two."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.gpu.rows import Stat, expand_rows, reduce_rows
from maskwise.ops.primitives import highest, lowest

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "extremum_backward", "logsumexp", "logsumexp_backward", "mean",
    "mean_backward", "norm", "norm_backward", "prod", "prod_backward", "std", "sum", "sum_backward", "var",
    "var_backward",
]  # fmt: skip


def reduce(
    stat: Stat, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype, along: int, *parameters: Any
) -> Tensor:
    """One reduction."""
    sizes = [1 if d in dim else size for d, size in enumerate(x.shape) if keepdim or d not in dim]
    out = x.new_empty(sizes, dtype=dtype)
    reduce_rows(stat, x, mask, dim, along, out, *parameters)
    return out


# -- forward -----------------------------------------------------------------------------------------------------------
def sum(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The sum."""
    return reduce(Stat("sum", 0), x, mask, dim, keepdim, x.dtype if x.is_floating_point() else torch.int64, along)


def prod(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The product."""
    return reduce(Stat("prod", 1), x, mask, dim, keepdim, x.dtype if x.is_floating_point() else torch.int64, along)


def mean(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The mean."""
    return reduce(Stat("mean", 0, n=True), x, mask, dim, keepdim, x.dtype, along)


def any(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """Whether any element is true."""
    return reduce(Stat("any", 0), x, mask, dim, keepdim, torch.uint8 if x.dtype is torch.uint8 else torch.bool, along)


def all(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """Whether all elements are true."""
    return reduce(Stat("all", 1), x, mask, dim, keepdim, torch.uint8 if x.dtype is torch.uint8 else torch.bool, along)


def amax(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The maximum."""
    return reduce(Stat("amax", lowest(x.dtype)), x, mask, dim, keepdim, x.dtype, along)


def amin(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The minimum."""
    return reduce(Stat("amin", highest(x.dtype)), x, mask, dim, keepdim, x.dtype, along)


def argmax(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The index of the maximum."""
    return reduce(Stat("argmax", lowest(x.dtype), n=True), x, mask, dim, keepdim, torch.int64, along)


def argmin(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The index of the minimum."""
    return reduce(Stat("argmin", highest(x.dtype), n=True), x, mask, dim, keepdim, torch.int64, along)


def logsumexp(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The logsumexp."""
    return reduce(Stat("logsumexp", -inf, b=True), x, mask, dim, keepdim, x.dtype, along)


def var(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float, along: int = 0) -> Tensor:
    """The variance."""
    return reduce(Stat("var", 0, b=True, n=True), x, mask, dim, keepdim, x.dtype, along, correction)


def std(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float, along: int = 0) -> Tensor:
    """The standard deviation."""
    return reduce(Stat("var", 0, b=True, n=True), x, mask, dim, keepdim, x.dtype, along, correction, True)


NORMS = {
    0.0: Stat("norm_0", 0),
    1.0: Stat("norm_1", 0),
    2.0: Stat("norm_2", 0),
    inf: Stat("norm_inf", 0),
}
NORMS[-inf] = Stat("norm_-inf", inf, n=True)
POWER = Stat("norm_p", 0, n=True)


def norm(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, ord: float, along: int = 0) -> Tensor:
    """The vector norm."""
    return reduce(NORMS.get(ord, POWER), x, mask, dim, keepdim, x.dtype, along, ord)


# -- backward ----------------------------------------------------------------------------------------------------------
def like(grad: Tensor, shape: list[int]) -> Tensor:
    """A stand-in for x where the gradient needs its shape only."""
    return grad.new_empty(()).expand(shape)


def sum_backward(grad: Tensor, mask: Tensor, shape: list[int], dim: list[int], keepdim: bool, along: int = 0) -> Tensor:
    """The gradient of the sum."""
    return expand_rows("sum", None, grad, None, like(grad, shape), mask, dim, along, need_x=False)


def mean_backward(
    grad: Tensor, mask: Tensor, shape: list[int], dim: list[int], keepdim: bool, along: int = 0
) -> Tensor:
    """The gradient of the mean."""
    return expand_rows("mean", Stat("count", 0, n=True), grad, None, like(grad, shape), mask, dim, along, need_x=False)


def prod_backward(
    grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0
) -> Tensor:
    """The gradient of the product."""
    return expand_rows("nonzeros", Stat("nonzeros", 1, n=True), grad, None, x, mask, dim, along, need_a=True)


def var_backward(
    grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float, root: bool, along: int = 0
) -> Tensor:
    """The gradient of the variance, or with ``root`` of the standard deviation."""
    state = Stat("var", 0, b=True, n=True)
    return expand_rows(
        "std" if root else "var", state, grad, None, x, mask, dim, along, need_a=True, parameter=correction
    )


def extremum_backward(
    grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, greatest: bool, along: int = 0
) -> Tensor:
    """The gradient of amax or amin."""
    return expand_rows("ties", Stat("ties", 0, n=True), grad, out, x, mask, dim, along)


def logsumexp_backward(
    grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, along: int = 0
) -> Tensor:
    """The gradient of logsumexp."""
    return expand_rows("logsumexp", None, grad, out, x, mask, dim, along)


def norm_backward(
    grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, ord: float, along: int = 0
) -> Tensor:
    """The gradient of a norm."""
    if ord == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if ord in (inf, -inf):
        return expand_rows("magnitude_ties", Stat("magnitude_ties", 0, n=True), grad, out, x, mask, dim, along)
    op = {1.0: "norm_1", 2.0: "norm_2"}.get(ord, "norm_p")
    return expand_rows(op, None, grad, None if op == "norm_1" else out, x, mask, dim, along, parameter=ord)
