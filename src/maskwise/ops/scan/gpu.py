"""The scans on a GPU: each op is one launch, forward and backward."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import Geometry, lay_out
from maskwise.ops.gpu.launch import Blocks, accumulator, as_bytes, blocks_for, launch, triton_type
from maskwise.ops.primitives import empty_dense, highest, lowest
from maskwise.ops.scan.triton import product_backward_kernel, scan_backward_kernel, scan_kernel

__all__ = [
    "cumextreme_backward", "cummax", "cummin", "cumprod", "cumprod_backward", "cumsum", "cumsum_backward",
    "logcumsumexp", "logcumsumexp_backward",
]  # fmt: skip


def launch_arguments(geometry: Geometry, blocks: Blocks, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that all kernels of the family share."""
    at = {f"{name}_outer": strides.outer for name, strides in zip(names, geometry.operands, strict=True)}
    at |= {f"{name}_inner": strides.inner for name, strides in zip(names, geometry.operands, strict=True)}
    return {
        **dict(outer=geometry.outer, inner=geometry.inner, **at, rows=geometry.rows, length=geometry.length),
        **dict(tiles=-(-geometry.rows // blocks.rows), DTYPE=triton_type(dtype), WIDE=blocks.wide),
        **dict(ROWS=blocks.rows, ELEMENTS=blocks.elements, GROUP=blocks.group, SKIP=blocks.skip),
    }


def forward(
    op: str, identity: float, x: Tensor, mask: Tensor, dim: list[int], dtype: torch.dtype, with_indices: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Launch a scan; ``with_indices`` also returns the indices of the values."""
    out, indices = empty_dense(x, dtype), empty_dense(x, torch.int64) if with_indices else None
    mask = mask.expand(x.shape)
    geometry = lay_out(dim if x.dim() else [], x, mask, out)
    blocks = blocks_for(geometry, x.element_size())
    arguments = launch_arguments(geometry, blocks, ("x", "mask", "out"), accumulator(dtype))
    operands = dict(x=as_bytes(x), mask=as_bytes(mask), out=as_bytes(out), indices=indices)
    launch(
        scan_kernel,
        arguments["tiles"],
        {**operands, **arguments, "OP": op, "IDENTITY": identity, "TRUTH": x.dtype is torch.bool},
        warps=blocks.warps,
        reads={"x": 1, "mask": 1},
        writes=("out", "indices") if with_indices else ("out",),
    )
    return out, indices


def total(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a running sum or product."""
    return dtype if dtype.is_floating_point else torch.int64


def cumsum(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The running sum."""
    return forward("cumsum", 0, x, mask, dim, total(x.dtype))[0]


def cumprod(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The running product."""
    return forward("cumprod", 1, x, mask, dim, total(x.dtype))[0]


def cummax(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor | None]:
    """The running maximum and its indices."""
    return forward("cummax", lowest(x.dtype), x, mask, dim, x.dtype, with_indices=True)


def cummin(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor | None]:
    """The running minimum and its indices."""
    return forward("cummin", highest(x.dtype), x, mask, dim, x.dtype, with_indices=True)


def logcumsumexp(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The logarithm of the running sum of exponentials."""
    return forward("logcumsumexp", -inf, x, mask, dim, x.dtype)[0]


def backward(
    op: str, grad: Tensor, x: Tensor | None, mask: Tensor | None, saved: Tensor | None, dim: list[int], like: Tensor
) -> Tensor:
    """Launch the gradient of a scan; its result has the strides of ``like``."""
    grad_x = empty_dense(like, like.dtype)
    mask = None if mask is None else mask.expand(grad.shape)
    operands = {"grad": grad, "x": x, "mask": mask, "saved": saved, "grad_x": grad_x}
    # An absent operand has strides too, which are never used.
    geometry = lay_out(dim if grad.dim() else [], grad_x, *(grad_x if t is None else t for t in operands.values()))
    blocks = blocks_for(geometry, grad_x.element_size())
    without = geometry._replace(operands=geometry.operands[1:])
    arguments = launch_arguments(without, blocks, tuple(operands), accumulator(grad_x.dtype))
    operands["mask"] = None if mask is None else as_bytes(mask)
    launch(
        scan_backward_kernel,
        arguments["tiles"],
        {**operands, **arguments, "steps": -(-geometry.length // blocks.elements), "OP": op},
        warps=blocks.warps,
        reads=dict.fromkeys(("grad", "x", "mask", "saved"), 1),
        writes=("grad_x",),
    )
    return grad_x


def cumsum_backward(grad: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The gradient of the running sum."""
    return backward("sum", grad, None, mask, None, dim, grad)


def cumextreme_backward(grad: Tensor, indices: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The gradient of a running extremum: indices are those of kept elements, or -1."""
    return backward("extreme", grad, None, None, indices, dim, grad)


def logcumsumexp_backward(grad: Tensor, x: Tensor, mask: Tensor, out: Tensor, dim: list[int]) -> Tensor:
    """The gradient of the running sum of exponentials."""
    return backward("exponentials", grad, x, mask, out, dim, x)


def cumprod_backward(grad: Tensor, x: Tensor, mask: Tensor, out: Tensor, dim: list[int]) -> Tensor:
    """The gradient of the running product."""
    grad_x = empty_dense(x, x.dtype)
    dtype = accumulator(x.dtype)
    scratch = torch.empty_strided(grad_x.shape, grad_x.stride(), dtype=dtype, device=x.device)
    mask = mask.expand(x.shape)
    geometry = lay_out(dim if x.dim() else [], x, grad, mask, grad_x)
    blocks = blocks_for(geometry, x.element_size())
    arguments = launch_arguments(geometry, blocks, ("x", "grad", "mask", "grad_x"), dtype)
    operands = dict(grad=grad, x=x, mask=as_bytes(mask), scratch=scratch, grad_x=grad_x)
    launch(
        product_backward_kernel,
        arguments["tiles"],
        {**operands, **arguments, "steps": -(-geometry.length // blocks.elements)},
        warps=blocks.warps,
        reads={"grad": 1, "x": 2, "mask": 2, "scratch": 1},
        writes=("grad_x", "scratch"),
    )
    return grad_x
