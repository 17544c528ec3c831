"""Softmax and normalization on a GPU: each op is one launch, forward and backward."""

from __future__ import annotations

from math import inf

from torch import Tensor

from maskwise.ops.gpu.launch import run_time
from maskwise.ops.gpu.rows import Stat, map_rows

__all__ = [
    "log_softmax", "log_softmax_backward", "normalize", "normalize_backward", "softmax", "softmax_backward", "softmin",
    "standardize", "standardize_backward",
]  # fmt: skip


EXPONENTIALS = Stat("logsumexp", -inf, b=True)
NEGATED = Stat("softmin", -inf, b=True)
MOMENTS = Stat("var", 0.0, b=True, n=True)
NORMS = {
    0.0: Stat("norm_0", 0.0),
    1.0: Stat("norm_1", 0.0),
    2.0: Stat("norm_2", 0.0),
    inf: Stat("norm_inf", 0.0),
    -inf: Stat("norm_-inf", inf, n=True),
}
POWER = Stat("norm_p", 0.0, n=True)
#: Rows of these are held in registers where they fit; rare norms always read rows twice.
COMMON = (1.0, 2.0)


def softmax(x: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The softmax."""
    return map_rows("softmax", EXPONENTIALS, x, mask, dim, along)


def softmin(x: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The softmax of -x."""
    return map_rows("softmin", NEGATED, x, mask, dim, along)


def log_softmax(x: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The logarithm of the softmax."""
    return map_rows("log_softmax", EXPONENTIALS, x, mask, dim, along)


@run_time(eps="eps")
def normalize(x: Tensor, mask: Tensor, dim: list[int], p: float, eps: float, along: int = 0) -> Tensor:
    """X divided by its norm."""
    return map_rows("normalize", NORMS.get(p, POWER), x, mask, dim, along, parameter=p, eps=eps, common=p in COMMON)


@run_time(correction="parameter", eps="eps")
def standardize(x: Tensor, mask: Tensor, dim: list[int], correction: float, eps: float, along: int = 0) -> Tensor:
    """X minus its mean, divided by its standard deviation."""
    return map_rows("standardize", MOMENTS, x, mask, dim, along, parameter=correction, eps=eps)


def softmax_backward(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int], negate: bool, along: int = 0) -> Tensor:
    """The gradient of softmax, or of softmin."""
    return map_rows("softmin" if negate else "softmax", None, out, mask, dim, along, grad=grad)


def log_softmax_backward(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The gradient of log_softmax."""
    return map_rows("log_softmax", None, out, mask, dim, along, grad=grad)


@run_time(eps="eps")
def normalize_backward(
    grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], p: float, eps: float, along: int = 0
) -> Tensor:
    """The gradient of normalize."""
    return map_rows(
        "normalize", NORMS.get(p, POWER), x, mask, dim, along, grad=grad, parameter=p, eps=eps, common=p in COMMON
    )


@run_time(correction="parameter", eps="eps")
def standardize_backward(
    grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], correction: float, eps: float, along: int = 0
) -> Tensor:
    """The gradient of standardize."""
    return map_rows("standardize", MOMENTS, x, mask, dim, along, grad=grad, parameter=correction, eps=eps)
