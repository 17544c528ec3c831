"""Losses of single elements and cross entropy, and their gradients, as Triton kernels.

What is summed up is summed by each program, and put together by the one that finishes last, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import (
    bases,
    beginning,
    cells,
    flat,
    joined,
    lift,
    merge,
    number,
    offsets,
    put,
    take,
    window,
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
def loss_of(x, t, code, parameter: tl.constexpr):
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
def slope_of(x, t, code, parameter: tl.constexpr):
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
    out, facts, part, part_n, counter, total, count, mean,
    REDUCED: tl.constexpr, PROGRAMS: tl.constexpr, STRAY: tl.constexpr,
):  # fmt: skip
    """The sum of all programs' totals and counts, by the last of them: the loss, and by what a mean divides."""
    me, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(part + me, total)
    tl.store(part_n + me, count)
    tl.debug_barrier()
    done = tl.atomic_add(counter, 1, sem="acq_rel")
    last = done == programs - 1
    if last:
        tl.store(counter, 0)
        each = tl.arange(0, PROGRAMS)
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
@triton.jit(do_not_specialize=["code", "mean"])
def element_kernel(
    x, target, mask, out, facts, part, part_n, counter,
    outer, inner, x_outer, x_inner, target_outer, target_inner, mask_outer, mask_inner, out_outer, out_inner,
    rows, length, tiles, steps, code, mean, parameter: tl.constexpr,
    REDUCED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, SKIP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A loss of single elements: unreduced, its sum or its mean."""
    total = tl.zeros((ROWS,), DTYPE)
    count = tl.zeros((ROWS,), tl.int64)
    for job in range(tl.program_id(0), tiles * steps, tl.num_programs(0)):
        row, real = bases(job // steps, rows, ROWS)
        start = beginning(job % steps, ELEMENTS, WIDE)
        mask_base = offsets(row, outer, mask_outer)
        index, inside, keep, wanted = window(
            mask, mask_base, inner, mask_inner, real, start, length, WIDE, ELEMENTS, GROUP, SKIP
        )
        value = take(x, offsets(row, outer, x_outer), inner, x_inner, index, wanted, keep, 0.0, DTYPE)
        wish = take(target, offsets(row, outer, target_outer), inner, target_inner, index, wanted, keep, 0.0, DTYPE)
        loss = tl.where(keep, loss_of(value, wish, code, parameter), 0.0)
        if REDUCED:
            total += tl.sum(flat(loss, ROWS, ELEMENTS), 1)
            count += tl.sum(flat(keep, ROWS, ELEMENTS).to(tl.int32), 1)
        else:
            put(out, offsets(row, outer, out_outer), inner, out_inner, index, inside, loss)
    if REDUCED:
        total_of_all, count_of_all = tl.sum(total, 0), tl.sum(count, 0)
        put_together(out, facts, part, part_n, counter, total_of_all, count_of_all, mean, REDUCED, PROGRAMS, False)


@triton.jit(do_not_specialize=["code", "mean"])
def element_backward_kernel(
    grad, x, target, mask, kept, of_x,
    outer, inner, grad_outer, grad_inner, x_outer, x_inner, target_outer, target_inner, mask_outer, mask_inner,
    of_x_outer, of_x_inner,
    rows, length, tiles, steps, code, mean, parameter: tl.constexpr,
    REDUCED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The gradient of a loss of single elements."""
    for job in range(tl.program_id(0), tiles * steps, tl.num_programs(0)):
        row, real = bases(job // steps, rows, ROWS)
        start = beginning(job % steps, ELEMENTS, WIDE)
        mask_base = offsets(row, outer, mask_outer)
        index, inside, keep, wanted = window(
            mask, mask_base, inner, mask_inner, real, start, length, WIDE, ELEMENTS, GROUP, SKIP
        )
        value = take(x, offsets(row, outer, x_outer), inner, x_inner, index, wanted, keep, 0.0, DTYPE)
        wish = take(target, offsets(row, outer, target_outer), inner, target_inner, index, wanted, keep, 0.0, DTYPE)
        if REDUCED:
            g = tl.load(grad).to(DTYPE) / divisor_of(tl.load(kept), mean).to(DTYPE)
        else:
            g = take(grad, offsets(row, outer, grad_outer), inner, grad_inner, index, wanted, keep, 0.0, DTYPE)
        result = tl.where(keep, slope_of(value, wish, code, parameter) * g, 0.0)
        put(of_x, offsets(row, outer, of_x_outer), inner, of_x_inner, index, inside, result)


# -- classes -----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["mean", "ignored"])
def class_kernel(
    x, target, mask, weight, out, sums, facts, part, part_n, counter,
    outer, inner, x_outer, x_inner, target_outer, mask_outer,
    rows, length, tiles, ignored, mean, smoothing: tl.constexpr,
    REDUCED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Cross entropy of rows of classes, of which what is dropped is never read. A class that is none gives NaN."""
    total = tl.zeros((ROWS,), DTYPE)
    count = tl.zeros((ROWS,), tl.float64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, real = bases(tile, rows, ROWS)
        x_base = offsets(row, outer, x_outer)
        keep = tl.load(mask + offsets(row, outer, mask_outer), mask=real, other=0) != 0
        wish = tl.load(target + offsets(row, outer, target_outer), mask=real & keep, other=ignored)
        keep = real & keep & (wish != ignored)
        a = tl.full((ROWS,), -float("inf"), DTYPE)
        b = tl.zeros((ROWS,), DTYPE)
        n = number(ROWS, WIDE, 0)
        level = tl.zeros((ROWS,), DTYPE)
        for start in range(0, length, ELEMENTS):
            index = cells(start, ELEMENTS, GROUP, WIDE)
            inside = tl.broadcast_to(keep[:, None, None], (ROWS, ELEMENTS // GROUP, GROUP)) & (index < length)
            value = take(x, x_base, inner, x_inner, index, inside, inside, -float("inf"), DTYPE)
            value, there = flat(value, ROWS, ELEMENTS), flat(inside, ROWS, ELEMENTS)
            la, lb, ln = lift(value, there, value, value, "logsumexp", 0, 0)
            ta, tb, tn = merge(la, lb, ln, "logsumexp", False)
            a, b, n = joined(a, b, n, ta, tb, tn, "logsumexp", False)
            if smoothing != 0.0:
                level += tl.sum(tl.where(there, value, 0.0), 1)
        stray = keep & ((wish < 0) | (wish >= length))
        tl.device_assert(stray == 0, "cross_entropy: a kept target is a class that does not exist")
        chosen = tl.where(keep & (stray == 0), wish, 0)
        if WIDE == 0:
            chosen = chosen.to(tl.int32)
        mine = tl.load(x + x_base + offsets(chosen, inner, x_inner), mask=keep, other=0).to(DTYPE)
        log_sum = tl.log(b) + tl.where(tl.abs(a) == float("inf"), 0.0, a)
        log_sum = tl.where(a == float("inf"), float("nan"), log_sum)
        loss = log_sum - mine
        share = tl.full((ROWS,), 1.0, DTYPE)
        if weight is not None:
            share = tl.load(weight + chosen, mask=keep, other=0).to(DTYPE)
            loss = loss * share
        if smoothing != 0.0:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - level / length)
        loss = tl.where(keep, tl.where(stray, float("nan"), loss), 0.0)
        if not REDUCED:
            tl.store(out + row, loss.to(out.dtype.element_ty), mask=real)
        tl.store(sums + row, tl.where(keep, tl.where(stray, float("nan"), log_sum), 0.0).to(tl.float64), mask=real)
        total += loss
        count += tl.where(keep, share, 0.0).to(tl.float64)
    total_of_all, count_of_all = tl.sum(total, 0), tl.sum(count, 0)
    put_together(out, facts, part, part_n, counter, total_of_all, count_of_all, mean, REDUCED, PROGRAMS, True)


@triton.jit(do_not_specialize=["mean", "ignored"])
def class_backward_kernel(
    grad, x, target, mask, weight, sums, facts, of_x,
    outer, inner, x_outer, x_inner, target_outer, mask_outer, of_x_outer, of_x_inner,
    rows, length, tiles, steps, ignored, mean, smoothing: tl.constexpr,
    REDUCED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of cross entropy."""
    for job in range(tl.program_id(0), tiles * steps, tl.num_programs(0)):
        row, real = bases(job // steps, rows, ROWS)
        keep = tl.load(mask + offsets(row, outer, mask_outer), mask=real, other=0) != 0
        wish = tl.load(target + offsets(row, outer, target_outer), mask=real & keep, other=ignored)
        keep = real & keep & (wish != ignored)
        index = cells(beginning(job % steps, ELEMENTS, WIDE), ELEMENTS, GROUP, WIDE)
        inside = real[:, None, None] & (index < length)
        wanted = tl.broadcast_to(keep[:, None, None], inside.shape) & inside
        value = take(x, offsets(row, outer, x_outer), inner, x_inner, index, wanted, wanted, 0.0, DTYPE)
        if REDUCED:
            g = tl.load(grad + row * 0, mask=keep, other=0).to(DTYPE) / divisor_of(tl.load(facts), mean).to(DTYPE)
        else:
            g = tl.load(grad + row, mask=keep, other=0).to(DTYPE)
        if weight is not None:
            # A class that is none has no weight to be read; its row is NaN, for so is its sum.
            there = keep & (wish >= 0) & (wish < length)
            g = g * tl.load(weight + wish, mask=there, other=0).to(DTYPE)
        log_sum = tl.load(sums + row, mask=keep, other=0).to(DTYPE)
        # In DTYPE from the start: a number of its own would be one of float32.
        chosen = tl.where(index == wish[:, None, None], tl.full((), 1.0 - smoothing, DTYPE), 0.0)
        even = tl.full((), smoothing, DTYPE) / length
        result = (tl.exp(value - log_sum[:, None, None]) - chosen - even) * g[:, None, None]
        put(of_x, offsets(row, outer, of_x_outer), inner, of_x_inner, index, inside, tl.where(wanted, result, 0.0))
