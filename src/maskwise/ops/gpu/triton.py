"""Device functions that kernels share: addresses, masks, loads that skip dropped elements, and accumulators of rows.

A reduction has up to three accumulators per row, ``a``, ``b`` and ``n``: `lift` initializes those of single elements,
`merge` reduces a tile, and `joined` combines two.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "bases", "beginning", "cells", "flat", "greater", "joined", "keeps", "lesser", "lift", "merge", "norm_of", "number",
    "offsets", "power", "put", "read", "take", "tl", "window",
]  # fmt: skip


@triton.jit
def offsets(index, sizes, strides):
    """The offset of an element from its row-major index."""
    offset = index * 0
    for d in tl.static_range(len(sizes) - 1, 0, -1):
        offset += (index % sizes[d]) * strides[d]
        index = index // sizes[d]
    return offset + index * strides[0]


@triton.jit
def cells(start, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr):
    """The indices of a tile's elements within their row: (1, groups, GROUP)."""
    groups = tl.arange(0, ELEMENTS // GROUP)[None, :, None] * GROUP
    index = groups + tl.arange(0, GROUP)[None, None, :]
    if WIDE:
        index = index.to(tl.int64)
    return start + index


@triton.jit
def flat(x, ROWS: tl.constexpr, ELEMENTS: tl.constexpr):
    """A tile of (ROWS, groups, GROUP) reshaped to (ROWS, ELEMENTS)."""
    return tl.reshape(x, (ROWS, ELEMENTS))


@triton.jit
def keeps(mask, base, sizes, strides, index, inside, SKIP: tl.constexpr):
    """The mask of a tile, and the predicate of its loads.

    The elements of one vector load share their predicate, and the load is skipped where none of them is kept: a
    predicate per element would split the load. SKIP is the direction of adjacent elements: "rows" or "columns".
    """
    byte = tl.load(mask + base[:, None, None] + offsets(index, sizes, strides), mask=inside, other=0)
    keep = inside & (byte != 0)
    wanted = keep
    if SKIP == "columns":
        wanted = tl.broadcast_to(tl.max(keep.to(tl.int32), 0)[None, :, :] != 0, keep.shape)
    elif keep.shape[2] > 1:
        wanted = tl.broadcast_to(tl.max(keep.to(tl.int32), 2)[:, :, None] != 0, keep.shape)
    return keep, wanted


@triton.jit
def take(x, base, sizes, strides, index, wanted, keep, other, DTYPE: tl.constexpr, TRUTH: tl.constexpr = False):
    """The values of a tile, ``other`` where they are dropped, so that dropped values cannot leak.

    TRUTH: the values are bytes of a bool tensor, where any nonzero byte is True.
    """
    value = tl.load(x + base[:, None, None] + offsets(index, sizes, strides), mask=wanted, other=0)
    if TRUTH:
        value = value != 0
    return tl.where(keep, value.to(DTYPE), other)


@triton.jit
def put(out, base, sizes, strides, index, inside, value):
    """Store a tile, (ROWS, ELEMENTS) or (ROWS, groups, GROUP)."""
    value = tl.reshape(value, inside.shape)
    tl.store(out + base[:, None, None] + offsets(index, sizes, strides), value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def bases(tile, rows, ROWS: tl.constexpr):
    """The row indices of a tile, and which are in range: 64-bit, which costs little for one index per row."""
    row = beginning(tile, ROWS, True) + tl.arange(0, ROWS)
    return row, row < rows


@triton.jit
def beginning(tile, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """The start of a tile; its number fits 32 bits, but the product may not."""
    if WIDE:
        tile = tl.cast(tile, tl.int64)
    return tile * SIZE


@triton.jit
def number(ROWS: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr):
    """An index or a count for each row."""
    out = tl.full((ROWS,), VALUE, tl.int32)
    if WIDE:
        out = out.to(tl.int64)
    return out


@triton.jit
def window(
    mask, base, sizes, strides, real, start, end,
    WIDE: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The indices of a tile's elements, and which of them are in range, kept, and loaded."""
    index = cells(start, ELEMENTS, GROUP, WIDE)
    inside = real[:, None, None] & (index < end)
    keep, wanted = keeps(mask, base, sizes, strides, index, inside, SKIP)
    return index, inside, keep, wanted


@triton.jit
def read(
    x, base, sizes, strides, index, wanted, keep, other,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, TRUTH: tl.constexpr = False,
):  # fmt: skip
    """The values of a tile as (ROWS, ELEMENTS), ``other`` where they are dropped."""
    return flat(take(x, base, sizes, strides, index, wanted, keep, other, DTYPE, TRUTH), ROWS, ELEMENTS)


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


# -- states ------------------------------------------------------------------------------------------------------------
@triton.jit
def power(x, exponent: tl.constexpr):
    """A power of x, which is not negative."""
    return tl.exp2(tl.log2(x) * exponent)


@triton.jit
def lift(x, keep, index, reference, OP: tl.constexpr, ord: tl.constexpr, IDENTITY: tl.constexpr):
    """The accumulators of single elements; of a dropped one, the identity."""
    b = x
    n = keep.to(tl.int32)
    a = x
    if OP == "argmax" or OP == "argmin":
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
    elif OP == "logsumexp":
        b = tl.where(keep, 1.0, 0.0).to(x.dtype)
    elif OP == "var":
        b = x * 0
    return a, b, n


@triton.jit
def merge(a, b, n, OP: tl.constexpr, NEED_N: tl.constexpr):
    """Reduce accumulators along dim 1."""
    out_a = a
    if OP == "prod" or OP == "nonzeros":
        out_a = tl.reduce(a, 1, times)
    elif OP == "amax" or OP == "any" or OP == "norm_inf":
        out_a = tl.reduce(a, 1, greater)
    elif OP == "amin" or OP == "all" or OP == "norm_-inf":
        out_a = tl.reduce(a, 1, lesser)
    elif OP == "argmax":
        out_a, out_n = tl.reduce((a, n), 1, earlier_greatest)
    elif OP == "argmin":
        out_a, out_n = tl.reduce((a, n), 1, earlier_least)
    elif OP != "var" and OP != "logsumexp":
        out_a = tl.sum(a, 1)
    out_b = out_a
    if OP != "argmax" and OP != "argmin":
        if NEED_N:
            out_n = tl.sum(n, 1)
        else:
            out_n = tl.zeros((a.shape[0],), n.dtype)
    if OP == "logsumexp":
        # Avoid inf - inf, which is NaN.
        out_a = tl.max(a, 1)
        shift = tl.where(tl.abs(out_a) == float("inf"), 0.0, out_a)[:, None]
        own = tl.where(tl.abs(a) == float("inf"), 0.0, a)
        exponent = tl.where(b == 1.0, a - shift, own - shift)
        out_b = tl.sum(tl.where(b == 0.0, 0.0, b * tl.exp(exponent)), 1)
    elif OP == "var":
        weight = n.to(a.dtype)
        total = tl.maximum(out_n, 1).to(a.dtype)
        first = tl.sum(weight * a, 1) / total
        # A second pass corrects the rounding of the mean, so that equal values equal their mean.
        out_a = first + tl.sum(weight * (a - first[:, None]), 1) / total
        delta = a - out_a[:, None]
        out_b = tl.sum(b + weight * delta * delta, 1)
    return out_a, out_b, out_n


@triton.jit
def joined(a, b, n, ta, tb, tn, OP: tl.constexpr, NEED_N: tl.constexpr):
    """Combine two accumulators; the first is the earlier in the row."""
    if OP == "var" or OP == "logsumexp" or OP == "argmax" or OP == "argmin":
        a, b, n = merge(tl.join(a, ta), tl.join(b, tb), tl.join(n, tn.to(n.dtype)), OP, NEED_N)
    else:
        if OP == "prod" or OP == "nonzeros":
            a = a * ta
        elif OP == "amax" or OP == "any" or OP == "norm_inf":
            a = greater(a, ta)
        elif OP == "amin" or OP == "all" or OP == "norm_-inf":
            a = lesser(a, ta)
        else:
            a = a + ta
        n = n + tn.to(n.dtype)
    return a, b, n


@triton.jit
def norm_of(a, n, OP: tl.constexpr, ord: tl.constexpr):
    """The norm from its accumulators; 0 where nothing is kept."""
    out = a
    if OP == "norm_2":
        out = tl.sqrt(a)
    elif OP == "norm_-inf":
        out = tl.where(n > 0, a, 0.0)
    elif OP == "norm_p":
        out = tl.where(n > 0, power(a, 1.0 / ord), 0.0)
    return out
