"""Losses on a GPU: the same ops as elsewhere, each as one launch, forward and backward."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import (
    Kept,
    are_alike,
    elementwise,
    in_memory_order,
    kept_rows,
    lay_out,
    row_strides,
)
from maskwise.ops.gpu.launch import (
    BUSY,
    accumulator,
    blocks_for,
    counters,
    launch,
    parts_for,
    row_arguments,
    run_time,
    splits_for,
    triton_type,
)
from maskwise.ops.loss.cross_entropy import empty_for_gradient
from maskwise.ops.loss.functional_losses import REDUCTION_CODES
from maskwise.ops.loss.triton import class_backward_kernel, class_kernel, element_backward_kernel, element_kernel
from maskwise.ops.primitives import empty_dense

__all__ = ["cross_entropy", "cross_entropy_backward", "loss", "loss_backward"]


MEAN = REDUCTION_CODES["mean"]


def sums_for(x: Tensor, programs: int, counted: torch.dtype) -> dict[str, Any]:
    """The buffers in which the programs of a launch combine their sums."""
    parts = dict(part=x.new_empty(programs, dtype=accumulator(x.dtype)), part_n=x.new_empty(programs, dtype=counted))
    return {**parts, "PROGRAMS": BUSY}


@run_time(parameter="parameter")
def loss(
    x: Tensor, target: Tensor, mask: Tensor, code: int, parameter: float, reduction: int, along: int = 0
) -> tuple[Tensor, Tensor]:
    """A loss of single elements, and for a mean how many are kept."""
    out = x.new_empty(()) if reduction else empty_dense(x)
    # Left uninitialised where nothing is divided by it.
    kept = x.new_empty((), dtype=torch.float64)
    others = (x, target, x if reduction else out)
    dims, keep = elementwise(*others, mask=mask, along=along, shape=x.shape)
    geometry = lay_out(dims, x, keep.strides, *others[1:], shape=x.shape)
    same = are_alike(geometry, 0, 2, 3) and x.element_size() == target.element_size()
    blocks = blocks_for(geometry, x, keep, same=same, loops=False)
    parts = parts_for(geometry, blocks)
    facts = row_arguments(geometry, blocks, keep, ("x", "mask", "target", "out"))
    jobs = facts["tiles"] * parts
    programs = max(1, min(jobs, BUSY)) if reduction else jobs
    launch(
        element_kernel,
        programs,
        {
            **dict(x=x, target=target, out=out, facts=kept, **sums_for(x, programs or 1, torch.int64), **facts),
            **dict(counter=counters(x, 1), parts=parts, code=code, mean=int(reduction == MEAN), parameter=parameter),
            **dict(REDUCED=reduction > 0, DTYPE=triton_type(accumulator(x.dtype))),
        },
        # Of halves, 16 in a thread of each operand would spill registers on sm_80: 8 are a vector of each.
        warps=blocks.warps * (2 if x.element_size() == 2 else 1),
        reads={"x": 1, "target": 1, "mask": 1},
        writes=("out",),
    )
    return out, kept


@run_time(parameter="parameter")
def loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    mask: Tensor,
    kept: Tensor,
    code: int,
    parameter: float,
    reduction: int,
    along: int = 0,
) -> Tensor:
    """The gradient of a loss of single elements."""
    of_x = empty_dense(x)
    others = (x, target, of_x if reduction else grad, of_x)
    dims, keep = elementwise(*others, mask=mask, along=along, shape=x.shape)
    geometry = lay_out(dims, x, keep.strides, *others[1:], shape=x.shape)
    same = are_alike(geometry, 0, 2, 3, 4) and x.element_size() == target.element_size() == grad.element_size()
    blocks = blocks_for(geometry, x, keep, same=same, loops=False)
    parts = parts_for(geometry, blocks)
    facts = row_arguments(geometry, blocks, keep, ("x", "mask", "target", "grad", "of_x"))
    launch(
        element_backward_kernel,
        facts["tiles"] * parts,
        {
            **dict(grad=grad, x=x, target=target, kept=kept, of_x=of_x, **facts, parts=parts),
            **dict(code=code, mean=int(reduction == MEAN), parameter=parameter, REDUCED=reduction > 0),
            **dict(DTYPE=triton_type(accumulator(x.dtype))),
        },
        warps=blocks.warps,
        reads={"x": 1, "target": 1, "mask": 1, "grad": 1},
        writes=("of_x",),
    )
    return of_x


def rows_of_classes(x: Tensor, target: Tensor, mask: Tensor, along: int) -> tuple[tuple[int, ...], Kept]:
    """The strides of the target, and the mask of rows of classes: that of the target."""
    strides = target.stride()
    keep = kept_rows(mask, along, target.shape, [], target.stride())
    # The same with the dim of classes, along which both repeat.
    if keep.kind == "across":
        outer = in_memory_order([d for d in range(x.dim()) if d != 1], x.stride())
        d = target.dim() + along
        d += d > 0
        keep = keep._replace(unit=prod(x.shape[each] for each in outer[outer.index(d) + 1 :]))
    else:
        keep = keep._replace(kind="rows")
    return (*strides[:1], 0, *strides[1:]), keep._replace(strides=(*keep.strides[:1], 0, *keep.strides[1:]))


@run_time(smoothing="smoothing")
def cross_entropy(
    x: Tensor,
    target: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    ignored: int,
    smoothing: float,
    reduction: int,
    along: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy; the log of each row's sum of exponentials; by what a mean divides, and -1."""
    out = x.new_empty(() if reduction else target.shape)
    sums, known = x.new_empty(target.shape, dtype=torch.float64), x.new_empty(2, dtype=torch.float64)
    target_at, keep = rows_of_classes(x, target, mask, along)
    geometry = lay_out([1], x, keep.strides, target_at, row_strides(x.shape, [1]), shape=x.shape)
    blocks = blocks_for(geometry, x, keep)
    facts = row_arguments(geometry, blocks, keep, ("x", "mask", "target", "row"), per_row=("mask", "target", "row"))
    splits, max_splits = splits_for(geometry, blocks, x.device)
    # The sums of split rows are put together by tiles, else by programs.
    if facts["tiles"] > BUSY:
        splits, max_splits = 1, 0
    programs = facts["tiles"] * splits if max_splits else max(1, min(facts["tiles"], BUSY))
    partial: tuple[Tensor | None, ...] = (None, None, None, None)
    if max_splits:
        size, dtype = splits * geometry.rows, accumulator(x.dtype)
        levels = x.new_empty(size, dtype=dtype) if smoothing else None
        partial = (x.new_empty(size, dtype=dtype), x.new_empty(size, dtype=dtype), levels, None)
    counter = counters(x, 1 + facts["tiles"] if max_splits else 1)
    launch(
        class_kernel,
        programs,
        {
            **dict(x=x, target=target, weight=weight, out=out, sums=sums, facts=known, counter=counter),
            **dict(zip(("part_a", "part_b", "part_l"), partial, strict=False)),
            **dict(counters=counter[1:] if max_splits else None, splits=splits, SPLITS=max_splits),
            **sums_for(x, min(programs, BUSY), torch.float64),
            **dict(**facts, ignored=ignored, mean=int(reduction == MEAN), smoothing=smoothing, SMOOTHED=smoothing != 0),
            **dict(REDUCED=reduction > 0, DTYPE=triton_type(accumulator(x.dtype))),
        },
        warps=blocks.warps,
        reads={"x": 1, "target": 1, "mask": 1},
        writes=("out", "sums"),
    )
    return out, sums, known


