"""The reductions on a GPU: each op is one launch, a gradient one or two."""

from __future__ import annotations

import builtins
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import lay_out
from maskwise.ops.gpu.launch import (
    accumulator,
    as_bytes,
    blocks_for,
    counters,
    launch,
    row_blocks,
    splits_for,
    triton_type,
)
from maskwise.ops.primitives import highest, lowest
from maskwise.ops.reduce.triton import expand_kernel, reduce_kernel

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "extremum_backward", "logsumexp", "logsumexp_backward", "mean",
    "mean_backward", "norm", "norm_backward", "prod", "prod_backward", "std", "sum", "sum_backward", "var",
    "var_backward",
]  # fmt: skip


class Stat(NamedTuple):
    """What the kernel accumulates per row: its name, its identity, and which of the accumulators b and n it needs."""

    op: str
    identity: float
    b: bool = False
    n: bool = False


class State(NamedTuple):
    """The accumulators of each row, for a gradient."""

    a: Tensor | None
    b: Tensor | None
    n: Tensor | None


def run(
    stat: Stat,
    x: Tensor,
    mask: Tensor,
    dim: list[int],
    out: Tensor | None,
    parameter: float = 0.0,
    root: bool = False,
    reference: Tensor | None = None,
) -> State:
    """Launch the kernel: into ``out``, or without it into the accumulators of the rows, which are returned."""
    geometry = lay_out(dim, x, mask.expand(x.shape))
    blocks = blocks_for(geometry, x.element_size())
    splits, max_splits = splits_for(geometry, blocks)
    tiles = -(-geometry.rows // blocks.rows)
    steps = -(-geometry.length // blocks.elements)
    chunk = -(-steps // splits) * blocks.elements
    wide = accumulator(x.dtype) if stat.op not in ("sum", "prod") or x.is_floating_point() else torch.int64
    state = State(None, None, None)
    rows = geometry.rows
    if out is None:
        has_a = stat.op not in ("count", "ties", "magnitude_ties")
        state = State(
            x.new_empty(rows, dtype=wide) if has_a else None,
            x.new_empty(rows, dtype=wide) if stat.b else None,
            x.new_empty(rows, dtype=torch.int64) if stat.n else None,
        )
    partials: tuple[Tensor | None, ...] = (None, None, None, None)
    if max_splits:
        kept = torch.int32 if stat.op in ("any", "all") else wide
        partials = (
            x.new_empty(splits * rows, dtype=kept),
            x.new_empty(splits * rows, dtype=wide) if stat.b else None,
            x.new_empty(splits * rows, dtype=torch.int64) if stat.n else None,
            counters(x, tiles),
        )
    result = None if out is None else as_bytes(out)
    names = [
        name for name, t in zip(("out", "out_a", "out_b", "out_n"), (result, *state), strict=True) if t is not None
    ]
    (x_at, mask_at) = geometry.operands
    launch(
        reduce_kernel,
        tiles * splits,
        {
            **dict(x=as_bytes(x), mask=as_bytes(mask.expand(x.shape)), reference=reference, out=result),
            **dict(out_a=state.a, out_b=state.b, out_n=state.n),
            **dict(zip(("part_a", "part_b", "part_n", "counter"), partials, strict=True)),
            **dict(outer=geometry.outer, inner=geometry.inner, x_outer=x_at.outer, x_inner=x_at.inner),
            **dict(mask_outer=mask_at.outer, mask_inner=mask_at.inner, rows=rows, length=geometry.length),
            **dict(tiles=tiles, splits=splits, chunk=chunk, parameter=parameter),
            **dict(
                OP=stat.op,
                IDENTITY=stat.identity,
                ROOT=root,
                RAW=out is None,
                NEED_B=stat.b,
                NEED_N=stat.n,
            ),
            **dict(
                DTYPE=triton_type(wide), WIDE=blocks.wide or max_splits > 0, ROWS=blocks.rows, ELEMENTS=blocks.elements
            ),
            **dict(GROUP=blocks.group, SKIP=blocks.skip, SPLITS=max_splits, TRUTH=x.dtype is torch.bool),
        },
        warps=blocks.warps,
        reads={"mask": 1, **({} if x is mask else {"x": 1}), **({} if reference is None else {"reference": 1})},
        writes=tuple(names),
    )
    return state


def reduce(
    stat: Stat, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype, *parameters: Any
) -> Tensor:
    """One reduction."""
    sizes = [1 if d in dim else size for d, size in enumerate(x.shape) if keepdim or d not in dim]
    out = x.new_empty(sizes, dtype=dtype)
    run(stat, x, mask, dim, out, *parameters)
    return out


# -- forward -----------------------------------------------------------------------------------------------------------
def sum(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The sum."""
    return reduce(Stat("sum", 0), x, mask, dim, keepdim, x.dtype if x.is_floating_point() else torch.int64)


def prod(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The product."""
    return reduce(Stat("prod", 1), x, mask, dim, keepdim, x.dtype if x.is_floating_point() else torch.int64)


def mean(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The mean."""
    return reduce(Stat("mean", 0, n=True), x, mask, dim, keepdim, x.dtype)


def any(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Whether any element is true."""
    return reduce(Stat("any", 0), x, mask, dim, keepdim, torch.uint8 if x.dtype is torch.uint8 else torch.bool)


def all(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Whether all elements are true."""
    return reduce(Stat("all", 1), x, mask, dim, keepdim, torch.uint8 if x.dtype is torch.uint8 else torch.bool)


def amax(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The maximum."""
    return reduce(Stat("amax", lowest(x.dtype)), x, mask, dim, keepdim, x.dtype)


def amin(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The minimum."""
    return reduce(Stat("amin", highest(x.dtype)), x, mask, dim, keepdim, x.dtype)


def argmax(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The index of the maximum."""
    return reduce(Stat("argmax", lowest(x.dtype), n=True), x, mask, dim, keepdim, torch.int64)


def argmin(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The index of the minimum."""
    return reduce(Stat("argmin", highest(x.dtype), n=True), x, mask, dim, keepdim, torch.int64)


def logsumexp(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The logsumexp."""
    return reduce(Stat("logsumexp", -inf, b=True), x, mask, dim, keepdim, x.dtype)


def var(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The variance."""
    return reduce(Stat("var", 0, b=True, n=True), x, mask, dim, keepdim, x.dtype, correction)


def std(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float) -> Tensor:
    """The standard deviation."""
    return reduce(Stat("var", 0, b=True, n=True), x, mask, dim, keepdim, x.dtype, correction, True)


NORMS = {
    0.0: Stat("norm_0", 0),
    1.0: Stat("norm_1", 0),
    2.0: Stat("norm_2", 0),
    inf: Stat("norm_inf", 0),
}
NORMS[-inf] = Stat("norm_-inf", inf, n=True)
POWER = Stat("norm_p", 0, n=True)


def norm(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, ord: float) -> Tensor:
    """The vector norm."""
    return reduce(NORMS.get(ord, POWER), x, mask, dim, keepdim, x.dtype, ord)


# -- backward ----------------------------------------------------------------------------------------------------------
def expand(
    op: str,
    state: Stat | None,
    grad: Tensor,
    out: Tensor | None,
    x: Tensor,
    mask: Tensor,
    dim: list[int],
    *,
    need_x: bool = True,
    need_a: bool = False,
    parameter: float = 0.0,
) -> Tensor:
    """Expand a gradient over kept elements: in one launch where rows fit into registers, else in two."""
    grad_x = torch.empty(x.shape, dtype=grad.dtype, device=x.device)
    mask = mask.expand(x.shape)
    geometry = lay_out(dim, x if need_x else grad_x, mask, grad_x)
    in_registers = row_blocks(geometry, x.element_size()) if state is not None else None
    blocks = in_registers or blocks_for(geometry, x.element_size())
    saved = State(None, None, None)
    if state is not None and in_registers is None:
        compared = None if out is None else out.reshape(-1)
        saved = run(state, x if need_x else mask, mask, dim, None, parameter, False, compared)
    grad, stride = along_rows(grad)
    x_at, mask_at, grad_x_at = geometry.operands
    tiles, steps = -(-geometry.rows // blocks.rows), -(-geometry.length // blocks.elements)
    launch(
        expand_kernel,
        tiles * steps,
        {
            **dict(
                x=x if need_x else None, mask=as_bytes(mask), grad=grad, out=None if out is None else out.reshape(-1)
            ),
            **dict(in_a=saved.a, in_b=saved.b, in_n=saved.n, grad_x=grad_x, outer=geometry.outer, inner=geometry.inner),
            **dict(x_outer=x_at.outer, x_inner=x_at.inner, mask_outer=mask_at.outer, mask_inner=mask_at.inner),
            **dict(
                grad_x_outer=grad_x_at.outer, grad_x_inner=grad_x_at.inner, rows=geometry.rows, length=geometry.length
            ),
            **dict(tiles=tiles, steps=steps, grad_stride=stride, parameter=parameter),
            **dict(OP=op, STATE=state.op if state else "", IDENTITY=state.identity if state else 0, NEED_X=need_x),
            **dict(NEED_OUT=out is not None, NEED_A=need_a, NEED_B=bool(state and state.b)),
            **dict(
                NEED_N=bool(state and state.n),
                IN_REGISTERS=in_registers is not None,
                DTYPE=triton_type(accumulator(grad.dtype)),
            ),
            **dict(WIDE=blocks.wide, ROWS=blocks.rows, ELEMENTS=blocks.elements, GROUP=blocks.group),
            **dict(SKIP=blocks.skip),
        },
        warps=blocks.warps,
        reads={"x": 1, "mask": 1, "grad": 1, "out": 1, "in_a": 1, "in_b": 1, "in_n": 1},
        writes=("grad_x",),
    )
    return grad_x


def along_rows(grad: Tensor) -> tuple[Tensor, int]:
    """The gradients of rows and their stride: 0 for an expanded scalar, which they often are."""
    if grad.numel() > 1 and builtins.all(
        stride == 0 or size == 1 for stride, size in zip(grad.stride(), grad.shape, strict=True)
    ):
        return grad, 0
    return grad.contiguous().reshape(-1), 1


def like(grad: Tensor, shape: list[int]) -> Tensor:
    """A stand-in for x where the gradient needs its shape only."""
    return grad.new_empty(()).expand(shape)


def sum_backward(grad: Tensor, mask: Tensor, shape: list[int], dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of the sum."""
    return expand("sum", None, grad, None, like(grad, shape), mask, dim, need_x=False)


def mean_backward(grad: Tensor, mask: Tensor, shape: list[int], dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of the mean."""
    return expand("mean", Stat("count", 0, n=True), grad, None, like(grad, shape), mask, dim, need_x=False)


def prod_backward(grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of the product."""
    return expand("nonzeros", Stat("nonzeros", 1, n=True), grad, None, x, mask, dim, need_a=True)


def var_backward(
    grad: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, correction: float, root: bool
) -> Tensor:
    """The gradient of the variance, or with ``root`` of the standard deviation."""
    state = Stat("var", 0, b=True, n=True)
    return expand("std" if root else "var", state, grad, None, x, mask, dim, need_a=True, parameter=correction)


def extremum_backward(
    grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, greatest: bool
) -> Tensor:
    """The gradient of amax or amin."""
    return expand("ties", Stat("ties", 0, n=True), grad, out, x, mask, dim)


def logsumexp_backward(grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of logsumexp."""
    return expand("logsumexp", None, grad, out, x, mask, dim)


def norm_backward(
    grad: Tensor, out: Tensor, x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, ord: float
) -> Tensor:
    """The gradient of a norm."""
    if ord == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if ord in (inf, -inf):
        return expand("magnitude_ties", Stat("magnitude_ties", 0, n=True), grad, out, x, mask, dim)
    op = {1.0: "norm_1", 2.0: "norm_2"}.get(ord, "norm_p")
    return expand(op, None, grad, None if op == "norm_1" else out, x, mask, dim, parameter=ord)
