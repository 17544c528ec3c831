"""The scans on a GPU: each op is one launch, forward and backward, or two where a few long rows are split.

The gradient of a product of split rows is three: it scans in both directions.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from maskwise.ops.gpu.geometry import Geometry, are_alike, kept_rows, lay_out
from maskwise.ops.gpu.launch import (
    HELD,
    WARP,
    Blocks,
    accumulator,
    as_bytes,
    blocks_for,
    launch,
    row_arguments,
    splits_for,
    triton_type,
)
from maskwise.ops.primitives import empty_dense, highest, lowest
from maskwise.ops.scan.triton import product_backward_kernel, scan_backward_kernel, scan_kernel

__all__ = [
    "cumextreme_backward", "cummax", "cummin", "cumprod", "cumprod_backward", "cumsum", "cumsum_backward",
    "logcumsumexp", "logcumsumexp_backward",
]  # fmt: skip


#: What the parts of a split row come to.
TOTALS = {"cumsum": "sum", "cumprod": "prod", "cummax": "cummax", "cummin": "cummin", "logcumsumexp": "logsumexp"}


#: How much a scan, or its gradient, holds of each element.
WEIGHTS = {"cumsum": 1, "cumprod": 1, "cummax": 4, "cummin": 4, "logcumsumexp": 4}
WEIGHTS |= {"sum": 1, "extreme": 4, "exponentials": 4, "product": 4}
#: The most warps of a program that scans: more leave each thread too few registers.
MOST_WARPS = 8
#: What spills registers over long rows unless a program has four warps, and the most elements of such a program.
FOUR_WARPS, FEW_ELEMENTS = ("cummax", "cummin", "product"), 2048
#: The most rows, that is columns of memory, of a tile in which each thread scans its own ones.
MOST_COLUMNS = 512


def of_scan(blocks: Blocks, geometry: Geometry, itemsize: int, dtype: torch.dtype, op: str) -> Blocks:
    """The tile of a kernel that scans.

    Args:
        blocks: the tile of a kernel that reduces the same rows.
        geometry: of the operands.
        itemsize: of the operand that is loaded.
        dtype: of the accumulators.
        op: the scan, or its gradient.
    """
    # Products of integers of 64 bits take four registers besides.
    size = dtype.itemsize * (1 if dtype.is_floating_point else 2)
    held = max(2, HELD * 4 // (WEIGHTS[op] * max(4, size)))
    if blocks.side == "columns":
        # Threads lie across: none waits for what another one has scanned.
        group = max(1, 16 // itemsize) if blocks.align else 1
        warps = next((n for n in (1, 2) if WARP * group * n >= geometry.outer[-1]), 4)
        rows = min(WARP * group * warps, MOST_COLUMNS)
        return blocks._replace(rows=rows, elements=max(2, held // group), warps=warps)
    if blocks.rows == 1 and blocks.warps < 4:
        # A row that is one warp's, or more where that would hold too much.
        return blocks._replace(warps=max(blocks.warps, blocks.elements // (WARP * held)))
    fewer = min(blocks.warps, MOST_WARPS)
    elements = blocks.elements * fewer // blocks.warps
    if blocks.rows == 1 and (op in FOUR_WARPS or (op == "cumprod" and not dtype.is_floating_point)):
        fewer, elements = 4, min(elements, FEW_ELEMENTS)
    return blocks._replace(warps=fewer, elements=elements)


def forward(
    op: str,
    identity: float,
    x: Tensor,
    mask: Tensor,
    dim: list[int],
    dtype: torch.dtype,
    along: int,
    with_indices: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch a scan; ``with_indices`` also returns the indices of the values."""
    out, indices = empty_dense(x, dtype), empty_dense(x, torch.int64) if with_indices else None
    dim = dim if x.dim() else []
    kept = kept_rows(mask, along, x.shape, dim, x.stride(), ordered=True)
    geometry = lay_out(dim, x, kept.strides, out, shape=x.shape, ordered=True)
    wide = accumulator(dtype)
    blocks = blocks_for(geometry, x, kept, same=are_alike(geometry, 0, 2))
    blocks = of_scan(blocks, geometry, x.element_size(), wide, op)
    splits, max_splits = splits_for(geometry, blocks, x.device)
    arguments = row_arguments(geometry, blocks, kept, ("x", "mask", "out"))
    a = b = n = None
    if max_splits:
        size, state = splits * geometry.rows, TOTALS[op]
        a = x.new_empty(size, dtype=wide)
        b = x.new_empty(size, dtype=wide) if state == "logsumexp" else None
        n = x.new_empty(size, dtype=torch.int64) if with_indices else None
    for which in ("totals", "scan") if max_splits else ("scan",):
        launch(
            scan_kernel,
            arguments["tiles"] * splits,
            {
                **dict(x=as_bytes(x), out=as_bytes(out), indices=indices, part_a=a, part_b=b, part_n=n, **arguments),
                **dict(splits=splits, OP=op, STATE=TOTALS[op], PASS=which, IDENTITY=identity, SPLITS=max_splits),
                **dict(TRUTH=x.dtype is torch.bool, DTYPE=triton_type(wide)),
            },
            warps=blocks.warps,
            reads={"x": 1, "mask": 1},
            writes=("part_a",) if which == "totals" else ("out", "indices") if with_indices else ("out",),
        )
    return out, indices


