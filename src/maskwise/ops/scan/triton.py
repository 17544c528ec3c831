"""The scans and their gradients as Triton kernels: tile by tile along rows, with a carry from tile to tile.

Gradients scan in reverse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import bases, beginning, cells, flat, keeps, number, offsets, put, read, window

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
def scan_kernel(
    x, mask, out, indices,
    outer, inner, x_outer, x_inner, mask_outer, mask_inner, out_outer, out_inner,
    rows, length, tiles,
    OP: tl.constexpr, IDENTITY: tl.constexpr, DTYPE: tl.constexpr, TRUTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """A running sum, product, extremum or logsumexp of kept elements."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, real = bases(tile, rows, ROWS)
        x_base, mask_base = offsets(row, outer, x_outer), offsets(row, outer, mask_outer)
        out_base = offsets(row, outer, out_outer)
        a = tl.full((ROWS, 1), IDENTITY, DTYPE)
        s = tl.zeros((ROWS, 1), DTYPE)
        n = number(ROWS, WIDE, -1)[:, None]
        for start in range(0, length, ELEMENTS):
            index, inside, keep, wanted = window(
                mask, mask_base, inner, mask_inner, real, start, length, WIDE, ELEMENTS, GROUP, SKIP
            )
            value = read(x, x_base, inner, x_inner, index, wanted, keep, IDENTITY, DTYPE, ROWS, ELEMENTS, TRUTH)
            kept = flat(keep, ROWS, ELEMENTS)
            column = tl.arange(0, ELEMENTS)[None, :]
            last = ELEMENTS - 1
            if OP == "cumsum":
                result = a + tl.associative_scan(value, 1, add)
                a = tl.sum(tl.where(column == last, result, 0), 1)[:, None]
            elif OP == "cumprod":
                result = a * tl.associative_scan(value, 1, multiply)
                a = tl.sum(tl.where(column == last, result, 0), 1)[:, None]
            elif OP == "logcumsumexp":
                one = tl.where(kept & (value != -float("inf")), 1.0, 0.0).to(DTYPE)
                # Unlike any other exponent, exp(inf) is not relative to the largest exponent.
                one = tl.where(value == float("inf"), float("inf"), one)
                high, total = tl.associative_scan((value, one), 1, add_exponentials)
                high, total = add_exponentials(a, s, high, total)
                result = tl.log(total) + tl.where(tl.abs(high) == float("inf"), 0.0, high)
                a = tl.sum(tl.where(column == last, tl.where(tl.abs(high) == float("inf"), 0.0, high), 0.0), 1)[:, None]
                s = tl.sum(tl.where(column == last, total, 0), 1)[:, None]
                # An empty sum has exponent -inf, which the masked sum above cannot extract.
                a = tl.where(s == 0.0, -float("inf"), a)
            else:
                position = flat(tl.broadcast_to(index, inside.shape), ROWS, ELEMENTS)
                position = tl.where(kept, position, -1)
                if OP == "cummax":
                    result, position = tl.associative_scan((value, position), 1, latest_greatest)
                    result, position = latest_greatest(a, n, result, position)
                else:
                    result, position = tl.associative_scan((value, position), 1, latest_least)
                    result, position = latest_least(a, n, result, position)
                n = tl.sum(tl.where(column == last, position, 0), 1)[:, None]
                # The masked sum extracts NaN and inf as well, since the rest of the tile is 0.
                a = tl.sum(tl.where(column == last, result, 0), 1)[:, None]
                put(indices, out_base, inner, out_inner, index, inside, position)
            put(out, out_base, inner, out_inner, index, inside, result)


