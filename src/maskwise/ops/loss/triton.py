"""Losses of single elements and cross entropy, and their gradients, as Triton kernels.

What is summed up is summed by each program, and put together by the one that finishes last, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import (
    accumulate,
    bases,
    beginning,
    divided,
    extents,
    is_last,
    merge,
    offsets,
    part_of,
    put,
    row_at,
    shifted,
    take,
    tile_at,
)

__all__ = ["class_backward_kernel", "class_kernel", "element_backward_kernel", "element_kernel"]


@triton.jit
def sign_of(x):
    """-1, 0 or 1; NaN of NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def log1p(x):
    """The logarithm of 1 + x for x in [0, 1], exact also where 1 + x is 1."""
    one = 1.0 + x
    return tl.where(one == 1.0, x, tl.log(one) * (x / tl.where(one == 1.0, 1.0, one - 1.0)))


@triton.jit
def positive(x):
    """X, or 0 where it is less; NaN stays."""
    return tl.where(x < 0, 0.0, x)


# The code is no constant: all programs of a launch take the same branch, and eleven kernels more for each dtype and
# shape would have to be compiled for nothing.
@triton.jit
def loss_of(x, t, code, parameter):
    """The loss of single elements, by its code: see SERVED in registered.py."""
    apart = x - t
    size = tl.abs(apart)
    out = apart * apart
    if code == 1:
        out = size
    elif code == 2:
        out = tl.where(size < parameter, 0.5 * apart * apart / parameter, size - 0.5 * parameter)
    elif code == 3:
        out = tl.where(size <= parameter, 0.5 * apart * apart, parameter * (size - 0.5 * parameter))
    elif code == 4:
        out = positive(x) - x * t + log1p(tl.exp(-tl.abs(x)))
    elif code == 5:
        out = tl.where(t == 0, 0.0, t * tl.log(tl.where(t == 0, 1.0, t))) - t * x
    elif code == 6:
        out = tl.exp(t) * (t - x)
    elif code == 7:
        out = tl.exp(x) - t * x
    elif code == 8:
        out = x - t * tl.log(x + parameter)
    elif code == 9:
        power = -t * x
        out = positive(power) + log1p(tl.exp(-tl.abs(power)))
    elif code == 10:
        out = tl.where(t != 1, positive(parameter - x), 0.0) + tl.where(t != -1, x, 0.0)
    return out


@triton.jit
def slope_of(x, t, code, parameter):
    """The gradient of single elements."""
    apart = x - t
    size = tl.abs(apart)
    out = 2.0 * apart
    if code == 1:
        # As torch has it, for this loss alone.
        out = tl.where(apart == apart, sign_of(apart), 0.0)
    elif code == 2:
        out = tl.where(size < parameter, apart / parameter, sign_of(apart))
    elif code == 3:
        out = tl.where(size <= parameter, apart, parameter * sign_of(apart))
    elif code == 4:
        small = tl.exp(-tl.abs(x))
        out = tl.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small)) - t
    elif code == 5:
        out = -t
    elif code == 6:
        out = -tl.exp(t)
    elif code == 7:
        out = tl.exp(x) - t
    elif code == 8:
        out = 1.0 - t / (x + parameter)
    elif code == 9:
        power = -t * x
        small = tl.exp(-tl.abs(power))
        out = -t * tl.where(power >= 0, 1.0 / (1.0 + small), small / (1.0 + small))
    elif code == 10:
        # Branches that are taken at run time must agree on the dtype, which a number alone would not have.
        zero = tl.zeros_like(x)
        out = tl.where((t != 1) & (parameter - x >= 0), zero - 1.0, zero) + tl.where(t != -1, zero + 1.0, zero)
    return out


@triton.jit
def put_together(
    out, facts, part, part_n, counter, me, programs, total, count, mean,
    REDUCED: tl.constexpr, PROGRAMS: tl.constexpr, STRAY: tl.constexpr,
):  # fmt: skip
    """The sum of all programs' totals and counts, by the last of them: the loss, and by what a mean divides."""
    tl.store(part + me, total)
    tl.store(part_n + me, count)
    if is_last(counter, programs):
        each = tl.arange(0, PROGRAMS)
        # Written by other programs: L1 may be stale.
        whole = tl.sum(tl.load(part + each, mask=each < programs, other=0, cache_modifier=".cg"), 0)
        many = tl.sum(tl.load(part_n + each, mask=each < programs, other=0, cache_modifier=".cg").to(tl.float64), 0)
        if REDUCED:
            tl.store(out, (whole / divisor_of(many, mean).to(whole.dtype)).to(out.dtype.element_ty))
        tl.store(facts, many)
        if STRAY:
            # In the place of the first class that is none, which makes the loss NaN here.
            tl.store(facts + 1, -1.0)


