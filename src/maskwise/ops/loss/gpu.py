"""Losses on a GPU: the same ops as elsewhere, each as one launch, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import Geometry, elementwise, lay_out
from maskwise.ops.gpu.launch import BUSY, TILE, Blocks, accumulator, as_bytes, blocks_for, counters, launch, triton_type
from maskwise.ops.loss.cross_entropy import empty_for_gradient
from maskwise.ops.loss.functional_losses import REDUCTION_CODES
from maskwise.ops.loss.triton import class_backward_kernel, class_kernel, element_backward_kernel, element_kernel
from maskwise.ops.primitives import empty_dense

__all__ = ["cross_entropy", "cross_entropy_backward", "loss", "loss_backward"]


MEAN = REDUCTION_CODES["mean"]
#: Elements of a tile: with two or three operands each, more would not fit into registers.
HALF = TILE // 2


def facts_of(geometry: Geometry, blocks: Blocks, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that all kernels of the family take."""
    at = {f"{name}_outer": strides.outer for name, strides in zip(names, geometry.operands, strict=True)}
    at |= {f"{name}_inner": strides.inner for name, strides in zip(names, geometry.operands, strict=True)}
    return {
        **dict(outer=geometry.outer, inner=geometry.inner, **at, rows=geometry.rows, length=geometry.length),
        **dict(tiles=-(-geometry.rows // blocks.rows), DTYPE=triton_type(accumulator(dtype)), WIDE=blocks.wide),
        **dict(ROWS=blocks.rows, ELEMENTS=blocks.elements, GROUP=blocks.group),
    }


def sums_for(x: Tensor, programs: int, counted: torch.dtype) -> dict[str, Any]:
    """The buffers in which the programs of a launch combine their sums."""
    parts = dict(part=x.new_empty(programs, dtype=accumulator(x.dtype)), part_n=x.new_empty(programs, dtype=counted))
    return {**parts, "counter": counters(x, 1), "PROGRAMS": BUSY}


def loss(x: Tensor, target: Tensor, mask: Tensor, code: int, parameter: float, reduction: int) -> tuple[Tensor, Tensor]:
    """A loss of single elements, and for a mean how many are kept."""
    out = x.new_empty(()) if reduction else empty_dense(x)
    # Left uninitialised where nothing is divided by it.
    kept = x.new_empty((), dtype=torch.float64)
    mask = mask.expand(x.shape)
    geometry = elementwise(x, target, mask, x if reduction else out)
    blocks = blocks_for(geometry, x.element_size(), HALF)
    facts = facts_of(geometry, blocks, ("x", "target", "mask", "out"), x.dtype)
    steps = -(-geometry.length // blocks.elements)
    programs = min(facts["tiles"] * steps, BUSY) if reduction else facts["tiles"] * steps
    buffers = sums_for(x, programs or 1, torch.int64)
    launch(
        element_kernel,
        programs,
        {
            **dict(x=x, target=target, mask=as_bytes(mask), out=out, facts=kept, **buffers, **facts, steps=steps),
            **dict(code=code, mean=int(reduction == MEAN), parameter=parameter, REDUCED=reduction > 0),
            **dict(SKIP=blocks.skip),
        },
        warps=blocks.warps,
        reads={"x": 1, "target": 1, "mask": 1},
        writes=("out",),
    )
    return out, kept


def loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, mask: Tensor, kept: Tensor, code: int, parameter: float, reduction: int
) -> Tensor:
    """The gradient of a loss of single elements."""
    of_x = empty_dense(x)
    mask = mask.expand(x.shape)
    geometry = elementwise(x, target, mask, of_x if reduction else grad, of_x)
    blocks = blocks_for(geometry, x.element_size(), HALF)
    facts = facts_of(geometry, blocks, ("x", "target", "mask", "grad", "of_x"), x.dtype)
    steps = -(-geometry.length // blocks.elements)
    launch(
        element_backward_kernel,
        facts["tiles"] * steps,
        {
            **dict(grad=grad, x=x, target=target, mask=as_bytes(mask), kept=kept, of_x=of_x, **facts, steps=steps),
            **dict(code=code, mean=int(reduction == MEAN), parameter=parameter, REDUCED=reduction > 0),
            **dict(SKIP=blocks.skip),
        },
        # A third operand for each element leaves too few registers to four warps.
        warps=blocks.warps if reduction else 2 * blocks.warps,
        reads={"x": 1, "target": 1, "mask": 1, "grad": 1},
        writes=("of_x",),
    )
    return of_x


def cross_entropy(
    x: Tensor, target: Tensor, mask: Tensor, weight: Tensor | None, ignored: int, smoothing: float, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy; the log of each row's sum of exponentials; by what a mean divides, and -1."""
    out = x.new_empty(() if reduction else target.shape)
    sums, known = x.new_empty(target.shape, dtype=torch.float64), x.new_empty(2, dtype=torch.float64)
    mask = mask.expand(target.shape)
    geometry = lay_out([1], x, target.unsqueeze(1).expand(x.shape), mask.unsqueeze(1).expand(x.shape))
    blocks = blocks_for(geometry, x.element_size())
    facts = facts_of(geometry, blocks, ("x", "target", "mask"), x.dtype)
    del facts["target_inner"], facts["mask_inner"]
    programs = min(facts["tiles"], BUSY)
    launch(
        class_kernel,
        programs,
        {
            **dict(x=x, target=target, mask=as_bytes(mask), weight=weight, out=out, sums=sums, facts=known),
            **sums_for(x, programs or 1, torch.float64),
            **dict(**facts, ignored=ignored, mean=int(reduction == MEAN), smoothing=smoothing, REDUCED=reduction > 0),
        },
        warps=blocks.warps,
        reads={"x": 1, "target": 1, "mask": 1},
        writes=("out", "sums"),
    )
    return out, sums, known


def cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    facts: Tensor,
    ignored: int,
    smoothing: float,
    reduction: int,
) -> Tensor:
    """The gradient of cross entropy."""
    of_x = empty_for_gradient(x)
    mask = mask.expand(target.shape)
    geometry = lay_out([1], x, target.unsqueeze(1).expand(x.shape), mask.unsqueeze(1).expand(x.shape), of_x)
    blocks = blocks_for(geometry, x.element_size())
    known = facts_of(geometry, blocks, ("x", "target", "mask", "of_x"), x.dtype)
    del known["target_inner"], known["mask_inner"]
    steps = -(-geometry.length // blocks.elements)
    launch(
        class_backward_kernel,
        known["tiles"] * steps,
        {
            **dict(grad=grad.contiguous(), x=x, target=target, mask=as_bytes(mask), weight=weight, sums=sums),
            **dict(facts=facts, of_x=of_x, **known, steps=steps, ignored=ignored, smoothing=smoothing),
            **dict(mean=int(reduction == MEAN), REDUCED=reduction > 0),
        },
        warps=blocks.warps,
        reads={"x": 1, "target": 1, "mask": 1, "grad": 1, "sums": 1},
        writes=("of_x",),
    )
    return of_x
