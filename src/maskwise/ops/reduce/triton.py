"""The reductions and their gradients as Triton kernels.

A few long rows are split; the program that finishes last combines the partial results, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import (
    bases,
    beginning,
    flat,
    joined,
    lift,
    merge,
    norm_of,
    number,
    offsets,
    power,
    put,
    read,
    window,
)

__all__ = ["expand_kernel", "reduce_kernel"]


@triton.jit
def finalize(a, b, n, OP: tl.constexpr, parameter: tl.constexpr, ROOT: tl.constexpr):
    """The result of a row from its accumulators."""
    out = a
    if OP == "argmax" or OP == "argmin":
        out = n
    elif OP == "mean":
        out = a / n.to(a.dtype)
    elif OP == "var":
        out = b / tl.maximum(n.to(a.dtype) - parameter, 0.0)
        out = tl.where(n > 0, out, float("nan"))
        if ROOT:
            out = tl.sqrt(out)
    elif OP == "logsumexp":
        shift = tl.where(tl.abs(a) == float("inf"), 0.0, a)
        out = tl.log(b) + shift
    elif OP == "norm_2" or OP == "norm_-inf" or OP == "norm_p":
        out = norm_of(a, n, OP, parameter)
    return out


# -- kernels -----------------------------------------------------------------------------------------------------------
@triton.jit
def reduce_kernel(
    x, mask, reference, out, out_a, out_b, out_n, part_a, part_b, part_n, counter,
    outer, inner, x_outer, x_inner, mask_outer, mask_inner,
    rows, length, tiles, splits, chunk, parameter: tl.constexpr,
    OP: tl.constexpr, IDENTITY: tl.constexpr, ROOT: tl.constexpr, RAW: tl.constexpr, NEED_B: tl.constexpr,
    NEED_N: tl.constexpr, DTYPE: tl.constexpr, TRUTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Reduce rows. A program reduces a tile of rows, or one split of each of them."""
    for job in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        tile, part = job // splits, job % splits
        row, real = bases(tile, rows, ROWS)
        x_base, mask_base = offsets(row, outer, x_outer), offsets(row, outer, mask_outer)
        mine = tl.zeros((ROWS,), DTYPE)
        if OP == "ties" or OP == "magnitude_ties":
            mine = tl.load(reference + row, mask=real, other=0).to(DTYPE)
        if OP == "any" or OP == "all":
            a = tl.full((ROWS,), IDENTITY, tl.int32)
        else:
            a = tl.full((ROWS,), IDENTITY, DTYPE)
        b = tl.zeros((ROWS,), DTYPE)
        if OP == "argmax" or OP == "argmin":
            n = number(ROWS, WIDE, -1)
        else:
            n = number(ROWS, WIDE, 0)
        begin = part * chunk
        if WIDE:
            begin = part.to(tl.int64) * chunk
        end = tl.minimum(begin + chunk, length)
        for start in range(begin, end, ELEMENTS):
            index, inside, keep, wanted = window(
                mask, mask_base, inner, mask_inner, real, start, end, WIDE, ELEMENTS, GROUP, SKIP
            )
            value = read(x, x_base, inner, x_inner, index, wanted, keep, IDENTITY, DTYPE, ROWS, ELEMENTS, TRUTH)
            position = flat(tl.broadcast_to(index, inside.shape), ROWS, ELEMENTS)
            la, lb, ln = lift(value, flat(keep, ROWS, ELEMENTS), position, mine[:, None], OP, parameter, IDENTITY)
            ta, tb, tn = merge(la, lb, ln, OP, NEED_N)
            a, b, n = joined(a, b, n, ta, tb, tn, OP, NEED_N)
        if SPLITS > 0:
            at = part * rows + row
            tl.store(part_a + at, a, mask=real)
            if NEED_B:
                tl.store(part_b + at, b, mask=real)
            if NEED_N:
                tl.store(part_n + at, n, mask=real)
            # The stores of all threads must precede the increment of the counter.
            tl.debug_barrier()
            done = tl.atomic_add(counter + tile, 1, sem="acq_rel")
            last = done == splits - 1
            if last:
                tl.store(counter + tile, 0)
                combine_partials(
                    out, out_a, out_b, out_n, part_a, part_b, part_n, row, real, rows, splits, parameter,
                    OP, IDENTITY, ROOT, RAW, NEED_B, NEED_N, DTYPE, ROWS, SPLITS,
                )  # fmt: skip
        else:
            write(out, out_a, out_b, out_n, row, real, a, b, n, OP, parameter, ROOT, RAW, NEED_B, NEED_N)


