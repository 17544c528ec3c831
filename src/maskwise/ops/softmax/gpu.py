"""Softmax and normalization on a GPU: each op is one launch, forward and backward."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import lay_out
from maskwise.ops.gpu.launch import accumulator, as_bytes, blocks_for, launch, row_blocks, triton_type
from maskwise.ops.softmax.triton import rowwise_kernel

__all__ = [
    "log_softmax", "log_softmax_backward", "normalize", "normalize_backward", "softmax", "softmax_backward", "softmin",
    "standardize", "standardize_backward",
]  # fmt: skip


class Stat(NamedTuple):
    """The statistics that the kernel accumulates per row before it writes it: their name and their identity."""

    state: str
    identity: float
    n: bool = False
    #: Whether to hold rows in registers where they fit.
    common: bool = True


NOTHING = Stat("", 0.0)
EXPONENTIALS = Stat("logsumexp", -inf)
MOMENTS = Stat("var", 0.0, n=True)
NORMS = {
    0.0: Stat("norm_0", 0.0, common=False),
    1.0: Stat("norm_1", 0.0),
    2.0: Stat("norm_2", 0.0),
    inf: Stat("norm_inf", 0.0, common=False),
    -inf: Stat("norm_-inf", inf, n=True, common=False),
}
POWER = Stat("norm_p", 0.0, n=True, common=False)


def run(
    op: str,
    stat: Stat,
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
    # Rare norms always read rows twice, which halves the number of their kernels.
    in_registers = row_blocks(geometry, x.element_size()) if stat.common else None
    blocks = in_registers or blocks_for(geometry, x.element_size())
    x_at, grad_at, mask_at, out_at = geometry.operands
    tiles = -(-geometry.rows // blocks.rows)
    # Passes over a row that is not held in registers: for its statistics, for the sums, and for the result.
    passes = 1 if in_registers else 1 + (stat.state != "") + (grad is not None)
    launch(
        rowwise_kernel,
        tiles,
        {
            **dict(x=x, grad=grad, mask=as_bytes(mask), out=out, outer=geometry.outer, inner=geometry.inner),
            **dict(x_outer=x_at.outer, x_inner=x_at.inner, grad_outer=grad_at.outer, grad_inner=grad_at.inner),
            **dict(mask_outer=mask_at.outer, mask_inner=mask_at.inner, out_outer=out_at.outer, out_inner=out_at.inner),
            **dict(rows=geometry.rows, length=geometry.length, tiles=tiles, parameter=parameter, eps=eps),
            **dict(sign=sign, OP=op, STATE=stat.state, IDENTITY=stat.identity, NEED_N=stat.n),
            **dict(
                BACKWARD=grad is not None,
                IN_REGISTERS=in_registers is not None,
                DTYPE=triton_type(accumulator(x.dtype)),
            ),
            **dict(
                WIDE=blocks.wide or in_registers is None, ROWS=blocks.rows, ELEMENTS=blocks.elements, GROUP=blocks.group
            ),
            **dict(SKIP=blocks.skip),
        },
        warps=blocks.warps,
        reads={"x": passes, "mask": passes, "grad": 1 if in_registers else 2},
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
    """X divided by its norm."""
    return run("normalize", NORMS.get(p, POWER), x, mask, dim, parameter=p, eps=eps)


def standardize(x: Tensor, mask: Tensor, dim: list[int], correction: float, eps: float) -> Tensor:
    """X minus its mean, divided by its standard deviation."""
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
