"""Addresses beyond 32 bits, which no tensor of a test can have: the functions that make them, by themselves."""

import torch
import triton
import triton.language as tl

from maskwise.ops.gpu.triton import bases, beginning, cells


@triton.jit
def rows_kernel(out, tile, rows):
    row, real = bases(tile, rows, 4)
    tl.store(out + tl.arange(0, 4), tl.where(real, row, -1))


@triton.jit
def elements_kernel(out, step):
    index = cells(beginning(step, 1024, True), 4, 4, True)
    tl.store(out + tl.arange(0, 4), tl.reshape(index, (4,)))


def test_the_rows_of_a_tile_are_counted_in_64_bits():
    out = torch.zeros(4, dtype=torch.int64)
    rows_kernel[(1,)](out, 1 << 30, (1 << 32) + 2)
    assert out.tolist() == [1 << 32, (1 << 32) + 1, -1, -1]


def test_the_elements_of_a_row_are_counted_in_64_bits_where_32_do_not_reach():
    out = torch.zeros(4, dtype=torch.int64)
    elements_kernel[(1,)](out, 1 << 22)
    assert out.tolist() == [(1 << 32) + i for i in range(4)]
