"""What the tests of the scans share: the scans in float64 on filled inputs, and bounds on their rounding."""

from __future__ import annotations

import math

import torch

import maskwise as mw
from tests.laws.samples import as_bool

IDENTITY = {"cumsum": 0, "cumprod": 1, "cummax": -math.inf, "cummin": math.inf, "logcumsumexp": -math.inf}
NAMES = list(IDENTITY)
EXTREMES = ["cummax", "cummin"]
TOTALS = ["cumsum", "cumprod"]


def first(result):
    return result[0] if isinstance(result, tuple) else result


def call(name, x, mask, dim):
    return first(getattr(mw, name)(x, mask, dim))


def identity(name, dtype):
    """The identity of a scan in a dtype: integers have no infinity."""
    value = IDENTITY[name]
    if dtype.is_floating_point or not math.isinf(value):
        return value
    if dtype is torch.bool:
        return value > 0
    return torch.iinfo(dtype).max if value > 0 else torch.iinfo(dtype).min


def expected(name, x, mask, dim):
    """The scan in float64 (or int64) by torch itself, on x filled with the identity."""
    wide = x.double() if x.is_floating_point() else x if name in EXTREMES else x.long()
    return first(getattr(torch, name)(wide.masked_fill(~as_bool(mask), identity(name, wide.dtype)), dim))


def assert_scans(name, out, x, mask, dim):
    """Out is the scan to the rounding of its accumulator at each step, and one rounding of the result."""
    exact = expected(name, x, mask, dim)
    assert out.shape == x.shape
    if not x.is_floating_point() or name in EXTREMES:
        torch.testing.assert_close(out, exact.to(out.dtype), rtol=0, atol=0, equal_nan=True)
        return
    # Half precision is accumulated in float32, everything else in float64.
    step = torch.finfo(torch.float32 if x.dtype.itemsize == 2 else torch.float64).eps
    steps = x.shape[dim] if x.dim() else 1
    if name == "cumsum":
        size = x.double().abs().masked_fill(~mask, 0).cumsum(dim)
    else:
        size = exact.abs() if name == "cumprod" else 1 + exact.abs()
    bound = (4 * steps * step) * size + torch.finfo(x.dtype).eps * exact.abs() + torch.finfo(x.dtype).tiny
    # What overflows x's dtype is infinite; near the edge either is right.
    edge = exact.abs() > torch.finfo(x.dtype).max * 0.99
    special = ~exact.isfinite() | edge
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out[special & ~edge].double(), exact[special & ~edge]) or exact[special].isnan().any()
    assert ((out.double() - exact).abs() <= bound)[~special].all()