# -- backward ----------------------------------------------------------------------------------------------------------
@triton.jit
def scan_backward_kernel(
    grad, x, mask, saved, grad_x,
    outer, inner, grad_outer, grad_inner, x_outer, x_inner, mask_outer, mask_inner, saved_outer, saved_inner,
    grad_x_outer, grad_x_inner,
    rows, length, tiles, steps,
    OP: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
    GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The gradient of a running sum, extremum (``saved``: its indices) or logsumexp (``saved``: the result)."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, real = bases(tile, rows, ROWS)
        grad_base, grad_x_base = offsets(row, outer, grad_outer), offsets(row, outer, grad_x_outer)
        a = tl.zeros((ROWS, 1), DTYPE)
        s = tl.zeros((ROWS, 1), DTYPE)
        n = number(ROWS, WIDE, -2)[:, None]
        column = tl.arange(0, ELEMENTS)[None, :]
        for step in range(steps):
            index = cells(beginning(steps - 1 - step, ELEMENTS, WIDE), ELEMENTS, GROUP, WIDE)
            inside = real[:, None, None] & (index < length)
            g = read(grad, grad_base, inner, grad_inner, index, inside, inside, 0.0, DTYPE, ROWS, ELEMENTS)
            if OP == "extreme":
                saved_base = offsets(row, outer, saved_outer)
                position = tl.load(
                    saved + saved_base[:, None, None] + offsets(index, inner, saved_inner), mask=inside, other=-1
                )
                here = tl.broadcast_to(index, inside.shape)
                position, here = flat(position, ROWS, ELEMENTS), flat(here, ROWS, ELEMENTS)
                total, key = tl.associative_scan((g, position), 1, add_same_key, reverse=True)
                total = tl.where((n == key), total + a, total)
                a = tl.sum(tl.where(column == 0, total, 0), 1)[:, None]
                n = tl.sum(tl.where(column == 0, key, 0), 1)[:, None].to(n.dtype)
                result = tl.where(position == here, total, 0.0)
            else:
                mask_base = offsets(row, outer, mask_outer)
                keep, wanted = keeps(mask, mask_base, inner, mask_inner, index, inside, SKIP)
                kept = flat(keep, ROWS, ELEMENTS)
                if OP == "sum":
                    total = a + tl.associative_scan(g, 1, add, reverse=True)
                    a = tl.sum(tl.where(column == 0, total, 0), 1)[:, None]
                    result = tl.where(kept, total, 0.0)
                else:
                    x_base, saved_base = offsets(row, outer, x_outer), offsets(row, outer, saved_outer)
                    value = read(x, x_base, inner, x_inner, index, wanted, keep, 0.0, DTYPE, ROWS, ELEMENTS)
                    out = read(saved, saved_base, inner, saved_inner, index, inside, inside, 0.0, DTYPE, ROWS, ELEMENTS)
                    # An empty sum has no gradient, and an infinite one none for finite terms.
                    there = flat(inside, ROWS, ELEMENTS) & (tl.abs(out) != float("inf"))
                    exponent = tl.where(there, -out, -float("inf"))
                    high, total = tl.associative_scan(
                        (exponent, tl.where(there, g, 0.0)), 1, add_exponentials, reverse=True
                    )
                    before = tl.where(s == 0.0, -float("inf"), a)
                    high, total = add_exponentials(before, s, high, total)
                    finite = tl.where(tl.abs(high) == float("inf"), 0.0, high)
                    a = tl.sum(tl.where(column == 0, finite, 0.0), 1)[:, None]
                    s = tl.sum(tl.where(column == 0, total, 0.0), 1)[:, None]
                    part = kept & (value != -float("inf")) & ((total != 0.0) | (value == float("inf")))
                    result = tl.where(part, tl.exp(value + finite) * total, 0.0)
            put(grad_x, grad_x_base, inner, grad_x_inner, index, inside, result)


@triton.jit
def product_backward_kernel(
    grad, x, mask, scratch, grad_x,
    outer, inner, grad_outer, grad_inner, x_outer, x_inner, mask_outer, mask_inner, grad_x_outer, grad_x_inner,
    rows, length, tiles, steps,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    """The gradient of a running product.

    Before the first 0 of a row, the sum of the later grad * product, divided by the element; at that 0, the sum of the
    products without it, up to the second 0; and 0 from there on. A forward pass writes the products of the nonzeros to
    ``scratch``, and a reverse pass sums them.
    """
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, real = bases(tile, rows, ROWS)
        grad_base, x_base = offsets(row, outer, grad_outer), offsets(row, outer, x_outer)
        mask_base, grad_x_base = offsets(row, outer, mask_outer), offsets(row, outer, grad_x_outer)
        column = tl.arange(0, ELEMENTS)[None, :]
        a = tl.full((ROWS, 1), 1.0, DTYPE)
        zeros = tl.zeros((ROWS, 1), tl.int32)
        for step in range(steps):
            start = beginning(step, ELEMENTS, WIDE)
            index, inside, keep, wanted = window(
                mask, mask_base, inner, mask_inner, real, start, length, WIDE, ELEMENTS, GROUP, SKIP
            )
            value = read(x, x_base, inner, x_inner, index, wanted, keep, 1.0, DTYPE, ROWS, ELEMENTS)
            zero = (value == 0).to(tl.int32)
            product, count = tl.associative_scan((tl.where(value == 0, 1.0, value), zero), 1, multiply_count_zeros)
            product, count = product * a, count + zeros
            a = tl.sum(tl.where(column == ELEMENTS - 1, product, 0), 1)[:, None]
            zeros = tl.sum(tl.where(column == ELEMENTS - 1, count, 0), 1)[:, None]
            put(scratch, grad_x_base, inner, grad_x_inner, index, inside, product)
        tl.debug_barrier()
        before = tl.zeros((ROWS, 1), DTYPE)
        after = tl.zeros((ROWS, 1), DTYPE)
        for step in range(steps):
            start = beginning(steps - 1 - step, ELEMENTS, WIDE)
            index, inside, keep, wanted = window(
                mask, mask_base, inner, mask_inner, real, start, length, WIDE, ELEMENTS, GROUP, SKIP
            )
            value = read(x, x_base, inner, x_inner, index, wanted, keep, 1.0, DTYPE, ROWS, ELEMENTS)
            zero = (value == 0).to(tl.int32)
            # The number of zeros up to each position: the total minus the later ones.
            behind = tl.associative_scan(zero, 1, add, reverse=True)
            count = zeros - behind + zero
            zeros = zeros - tl.sum(zero, 1)[:, None]
            product = read(scratch, grad_x_base, inner, grad_x_inner, index, inside, inside, 0.0, DTYPE, ROWS, ELEMENTS)
            g = read(grad, grad_base, inner, grad_inner, index, inside, inside, 0.0, DTYPE, ROWS, ELEMENTS) * product
            none = before + tl.associative_scan(tl.where(count == 0, g, 0.0), 1, add, reverse=True)
            one = after + tl.associative_scan(tl.where(count == 1, g, 0.0), 1, add, reverse=True)
            before = tl.sum(tl.where(column == 0, none, 0), 1)[:, None]
            after = tl.sum(tl.where(column == 0, one, 0), 1)[:, None]
            safe = tl.where(value == 0, 1.0, value)
            result = tl.where(count == 0, none / safe, tl.where((count == 1) & (zero != 0), one, 0.0))
            put(
                grad_x,
                grad_x_base,
                inner,
                grad_x_inner,
                index,
                inside,
                tl.where(flat(keep, ROWS, ELEMENTS), result, 0.0),
            )
