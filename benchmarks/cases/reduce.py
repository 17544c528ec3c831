"""Reductions: ``mw.sum``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

import maskwise as mw
from benchmarks.case import Case, Side, at_least, at_most, never_slower
from benchmarks.cases.sides import Call, Masked, compiled, masked_inputs, torch_dtype, with_backward

__all__ = ["cases"]


def _ours(i: Masked) -> Call:
    return lambda: mw.sum(i.x, i.mask, i.dim)


def _ours_from_bool(i: Masked) -> Call:
    return lambda: mw.sum(i.x, i.keep, i.dim)


def _where(i: Masked) -> Call:
    return lambda: torch.where(i.keep, i.x, 0.0).sum(i.dim)


def _masked_fill(i: Masked) -> Call:
    # The mask is inverted once, outside: people who write masked_fill hold the mask in that convention.
    drop = ~i.keep
    return lambda: i.x.masked_fill(drop, 0.0).sum(i.dim)


def _multiply(i: Masked) -> Call:
    return lambda: (i.x * i.keep).sum(i.dim)


def _torch_masked(i: Masked) -> Call:
    keep = i.keep.expand_as(i.x)
    return lambda: torch.masked.sum(i.x, i.dim, mask=keep)


def _unmasked(i: Masked) -> Call:
    return lambda: i.x.sum(i.dim)


IDIOMS = (
    Side("where+sum", _where),
    Side("masked_fill+sum", _masked_fill),
    Side("torch.masked.sum", _torch_masked),
)
LEAKY = Side("x*mask", _multiply, kind="leaky")
COMPILED = compiled("where+sum", _where)
COMPILED_LEAKY = replace(compiled("x*mask", _multiply), kind="leaky")
FLOOR = Side("x.sum", _unmasked, kind="floor")
LARGE = (Side("mw.sum", _ours, kind="ours"), *IDIOMS, COMPILED, LEAKY, COMPILED_LEAKY, FLOOR)
BACKWARD = tuple(with_backward(side) for side in LARGE if side not in (COMPILED, COMPILED_LEAKY))


def _moved(case: Case) -> int:
    # What must be read at least: every value and every byte of the mask, once.
    return math.prod(case.shape) * (torch_dtype(case).itemsize + 1)


def _sum(variant: str, shape: tuple[int, ...], sides: tuple[Side, ...] = LARGE, **more: object) -> Case:
    return Case("reduce", "sum", variant, masked_inputs, sides, shape, moved_bytes=_moved, **more)  # type: ignore[arg-type]


def _tiny(variant: str, ours: Callable[[Masked], Call]) -> Case:
    # Overhead is all there is at this size: bytes say nothing.
    sides = (Side("mw.sum", ours, kind="ours"), *IDIOMS, LEAKY, FLOOR)
    targets = (at_most(1.5, "where+sum"), never_slower())
    return replace(_sum(variant, (4, 8), sides, density=0.5, dim=-1, targets=targets), moved_bytes=None)


def _broadcast(case: Case) -> Masked:
    return masked_inputs(case, mask_shape=(1, *case.shape[1:]))


def cases() -> tuple[Case, ...]:
    """Return the cases of the reductions."""
    square = (4096, 4096)
    promise = (at_least(15, "best peer"), at_most(2, "x.sum"))
    return (
        *(
            _sum(f"4096x4096 dim=-1 keep={round(100 * d)}%", square, density=d, dim=-1, targets=promise)
            for d in (0.1, 0.5, 0.9)
        ),
        _sum("4096x4096 dim=0 keep=50%", square, density=0.5, dim=0, targets=(never_slower(),)),
        _sum("4096x4096 dim=None keep=50%", square, density=0.5, dim=None, targets=(never_slower(),)),
        replace(
            _sum("4096x4096 dim=-1 mask=1x4096", square, density=0.5, dim=-1, targets=(never_slower(),)),
            setup=_broadcast,
        ),
        _sum("64x512x256 dim=1 keep=50%", (64, 512, 256), density=0.5, dim=1, targets=(never_slower(),)),
        replace(
            _sum("4096x4096 forward+backward", square, BACKWARD, density=0.5, dim=-1, targets=(never_slower(),)),
            moved_bytes=None,
        ),
        _tiny("4x8 from a bool tensor", _ours_from_bool),
        _tiny("4x8 from a Mask", _ours),
    )
