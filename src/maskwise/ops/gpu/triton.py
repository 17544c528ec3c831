"""The engine of all kernels that work on rows: addresses, what of a row is kept, loads, and accumulators.

A tile is (ROWS, lanes, GROUP): GROUP elements that are adjacent in memory are one 16-byte load of one thread. A
reduction has up to three accumulators, ``a``, ``b`` and ``n``: `lift` initializes those of single elements, `merge`
reduces a tile along one of its dims, and `joined` combines two. While it loops over a row, each thread has accumulators
of its own, (ROWS, lanes): threads exchange them once, after the loop.

What is kept of a row is first of all a range, from `extents`. What lies outside of it is not loaded. A mask of bits is
read besides, at the same time as x; values that it drops are replaced after the load.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "accumulate", "bases", "beginning", "cells", "covered", "divided", "extents", "greater", "hinted", "initial",
    "is_last", "joined", "keeps", "lesser", "lift", "mask_row_at", "merge", "merge_rows", "norm_of", "number",
    "offsets", "part_of", "part_range", "power", "put", "row_at", "shifted", "take", "tile_at", "tl",
]  # fmt: skip


# -- addresses ---------------------------------------------------------------------------------------------------------
@triton.jit
def offsets(index, sizes, strides):
    """The offset of an element from its row-major index."""
    offset = index * 0
    for d in tl.static_range(len(sizes) - 1, 0, -1):
        offset += (index % sizes[d]) * strides[d]
        index = index // sizes[d]
    return offset + index * strides[0]


@triton.jit
def bases(tile, rows, ROWS: tl.constexpr):
    """The row indices of a tile, and which are in range: 64-bit, which costs little for one index per row."""
    row = beginning(tile, ROWS, True) + tl.arange(0, ROWS)
    return row, row < rows


@triton.jit
def divided(job, parts):
    """Which tile of rows a job is of, and which part of it."""
    # Without a sign, a division is shorter.
    whole = tl.cast(job, tl.uint32)
    tile = whole // tl.cast(parts, tl.uint32)
    return tile.to(tl.int32), (whole - tile * tl.cast(parts, tl.uint32)).to(tl.int32)


@triton.jit
def beginning(tile, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """The start of a tile; its number fits 32 bits, but the product may not."""
    if WIDE:
        tile = tl.cast(tile, tl.int64)
    return tile * SIZE


@triton.jit
def cells(start, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr):
    """The indices of a tile's elements within their row: (1, lanes, GROUP)."""
    groups = tl.arange(0, ELEMENTS // GROUP)[None, :, None] * GROUP
    index = groups + tl.arange(0, GROUP)[None, None, :]
    if WIDE:
        index = index.to(tl.int64)
    return start + index


@triton.jit
def vectors(start, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr):
    """The indices at which a tile's vectors begin: (1, lanes, 1)."""
    index = tl.arange(0, ELEMENTS // GROUP)[None, :, None] * GROUP
    if WIDE:
        index = index.to(tl.int64)
    return start + index


@triton.jit
def across(real, ALIGN: tl.constexpr):
    """Which rows are real: (ROWS, 1, 1). Of columns that are "even", 16 are or none."""
    out = real[:, None, None]
    if ALIGN == "even":
        out = tl.max_constancy(out, [16, 1, 1])
    return out


@triton.jit
def number(ROWS: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr):
    """An index or a count for each row."""
    out = tl.full((ROWS,), VALUE, tl.int32)
    if WIDE:
        out = out.to(tl.int64)
    return out


# -- what of a row is kept ---------------------------------------------------------------------------------------------
@triton.jit
def extents(
    mask, row, real, outer, mask_outer, length, unit, size, step, MASK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The range of each row outside of which nothing is kept; an empty one where the row is not real.

    MASK: "bits" may be anywhere in the row; "rows" has a byte for each row; "along" has intervals of ``size`` times
    ``unit`` elements along the row, and "across" keeps whole rows, those whose index along one of the outer dims is in
    an interval. Of intervals, the ends are ``step`` behind the starts.
    """
    begin = row * 0
    end = begin + length
    if MASK == "rows":
        byte = tl.load(mask + offsets(row, outer, mask_outer), mask=real, other=0)
        end = tl.where(byte != 0, end, 0)
    elif MASK != "bits":
        at = mask + offsets(row, outer, mask_outer)
        start = tl.load(at, mask=real, other=0).to(tl.int64)
        stop = tl.load(at + step, mask=real, other=0).to(tl.int64)
        if MASK == "along":
            begin = tl.minimum(tl.maximum(start, 0), size) * unit
            end = tl.minimum(tl.maximum(stop, 0), size) * unit
        else:
            place = (row // unit) % size
            end = tl.where((start <= place) & (place < stop), end, 0)
    end = tl.where(real, end, 0)
    end = tl.maximum(begin, end)
    if not WIDE:
        begin, end = begin.to(tl.int32), end.to(tl.int32)
    return begin, end


@triton.jit
def shifted(x_row, ALIGN: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr):
    """How far rows begin behind the last 16-byte boundary, in elements: loads start there."""
    lead = x_row * 0
    if ALIGN == "shifted":
        lead = x_row % GROUP
    if not WIDE:
        lead = lead.to(tl.int32)
    return lead


@triton.jit
def hinted(row, ALIGN: tl.constexpr, GROUP: tl.constexpr):
    """The offset of a row, which is a multiple of a vector unless ALIGN is "", so that the compiler knows it."""
    if ALIGN != "":
        # By shifts, which are one instruction; a division of 64 bits is five, but of 16 elements of a byte the compiler
        # then leaves pointers in loops, which are fewer instructions than an address for each load.
        LOG: tl.constexpr = (GROUP >= 2) + (GROUP >= 4) + (GROUP >= 8)
        if GROUP < 16:
            row = (row >> LOG) << LOG
        else:
            row = row // GROUP * GROUP
    return row


@triton.jit
def row_at(row, lead, outer, x_outer, x_inner, ALIGN: tl.constexpr, GROUP: tl.constexpr):
    """The offset at which the first vector of a row begins."""
    at = offsets(row, outer, x_outer)
    if x_inner[len(x_inner) - 1] == 1:
        at = hinted(at - lead, ALIGN, GROUP)
    elif ALIGN == "shifted":
        at = at - lead * x_inner[len(x_inner) - 1]
    return at


@triton.jit
def mask_row_at(row, lead, outer, mask_outer, mask_inner, ALIGN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The same of a mask, whose vectors may lie otherwise than those of x."""
    at = offsets(row, outer, mask_outer) - lead * mask_inner[len(mask_inner) - 1]
    if BITS:
        at = hinted(at, ALIGN, GROUP)
    return at


@triton.jit
def covered(start, first, last, real, MASK: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
            ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """The elements of a tile that are in the range of their row, and those that are loaded: whole vectors.

    A vector of which one byte may be read may be read as a whole: it does not cross a 16-byte boundary.
    """
    if ALIGN == "even" and SIDE == "rows" and MASK != "along":
        # Ranges are rows, or nothing: all of a vector is in its range, or none of it.
        keep = vectors(start, ELEMENTS, GROUP, WIDE) < last[:, None, None]
        keep = tl.broadcast_to(keep, (ROWS, ELEMENTS // GROUP, GROUP))
        return keep, keep
    cell = cells(start, ELEMENTS, GROUP, WIDE)
    keep = (cell >= first[:, None, None]) & (cell < last[:, None, None])
    near = keep
    if SIDE == "columns":
        # Vectors lie across rows.
        near = across(real, ALIGN) & (cell < tl.max(last, 0))
        if MASK == "bits":
            keep = near
    elif ALIGN != "":
        vector = vectors(start, ELEMENTS, GROUP, WIDE)
        near = (vector < last[:, None, None]) & (vector + GROUP > first[:, None, None])
        near = tl.broadcast_to(near, (ROWS, ELEMENTS // GROUP, GROUP))
    return keep, near


@triton.jit
def bits_at(mask, mask_row, inner, mask_inner, cell, BITS: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr):
    """Where the bytes of a mask are. BITS is how many one load of a thread reads: as many as it loads elements of x.

    If a thread loaded more of them, it would exchange them with other threads, in shared memory.
    """
    at = mask + mask_row[:, None, None] + offsets(cell, inner, mask_inner)
    if SIDE == "columns":
        at = tl.max_contiguous(at, [max(BITS, 1), 1, 1])
    elif GROUP == 1:
        at = tl.max_contiguous(at, [1, 1, 1])
    return at


@triton.jit
def keeps(
    mask, mask_row, inner, mask_inner, cell, keep, near,
    MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Which elements of a tile are kept. BITS: whether the mask is loaded in vectors, as x is."""
    if MASK == "bits":
        at = bits_at(mask, mask_row, inner, mask_inner, cell, BITS, SIDE, GROUP)
        if BITS > 0 and ALIGN != "even":
            keep = keep & (tl.load(at, mask=near, other=0) != 0)
        else:
            keep = tl.load(at, mask=keep, other=0) != 0
    return keep


@triton.jit
def take(x, row, sizes, strides, cell, near, keep, other, DTYPE: tl.constexpr, TRUTH: tl.constexpr = False):
    """The values of a tile, ``other`` where they are dropped, so that dropped values cannot leak.

    TRUTH: the values are bytes of a bool tensor, where any nonzero byte is True.
    """
    value = tl.load(x + row[:, None, None] + offsets(cell, sizes, strides), mask=near, other=0)
    if TRUTH:
        value = value != 0
    return tl.where(keep, value.to(DTYPE), other)


@triton.jit
def unsigned(value, LOWEST: tl.constexpr):
    """How far signed integers are above their lowest one, -LOWEST: without a sign, widening takes no instruction."""
    if LOWEST == 2**7:
        out = (value.to(tl.uint8, bitcast=True) ^ LOWEST).to(tl.int32)
    elif LOWEST == 2**15:
        out = (value.to(tl.uint16, bitcast=True) ^ LOWEST).to(tl.int32)
    else:
        out = (value.to(tl.uint32, bitcast=True) ^ LOWEST).to(tl.int64)
    return out


@triton.jit
def put(out, row, sizes, strides, cell, inside, whole, value):
    """Store a tile; one that is ``whole`` is in range with all its elements."""
    at = out + row[:, None, None] + offsets(cell, sizes, strides)
    value = value.to(out.dtype.element_ty)
    if whole:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=inside)


# -- combinations of two -----------------------------------------------------------------------------------------------
@triton.jit
def times(a, b):
    """The product."""
    return a * b


@triton.jit
def greater(a, b):
    """The greater, or NaN."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def lesser(a, b):
    """The lesser, or NaN."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def earlier_greatest(a, i, b, j):
    """The greater value with its index; ties take the lower index; NaN wins; index -1 means none."""
    equal = (a == b) | ((a != a) & (b != b))
    second = (a < b) | ((b != b) & (a == a)) | (equal & (j < i))
    second = (i < 0) | ((j >= 0) & second)
    return tl.where(second, b, a), tl.where(second, j, i)


@triton.jit
def earlier_least(a, i, b, j):
    """The lesser value with its index; otherwise as `earlier_greatest`."""
    equal = (a == b) | ((a != a) & (b != b))
    second = (a > b) | ((b != b) & (a == a)) | (equal & (j < i))
    second = (i < 0) | ((j >= 0) & second)
    return tl.where(second, b, a), tl.where(second, j, i)


@triton.jit
def later_greatest(a, i, b, j):
    """The greater value with its index; ties take the higher index; otherwise as `earlier_greatest`."""
    equal = (a == b) | ((a != a) & (b != b))
    second = (a < b) | ((b != b) & (a == a)) | (equal & (j > i))
    second = (i < 0) | ((j >= 0) & second)
    return tl.where(second, b, a), tl.where(second, j, i)


@triton.jit
def later_least(a, i, b, j):
    """The lesser value with its index; otherwise as `later_greatest`."""
    equal = (a == b) | ((a != a) & (b != b))
    second = (a > b) | ((b != b) & (a == a)) | (equal & (j > i))
    second = (i < 0) | ((j >= 0) & second)
    return tl.where(second, b, a), tl.where(second, j, i)


# -- accumulators ------------------------------------------------------------------------------------------------------
@triton.jit
def power(x, exponent):
    """A power of x, which is not negative."""
    return tl.exp2(tl.log2(x) * exponent)


@triton.jit
def initial(
    OP: tl.constexpr, IDENTITY: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """The accumulators of nothing. Those of "levels" are a logsumexp, and in ``n`` a sum."""
    if OP == "any" or OP == "all":
        a = tl.full((ROWS, LANES), IDENTITY, tl.int32)
    else:
        a = tl.full((ROWS, LANES), IDENTITY, DTYPE)
    b = tl.zeros((ROWS, LANES), DTYPE)
    if OP == "levels":
        n = tl.zeros((ROWS, LANES), DTYPE)
    else:
        n = tl.full((ROWS, LANES), 0, tl.int32)
        if OP == "argmax" or OP == "argmin" or OP == "cummax" or OP == "cummin":
            n = n - 1
        if WIDE:
            n = n.to(tl.int64)
    return a, b, n


@triton.jit
def lift(x, keep, index, reference, OP: tl.constexpr, ord, IDENTITY: tl.constexpr):
    """The accumulators of single elements; of a dropped one, the identity."""
    b = x
    n = keep.to(tl.int32)
    a = x
    if OP == "argmax" or OP == "argmin" or OP == "cummax" or OP == "cummin":
        n = tl.where(keep, index, -1)
    elif OP == "any" or OP == "all":
        a = tl.where(keep, (x != 0).to(tl.int32), IDENTITY)
    elif OP == "nonzeros":
        # The product of the nonzeros, and the number of zeros.
        n = (keep & (x == 0)).to(tl.int32)
        a = tl.where(x == 0, 1.0, x)
    elif OP == "ties":
        n = (keep & (x == reference)).to(tl.int32)
    elif OP == "magnitude_ties":
        n = (keep & (tl.abs(x) == reference)).to(tl.int32)
    elif OP == "norm_0":
        a = (keep & (x != 0)).to(x.dtype)
    elif OP == "norm_1":
        a = tl.abs(x)
    elif OP == "norm_2":
        a = x * x
    elif OP == "norm_inf" or OP == "norm_-inf":
        a = tl.where(keep, tl.abs(x), IDENTITY)
    elif OP == "norm_p":
        a = tl.where(keep, power(tl.abs(x), ord), 0.0)
    elif OP == "logsumexp" or OP == "softmin" or OP == "levels":
        if OP == "softmin":
            a = tl.where(keep, -x, IDENTITY)
        # The exponential of a dropped one is 0 anyway.
        b = tl.full(x.shape, 1.0, x.dtype)
        if OP == "levels":
            n = tl.where(keep, x, 0.0)
    elif OP == "var":
        b = x * 0
    return a, b, n


@triton.jit
def merge(a, b, n, OP: tl.constexpr, NEED_N: tl.constexpr, AXIS: tl.constexpr):
    """Reduce accumulators along a dim."""
    if OP == "argmax":
        out_a, out_n = tl.reduce((a, n), AXIS, earlier_greatest)
    elif OP == "argmin":
        out_a, out_n = tl.reduce((a, n), AXIS, earlier_least)
    elif OP == "cummax":
        out_a, out_n = tl.reduce((a, n), AXIS, later_greatest)
    elif OP == "cummin":
        out_a, out_n = tl.reduce((a, n), AXIS, later_least)
    else:
        out_n = tl.sum(n, AXIS)
        if OP == "prod" or OP == "nonzeros":
            out_a = tl.reduce(a, AXIS, times)
        elif OP == "amax" or OP == "any" or OP == "norm_inf":
            out_a = tl.reduce(a, AXIS, greater)
        elif OP == "amin" or OP == "all" or OP == "norm_-inf":
            out_a = tl.reduce(a, AXIS, lesser)
        elif OP == "logsumexp" or OP == "softmin" or OP == "levels":
            out_a = tl.max(a, AXIS)
        elif OP != "var":
            out_a = tl.sum(a, AXIS)
        else:
            out_a = tl.sum(n.to(a.dtype) * a, AXIS)
    out_b = out_a
    if OP == "logsumexp" or OP == "softmin" or OP == "levels":
        # Avoid inf - inf, which is NaN.
        shift = tl.where(tl.abs(out_a) == float("inf"), 0.0, out_a)
        out_b = tl.sum(b * tl.exp(a - tl.expand_dims(shift, AXIS)), AXIS)
    elif OP == "var":
        weight = n.to(a.dtype)
        total = tl.maximum(out_n, 1).to(a.dtype)
        first = out_a / total
        # A second pass corrects the rounding of the mean, so that equal values equal their mean.
        out_a = first + tl.sum(weight * (a - tl.expand_dims(first, AXIS)), AXIS) / total
        delta = a - tl.expand_dims(out_a, AXIS)
        out_b = tl.sum(b + weight * delta * delta, AXIS)
    return out_a, out_b, out_n


@triton.jit
def joined(a, b, n, ta, tb, tn, OP: tl.constexpr, NEED_N: tl.constexpr):
    """Combine two accumulators."""
    tn = tn.to(n.dtype)
    if OP == "argmax":
        a, n = earlier_greatest(a, n, ta, tn)
    elif OP == "argmin":
        a, n = earlier_least(a, n, ta, tn)
    elif OP == "cummax":
        a, n = later_greatest(a, n, ta, tn)
    elif OP == "cummin":
        a, n = later_least(a, n, ta, tn)
    elif OP == "logsumexp" or OP == "softmin" or OP == "levels":
        high = tl.maximum(a, ta)
        shift = tl.where(tl.abs(high) == float("inf"), 0.0, high)
        b = b * tl.exp(a - shift) + tb * tl.exp(ta - shift)
        a = high
        if OP == "levels":
            n = n + tn
    elif OP == "var":
        total = n + tn
        share = tn.to(a.dtype) / tl.maximum(total, 1).to(a.dtype)
        delta = tl.where(tn > 0, ta - a, 0.0)
        b = b + tb + delta * delta * share * n.to(a.dtype)
        a = a + delta * share
        n = total
    else:
        if OP == "prod" or OP == "nonzeros":
            a = a * ta
        elif OP == "amax" or OP == "any" or OP == "norm_inf":
            a = greater(a, ta)
        elif OP == "amin" or OP == "all" or OP == "norm_-inf":
            a = lesser(a, ta)
        elif OP != "count" and OP != "ties" and OP != "magnitude_ties":
            a = a + ta
        if NEED_N:
            n = n + tn
    return a, b, n


@triton.jit
def norm_of(a, n, OP: tl.constexpr, ord):
    """The norm from its accumulators; 0 where nothing is kept."""
    out = a
    if OP == "norm_2":
        out = tl.sqrt(a)
    elif OP == "norm_-inf":
        out = tl.where(n > 0, a, 0.0)
    elif OP == "norm_p":
        out = tl.where(n > 0, power(a, 1.0 / ord), 0.0)
    return out


# -- loops over rows ---------------------------------------------------------------------------------------------------
@triton.jit
def part_of(first, last, part, splits, ELEMENTS: tl.constexpr):
    """The ranges of rows within one of the splits of a tile of rows, which are as even as whole tiles allow."""
    high = tl.max(last, 0)
    low = tl.min(tl.where(first < last, first, high), 0) // ELEMENTS * ELEMENTS
    steps = (high - low + ELEMENTS - 1) // ELEMENTS
    chunk = (steps + splits - 1) // splits * ELEMENTS
    low = low + part * chunk
    first = tl.maximum(first, low)
    return first, tl.maximum(first, tl.minimum(last, low + chunk))


@triton.jit
def part_range(first, last, lead, stop, part, parts, ONLY: tl.constexpr, ELEMENTS: tl.constexpr):
    """Where the tiles of a part of rows that are written begin and end: of their ranges with ONLY, else of all."""
    if not ONLY:
        first, last = lead, stop
    first, last = part_of(first, last, part, parts, ELEMENTS)
    high = tl.max(last, 0)
    return tl.min(tl.where(first < last, first, high), 0) // ELEMENTS * ELEMENTS, high


@triton.jit
def tile_step(
    x, mask, x_row, mask_row, inner, x_inner, mask_inner, lead, first, last, real, start, mine, a, b, n,
    CHECKED: tl.constexpr, OP: tl.constexpr, parameter, IDENTITY: tl.constexpr, DTYPE: tl.constexpr,
    TRUTH: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr,
    NEED_N: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Accumulate one tile. Unless CHECKED, all of it is in the range of its row."""
    cell = cells(start, ELEMENTS, GROUP, WIDE)
    # Sums of signed integers with less than 64 bits: those of a vector are sums of what is above the lowest one.
    LOWEST: tl.constexpr = 1 << (x.dtype.element_ty.primitive_bitwidth - 1)
    ABOVE: tl.constexpr = (
        OP == "sum" and tl.int64 == DTYPE and MASK == "bits" and not CHECKED and x.dtype.element_ty.is_int_signed()
        and LOWEST < 2**63
    )  # fmt: skip
    if CHECKED:
        keep, near = covered(start, first, last, real, MASK, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP)
        keep = keeps(mask, mask_row, inner, mask_inner, cell, keep, near, MASK, BITS, ALIGN, SIDE, GROUP)
        value = take(x, x_row, inner, x_inner, cell, near, keep, IDENTITY, DTYPE, TRUTH)
    else:
        value = tl.load(x + x_row[:, None, None] + offsets(cell, inner, x_inner))
        if TRUTH:
            value = value != 0
        if MASK == "bits":
            keep = tl.load(bits_at(mask, mask_row, inner, mask_inner, cell, BITS, SIDE, GROUP)) != 0
            if ABOVE:
                value = tl.where(keep, unsigned(value, LOWEST), LOWEST)
            else:
                value = tl.where(keep, value.to(DTYPE), IDENTITY)
        else:
            keep = tl.full((ROWS, ELEMENTS // GROUP, GROUP), 1, tl.int1)
            value = value.to(DTYPE)
    position = cell - lead[:, None, None]
    la, lb, ln = lift(value, keep, position, mine[:, None, None], OP, parameter, IDENTITY)
    ta, tb, tn = merge(la, lb, ln, OP, NEED_N, 2)
    if ABOVE:
        ta = ta.to(DTYPE) - LOWEST * GROUP
        tb = ta
    return joined(a, b, n, ta, tb, tn, OP, NEED_N)


@triton.jit
def accumulate(
    x, mask, x_row, mask_row, inner, x_inner, mask_inner, lead, first, last, real, mine,
    OP: tl.constexpr, parameter, IDENTITY: tl.constexpr, DTYPE: tl.constexpr,
    TRUTH: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr,
    NEED_N: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The accumulators of each row's range."""
    a, b, n = initial(OP, IDENTITY, DTYPE, WIDE, ROWS, ELEMENTS // GROUP)
    # Tiles at either end of the ranges are checked; those that are in all of them are not.
    high = (tl.max(last, 0) + ELEMENTS - 1) // ELEMENTS * ELEMENTS
    low = tl.min(tl.where(first < last, first, high), 0) // ELEMENTS * ELEMENTS
    inner_low = (tl.max(first, 0) + ELEMENTS - 1) // ELEMENTS * ELEMENTS
    inner_high = tl.min(last, 0) // ELEMENTS * ELEMENTS
    if inner_high <= inner_low:
        inner_low = high
        inner_high = high
    heads = (inner_low - low) // ELEMENTS
    tails = (high - inner_high) // ELEMENTS
    for edge in range(heads + tails):
        start = tl.where(edge < heads, low + edge * ELEMENTS, inner_high + (edge - heads) * ELEMENTS)
        a, b, n = tile_step(
            x, mask, x_row, mask_row, inner, x_inner, mask_inner, lead, first, last, real, start, mine, a, b, n,
            True, OP, parameter, IDENTITY, DTYPE, TRUTH, MASK, BITS, ALIGN, SIDE, NEED_N, WIDE, ROWS, ELEMENTS, GROUP,
        )  # fmt: skip
    for start in range(inner_low, inner_high, ELEMENTS):
        a, b, n = tile_step(
            x, mask, x_row, mask_row, inner, x_inner, mask_inner, lead, first, last, real, start, mine, a, b, n,
            False, OP, parameter, IDENTITY, DTYPE, TRUTH, MASK, BITS, ALIGN, SIDE, NEED_N, WIDE, ROWS, ELEMENTS, GROUP,
        )  # fmt: skip
    return merge(a, b, n, OP, NEED_N, 1)


@triton.jit
def is_last(counter, programs):
    """Whether this is the last of some programs to come here; it resets their counter."""
    # The stores of all threads must precede the increment of the counter.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merge_rows(a, b, n, OP: tl.constexpr, NEED_N: tl.constexpr):
    """Reduce the accumulators of a tile to those of its rows."""
    a, b, n = merge(a, b, n, OP, NEED_N, 2)
    return merge(a, b, n, OP, NEED_N, 1)


@triton.jit
def tile_at(
    mask, start, row, real, lead, first, last, stop, outer, inner, mask_outer, mask_inner,
    ONLY: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile that is written: its indices, and which elements are written, loaded, and kept; and whether all are.

    Args are as in `covered`, and: ``stop`` is where rows end; with ONLY, what is outside of the range is not written.
    """
    cell = cells(start, ELEMENTS, GROUP, WIDE)
    keep, near = covered(start, first, last, real, MASK, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP)
    # Only vectors along rows are split by a predicate, unless rows end where vectors do.
    whole = False
    if ONLY:
        inside = keep
        if SIDE == "rows" and GROUP > 1:
            whole = (start >= tl.max(first, 0)) & (start + ELEMENTS <= tl.min(last, 0))
    elif SIDE == "rows" and ALIGN == "even":
        inside = real[:, None, None] & (vectors(start, ELEMENTS, GROUP, WIDE) < stop[:, None, None])
        inside = tl.broadcast_to(inside, (ROWS, ELEMENTS // GROUP, GROUP))
    elif SIDE == "columns":
        inside = across(real, ALIGN) & (cell < stop[:, None, None])
    else:
        inside = real[:, None, None] & (cell < stop[:, None, None])
        if ALIGN == "shifted":
            inside = inside & (cell >= lead[:, None, None])
        if GROUP > 1:
            whole = (start >= tl.max(lead, 0)) & (start + ELEMENTS <= tl.min(tl.where(real, stop, 0), 0))
    mask_row = mask_row_at(row, lead, outer, mask_outer, mask_inner, ALIGN, BITS, GROUP)
    keep = keeps(mask, mask_row, inner, mask_inner, cell, keep, near, MASK, BITS, ALIGN, SIDE, GROUP)
    return cell, inside, near, keep, whole
