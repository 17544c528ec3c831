"""Filling: ``mw.fill``."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

import maskwise as mw
from benchmarks.case import Case, Side, at_most, never_slower
from benchmarks.cases.grid import Measured
from benchmarks.cases.sides import Call, Masked, compiled, masked_inputs, torch_dtype, with_backward

__all__ = ["cases", "measured"]


def _ours(i: Masked) -> Call:
    return lambda: mw.fill(i.x, i.mask, -1.0)


def _ours_from_bool(i: Masked) -> Call:
    return lambda: mw.fill(i.x, i.keep, -1.0)


def _where(i: Masked) -> Call:
    return lambda: torch.where(i.keep, i.x, -1.0)


def _masked_fill(i: Masked) -> Call:
    # The mask is inverted once, outside: people who write masked_fill hold the mask in that convention.
    drop = ~i.keep
    return lambda: i.x.masked_fill(drop, -1.0)


def _clone(i: Masked) -> Call:
    return i.x.clone


IDIOMS = (Side("masked_fill", _masked_fill), Side("where", _where))
FLOOR = Side("x.clone", _clone, kind="floor")
LARGE = (Side("mw.fill", _ours, kind="ours"), *IDIOMS, compiled("where", _where), FLOOR)
TINY = (Side("mw.fill", _ours_from_bool, kind="ours"), *IDIOMS, FLOOR)
BACKWARD = tuple(with_backward(side) for side in TINY if side is not FLOOR)


def measured() -> Measured:
    """Return fill, with the idiom that it replaces."""
    return Measured("fill", "fill", _ours_from_bool, _where, floor=_clone, written=4)


def _moved(case: Case) -> int:
    return math.prod(case.shape) * (2 * torch_dtype(case).itemsize + 1)


def _broadcast(case: Case) -> Masked:
    return masked_inputs(case, mask_shape=(1, *case.shape[1:]))


def cases() -> tuple[Case, ...]:
    """Return the cases of filling."""
    square = Case("fill", "fill", "", masked_inputs, LARGE, (4096, 4096), 0.5, None, moved_bytes=_moved)
    square = replace(square, targets=(never_slower(),))
    tiny = replace(square, shape=(4, 8), moved_bytes=None)
    return (
        *(replace(square, variant=f"4096x4096 keep={round(100 * d)}%", density=d) for d in (0.1, 0.5, 0.9)),
        replace(square, variant="4096x4096 mask=1x4096", setup=_broadcast),
        replace(square, variant="4096x4096 forward+backward", sides=BACKWARD),
        replace(tiny, variant="4x8", sides=TINY, targets=(at_most(1.5, "where"), never_slower())),
        replace(tiny, variant="4x8 forward+backward", sides=BACKWARD),
    )
