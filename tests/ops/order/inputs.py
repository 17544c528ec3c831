"""What the tests of the order family share: a loop in plain Python over slices, and inputs that are hard to order."""

import torch

from tests.laws.samples import as_bool


def slices_of(x, mask, dim):
    """(x, mask) with the dim last, and one row a slice."""
    mask = as_bool(mask).expand(x.shape)
    rows, bits = x.movedim(dim, -1), mask.movedim(dim, -1)
    return rows.reshape(-1, rows.shape[-1]), bits.reshape(-1, bits.shape[-1])


def sorted_loop(x, mask, dim, descending=False, k=None, tail=0):
    """Sort or topk, one slice after the other, by torch's stable sort of what is kept."""
    n = x.shape[dim] if k is None else k
    rows, bits = slices_of(x, mask, dim)
    values = torch.full((len(rows), n), tail, dtype=x.dtype)
    indices = torch.full((len(rows), n), -1)
    for r, (row, keep) in enumerate(zip(rows, bits, strict=True)):
        places = keep.nonzero()[:, 0]
        order = row[places].sort(descending=descending, stable=True).indices[:n]
        values[r, : len(order)], indices[r, : len(order)] = row[places][order], places[order]
    shape = [*x.movedim(dim, -1).shape[:-1], n]
    return values.reshape(shape).movedim(-1, dim), indices.reshape(shape).movedim(-1, dim)


def tricky(shape, dtype, seed=0):
    """Values with many ties, both zeros, and for floats infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).mul(3).round().to(dtype)
    if dtype.is_floating_point:
        kind = torch.randint(0, 30, shape, generator=generator)
        for code, value in enumerate((float("inf"), -float("inf"), float("nan"), 0.0, -0.0)):
            x[kind == code] = value
    return x


def same_bits(a, b):
    """Equal to the last bit, signs of zeros included; any NaN equals any NaN."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    numbers = torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    return numbers and torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())
