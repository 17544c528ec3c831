"""The scans and their gradients as Triton kernels: tile by tile along rows, with a carry from tile to tile.

A few long rows are split between programs: reduce, then scan. Gradients do the same, in reverse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import (
    accumulate,
    bases,
    cells,
    covered,
    divided,
    extents,
    initial,
    joined,
    mask_row_at,
    merge,
    number,
    offsets,
    part_range,
    put,
    row_at,
    shifted,
    take,
    tile_at,
)

__all__ = ["product_backward_kernel", "scan_backward_kernel", "scan_kernel"]


# -- combinations of two, the first being the earlier ------------------------------------------------------------------
@triton.jit
def add(a, b):
    """The sum."""
    return a + b


@triton.jit
def multiply(a, b):
    """The product."""
    return a * b


@triton.jit
def add_exponentials(a, s, b, t):
    """Combine two sums of exponentials, each as its largest exponent and the sum relative to it."""
    high = tl.where(a > b, a, b)
    shift = tl.where(tl.abs(high) == float("inf"), 0.0, high)
    first = tl.where(s == 0.0, 0.0, s * tl.exp(tl.where(tl.abs(a) == float("inf"), 0.0, a) - shift))
    second = tl.where(t == 0.0, 0.0, t * tl.exp(tl.where(tl.abs(b) == float("inf"), 0.0, b) - shift))
    return high, first + second


@triton.jit
def latest_greatest(a, i, b, j):
    """The greater value with its index; ties take the higher index; NaN wins; index -1 means none."""
    second = ((b >= a) & (a == a)) | (b != b)
    second = (i < 0) | ((j >= 0) & second)
    return tl.where(second, b, a), tl.where(second, j, i)


@triton.jit
def latest_least(a, i, b, j):
    """The lesser value with its index; otherwise as `latest_greatest`."""
    second = ((b <= a) & (a == a)) | (b != b)
    second = (i < 0) | ((j >= 0) & second)
    return tl.where(second, b, a), tl.where(second, j, i)


@triton.jit
def add_same_key(a, i, b, j):
    """The sum of values with the same key; another key restarts it."""
    return tl.where(i == j, a + b, b), j


@triton.jit
def multiply_count_zeros(a, n, b, m):
    """The product of the nonzeros, and the number of zeros."""
    return a * b, n + m


# -- forward -----------------------------------------------------------------------------------------------------------
@triton.jit
def flat(x, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr):
    """A tile of (ROWS, lanes, GROUP) reshaped to (ROWS, ELEMENTS), along which it is scanned, unless GROUP is 1.

    A tile that keeps its shape keeps its layout: no thread hands over what it stores.
    """
    if GROUP > 1:
        x = tl.reshape(x, (ROWS, ELEMENTS))
    return x


@triton.jit
def columns(ELEMENTS: tl.constexpr, GROUP: tl.constexpr):
    """The places along a flat tile."""
    out = tl.arange(0, ELEMENTS)[None, :]
    if GROUP == 1:
        out = out[:, :, None]
    return out


@triton.jit
def beside(x, GROUP: tl.constexpr):
    """One number for each row, (ROWS,), as a flat tile has it."""
    out = x[:, None]
    if GROUP == 1:
        out = out[:, :, None]
    return out


@triton.jit
def along(x, GROUP: tl.constexpr):
    """The sums of a flat tile's rows."""
    out = tl.sum(x, 1)
    if GROUP == 1:
        return out[:, None, :]
    return out[:, None]


