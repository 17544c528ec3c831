"""The kernels that op families share: reductions of rows, gradients that expand over rows, and functions of rows.

A few long rows are split between programs. The program that finishes last combines partial results, always in the same
order. Functions of rows (softmax and normalization) make up to three passes over a row: for its statistics, for the two
sums of a gradient, which need the statistics, and to write the result. A row that fits into "registers" is read once.
In a "loop", one program makes all passes, the later ones from the cache. Of split rows the statistics are a reduction,
"sums" leaves partial sums, and "write" adds them up and writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import (
    accumulate,
    bases,
    divided,
    extents,
    initial,
    is_last,
    joined,
    lift,
    mask_row_at,
    merge,
    merge_rows,
    norm_of,
    number,
    offsets,
    part_of,
    part_range,
    power,
    put,
    row_at,
    shifted,
    take,
    tile_at,
)

__all__ = ["expand_kernel", "reduce_kernel", "rowwise_kernel"]


@triton.jit
def finalize(a, b, n, OP: tl.constexpr, parameter, ROOT: tl.constexpr):
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


# -- reductions --------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["rows", "tiles", "splits", "unit", "size", "step"])
def reduce_kernel(
    x, mask, reference, out, out_a, out_b, out_n, part_a, part_b, part_n, counter,
    outer, inner, x_outer, x_inner, mask_outer, mask_inner, out_outer,
    rows, length, tiles, splits, unit, size, step, parameter: tl.float64,
    OP: tl.constexpr, IDENTITY: tl.constexpr, ROOT: tl.constexpr, RAW: tl.constexpr, NEED_B: tl.constexpr,
    NEED_N: tl.constexpr, DTYPE: tl.constexpr, TRUTH: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr,
    ALIGN: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Reduce rows. A program reduces a tile of rows, or one split of each of them."""
    parameter = tl.full((), parameter, DTYPE)
    for job in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        tile, part = divided(job, splits)
        row, real = bases(tile, rows, ROWS)
        place = offsets(row, outer, out_outer)
        lead = shifted(offsets(row, outer, x_outer), ALIGN, GROUP, WIDE)
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        mask_row = mask_row_at(row, lead, outer, mask_outer, mask_inner, ALIGN, BITS, GROUP)
        begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, WIDE)
        first, last = begin + lead, end + lead
        if SPLITS > 0:
            first, last = part_of(first, last, part, splits, ELEMENTS)
        mine = tl.zeros((ROWS,), DTYPE)
        if OP == "ties" or OP == "magnitude_ties":
            mine = tl.load(reference + place, mask=real, other=0).to(DTYPE)
        # How many a range keeps is known without a loop.
        COUNTED: tl.constexpr = MASK != "bits" and (
            OP == "mean" or OP == "count" or OP == "norm_-inf" or OP == "norm_p"
        )
        if OP == "count" and COUNTED:
            a, b, n = mine, mine, number(ROWS, WIDE, 0)
        else:
            a, b, n = accumulate(
                x, mask, x_row, mask_row, inner, x_inner, mask_inner, lead, first, last, real, mine,
                OP, parameter, IDENTITY, DTYPE, TRUTH, MASK, BITS, ALIGN, SIDE, NEED_N and not COUNTED, WIDE, ROWS,
                ELEMENTS, GROUP,
            )  # fmt: skip
        if COUNTED:
            n = last - first
        if SPLITS > 0:
            at = part * rows + row
            tl.store(part_a + at, a, mask=real)
            if NEED_B:
                tl.store(part_b + at, b, mask=real)
            if NEED_N:
                tl.store(part_n + at, n, mask=real)
            if is_last(counter + tile, splits):
                combine_partials(
                    out, out_a, out_b, out_n, part_a, part_b, part_n, row, place, real, rows, splits, parameter,
                    OP, IDENTITY, ROOT, RAW, NEED_B, NEED_N, DTYPE, ROWS, SPLITS,
                )  # fmt: skip
        else:
            write(out, out_a, out_b, out_n, place, real, a, b, n, OP, parameter, ROOT, RAW, NEED_B, NEED_N)