@triton.jit
def combine_partials(
    out, out_a, out_b, out_n, part_a, part_b, part_n, row, real, rows, splits, parameter: tl.constexpr,
    OP: tl.constexpr, IDENTITY: tl.constexpr, ROOT: tl.constexpr, RAW: tl.constexpr, NEED_B: tl.constexpr,
    NEED_N: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of rows, and write them."""
    each = tl.arange(0, SPLITS)
    at = each[None, :] * rows + row[:, None]
    there = real[:, None] & (each < splits)[None, :]
    # Written by other programs: L1 may be stale.
    a = tl.load(part_a + at, mask=there, other=IDENTITY, cache_modifier=".cg")
    b = tl.zeros((ROWS, SPLITS), DTYPE)
    if NEED_B:
        b = tl.load(part_b + at, mask=there, other=0, cache_modifier=".cg")
    n = tl.zeros((ROWS, SPLITS), tl.int32)
    if NEED_N:
        # There may be fewer than SPLITS partial results; the index of a missing one is -1.
        no_index: tl.constexpr = -1 if OP == "argmax" or OP == "argmin" else 0
        n = tl.load(part_n + at, mask=there, other=no_index, cache_modifier=".cg")
    total_a, total_b, total_n = merge(a, b, n, OP, NEED_N)
    write(
        out, out_a, out_b, out_n, row, real, total_a, total_b, total_n, OP, parameter, ROOT, RAW, NEED_B, NEED_N
    )  # fmt: skip


@triton.jit
def write(
    out, out_a, out_b, out_n, row, real, a, b, n, OP: tl.constexpr, parameter: tl.constexpr, ROOT: tl.constexpr,
    RAW: tl.constexpr, NEED_B: tl.constexpr, NEED_N: tl.constexpr,
):  # fmt: skip
    """Write the results of rows, or their accumulators for a gradient."""
    if RAW:
        if OP != "ties" and OP != "magnitude_ties" and OP != "count":
            tl.store(out_a + row, a, mask=real)
        if NEED_B:
            tl.store(out_b + row, b, mask=real)
        if NEED_N:
            tl.store(out_n + row, n, mask=real)
    else:
        result = finalize(a, b, n, OP, parameter, ROOT)
        tl.store(out + row, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def gradient_of(x, g, out, a, b, n, keep, OP: tl.constexpr, parameter: tl.constexpr):
    """The gradient of the elements of a row, from its ``g`` and ``out``, and its accumulators ``a``, ``b``, ``n``."""
    result = g + x * 0
    if OP == "mean":
        result = g / n.to(g.dtype) + x * 0
    elif OP == "logsumexp":
        result = tl.exp(x - out) * g
    elif OP == "var":
        result = g * (2.0 / tl.maximum(n.to(g.dtype) - parameter, 0.0)) * (x - a)
    elif OP == "std":
        freedom = tl.maximum(n.to(g.dtype) - parameter, 0.0)
        deviation = tl.sqrt(b / freedom)
        scale = tl.where(deviation == 0.0, 0.0, g / freedom / deviation)
        result = scale * (x - a)
    elif OP == "ties":
        result = tl.where((x == out) | (out != out), g / n.to(g.dtype), 0.0)
    elif OP == "nonzeros":
        zero = x == 0
        others = tl.where(zero, a, a / tl.where(zero, 1.0, x))
        result = tl.where((n == 0) | (zero & (n == 1)), others, 0.0) * g
    elif OP == "magnitude_ties":
        sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
        result = tl.where((tl.abs(x) == out) | (out != out), sign * g / n.to(g.dtype), 0.0)
    elif OP == "norm_1":
        result = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x)) * g
    elif OP == "norm_2":
        result = tl.where(out != 0, x / out * g, 0.0)
    elif OP == "norm_p":
        sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
        derivative = power(tl.abs(x) / out, parameter - 1.0)
        result = tl.where((out != 0) & (x != 0), sign * derivative * g, 0.0)
    return tl.where(keep, result, 0.0)


@triton.jit
def expand_kernel(
    x, mask, grad, out, in_a, in_b, in_n, grad_x,
    outer, inner, x_outer, x_inner, mask_outer, mask_inner, grad_x_outer, grad_x_inner,
    rows, length, tiles, steps, grad_stride, parameter: tl.constexpr,
    OP: tl.constexpr, STATE: tl.constexpr, IDENTITY: tl.constexpr, NEED_X: tl.constexpr, NEED_OUT: tl.constexpr,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, NEED_N: tl.constexpr, IN_REGISTERS: tl.constexpr, DTYPE: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Expand the gradient of each row over kept elements; with IN_REGISTERS, it computes the accumulators as well."""
    for job in range(tl.program_id(0), tiles * steps, tl.num_programs(0)):
        tile, step = job // steps, job % steps
        row, real = bases(tile, rows, ROWS)
        start = beginning(step, ELEMENTS, WIDE)
        mask_base, grad_x_base = offsets(row, outer, mask_outer), offsets(row, outer, grad_x_outer)
        index, inside, keep, wanted = window(
            mask, mask_base, inner, mask_inner, real, start, length, WIDE, ELEMENTS, GROUP, SKIP
        )
        kept = flat(keep, ROWS, ELEMENTS)
        if NEED_X:
            x_base = offsets(row, outer, x_outer)
            value = read(x, x_base, inner, x_inner, index, wanted, keep, IDENTITY, DTYPE, ROWS, ELEMENTS)
        else:
            value = tl.zeros((ROWS, ELEMENTS), DTYPE)
        g = tl.load(grad + row * grad_stride, mask=real, other=0).to(DTYPE)
        a, b, n, result = g, g, number(ROWS, WIDE, 0), g
        if NEED_OUT:
            result = tl.load(out + row, mask=real, other=0).to(DTYPE)
        if IN_REGISTERS:
            la, lb, ln = lift(value, kept, value, result[:, None], STATE, parameter, IDENTITY)
            a, b, n = merge(la, lb, ln, STATE, NEED_N)
        else:
            if NEED_A:
                a = tl.load(in_a + row, mask=real, other=0)
            if NEED_B:
                b = tl.load(in_b + row, mask=real, other=0)
            if NEED_N:
                n = tl.load(in_n + row, mask=real, other=0)
        gradient = gradient_of(
            value, g[:, None], result[:, None], a[:, None], b[:, None], n[:, None], kept, OP, parameter
        )
        put(grad_x, grad_x_base, inner, grad_x_inner, index, inside, gradient)