@triton.jit
def divisor_of(many, mean):
    """By what the sum of a loss is divided: 1, unless it is a mean of something."""
    return tl.where((mean != 0) & (many != 0), many, 1.0)


# -- single elements ---------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["rows", "tiles", "parts", "unit", "size", "step", "code", "mean"])
def element_kernel(
    x, target, mask, out, facts, part, part_n, counter,
    outer, inner, x_outer, x_inner, target_outer, target_inner, mask_outer, mask_inner, out_outer, out_inner,
    rows, length, tiles, parts, unit, size, step, code, mean, parameter: tl.float64,
    REDUCED: tl.constexpr, DTYPE: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr,
    SIDE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A loss of single elements: unreduced, its sum or its mean."""
    parameter = tl.full((), parameter, DTYPE)
    total = tl.zeros((ROWS, ELEMENTS // GROUP), DTYPE)
    count = tl.zeros((ROWS, ELEMENTS // GROUP), tl.int32)
    for job in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        tile, piece = divided(job, parts)
        row, real = bases(tile, rows, ROWS)
        begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, WIDE)
        lead = shifted(offsets(row, outer, x_outer), ALIGN, GROUP, WIDE)
        cell, inside, near, keep, whole = tile_at(
            mask, beginning(piece, ELEMENTS, WIDE), row, real, lead, begin + lead, end + lead, length + lead,
            outer, inner, mask_outer, mask_inner, False, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
        )  # fmt: skip
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        target_row = row_at(row, lead, outer, target_outer, target_inner, ALIGN, GROUP)
        value = take(x, x_row, inner, x_inner, cell, near, keep, 0.0, DTYPE)
        wish = take(target, target_row, inner, target_inner, cell, near, keep, 0.0, DTYPE)
        loss = tl.where(keep, loss_of(value, wish, code, parameter), 0.0)
        if REDUCED:
            total += tl.sum(loss, 2)
            count += tl.sum(keep.to(tl.int32), 2)
        else:
            out_row = row_at(row, lead, outer, out_outer, out_inner, ALIGN, GROUP)
            put(out, out_row, inner, out_inner, cell, inside, whole, loss)
    if REDUCED:
        total_of_all, count_of_all = tl.sum(tl.sum(total, 1), 0), tl.sum(tl.sum(count.to(tl.int64), 1), 0)
        put_together(
            out, facts, part, part_n, counter, tl.program_id(0), tl.num_programs(0), total_of_all, count_of_all, mean,
            REDUCED, PROGRAMS, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles", "parts", "unit", "size", "step", "code", "mean"])
def element_backward_kernel(
    grad, x, target, mask, kept, of_x,
    outer, inner, grad_outer, grad_inner, x_outer, x_inner, target_outer, target_inner, mask_outer, mask_inner,
    of_x_outer, of_x_inner,
    rows, length, tiles, parts, unit, size, step, code, mean, parameter: tl.float64,
    REDUCED: tl.constexpr, DTYPE: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr,
    SIDE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of a loss of single elements."""
    parameter = tl.full((), parameter, DTYPE)
    for job in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        tile, piece = divided(job, parts)
        row, real = bases(tile, rows, ROWS)
        begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, WIDE)
        lead = shifted(offsets(row, outer, x_outer), ALIGN, GROUP, WIDE)
        cell, inside, near, keep, whole = tile_at(
            mask, beginning(piece, ELEMENTS, WIDE), row, real, lead, begin + lead, end + lead, length + lead,
            outer, inner, mask_outer, mask_inner, False, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
        )  # fmt: skip
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        target_row = row_at(row, lead, outer, target_outer, target_inner, ALIGN, GROUP)
        value = take(x, x_row, inner, x_inner, cell, near, keep, 0.0, DTYPE)
        wish = take(target, target_row, inner, target_inner, cell, near, keep, 0.0, DTYPE)
        if REDUCED:
            g = tl.load(grad).to(DTYPE) / divisor_of(tl.load(kept), mean).to(DTYPE)
        else:
            grad_row = row_at(row, lead, outer, grad_outer, grad_inner, ALIGN, GROUP)
            g = take(grad, grad_row, inner, grad_inner, cell, near, keep, 0.0, DTYPE)
        result = tl.where(keep, slope_of(value, wish, code, parameter) * g, 0.0)
        of_x_row = row_at(row, lead, outer, of_x_outer, of_x_inner, ALIGN, GROUP)
        put(of_x, of_x_row, inner, of_x_inner, cell, inside, whole, result)


