"""mw.fill as a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from maskwise.ops.gpu.triton import bases, beginning, offsets, window

__all__ = ["fill_kernel"]


@triton.jit
def fill_kernel(
    x, mask, values, number, out,
    outer, inner, x_outer, x_inner, mask_outer, mask_inner, values_outer, values_inner, out_outer, out_inner,
    rows, length, tiles, steps,
    WIDE: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr, GROUP: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """X where it is kept, else the number, or the value where there is no number."""
    for job in range(tl.program_id(0), tiles * steps, tl.num_programs(0)):
        row, real = bases(job // steps, rows, ROWS)
        start = beginning(job % steps, ELEMENTS, WIDE)
        mask_base, x_base = offsets(row, outer, mask_outer), offsets(row, outer, x_outer)
        index, inside, keep, wanted = window(
            mask, mask_base, inner, mask_inner, real, start, length, WIDE, ELEMENTS, GROUP, SKIP
        )
        kept = tl.load(x + x_base[:, None, None] + offsets(index, inner, x_inner), mask=wanted, other=0)
        if number is None:
            at = offsets(row, outer, values_outer)[:, None, None] + offsets(index, inner, values_inner)
            other = tl.load(values + at, mask=inside & (keep == 0), other=0)
        elif kept.dtype == tl.float64:
            # Float arguments of kernels are float32, so a float64 comes as the integer of its bits.
            other = tl.cast(number, tl.int64).to(tl.float64, bitcast=True)
        else:
            other = tl.cast(number, kept.dtype)
        at = offsets(row, outer, out_outer)[:, None, None] + offsets(index, inner, out_inner)
        tl.store(out + at, tl.where(keep, kept, other), mask=inside)