@triton.jit
def combine_partials(
    out, out_a, out_b, out_n, part_a, part_b, part_n, row, place, real, rows, splits, parameter,
    OP: tl.constexpr, IDENTITY: tl.constexpr, ROOT: tl.constexpr, RAW: tl.constexpr, NEED_B: tl.constexpr,
    NEED_N: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of rows, and write them."""
    # In steps, so that a thread holds but a few of them.
    STEP: tl.constexpr = min(SPLITS, max(1, 1024 // ROWS))
    a, b, n = initial(OP, IDENTITY, DTYPE, NEED_N, ROWS, STEP)
    for start in range(0, splits, STEP):
        each = start + tl.arange(0, STEP)
        at = each[None, :] * rows + row[:, None]
        there = real[:, None] & (each < splits)[None, :]
        # Written by other programs: L1 may be stale.
        ta = tl.load(part_a + at, mask=there, other=IDENTITY, cache_modifier=".cg")
        tb, tn = b, n
        if NEED_B:
            tb = tl.load(part_b + at, mask=there, other=0, cache_modifier=".cg")
        if NEED_N:
            # There may be fewer than STEP partial results; the index of a missing one is -1.
            no_index: tl.constexpr = -1 if OP == "argmax" or OP == "argmin" else 0
            tn = tl.load(part_n + at, mask=there, other=no_index, cache_modifier=".cg")
        a, b, n = joined(a, b, n, ta, tb, tn, OP, NEED_N)
    total_a, total_b, total_n = merge(a, b, n, OP, NEED_N, 1)
    write(
        out, out_a, out_b, out_n, place, real, total_a, total_b, total_n, OP, parameter, ROOT, RAW, NEED_B, NEED_N
    )  # fmt: skip


@triton.jit
def write(
    out, out_a, out_b, out_n, place, real, a, b, n, OP: tl.constexpr, parameter, ROOT: tl.constexpr,
    RAW: tl.constexpr, NEED_B: tl.constexpr, NEED_N: tl.constexpr,
):  # fmt: skip
    """Write the results of rows, or their accumulators for a gradient."""
    if RAW:
        if OP != "ties" and OP != "magnitude_ties" and OP != "count":
            tl.store(out_a + place, a, mask=real)
        if NEED_B:
            tl.store(out_b + place, b, mask=real)
        if NEED_N:
            tl.store(out_n + place, n, mask=real)
    else:
        result = finalize(a, b, n, OP, parameter, ROOT)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def gradient_of(x, g, out, a, b, n, keep, OP: tl.constexpr, parameter):
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


@triton.jit(do_not_specialize=["rows", "tiles", "parts", "unit", "size", "step", "grad_stride"])
def expand_kernel(
    x, mask, grad, out, in_a, in_b, in_n, grad_x,
    outer, inner, x_outer, x_inner, mask_outer, mask_inner, row_outer, grad_x_outer, grad_x_inner,
    rows, length, tiles, parts, unit, size, step, grad_stride, parameter: tl.float64,
    OP: tl.constexpr, STATE: tl.constexpr, IDENTITY: tl.constexpr, NEED_X: tl.constexpr, NEED_OUT: tl.constexpr,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, NEED_N: tl.constexpr, IN_REGISTERS: tl.constexpr, DTYPE: tl.constexpr,
    ONLY: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Expand the gradient of each row over kept elements; with IN_REGISTERS, it computes the accumulators as well."""
    parameter = tl.full((), parameter, DTYPE)
    for job in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        tile, part = divided(job, parts)
        row, real = bases(tile, rows, ROWS)
        place = offsets(row, outer, row_outer)
        begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, WIDE)
        lead = shifted(offsets(row, outer, grad_x_outer), ALIGN, GROUP, WIDE)
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        grad_x_row = row_at(row, lead, outer, grad_x_outer, grad_x_inner, ALIGN, GROUP)
        first, last, stop = begin + lead, end + lead, length + lead
        low, high = part_range(first, last, lead, stop, part, parts, ONLY, ELEMENTS)
        g = tl.load(grad + place * grad_stride, mask=real, other=0).to(DTYPE)
        a, b, n, result = g, g, number(ROWS, WIDE, 0), g
        if NEED_OUT:
            result = tl.load(out + place, mask=real, other=0).to(DTYPE)
        if STATE == "count" and MASK != "bits":
            n = end - begin
        elif STATE != "" and not IN_REGISTERS:
            if NEED_A:
                a = tl.load(in_a + place, mask=real, other=0)
            if NEED_B:
                b = tl.load(in_b + place, mask=real, other=0)
            if NEED_N:
                n = tl.load(in_n + place, mask=real, other=0)
        for start in range(low, high, ELEMENTS):
            cell, inside, near, keep, whole = tile_at(
                mask, start, row, real, lead, first, last, stop, outer, inner, mask_outer, mask_inner,
                ONLY, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
            )  # fmt: skip
            if NEED_X:
                value = take(x, x_row, inner, x_inner, cell, near, keep, IDENTITY, DTYPE)
            else:
                value = tl.zeros((ROWS, ELEMENTS // GROUP, GROUP), DTYPE)
            if IN_REGISTERS:
                la, lb, ln = lift(value, keep, value, result[:, None, None], STATE, parameter, IDENTITY)
                ta, tb, tn = merge_rows(la, lb, ln, STATE, NEED_N)
                gradient = gradient_of(
                    value, g[:, None, None], result[:, None, None], ta[:, None, None], tb[:, None, None],
                    tn[:, None, None], keep, OP, parameter,
                )  # fmt: skip
            else:
                gradient = gradient_of(
                    value, g[:, None, None], result[:, None, None], a[:, None, None], b[:, None, None],
                    n[:, None, None], keep, OP, parameter,
                )  # fmt: skip
            put(grad_x, grad_x_row, inner, grad_x_inner, cell, inside, whole, gradient)


# -- functions of rows -------------------------------------------------------------------------------------------------
@triton.jit
def at_least(x, least):
    """The maximum of x and ``least``; unlike tl.maximum, it propagates NaN."""
    return tl.where(x < least, least, x)


@triton.jit
def finite_of(a):
    """The largest exponent of a row, by which others are reduced; 0 where it is infinite: inf - inf is NaN."""
    return tl.where(tl.abs(a) == float("inf"), 0.0, a)


@triton.jit
def scale_of(a, b):
    """The factor of the exponentials of a row. As in torch, +inf in a row makes it NaN."""
    return tl.where(a == float("inf"), float("nan"), 1.0 / b)


@triton.jit
def result_of(x, keep, a, b, n, OP: tl.constexpr, STATE: tl.constexpr, parameter, eps):
    """The result for the elements of a row, from its statistics."""
    out = x
    if OP == "softmax":
        out = tl.exp(x - finite_of(a)) * scale_of(a, b)
    elif OP == "softmin":
        out = tl.exp(-x - finite_of(a)) * scale_of(a, b)
    elif OP == "log_softmax":
        # As in torch, +inf in a row makes it NaN.
        out = x - finite_of(a) - tl.where(a == float("inf"), float("nan"), tl.log(b))
    elif OP == "normalize":
        out = x / at_least(norm_of(a, n, STATE, parameter), eps)
    elif OP == "standardize":
        out = (x - a) * tl.rsqrt(b / tl.maximum(n.to(x.dtype) - parameter, 0.0) + eps)
    if OP == "log_softmax":
        return tl.where(keep, out, -float("inf"))
    return tl.where(keep, out, 0.0)


@triton.jit
def gradient_terms(g, x, keep, a, b, n, OP: tl.constexpr, STATE: tl.constexpr, parameter, eps):
    """The terms of the two sums over a row that its gradient needs."""
    p, q = g, g
    if OP == "softmax" or OP == "softmin":
        p = g * x
    elif OP == "normalize":
        p = g * x
        norm = norm_of(a, n, STATE, parameter)
        q = tl.where(keep & (tl.abs(x) == norm), 1.0, 0.0).to(g.dtype)
    elif OP == "standardize":
        q = tl.where(keep, g * (x - a) * tl.rsqrt(b / tl.maximum(n.to(x.dtype) - parameter, 0.0) + eps), 0.0)
    return p, q


@triton.jit
def rowwise_gradient(
    g, x, keep, a, b, n, p, q,
    OP: tl.constexpr, STATE: tl.constexpr, parameter, eps,
):  # fmt: skip
    """The gradient of the elements of a row."""
    out = g
    if OP == "softmax":
        out = x * (g - p)
    elif OP == "softmin":
        out = x * (p - g)
    elif OP == "log_softmax":
        out = g - tl.exp(x) * p
    elif OP == "normalize":
        norm = norm_of(a, n, STATE, parameter)
        divisor = at_least(norm, eps)
        grad_norm = tl.where(norm >= eps, p / (divisor * divisor), 0.0)
        sign_x = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
        safe = tl.where(norm == 0, 1.0, norm)
        if STATE == "norm_0":
            derivative = x * 0
        elif STATE == "norm_1":
            derivative = sign_x
        elif STATE == "norm_2":
            derivative = x / safe
        elif STATE == "norm_p":
            derivative = sign_x * power(tl.where(x == 0, 1.0, tl.abs(x)) / safe, parameter - 1.0)
        else:
            derivative = tl.where(tl.abs(x) == norm, sign_x, 0.0) / tl.maximum(q, 1.0)
        out = g / divisor - grad_norm * derivative
    elif OP == "standardize":
        count = tl.maximum(n, 1).to(x.dtype)
        freedom = tl.maximum(n.to(x.dtype) - parameter, 0.0)
        scale = tl.rsqrt(b / freedom + eps)
        out = (g - p / count - (x - a) * scale * (q / freedom)) * scale
    return tl.where(keep, out, 0.0)


@triton.jit
def sums_over(
    x, grad, mask, row, x_row, grad_row, real, lead, first, last, outer, inner, x_inner, grad_inner, mask_outer,
    mask_inner, a, b, n,
    OP: tl.constexpr, STATE: tl.constexpr, parameter, eps, IDENTITY: tl.constexpr,
    DTYPE: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The two sums that the gradient of each row needs, of its range."""
    p = tl.zeros((ROWS, ELEMENTS // GROUP), DTYPE)
    q = tl.zeros((ROWS, ELEMENTS // GROUP), DTYPE)
    high = tl.max(last, 0)
    low = tl.min(tl.where(first < last, first, high), 0) // ELEMENTS * ELEMENTS
    for start in range(low, high, ELEMENTS):
        cell, _, near, keep, _ = tile_at(
            mask, start, row, real, lead, first, last, last, outer, inner, mask_outer, mask_inner,
            True, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
        )  # fmt: skip
        value = take(x, x_row, inner, x_inner, cell, near, keep, IDENTITY, DTYPE)
        g = take(grad, grad_row, inner, grad_inner, cell, near, keep, 0.0, DTYPE)
        lp, lq = gradient_terms(g, value, keep, a, b, n, OP, STATE, parameter, eps)
        p += tl.sum(lp, 2)
        q += tl.sum(lq, 2)
    return tl.sum(p, 1), tl.sum(q, 1)


@triton.jit
def added(part, row, real, rows, parts, DTYPE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The sum of the parts of rows, from the launch before: in steps, so that a thread holds but a few of them."""
    STEP: tl.constexpr = min(PARTS, max(1, 1024 // ROWS))
    total = tl.zeros((ROWS, STEP), DTYPE)
    for start in range(0, parts, STEP):
        each = start + tl.arange(0, STEP)
        there = real[:, None] & (each < parts)[None, :]
        total += tl.load(part + each[None, :] * rows + row[:, None], mask=there, other=0)
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["rows", "tiles", "parts", "unit", "size", "step"])
def rowwise_kernel(
    x, grad, mask, out, in_a, in_b, in_n, part_p, part_q,
    outer, inner, x_outer, x_inner, grad_outer, grad_inner, mask_outer, mask_inner, out_outer, out_inner, row_outer,
    rows, length, tiles, parts, unit, size, step, parameter: tl.float64, eps: tl.float64,
    OP: tl.constexpr, STATE: tl.constexpr, IDENTITY: tl.constexpr, NEED_N: tl.constexpr, BACKWARD: tl.constexpr,
    PASS: tl.constexpr, DTYPE: tl.constexpr, ONLY: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr,
    ALIGN: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Softmax, softmin, log_softmax, normalize, standardize; or the gradient, from ``grad``."""
    parameter, eps = tl.full((), parameter, DTYPE), tl.full((), eps, DTYPE)
    for job in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        tile, part = divided(job, parts)
        row, real = bases(tile, rows, ROWS)
        place = offsets(row, outer, row_outer)
        begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, WIDE)
        lead = shifted(offsets(row, outer, x_outer), ALIGN, GROUP, WIDE)
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        out_row = row_at(row, lead, outer, out_outer, out_inner, ALIGN, GROUP)
        grad_row = out_row
        if BACKWARD:
            grad_row = row_at(row, lead, outer, grad_outer, grad_inner, ALIGN, GROUP)
        first, last, stop = begin + lead, end + lead, length + lead
        none = tl.zeros((ROWS,), DTYPE)
        if PASS == "registers":
            cell, inside, near, keep, whole = tile_at(
                mask, 0, row, real, lead, first, last, stop, outer, inner, mask_outer, mask_inner,
                ONLY, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
            )  # fmt: skip
            value = take(x, x_row, inner, x_inner, cell, near, keep, IDENTITY, DTYPE)
            a, b, n = none, none, number(ROWS, WIDE, 0)
            # An exponential for each element, not one more for each merge.
            ONCE: tl.constexpr = STATE == "logsumexp" or STATE == "softmin"
            powers = value
            if ONCE:
                if STATE == "softmin":
                    value = tl.where(keep, -value, IDENTITY)
                a = tl.max(tl.max(value, 2), 1)
                powers = tl.exp(value - finite_of(a)[:, None, None])
                b = tl.sum(tl.sum(powers, 2), 1)
            elif STATE != "":
                la, lb, ln = lift(value, keep, value, value, STATE, parameter, IDENTITY)
                a, b, n = merge_rows(la, lb, ln, STATE, NEED_N)
            A, B, N = a[:, None, None], b[:, None, None], n[:, None, None]
            if ONCE and OP != "log_softmax":
                result = tl.where(keep, powers * scale_of(a, b)[:, None, None], 0.0)
            elif BACKWARD:
                g = take(grad, grad_row, inner, grad_inner, cell, near, keep, 0.0, DTYPE)
                lp, lq = gradient_terms(g, value, keep, A, B, N, OP, STATE, parameter, eps)
                P, Q = tl.sum(tl.sum(lp, 2), 1)[:, None, None], tl.sum(tl.sum(lq, 2), 1)[:, None, None]
                result = rowwise_gradient(g, value, keep, A, B, N, P, Q, OP, STATE, parameter, eps)
            else:
                result = result_of(value, keep, A, B, N, OP, STATE, parameter, eps)
            put(out, out_row, inner, out_inner, cell, inside, whole, result)
        else:
            a, b, n = none, none, number(ROWS, WIDE, 0)
            if STATE != "":
                if PASS == "loop":
                    mask_row = mask_row_at(row, lead, outer, mask_outer, mask_inner, ALIGN, BITS, GROUP)
                    a, b, n = accumulate(
                        x, mask, x_row, mask_row, inner, x_inner, mask_inner, lead, first, last, real, none,
                        STATE, parameter, IDENTITY, DTYPE, False, MASK, BITS, ALIGN, SIDE, NEED_N, WIDE, ROWS,
                        ELEMENTS, GROUP,
                    )  # fmt: skip
                else:
                    a = tl.load(in_a + place, mask=real, other=0)
                    if in_b is not None:
                        b = tl.load(in_b + place, mask=real, other=0)
                    if NEED_N:
                        n = tl.load(in_n + place, mask=real, other=0)
            A, B, N = a[:, None, None], b[:, None, None], n[:, None, None]
            p, q = none, none
            if BACKWARD:
                if PASS == "write":
                    p = added(part_p, row, real, rows, parts, DTYPE, ROWS, PARTS)
                    q = added(part_q, row, real, rows, parts, DTYPE, ROWS, PARTS)
                else:
                    low, high = first, last
                    if PASS == "sums":
                        low, high = part_of(first, last, part, parts, ELEMENTS)
                    p, q = sums_over(
                        x, grad, mask, row, x_row, grad_row, real, lead, low, high, outer, inner, x_inner, grad_inner,
                        mask_outer, mask_inner, A, B, N, OP, STATE, parameter, eps, IDENTITY, DTYPE, MASK, BITS, ALIGN,
                        SIDE, WIDE, ROWS, ELEMENTS, GROUP,
                    )  # fmt: skip
            if PASS == "sums":
                tl.store(part_p + part * rows + row, p, mask=real)
                tl.store(part_q + part * rows + row, q, mask=real)
            else:
                P, Q = p[:, None, None], q[:, None, None]
                low, high = part_range(first, last, lead, stop, part, parts, ONLY, ELEMENTS)
                for start in range(low, high, ELEMENTS):
                    cell, inside, near, keep, whole = tile_at(
                        mask, start, row, real, lead, first, last, stop, outer, inner, mask_outer, mask_inner,
                        ONLY, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
                    )  # fmt: skip
                    value = take(x, x_row, inner, x_inner, cell, near, keep, IDENTITY, DTYPE)
                    if BACKWARD:
                        g = take(grad, grad_row, inner, grad_inner, cell, near, keep, 0.0, DTYPE)
                        result = rowwise_gradient(g, value, keep, A, B, N, P, Q, OP, STATE, parameter, eps)
                    else:
                        result = result_of(value, keep, A, B, N, OP, STATE, parameter, eps)
                    put(out, out_row, inner, out_inner, cell, inside, whole, result)