# -- classes -----------------------------------------------------------------------------------------------------------
@triton.jit
def kept_classes(
    mask, target, row, real, outer, mask_outer, target_outer, length, unit, size, step, ignored, MASK: tl.constexpr
):
    """Which rows of classes are kept, and their targets: what is dropped is never read."""
    begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, True)
    keep = begin < end
    wish = tl.load(target + offsets(row, outer, target_outer), mask=keep, other=ignored)
    return keep & (wish != ignored), wish


@triton.jit(do_not_specialize=["rows", "tiles", "splits", "unit", "size", "step", "ignored", "mean"])
def class_kernel(
    x, target, mask, weight, out, sums, facts, part, part_n, counter, part_a, part_b, part_l, counters,
    outer, inner, x_outer, x_inner, target_outer, mask_outer, row_outer,
    rows, length, tiles, splits, unit, size, step, ignored, mean, smoothing: tl.float64,
    SMOOTHED: tl.constexpr, REDUCED: tl.constexpr, DTYPE: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr,
    ALIGN: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Cross entropy of rows of classes, of which what is dropped is never read. A class that is none gives NaN."""
    OP: tl.constexpr = "levels" if SMOOTHED else "logsumexp"
    smoothing = tl.full((), smoothing, DTYPE)
    total = tl.zeros((ROWS,), DTYPE)
    count = tl.zeros((ROWS,), tl.float64)
    for job in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        tile, split = divided(job, splits)
        row, real = bases(tile, rows, ROWS)
        keep, wish = kept_classes(
            mask, target, row, real, outer, mask_outer, target_outer, length, unit, size, step, ignored, MASK
        )
        lead = shifted(offsets(row, outer, x_outer), ALIGN, GROUP, WIDE)
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        first, last = lead, tl.where(keep, length + lead, lead)
        if SPLITS > 0:
            first, last = part_of(first, last, split, splits, ELEMENTS)
        a, b, level = accumulate(
            x, mask, x_row, x_row, inner, x_inner, x_inner, lead, first, last, real, total,
            OP, 0.0, -float("inf"), DTYPE, False, "rows", False, ALIGN, SIDE, False, WIDE, ROWS, ELEMENTS, GROUP,
        )  # fmt: skip
        if SPLITS > 0:
            at = split * rows + row
            tl.store(part_a + at, a, mask=real)
            tl.store(part_b + at, b, mask=real)
            if SMOOTHED:
                tl.store(part_l + at, level, mask=real)
            if is_last(counters + tile, splits):
                combine_classes(
                    x, weight, out, sums, facts, part, part_n, counter, part_a, part_b, part_l, tile, tiles, row, real,
                    rows, splits, keep, wish, outer, inner, x_outer, x_inner, row_outer, length, mean, smoothing,
                    OP, SMOOTHED, REDUCED, DTYPE, WIDE, ROWS, PROGRAMS, SPLITS,
                )  # fmt: skip
        else:
            loss, share = class_loss(
                x, weight, out, sums, row, real, keep, wish, a, b, level, outer, inner, x_outer, x_inner, row_outer,
                length, smoothing, SMOOTHED, REDUCED, DTYPE, WIDE, ROWS,
            )  # fmt: skip
            total += loss
            count += share
    if SPLITS == 0:
        total_of_all, count_of_all = tl.sum(total, 0), tl.sum(count, 0)
        put_together(
            out, facts, part, part_n, counter, tl.program_id(0), tl.num_programs(0), total_of_all, count_of_all, mean,
            REDUCED, PROGRAMS, True,
        )  # fmt: skip


@triton.jit
def combine_classes(
    x, weight, out, sums, facts, part, part_n, counter, part_a, part_b, part_l, tile, tiles, row, real,
    rows, splits, keep, wish, outer, inner, x_outer, x_inner, row_outer, length, mean, smoothing,
    OP: tl.constexpr, SMOOTHED: tl.constexpr, REDUCED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of rows, and put the rows together."""
    each = tl.arange(0, SPLITS)
    at = each[None, :] * rows + row[:, None]
    there = real[:, None] & (each < splits)[None, :]
    # Written by other programs: L1 may be stale.
    a = tl.load(part_a + at, mask=there, other=-float("inf"), cache_modifier=".cg")
    b = tl.load(part_b + at, mask=there, other=0, cache_modifier=".cg")
    level = b
    if SMOOTHED:
        level = tl.load(part_l + at, mask=there, other=0, cache_modifier=".cg")
    total_a, total_b, total_level = merge(a, b, level, OP, False, 1)
    loss, share = class_loss(
        x, weight, out, sums, row, real, keep, wish, total_a, total_b, total_level, outer, inner, x_outer, x_inner,
        row_outer, length, smoothing, SMOOTHED, REDUCED, DTYPE, WIDE, ROWS,
    )  # fmt: skip
    put_together(
        out, facts, part, part_n, counter, tile, tiles, tl.sum(loss, 0), tl.sum(share, 0), mean, REDUCED, PROGRAMS, True
    )


@triton.jit
def class_loss(
    x, weight, out, sums, row, real, keep, wish, a, b, level, outer, inner, x_outer, x_inner, row_outer, length,
    smoothing, SMOOTHED: tl.constexpr, REDUCED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The loss of rows, from their sums of exponentials, and by how much each counts."""
    stray = keep & ((wish < 0) | (wish >= length))
    tl.device_assert(stray == 0, "cross_entropy: a kept target is a class that does not exist")
    chosen = tl.where(keep & (stray == 0), wish, 0)
    mine = tl.load(x + offsets(row, outer, x_outer) + offsets(chosen, inner, x_inner), mask=keep, other=0).to(DTYPE)
    log_sum = tl.log(b) + tl.where(tl.abs(a) == float("inf"), 0.0, a)
    log_sum = tl.where(a == float("inf"), float("nan"), log_sum)
    loss = log_sum - mine
    share = tl.full((ROWS,), 1.0, DTYPE)
    if weight is not None:
        share = tl.load(weight + chosen, mask=keep, other=0).to(DTYPE)
        loss = loss * share
    if SMOOTHED:
        loss = (1.0 - smoothing) * loss + smoothing * (log_sum - level / length)
    loss = tl.where(keep, tl.where(stray, float("nan"), loss), 0.0)
    place = offsets(row, outer, row_outer)
    if not REDUCED:
        tl.store(out + place, loss.to(out.dtype.element_ty), mask=real)
    tl.store(sums + place, tl.where(keep, tl.where(stray, float("nan"), log_sum), 0.0).to(tl.float64), mask=real)
    return loss, tl.where(keep, share, 0.0).to(tl.float64)


@triton.jit(do_not_specialize=["rows", "tiles", "parts", "unit", "size", "step", "ignored", "mean"])
def class_backward_kernel(
    grad, x, target, mask, weight, sums, facts, of_x,
    outer, inner, x_outer, x_inner, target_outer, mask_outer, of_x_outer, of_x_inner, row_outer,
    rows, length, tiles, parts, unit, size, step, ignored, mean, smoothing: tl.float64,
    REDUCED: tl.constexpr, DTYPE: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr,
    SIDE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of cross entropy."""
    # In DTYPE from the start: a number of its own would be one of float32.
    smoothing = tl.full((), smoothing, DTYPE)
    for job in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        tile, piece = divided(job, parts)
        row, real = bases(tile, rows, ROWS)
        place = offsets(row, outer, row_outer)
        keep, wish = kept_classes(
            mask, target, row, real, outer, mask_outer, target_outer, length, unit, size, step, ignored, MASK
        )
        lead = shifted(offsets(row, outer, x_outer), ALIGN, GROUP, WIDE)
        cell, inside, near, wanted, whole = tile_at(
            mask, beginning(piece, ELEMENTS, WIDE), row, real, lead, lead, tl.where(keep, length + lead, lead),
            length + lead, outer, inner, x_outer, x_inner, False, "rows", False, ALIGN, SIDE, WIDE, ROWS, ELEMENTS,
            GROUP,
        )  # fmt: skip
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        value = take(x, x_row, inner, x_inner, cell, near, wanted, 0.0, DTYPE)
        if REDUCED:
            g = tl.load(grad + row * 0, mask=keep, other=0).to(DTYPE) / divisor_of(tl.load(facts), mean).to(DTYPE)
        else:
            g = tl.load(grad + place, mask=keep, other=0).to(DTYPE)
        if weight is not None:
            # A class that is none has no weight to be read; its row is NaN, for so is its sum.
            there = keep & (wish >= 0) & (wish < length)
            g = g * tl.load(weight + wish, mask=there, other=0).to(DTYPE)
        log_sum = tl.load(sums + place, mask=keep, other=0).to(DTYPE)
        index = cell - lead[:, None, None]
        chosen = tl.where(index == wish[:, None, None], 1.0 - smoothing, 0.0)
        even = smoothing / length
        result = (tl.exp(value - log_sum[:, None, None]) - chosen - even) * g[:, None, None]
        of_x_row = row_at(row, lead, outer, of_x_outer, of_x_inner, ALIGN, GROUP)
        put(of_x, of_x_row, inner, of_x_inner, cell, inside, whole, tl.where(wanted, result, 0.0))
