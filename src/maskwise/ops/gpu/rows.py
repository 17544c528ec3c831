"""The launches of the kernels of rows: a reduction, a gradient that expands over rows, and a function of rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import are_alike, kept_rows, lay_out, row_strides
from maskwise.ops.gpu.kernels import expand_kernel, reduce_kernel, rowwise_kernel
from maskwise.ops.gpu.launch import (
    ENOUGH,
    VECTORS,
    accumulator,
    as_bytes,
    blocks_for,
    counters,
    launch,
    parts_for,
    row_arguments,
    row_blocks,
    splits_for,
    triton_type,
)

__all__ = ["Stat", "State", "expand_rows", "map_rows", "reduce_rows"]


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


def weight_of(stat: Stat) -> int:
    """How many accumulators a reduction has, as a power of two."""
    return 1 << (stat.b + stat.n)


def reduce_rows(
    stat: Stat,
    x: Tensor,
    mask: Tensor,
    dim: list[int],
    along: int,
    out: Tensor | None,
    parameter: float = 0.0,
    root: bool = False,
    reference: Tensor | None = None,
    *,
    typical: int = 0,
) -> State:
    """Launch the kernel: into ``out``, or without it into the accumulators of the rows, which are returned.

    ``typical`` is the length of intervals that are but a part of their row each.
    """
    # The index of an extremum counts elements in their order.
    ordered = stat.op in ("argmax", "argmin")
    kept = kept_rows(mask, along, x.shape, dim, x.stride(), ordered)
    geometry = lay_out(dim, x, kept.strides, row_strides(x.shape, dim), shape=x.shape, ordered=ordered)
    # Sums of 32-bit integers take instructions of 64 bits: a loop has fewer others where it has more elements.
    vectors = 2 * VECTORS if stat.op == "sum" and x.dtype is torch.int32 else VECTORS
    blocks = blocks_for(geometry, x, kept, typical=typical, weight=weight_of(stat), vectors=vectors)
    splits, max_splits = splits_for(geometry, blocks, x.device, typical=typical)
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
    arguments = row_arguments(geometry, blocks, kept, ("x", "mask", "out"), per_row=("out",))
    partials: tuple[Tensor | None, ...] = (None, None, None, None)
    if max_splits:
        of_a = torch.int32 if stat.op in ("any", "all") else wide
        partials = (
            x.new_empty(splits * rows, dtype=of_a),
            x.new_empty(splits * rows, dtype=wide) if stat.b else None,
            x.new_empty(splits * rows, dtype=torch.int64) if stat.n else None,
            counters(x, arguments["tiles"]),
        )
    result = None if out is None else as_bytes(out)
    names = [
        name for name, t in zip(("out", "out_a", "out_b", "out_n"), (result, *state), strict=True) if t is not None
    ]
    launch(
        reduce_kernel,
        arguments["tiles"] * splits,
        {
            **dict(x=as_bytes(x), reference=reference, out=result, out_a=state.a, out_b=state.b, out_n=state.n),
            **dict(zip(("part_a", "part_b", "part_n", "counter"), partials, strict=True)),
            **arguments,
            **dict(splits=splits, parameter=parameter, OP=stat.op, IDENTITY=stat.identity, ROOT=root),
            **dict(RAW=out is None, NEED_B=stat.b, NEED_N=stat.n, DTYPE=triton_type(wide), SPLITS=max_splits),
            **dict(TRUTH=x.dtype is torch.bool),
        },
        warps=blocks.warps,
        reads={
            "mask": 1,
            **({} if stat.op == "count" else {"x": 1}),
            **({} if reference is None else {"reference": 1}),
        },
        writes=tuple(names),
    )
    return state


def expand_rows(
    op: str,
    state: Stat | None,
    grad: Tensor,
    out: Tensor | None,
    x: Tensor,
    mask: Tensor,
    dim: list[int],
    along: int,
    *,
    need_x: bool = True,
    need_a: bool = False,
    parameter: float = 0.0,
    grad_x: Tensor | None = None,
    typical: int = 0,
) -> Tensor:
    """Expand a gradient over kept elements: in one launch where rows fit into registers, else in two.

    With ``grad_x``, what is outside of the intervals of the mask is not written; ``typical`` is their length.
    """
    only = grad_x is not None
    grad_x = torch.empty(x.shape, dtype=grad.dtype, device=x.device) if grad_x is None else grad_x
    first = x if need_x else grad_x
    kept = kept_rows(mask, along, x.shape, dim, first.stride())
    geometry = lay_out(dim, first, kept.strides, grad_x, row_strides(x.shape, dim), shape=x.shape)
    same = are_alike(geometry, 0, 2) and first.element_size() == grad_x.element_size()
    # How many a range keeps is known without a pass over it.
    counted = state is not None and state.op == "count" and kept.kind != "bits"
    needed = state is not None and not counted
    in_registers = row_blocks(geometry, first, kept, same=same) if needed and not only else None
    blocks = in_registers or blocks_for(
        geometry,
        first,
        kept,
        same=same,
        typical=typical,
        loops=only,
        vectors=2 if only or first.element_size() < 4 else 4,
    )
    saved = State(None, None, None)
    if state is not None and needed and in_registers is None:
        compared = None if out is None else out.reshape(-1)
        if kept.kind == "bits":
            mask, along = kept.tensor, 0
        saved = reduce_rows(
            state, x if need_x else mask.expand(x.shape), mask, dim, along, None, parameter, False, compared
        )
    grad, stride = along_rows(grad)
    arguments = row_arguments(geometry, blocks, kept, ("x", "mask", "grad_x", "row"), per_row=("row",))
    parts = splits_for(geometry, blocks, x.device, typical=typical)[0] if only else parts_for(geometry, blocks)
    launch(
        expand_kernel,
        arguments["tiles"] * parts,
        {
            **dict(x=x if need_x else None, grad=grad, out=None if out is None else out.reshape(-1)),
            **dict(in_a=saved.a, in_b=saved.b, in_n=saved.n, grad_x=grad_x, **arguments, parts=parts),
            **dict(grad_stride=stride, parameter=parameter),
            **dict(OP=op, STATE=state.op if state else "", IDENTITY=state.identity if state else 0, NEED_X=need_x),
            **dict(NEED_OUT=out is not None, NEED_A=need_a, NEED_B=bool(state and state.b)),
            **dict(NEED_N=bool(state and state.n), IN_REGISTERS=in_registers is not None),
            **dict(DTYPE=triton_type(accumulator(grad.dtype)), ONLY=only),
        },
        warps=blocks.warps,
        reads={"x": 1, "mask": 1, "grad": 1, "out": 1, "in_a": 1, "in_b": 1, "in_n": 1},
        writes=("grad_x",),
    )
    return grad_x


def along_rows(grad: Tensor) -> tuple[Tensor, int]:
    """The gradients of rows and their stride: 0 for an expanded scalar, which they often are."""
    if grad.numel() > 1 and all(
        stride == 0 or size == 1 for stride, size in zip(grad.stride(), grad.shape, strict=True)
    ):
        return grad, 0
    return grad.contiguous().reshape(-1), 1


def map_rows(
    op: str,
    stat: Stat | None,
    x: Tensor,
    mask: Tensor,
    dim: list[int],
    along: int = 0,
    *,
    grad: Tensor | None = None,
    parameter: float = 0.0,
    eps: float = 0.0,
    out: Tensor | None = None,
    typical: int = 0,
    common: bool = True,
) -> Tensor:
    """Launch the kernel for a function of x, or for its gradient.

    With ``out``, what is outside of the intervals of the mask is not written; ``typical`` is their length.
    """
    only = out is not None
    out = torch.empty_like(x) if out is None else out
    kept = kept_rows(mask, along, x.shape, dim, x.stride())
    second = out if grad is None else grad
    geometry = lay_out(dim, x, kept.strides, second, out, row_strides(x.shape, dim), shape=x.shape)
    same = are_alike(geometry, 0, 2, 3) and x.element_size() == second.element_size() == out.element_size()
    # Rare norms always read rows twice, which halves the number of their kernels.
    weight = 1 if stat is None else weight_of(stat)
    in_registers = None if only or not common else row_blocks(geometry, x, kept, same=same, weight=weight)
    blocks = in_registers or blocks_for(geometry, x, kept, same=same, typical=typical, weight=weight)
    splits, max_splits = 1, 0
    if in_registers is None:
        splits, max_splits = splits_for(geometry, blocks, x.device, typical=typical, resident=ENOUGH)
    if max_splits:
        # The statistics are a launch before; what is left to do takes no accumulators.
        blocks = blocks_for(geometry, x, kept, same=same, typical=typical)
        splits, max_splits = splits_for(geometry, blocks, x.device, typical=typical)
    arguments = row_arguments(geometry, blocks, kept, ("x", "mask", "grad", "out", "row"), per_row=("row",))
    a = b = n = p = q = None
    if max_splits:
        if stat is not None:
            a, b, n = reduce_rows(stat, x, mask, dim, along, None, parameter, typical=typical)
        if grad is not None:
            p, q = (x.new_empty(splits * geometry.rows, dtype=accumulator(x.dtype)) for _ in range(2))
    if in_registers:
        launches: tuple[str, ...] = ("registers",)
    elif max_splits:
        launches = ("write",) if grad is None else ("sums", "write")
    else:
        launches = ("loop",)
    for which in launches:
        # Passes over a row that is not held in registers: for its statistics, for the sums, and for the result.
        passes = 1 + (which == "loop") * ((stat is not None) + (grad is not None))
        launch(
            rowwise_kernel,
            arguments["tiles"] * splits,
            {
                **dict(x=x, grad=grad, out=out, in_a=a, in_b=b, in_n=n, part_p=p, part_q=q, **arguments),
                **dict(parts=splits, parameter=parameter, eps=eps, OP=op, STATE=stat.op if stat else ""),
                **dict(IDENTITY=stat.identity if stat else 0.0, NEED_N=bool(stat and stat.n)),
                **dict(BACKWARD=grad is not None, PASS=which, ONLY=only, PARTS=max_splits),
                **dict(DTYPE=triton_type(accumulator(x.dtype))),
            },
            warps=blocks.warps,
            reads={"x": passes, "mask": passes, "grad": 2 if which == "loop" else 1},
            writes=("part_p", "part_q") if which == "sums" else ("out",),
        )
    return out