@triton.jit
def carried(
    part_a, part_b, part_n, row, real, rows, begin, end,
    STATE: tl.constexpr, IDENTITY: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """What the parts of rows from one to another come to, from the launch before."""
    # In steps, so that a thread holds but a few of them.
    STEP: tl.constexpr = min(SPLITS, max(1, 1024 // ROWS))
    a, b, n = initial(STATE, IDENTITY, DTYPE, True, ROWS, STEP)
    for start in range(begin, end, STEP):
        each = start + tl.arange(0, STEP)
        at = each[None, :] * rows + row[:, None]
        there = real[:, None] & (each < end)[None, :]
        ta = tl.load(part_a + at, mask=there, other=IDENTITY)
        tb, tn = b, n
        if STATE == "logsumexp":
            tb = tl.load(part_b + at, mask=there, other=0)
        elif STATE == "cummax" or STATE == "cummin":
            tn = tl.load(part_n + at, mask=there, other=-1)
        elif STATE == "nonzeros":
            tn = tl.load(part_n + at, mask=there, other=0)
        a, b, n = joined(a, b, n, ta, tb, tn, STATE, STATE == "nonzeros")
    total_a, total_b, total_n = merge(a, b, n, STATE, STATE == "nonzeros", 1)
    if STATE == "logsumexp":
        # A sum of exponentials with an exponent that is always finite, unless there are none.
        total_a = tl.where(tl.abs(total_a) == float("inf"), 0.0, total_a)
        total_a = tl.where(total_b == 0.0, -float("inf"), total_a)
    if not WIDE:
        total_n = total_n.to(tl.int32)
    return total_a, total_b, total_n


@triton.jit(do_not_specialize=["rows", "tiles", "splits", "unit", "size", "step"])
def scan_kernel(
    x, mask, out, indices, part_a, part_b, part_n,
    outer, inner, x_outer, x_inner, mask_outer, mask_inner, out_outer, out_inner,
    rows, length, tiles, splits, unit, size, step,
    OP: tl.constexpr, STATE: tl.constexpr, PASS: tl.constexpr, IDENTITY: tl.constexpr, DTYPE: tl.constexpr,
    TRUTH: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A running sum, product, extremum or logsumexp of kept elements.

    Of split rows a first launch, "totals", leaves what each part comes to; each part then starts with those before it.
    """
    for job in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        tile, part = divided(job, splits)
        row, real = bases(tile, rows, ROWS)
        begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, WIDE)
        lead = shifted(offsets(row, outer, x_outer), ALIGN, GROUP, WIDE)
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        out_row = row_at(row, lead, outer, out_outer, out_inner, ALIGN, GROUP)
        first, last, stop = begin + lead, end + lead, length + lead
        low, high = part_range(first, last, lead, stop, part, splits, False, ELEMENTS)
        if PASS == "totals":
            mask_row = mask_row_at(row, lead, outer, mask_outer, mask_inner, ALIGN, BITS, GROUP)
            first, last = tl.maximum(first, low), tl.minimum(last, high)
            last = tl.maximum(first, last)
            none = tl.zeros((ROWS,), DTYPE)
            a, b, n = accumulate(
                x, mask, x_row, mask_row, inner, x_inner, mask_inner, lead, first, last, real, none,
                STATE, 0.0, IDENTITY, DTYPE, TRUTH, MASK, BITS, ALIGN, SIDE, False, WIDE, ROWS, ELEMENTS, GROUP,
            )  # fmt: skip
            at = part * rows + row
            tl.store(part_a + at, a, mask=real)
            if STATE == "logsumexp":
                tl.store(part_b + at, b, mask=real)
            if STATE == "cummax" or STATE == "cummin":
                tl.store(part_n + at, n, mask=real)
        else:
            a = beside(tl.full((ROWS,), IDENTITY, DTYPE), GROUP)
            s = beside(tl.zeros((ROWS,), DTYPE), GROUP)
            n = beside(number(ROWS, WIDE, -1), GROUP)
            if SPLITS > 0:
                a, s, n = carried(
                    part_a, part_b, part_n, row, real, rows, 0, part, STATE, IDENTITY, DTYPE, WIDE, ROWS, SPLITS,
                )  # fmt: skip
                a, s, n = beside(a, GROUP), beside(s, GROUP), beside(n, GROUP)
            for start in range(low, high, ELEMENTS):
                cell, inside, near, keep, whole = tile_at(
                    mask, start, row, real, lead, first, last, stop, outer, inner, mask_outer, mask_inner,
                    False, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
                )  # fmt: skip
                value = take(x, x_row, inner, x_inner, cell, near, keep, IDENTITY, DTYPE, TRUTH)
                value, kept = flat(value, ROWS, ELEMENTS, GROUP), flat(keep, ROWS, ELEMENTS, GROUP)
                column = columns(ELEMENTS, GROUP)
                last_one = ELEMENTS - 1
                if OP == "cumsum":
                    result = a + tl.associative_scan(value, 1, add)
                    a = along(tl.where(column == last_one, result, 0), GROUP)
                elif OP == "cumprod":
                    result = a * tl.associative_scan(value, 1, multiply)
                    a = along(tl.where(column == last_one, result, 0), GROUP)
                elif OP == "logcumsumexp":
                    one = tl.where(kept & (value != -float("inf")), 1.0, 0.0).to(DTYPE)
                    # Unlike any other exponent, exp(inf) is not relative to the largest exponent.
                    one = tl.where(value == float("inf"), float("inf"), one)
                    exponent, total = tl.associative_scan((value, one), 1, add_exponentials)
                    exponent, total = add_exponentials(a, s, exponent, total)
                    finite = tl.where(tl.abs(exponent) == float("inf"), 0.0, exponent)
                    result = tl.log(total) + finite
                    a = along(tl.where(column == last_one, finite, 0.0), GROUP)
                    s = along(tl.where(column == last_one, total, 0), GROUP)
                    # An empty sum has exponent -inf, which the masked sum above cannot extract.
                    a = tl.where(s == 0.0, -float("inf"), a)
                else:
                    position = flat(tl.broadcast_to(cell - lead[:, None, None], inside.shape), ROWS, ELEMENTS, GROUP)
                    position = tl.where(kept, position, -1)
                    if OP == "cummax":
                        result, position = tl.associative_scan((value, position), 1, latest_greatest)
                        result, position = latest_greatest(a, n, result, position)
                    else:
                        result, position = tl.associative_scan((value, position), 1, latest_least)
                        result, position = latest_least(a, n, result, position)
                    n = along(tl.where(column == last_one, position, 0), GROUP).to(n.dtype)
                    # The masked sum extracts NaN and inf as well, since the rest of the tile is 0.
                    a = along(tl.where(column == last_one, result, 0), GROUP)
                    at = tl.reshape(position, inside.shape)
                    put(indices, out_row, inner, out_inner, cell, inside, whole, at)
                put(out, out_row, inner, out_inner, cell, inside, whole, tl.reshape(result, inside.shape))


# -- backward ----------------------------------------------------------------------------------------------------------
@triton.jit
def gradient_totals(
    grad, saved, grad_row, saved_row, inner, grad_inner, saved_inner, low, high, first, last, real,
    OP: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What a part of rows adds to the gradients before it: ``a``, ``b`` and a key.

    Of an extremum, the sum of the gradients with the key of the part's first element, and that key: equal keys are
    adjacent. Of a logsumexp, the gradients by their exponents.
    """
    key = first
    if OP == "extreme":
        beginning_at = saved + saved_row + offsets(first, inner, saved_inner)
        key = tl.load(beginning_at, mask=real & (first < last), other=-2)
    a, b, n = initial("logsumexp", -float("inf") if OP == "exponentials" else 0.0, DTYPE, WIDE, ROWS, ELEMENTS // GROUP)
    for start in range(low, high, ELEMENTS):
        cell = cells(start, ELEMENTS, GROUP, WIDE)
        inside, near = covered(start, first, last, real, "along", ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP)
        g = take(grad, grad_row, inner, grad_inner, cell, near, inside, 0.0, DTYPE)
        at = saved + saved_row[:, None, None] + offsets(cell, inner, saved_inner)
        if OP == "extreme":
            same = tl.load(at, mask=inside, other=-1) == key[:, None, None]
            a += tl.sum(tl.where(same, g, 0.0), 2)
        else:
            out = tl.load(at, mask=inside, other=float("inf")).to(DTYPE)
            there = tl.abs(out) != float("inf")
            exponent, weight = tl.where(there, -out, -float("inf")), tl.where(there, g, 0.0)
            ta, tb, tn = merge(exponent, weight, inside.to(tl.int32), "logsumexp", False, 2)
            a, b, n = joined(a, b, n, ta, tb, tn, "logsumexp", False)
    if OP == "extreme":
        return tl.sum(a, 1), tl.sum(b, 1), key
    a, b, n = merge(a, b, n, "logsumexp", False, 1)
    return a, b, key


@triton.jit
def same_key(
    part_a, part_n, row, real, rows, begin, end, DTYPE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """The sum of the parts of rows, from one to another, with the key of the first of them; and that key."""
    STEP: tl.constexpr = min(SPLITS, max(1, 1024 // ROWS))
    key = tl.load(part_n + begin * rows + row, mask=real & (row * 0 + begin < end), other=-2)
    a = tl.zeros((ROWS, STEP), DTYPE)
    for start in range(begin, end, STEP):
        each = start + tl.arange(0, STEP)
        at = each[None, :] * rows + row[:, None]
        there = real[:, None] & (each < end)[None, :]
        same = tl.load(part_n + at, mask=there, other=-3) == key[:, None]
        a += tl.where(same, tl.load(part_a + at, mask=there, other=0), 0.0)
    return tl.sum(a, 1), key


@triton.jit(do_not_specialize=["rows", "tiles", "splits", "unit", "size", "step"])
def scan_backward_kernel(
    grad, x, mask, saved, grad_x, part_a, part_b, part_n,
    outer, inner, grad_outer, grad_inner, x_outer, x_inner, mask_outer, mask_inner, saved_outer, saved_inner,
    grad_x_outer, grad_x_inner,
    rows, length, tiles, splits, unit, size, step,
    OP: tl.constexpr, PASS: tl.constexpr, DTYPE: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr,
    ALIGN: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The gradient of a running sum, extremum (``saved``: its indices) or logsumexp (``saved``: the result)."""
    for job in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        tile, part = divided(job, splits)
        row, real = bases(tile, rows, ROWS)
        begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, WIDE)
        lead = shifted(offsets(row, outer, grad_x_outer), ALIGN, GROUP, WIDE)
        grad_row = row_at(row, lead, outer, grad_outer, grad_inner, ALIGN, GROUP)
        grad_x_row = row_at(row, lead, outer, grad_x_outer, grad_x_inner, ALIGN, GROUP)
        saved_row = row_at(row, lead, outer, saved_outer, saved_inner, ALIGN, GROUP)
        first, last, stop = begin + lead, end + lead, length + lead
        low, high = part_range(first, last, lead, stop, part, splits, False, ELEMENTS)
        if PASS == "totals":
            # All of a gradient counts, also where the element is dropped.
            from_here = tl.maximum(lead, low)
            to_there = tl.maximum(from_here, tl.where(real, tl.minimum(stop, high), 0))
            at = part * rows + row
            if OP == "sum":
                none = tl.zeros((ROWS,), DTYPE)
                total_of_part, _, _ = accumulate(
                    grad, mask, grad_row, grad_row, inner, grad_inner, grad_inner, lead, from_here, to_there, real,
                    none, "sum", 0.0, 0.0, DTYPE, False, "rows", False, ALIGN, SIDE, False, WIDE, ROWS, ELEMENTS,
                    GROUP,
                )  # fmt: skip
                tl.store(part_a + at, total_of_part, mask=real)
            else:
                of_part, scaled, key = gradient_totals(
                    grad, saved, grad_row, saved_row, inner, grad_inner, saved_inner, low, high, from_here, to_there,
                    real, OP, DTYPE, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
                )  # fmt: skip
                tl.store(part_a + at, of_part, mask=real)
                if OP == "extreme":
                    tl.store(part_n + at, key, mask=real)
                else:
                    tl.store(part_b + at, scaled, mask=real)
        else:
            a = beside(tl.zeros((ROWS,), DTYPE), GROUP)
            s = beside(tl.zeros((ROWS,), DTYPE), GROUP)
            n = beside(number(ROWS, WIDE, -2), GROUP)
            if SPLITS > 0:
                if OP == "exponentials":
                    of_a, of_s, _ = carried(
                        part_a, part_b, part_n, row, real, rows, part + 1, splits, "logsumexp", -float("inf"), DTYPE,
                        WIDE, ROWS, SPLITS,
                    )  # fmt: skip
                    s = beside(of_s, GROUP)
                elif OP == "extreme":
                    of_a, keys = same_key(part_a, part_n, row, real, rows, part + 1, splits, DTYPE, ROWS, SPLITS)
                    n = beside(keys.to(n.dtype), GROUP)
                else:
                    of_a, _, _ = carried(
                        part_a, part_b, part_n, row, real, rows, part + 1, splits, "sum", 0.0, DTYPE, WIDE, ROWS,
                        SPLITS,
                    )  # fmt: skip
                a = beside(of_a, GROUP)
            column = columns(ELEMENTS, GROUP)
            steps = (high - low + ELEMENTS - 1) // ELEMENTS
            for back in range(steps):
                cell, inside, near, keep, whole = tile_at(
                    mask, low + (steps - 1 - back) * ELEMENTS, row, real, lead, first, last, stop, outer, inner,
                    mask_outer, mask_inner, False, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
                )  # fmt: skip
                kept = flat(keep, ROWS, ELEMENTS, GROUP)
                g = flat(
                    take(grad, grad_row, inner, grad_inner, cell, inside, inside, 0.0, DTYPE), ROWS, ELEMENTS, GROUP
                )
                if OP == "extreme":
                    position = tl.load(
                        saved + saved_row[:, None, None] + offsets(cell, inner, saved_inner), mask=inside, other=-1
                    )
                    here = flat(tl.broadcast_to(cell - lead[:, None, None], inside.shape), ROWS, ELEMENTS, GROUP)
                    position = flat(position, ROWS, ELEMENTS, GROUP)
                    total, key = tl.associative_scan((g, position), 1, add_same_key, reverse=True)
                    total = tl.where((n == key), total + a, total)
                    a = along(tl.where(column == 0, total, 0), GROUP)
                    n = along(tl.where(column == 0, key, 0), GROUP).to(n.dtype)
                    result = tl.where(position == here, total, 0.0)
                elif OP == "sum":
                    total = a + tl.associative_scan(g, 1, add, reverse=True)
                    a = along(tl.where(column == 0, total, 0), GROUP)
                    result = tl.where(kept, total, 0.0)
                else:
                    x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
                    value = flat(take(x, x_row, inner, x_inner, cell, near, keep, 0.0, DTYPE), ROWS, ELEMENTS, GROUP)
                    out = take(saved, saved_row, inner, saved_inner, cell, inside, inside, 0.0, DTYPE)
                    out = flat(out, ROWS, ELEMENTS, GROUP)
                    # An empty sum has no gradient, and an infinite one none for finite terms.
                    there = flat(inside, ROWS, ELEMENTS, GROUP) & (tl.abs(out) != float("inf"))
                    exponent = tl.where(there, -out, -float("inf"))
                    exponent, total = tl.associative_scan(
                        (exponent, tl.where(there, g, 0.0)), 1, add_exponentials, reverse=True
                    )
                    before = tl.where(s == 0.0, -float("inf"), a)
                    exponent, total = add_exponentials(before, s, exponent, total)
                    finite = tl.where(tl.abs(exponent) == float("inf"), 0.0, exponent)
                    a = along(tl.where(column == 0, finite, 0.0), GROUP)
                    s = along(tl.where(column == 0, total, 0.0), GROUP)
                    counts = kept & (value != -float("inf")) & ((total != 0.0) | (value == float("inf")))
                    result = tl.where(counts, tl.exp(value + finite) * total, 0.0)
                put(grad_x, grad_x_row, inner, grad_x_inner, cell, inside, whole, tl.reshape(result, inside.shape))


@triton.jit(do_not_specialize=["rows", "tiles", "splits", "unit", "size", "step"])
def product_backward_kernel(
    grad, x, mask, scratch, grad_x, part_a, part_n, part_p, part_q,
    outer, inner, grad_outer, grad_inner, x_outer, x_inner, mask_outer, mask_inner, grad_x_outer, grad_x_inner,
    rows, length, tiles, splits, unit, size, step,
    PASS: tl.constexpr, DTYPE: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr,
    SIDE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The gradient of a running product.

    Before the first 0 of a row, the sum of the later grad * product, divided by the element; at that 0, the sum of the
    products without it, up to the second 0; and 0 from there on. A forward pass writes the products of the nonzeros to
    ``scratch``, and a reverse pass sums them: both in one launch, "all". Of split rows, "totals" leaves the product and
    the zeros of each part, "products" writes the products and leaves the sums of each part, and "sums" is the reverse
    pass.
    """
    for job in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        tile, part = divided(job, splits)
        row, real = bases(tile, rows, ROWS)
        begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, WIDE)
        lead = shifted(offsets(row, outer, x_outer), ALIGN, GROUP, WIDE)
        grad_row = row_at(row, lead, outer, grad_outer, grad_inner, ALIGN, GROUP)
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        grad_x_row = row_at(row, lead, outer, grad_x_outer, grad_x_inner, ALIGN, GROUP)
        first, last, stop = begin + lead, end + lead, length + lead
        low, high = part_range(first, last, lead, stop, part, splits, False, ELEMENTS)
        place = part * rows + row
        column = columns(ELEMENTS, GROUP)
        a = beside(tl.full((ROWS,), 1.0, DTYPE), GROUP)
        zeros = beside(number(ROWS, WIDE, 0), GROUP)
        before = beside(tl.zeros((ROWS,), DTYPE), GROUP)
        after = beside(tl.zeros((ROWS,), DTYPE), GROUP)
        if PASS == "products" or PASS == "sums":
            if PASS == "products":
                factors, _, zeros_before = carried(
                    part_a, part_a, part_n, row, real, rows, 0, part, "nonzeros", 1.0, DTYPE, WIDE, ROWS, SPLITS
                )
                a, zeros = beside(factors, GROUP), beside(zeros_before, GROUP)
            else:
                _, _, zeros_here = carried(
                    part_a, part_a, part_n, row, real, rows, 0, part + 1, "nonzeros", 1.0, DTYPE, WIDE, ROWS, SPLITS
                )
                of_p, _, _ = carried(
                    part_p, part_p, part_n, row, real, rows, part + 1, splits, "sum", 0.0, DTYPE, WIDE, ROWS, SPLITS
                )
                of_q, _, _ = carried(
                    part_q, part_q, part_n, row, real, rows, part + 1, splits, "sum", 0.0, DTYPE, WIDE, ROWS, SPLITS
                )
                zeros, before, after = beside(zeros_here, GROUP), beside(of_p, GROUP), beside(of_q, GROUP)
        steps = (high - low + ELEMENTS - 1) // ELEMENTS
        if PASS == "totals":
            mask_row = mask_row_at(row, lead, outer, mask_outer, mask_inner, ALIGN, BITS, GROUP)
            first, last = tl.maximum(first, low), tl.minimum(last, high)
            last = tl.maximum(first, last)
            none = tl.zeros((ROWS,), DTYPE)
            of_part, _, zeros_of_part = accumulate(
                x, mask, x_row, mask_row, inner, x_inner, mask_inner, lead, first, last, real, none,
                "nonzeros", 0.0, 1.0, DTYPE, False, MASK, BITS, ALIGN, SIDE, True, WIDE, ROWS, ELEMENTS, GROUP,
            )  # fmt: skip
            tl.store(part_a + place, of_part, mask=real)
            tl.store(part_n + place, zeros_of_part, mask=real)
        if PASS == "all" or PASS == "products":
            p = beside(tl.zeros((ROWS,), DTYPE), GROUP)
            q = beside(tl.zeros((ROWS,), DTYPE), GROUP)
            for forth in range(steps):
                cell, inside, near, keep, whole = tile_at(
                    mask, low + forth * ELEMENTS, row, real, lead, first, last, stop, outer, inner, mask_outer,
                    mask_inner, False, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
                )  # fmt: skip
                value = flat(take(x, x_row, inner, x_inner, cell, near, keep, 1.0, DTYPE), ROWS, ELEMENTS, GROUP)
                zero = (value == 0).to(tl.int32)
                product, count = tl.associative_scan((tl.where(value == 0, 1.0, value), zero), 1, multiply_count_zeros)
                product, count = product * a, count + zeros
                a = along(tl.where(column == ELEMENTS - 1, product, 0), GROUP)
                zeros = along(tl.where(column == ELEMENTS - 1, count, 0), GROUP)
                if PASS == "products":
                    g = flat(
                        take(grad, grad_row, inner, grad_inner, cell, inside, inside, 0.0, DTYPE), ROWS, ELEMENTS, GROUP
                    )
                    g = tl.where(flat(inside, ROWS, ELEMENTS, GROUP), g * product, 0.0)
                    p += along(tl.where(count == 0, g, 0.0), GROUP)
                    q += along(tl.where(count == 1, g, 0.0), GROUP)
                put(scratch, grad_x_row, inner, grad_x_inner, cell, inside, whole, tl.reshape(product, inside.shape))
            if PASS == "products":
                tl.store(part_p + beside(place, GROUP), p, mask=beside(real, GROUP))
                tl.store(part_q + beside(place, GROUP), q, mask=beside(real, GROUP))
            else:
                tl.debug_barrier()
        if PASS == "all" or PASS == "sums":
            for back in range(steps):
                cell, inside, near, keep, whole = tile_at(
                    mask, low + (steps - 1 - back) * ELEMENTS, row, real, lead, first, last, stop, outer, inner,
                    mask_outer, mask_inner, False, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
                )  # fmt: skip
                value = flat(take(x, x_row, inner, x_inner, cell, near, keep, 1.0, DTYPE), ROWS, ELEMENTS, GROUP)
                zero = (value == 0).to(tl.int32)
                # The number of zeros up to each position: the total minus the later ones.
                behind = tl.associative_scan(zero, 1, add, reverse=True)
                count = zeros - behind + zero
                zeros = zeros - along(zero, GROUP)
                product = take(scratch, grad_x_row, inner, grad_x_inner, cell, inside, inside, 0.0, DTYPE)
                g = take(grad, grad_row, inner, grad_inner, cell, inside, inside, 0.0, DTYPE) * product
                g = flat(g, ROWS, ELEMENTS, GROUP)
                none = before + tl.associative_scan(tl.where(count == 0, g, 0.0), 1, add, reverse=True)
                one = after + tl.associative_scan(tl.where(count == 1, g, 0.0), 1, add, reverse=True)
                before = along(tl.where(column == 0, none, 0), GROUP)
                after = along(tl.where(column == 0, one, 0), GROUP)
                safe = tl.where(value == 0, 1.0, value)
                result = tl.where(count == 0, none / safe, tl.where((count == 1) & (zero != 0), one, 0.0))
                result = tl.reshape(result, inside.shape)
                put(grad_x, grad_x_row, inner, grad_x_inner, cell, inside, whole, tl.where(keep, result, 0.0))
