"""mw.fill as a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import bases, beginning, divided, extents, offsets, put, row_at, shifted, tile_at

__all__ = ["fill_kernel"]


@triton.jit(do_not_specialize=["number", "rows", "tiles", "parts", "unit", "size", "step"])
def fill_kernel(
    x, mask, values, number, out,
    outer, inner, x_outer, x_inner, mask_outer, mask_inner, values_outer, values_inner, out_outer, out_inner,
    rows, length, tiles, parts, unit, size, step,
    MASK: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """X where it is kept, else the number, or the value where there is no number."""
    for job in range(tl.program_id(0), tiles * parts, tl.num_programs(0)):
        tile, part = divided(job, parts)
        row, real = bases(tile, rows, ROWS)
        begin, end = extents(mask, row, real, outer, mask_outer, length, unit, size, step, MASK, WIDE)
        lead = shifted(offsets(row, outer, out_outer), ALIGN, GROUP, WIDE)
        cell, inside, near, keep, whole = tile_at(
            mask, beginning(part, ELEMENTS, WIDE), row, real, lead, begin + lead, end + lead, length + lead,
            outer, inner, mask_outer, mask_inner, False, MASK, BITS, ALIGN, SIDE, WIDE, ROWS, ELEMENTS, GROUP,
        )  # fmt: skip
        x_row = row_at(row, lead, outer, x_outer, x_inner, ALIGN, GROUP)
        kept = tl.load(x + x_row[:, None, None] + offsets(cell, inner, x_inner), mask=near, other=0)
        if number is None:
            values_row = row_at(row, lead, outer, values_outer, values_inner, ALIGN, GROUP)
            at = values_row[:, None, None] + offsets(cell, inner, values_inner)
            other = tl.load(values + at, mask=inside & (keep == 0), other=0)
        elif kept.dtype == tl.float64:
            # Float arguments of kernels are float32, so a float64 comes as the integer of its bits.
            other = tl.cast(number, tl.int64).to(tl.float64, bitcast=True)
        else:
            other = tl.cast(number, kept.dtype)
        out_row = row_at(row, lead, outer, out_outer, out_inner, ALIGN, GROUP)
        put(out, out_row, inner, out_inner, cell, inside, whole, tl.where(keep, kept, other))
