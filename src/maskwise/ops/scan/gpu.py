"""The scans on a GPU: the same ops as elsewhere, each as one launch, forward and backward."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.gpu.dtypes import accumulator, as_bytes, triton_type
from maskwise.ops.gpu.geometry import Geometry, lay_out
from maskwise.ops.gpu.launch import Blocks, blocks_for, launch
from maskwise.ops.primitives import empty_dense, highest, lowest
from maskwise.ops.scan.triton import product_backward_kernel, scan_backward_kernel, scan_kernel

__all__ = [
    "cumextreme_backward", "cummax", "cummin", "cumprod", "cumprod_backward", "cumsum", "cumsum_backward",
    "logcumsumexp", "logcumsumexp_backward",
]  # fmt: skip


def facts_of(geometry: Geometry, blocks: Blocks, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that all kernels of the family take."""
    at = {f"{name}_outer": strides.outer for name, strides in zip(names, geometry.operands, strict=True)}
    at |= {f"{name}_inner": strides.inner for name, strides in zip(names, geometry.operands, strict=True)}
    return {
        **dict(outer=geometry.outer, inner=geometry.inner, **at, rows=geometry.rows, length=geometry.length),
        **dict(tiles=-(-geometry.rows // blocks.rows), DTYPE=triton_type(dtype), WIDE=blocks.wide),
        **dict(ROWS=blocks.rows, ELEMENTS=blocks.elements, GROUP=blocks.group, SKIP=blocks.skip),
    }


def forward(
    op: str, identity: float, x: Tensor, mask: Tensor, dim: list[int], dtype: torch.dtype, places: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Launch a scan; with ``places``, it tells where its values come from."""
    out, found = empty_dense(x, dtype), empty_dense(x, torch.int64) if places else None
    mask = mask.expand(x.shape)
    geometry = lay_out(dim if x.dim() else [], x, mask, out)
    blocks = blocks_for(geometry, x.element_size())
    facts = facts_of(geometry, blocks, ("x", "mask", "out"), accumulator(dtype))
    operands = dict(x=as_bytes(x), mask=as_bytes(mask), out=as_bytes(out), places=found)
    launch(
        scan_kernel,
        facts["tiles"],
        {**operands, **facts, "OP": op, "IDENTITY": identity, "TRUTH": x.dtype is torch.bool},
        warps=blocks.warps,
        reads={"x": 1, "mask": 1},
        writes=("out", "places") if places else ("out",),
    )
    return out, found


def total(dtype: torch.dtype) -> torch.dtype:
    """What a running sum or product of the dtype is made of."""
    return dtype if dtype.is_floating_point else torch.int64


def cumsum(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The running sum."""
    return forward("cumsum", 0, x, mask, dim, total(x.dtype))[0]


def cumprod(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The running product."""
    return forward("cumprod", 1, x, mask, dim, total(x.dtype))[0]


def cummax(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor | None]:
    """The running maximum and where it stands."""
    return forward("cummax", lowest(x.dtype), x, mask, dim, x.dtype, places=True)


def cummin(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor | None]:
    """The running minimum and where it stands."""
    return forward("cummin", highest(x.dtype), x, mask, dim, x.dtype, places=True)


def logcumsumexp(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The logarithm of the running sum of exponentials."""
    return forward("logcumsumexp", -inf, x, mask, dim, x.dtype)[0]


def backward(
    op: str, grad: Tensor, x: Tensor | None, mask: Tensor | None, known: Tensor | None, dim: list[int], like: Tensor
) -> Tensor:
    """Launch the gradient of a scan; its result is laid out as ``like``."""
    of_x = empty_dense(like, like.dtype)
    mask = None if mask is None else mask.expand(grad.shape)
    given = {"grad": grad, "x": x, "mask": mask, "known": known, "of_x": of_x}
    # An operand that there is not has strides too, which nobody reads.
    geometry = lay_out(dim if grad.dim() else [], of_x, *(of_x if t is None else t for t in given.values()))
    blocks = blocks_for(geometry, of_x.element_size())
    without = geometry._replace(operands=geometry.operands[1:])
    facts = facts_of(without, blocks, tuple(given), accumulator(of_x.dtype))
    given["mask"] = None if mask is None else as_bytes(mask)
    launch(
        scan_backward_kernel,
        facts["tiles"],
        {**given, **facts, "steps": -(-geometry.length // blocks.elements), "OP": op},
        warps=blocks.warps,
        reads=dict.fromkeys(("grad", "x", "mask", "known"), 1),
        writes=("of_x",),
    )
    return of_x


def cumsum_backward(grad: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The gradient of the running sum."""
    return backward("sum", grad, None, mask, None, dim, grad)


def cumextreme_backward(grad: Tensor, places: Tensor, dim: list[int]) -> Tensor:
    """The gradient of a running extreme."""
    return backward("extreme", grad, None, None, places, dim, grad)


def logcumsumexp_backward(grad: Tensor, x: Tensor, mask: Tensor, out: Tensor, dim: list[int]) -> Tensor:
    """The gradient of the running sum of exponentials."""
    return backward("exponentials", grad, x, mask, out, dim, x)


def cumprod_backward(grad: Tensor, x: Tensor, mask: Tensor, out: Tensor, dim: list[int]) -> Tensor:
    """The gradient of the running product."""
    of_x = empty_dense(x, x.dtype)
    dtype = accumulator(x.dtype)
    scratch = torch.empty_strided(of_x.shape, of_x.stride(), dtype=dtype, device=x.device)
    mask = mask.expand(x.shape)
    geometry = lay_out(dim if x.dim() else [], x, grad, mask, of_x)
    blocks = blocks_for(geometry, x.element_size())
    facts = facts_of(geometry, blocks, ("x", "grad", "mask", "of_x"), dtype)
    operands = dict(grad=grad, x=x, mask=as_bytes(mask), scratch=scratch, of_x=of_x)
    launch(
        product_backward_kernel,
        facts["tiles"],
        {**operands, **facts, "steps": -(-geometry.length // blocks.elements)},
        warps=blocks.warps,
        reads={"grad": 1, "x": 2, "mask": 2, "scratch": 1},
        writes=("of_x", "scratch"),
    )
    return of_x
