"""Softmax and friends on a GPU: the same ops as elsewhere, each as one launch, forward and backward."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from maskwise.ops.gpu.dtypes import accumulator, as_bytes, triton_type
from maskwise.ops.gpu.geometry import lay_out
from maskwise.ops.gpu.launch import blocks_for, launch, row_blocks
from maskwise.ops.softmax.triton import rowwise_kernel

__all__ = [
    "log_softmax", "log_softmax_backward", "normalize", "normalize_backward", "softmax", "softmax_backward", "softmin",
    "standardize", "standardize_backward",
]  # fmt: skip


class Kind(NamedTuple):
    """What the kernel must know of a row before it can write it: a state's name, and what changes nothing in it."""

    state: str
    identity: float
    n: bool = False
    #: Whether rows that fit into registers are held there.
    common: bool = True


NOTHING = Kind("", 0.0)
EXPONENTIALS = Kind("logsumexp", -inf)
MOMENTS = Kind("var", 0.0, n=True)
NORMS = {
    0.0: Kind("norm_0", 0.0, common=False),
    1.0: Kind("norm_1", 0.0),
    2.0: Kind("norm_2", 0.0),
    inf: Kind("norm_inf", 0.0, common=False),
    -inf: Kind("norm_-inf", inf, n=True, common=False),
}
POWER = Kind("norm_p", 0.0, n=True, common=False)


def run(
    op: str,
    kind: Kind,
    x: Tensor,
    mask: Tensor,
    dim: list[int],
    *,
    grad: Tensor | None = None,
    parameter: float = 0.0,
    eps: float = 0.0,
    sign: float = 1.0,
) -> Tensor:
    """Launch the kernel for a function of x, or for its gradient."""
    out = torch.empty_like(x)
    mask = mask.expand(x.shape)
    second = out if grad is None else grad
    geometry = lay_out(dim, x, second, mask, out)
    # Norms that are seldom asked for read long rows twice; that is half of the kernels there would be of them.
    whole = row_blocks(geometry, x.element_size()) if kind.common else None
    blocks = whole or blocks_for(geometry, x.element_size())
    x_at, grad_at, mask_at, out_at = geometry.operands
    tiles = -(-geometry.rows // blocks.rows)
    # How often a row that is not held in registers is read: for its state, for the sums, and for the result.
    looks = 1 if whole else 1 + (kind.state != "") + (grad is not None)
    launch(
        rowwise_kernel,
        tiles,
        {
            **dict(x=x, grad=grad, mask=as_bytes(mask), out=out, outer=geometry.outer, inner=geometry.inner),
            **dict(x_outer=x_at.outer, x_inner=x_at.inner, grad_outer=grad_at.outer, grad_inner=grad_at.inner),
            **dict(mask_outer=mask_at.outer, mask_inner=mask_at.inner, out_outer=out_at.outer, out_inner=out_at.inner),
            **dict(rows=geometry.rows, length=geometry.length, tiles=tiles, parameter=parameter, eps=eps),
            **dict(sign=sign, OP=op, STATE=kind.state, IDENTITY=kind.identity, NEED_N=kind.n),
            **dict(BACKWARD=grad is not None, WHOLE=whole is not None, DTYPE=triton_type(accumulator(x.dtype))),
            **dict(WIDE=blocks.wide or whole is None, ROWS=blocks.rows, ELEMENTS=blocks.elements, GROUP=blocks.group),
            **dict(SKIP=blocks.skip),
        },
        warps=blocks.warps,
        reads={"x": looks, "mask": looks, "grad": 1 if whole else 2},
        writes=("out",),
    )
    return out


def softmax(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The softmax."""
    return run("softmax", EXPONENTIALS, x, mask, dim)


def softmin(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The softmax of -x."""
    return run("softmax", EXPONENTIALS, x, mask, dim, sign=-1.0)


def log_softmax(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The logarithm of the softmax."""
    return run("log_softmax", EXPONENTIALS, x, mask, dim)


def normalize(x: Tensor, mask: Tensor, dim: list[int], p: float, eps: float) -> Tensor:
    """X over its norm."""
    return run("normalize", NORMS.get(p, POWER), x, mask, dim, parameter=p, eps=eps)


def standardize(x: Tensor, mask: Tensor, dim: list[int], correction: float, eps: float) -> Tensor:
    """X less its mean, over its deviation."""
    return run("standardize", MOMENTS, x, mask, dim, parameter=correction, eps=eps)


def softmax_backward(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int], negate: bool) -> Tensor:
    """The gradient of softmax, or of softmin."""
    return run("softmax", NOTHING, out, mask, dim, grad=grad, sign=-1.0 if negate else 1.0)


def log_softmax_backward(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The gradient of log_softmax."""
    return run("log_softmax", NOTHING, out, mask, dim, grad=grad)


def normalize_backward(grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], p: float, eps: float) -> Tensor:
    """The gradient of normalize."""
    return run("normalize", NORMS.get(p, POWER), x, mask, dim, grad=grad, parameter=p, eps=eps)


def standardize_backward(
    grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], correction: float, eps: float
) -> Tensor:
    """The gradient of standardize."""
    return run("standardize", MOMENTS, x, mask, dim, grad=grad, parameter=correction, eps=eps)