def total(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a running sum or product."""
    return dtype if dtype.is_floating_point else torch.int64


def cumsum(x: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The running sum."""
    return forward("cumsum", 0, x, mask, dim, total(x.dtype), along)[0]


def cumprod(x: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The running product."""
    return forward("cumprod", 1, x, mask, dim, total(x.dtype), along)[0]


def cummax(x: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> tuple[Tensor, Tensor | None]:
    """The running maximum and its indices."""
    return forward("cummax", lowest(x.dtype), x, mask, dim, x.dtype, along, with_indices=True)


def cummin(x: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> tuple[Tensor, Tensor | None]:
    """The running minimum and its indices."""
    return forward("cummin", highest(x.dtype), x, mask, dim, x.dtype, along, with_indices=True)


def logcumsumexp(x: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The logarithm of the running sum of exponentials."""
    return forward("logcumsumexp", -inf, x, mask, dim, x.dtype, along)[0]


def backward(
    op: str,
    grad: Tensor,
    x: Tensor | None,
    mask: Tensor,
    saved: Tensor | None,
    dim: list[int],
    like: Tensor,
    along: int,
) -> Tensor:
    """Launch the gradient of a scan; its result has the strides of ``like``."""
    grad_x = empty_dense(like, like.dtype)
    operands = {"grad": grad, "x": x, "saved": saved, "grad_x": grad_x}
    dim = dim if grad.dim() else []
    kept = kept_rows(mask, along, grad.shape, dim, grad_x.stride(), ordered=True)
    # An absent operand has strides too, which are never used.
    others = [grad_x if t is None else t for t in operands.values()]
    geometry = lay_out(dim, grad_x, kept.strides, *others, shape=grad.shape, ordered=True)
    same = are_alike(geometry, 0, 2, 3, 4) and len({t.element_size() for t in (grad, grad_x, others[1])}) == 1
    dtype = accumulator(grad_x.dtype)
    blocks = blocks_for(geometry, grad_x, kept, same=same)
    blocks = of_scan(blocks, geometry, grad_x.element_size(), dtype, op)
    splits, max_splits = splits_for(geometry, blocks, grad.device)
    without = geometry._replace(operands=geometry.operands[1:])
    arguments = row_arguments(without, blocks, kept, ("mask", *operands))
    size = splits * geometry.rows if max_splits else 0
    parts = {
        "part_a": grad.new_empty(size, dtype=dtype) if size else None,
        "part_b": grad.new_empty(size, dtype=dtype) if size and op == "exponentials" else None,
        "part_n": grad.new_empty(size, dtype=torch.int64) if size and op == "extreme" else None,
    }
    for which in ("totals", "scan") if max_splits else ("scan",):
        launch(
            scan_backward_kernel,
            arguments["tiles"] * splits,
            {
                **parts,
                **dict(**operands, splits=splits, OP=op, PASS=which, SPLITS=max_splits, DTYPE=triton_type(dtype)),
                **arguments,
            },
            warps=blocks.warps,
            reads=dict.fromkeys(
                ("grad", "saved") if which == "totals" and op != "sum" else ("grad", "x", "mask", "saved"), 1
            ),
            writes=("part_a",) if which == "totals" else ("grad_x",),
        )
    return grad_x


def cumsum_backward(grad: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The gradient of the running sum."""
    return backward("sum", grad, None, mask, None, dim, grad, along)


def cumextreme_backward(grad: Tensor, indices: Tensor, mask: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The gradient of a running extremum: indices are those of kept elements, or -1."""
    return backward("extreme", grad, None, mask, indices, dim, grad, along)


def logcumsumexp_backward(grad: Tensor, x: Tensor, mask: Tensor, out: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The gradient of the running sum of exponentials."""
    return backward("exponentials", grad, x, mask, out, dim, x, along)


def cumprod_backward(grad: Tensor, x: Tensor, mask: Tensor, out: Tensor, dim: list[int], along: int = 0) -> Tensor:
    """The gradient of the running product."""
    grad_x = empty_dense(x, x.dtype)
    dtype = accumulator(x.dtype)
    scratch = torch.empty_strided(grad_x.shape, grad_x.stride(), dtype=dtype, device=x.device)
    dim = dim if x.dim() else []
    kept = kept_rows(mask, along, x.shape, dim, x.stride(), ordered=True)
    geometry = lay_out(dim, x, kept.strides, grad, grad_x, shape=x.shape, ordered=True)
    same = are_alike(geometry, 0, 2, 3) and x.element_size() == grad.element_size()
    blocks = blocks_for(geometry, x, kept, same=same)
    blocks = of_scan(blocks, geometry, x.element_size(), dtype, "product")
    if blocks.group == 8:
        # Half precision is computed in float32: a thread has as many elements as there.
        blocks = blocks._replace(elements=blocks.elements // 2, group=4)
    splits, max_splits = splits_for(geometry, blocks, x.device)
    arguments = row_arguments(geometry, blocks, kept, ("x", "mask", "grad", "grad_x"))
    size = splits * geometry.rows if max_splits else 0
    parts = {
        f"part_{name}": x.new_empty(size, dtype=torch.int64 if name == "n" else dtype) if size else None
        for name in "anpq"
    }
    moved: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
        "totals": ({"x": 1, "mask": 1}, ("part_a", "part_n")),
        "products": ({"grad": 1, "x": 1, "mask": 1}, ("scratch", "part_p", "part_q")),
        "sums": ({"grad": 1, "x": 1, "mask": 1, "scratch": 1}, ("grad_x",)),
        "all": ({"grad": 1, "x": 2, "mask": 2, "scratch": 1}, ("grad_x", "scratch")),
    }
    for which in ("totals", "products", "sums") if max_splits else ("all",):
        reads, writes = moved[which]
        launch(
            product_backward_kernel,
            arguments["tiles"] * splits,
            {
                **dict(grad=grad, x=x, scratch=scratch, grad_x=grad_x, splits=splits, PASS=which, SPLITS=max_splits),
                **parts,
                **arguments,
                "DTYPE": triton_type(dtype),
            },
            warps=blocks.warps,
            reads=reads,
            writes=writes,
        )
    return grad_x