@run_time(smoothing="smoothing")
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
    along: int = 0,
) -> Tensor:
    """The gradient of cross entropy."""
    of_x = empty_for_gradient(x)
    target_at, keep = rows_of_classes(x, target, mask, along)
    geometry = lay_out([1], x, keep.strides, target_at, of_x, row_strides(x.shape, [1]), shape=x.shape)
    blocks = blocks_for(geometry, x, keep, same=are_alike(geometry, 0, 3), loops=False)
    parts = parts_for(geometry, blocks)
    names = ("x", "mask", "target", "of_x", "row")
    known = row_arguments(geometry, blocks, keep, names, per_row=("mask", "target", "row"))
    launch(
        class_backward_kernel,
        known["tiles"] * parts,
        {
            **dict(grad=grad.contiguous(), x=x, target=target, weight=weight, sums=sums, facts=facts, of_x=of_x),
            **dict(**known, parts=parts, ignored=ignored, smoothing=smoothing, mean=int(reduction == MEAN)),
            **dict(REDUCED=reduction > 0, DTYPE=triton_type(accumulator(x.dtype))),
        },
        warps=blocks.warps,
        reads={"x": 1, "target": 1, "mask": 1, "grad": 1, "sums": 1},
        writes=("of_x",),
    )
    return of_x
