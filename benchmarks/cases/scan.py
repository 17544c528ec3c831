"""Scans: ``mw.cumsum``, ``cumprod``, ``cummax``, ``cummin``, ``logcumsumexp``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import maskwise as mw
from benchmarks.case import Case, Side, at_most, never_slower
from benchmarks.cases.grid import Measured
from benchmarks.cases.sides import Call, Masked, compiled, masked_inputs, near_one, torch_dtype, with_backward

__all__ = ["cases", "measured"]

IDENTITY = {"cumsum": 0.0, "cumprod": 1.0, "cummax": -math.inf, "cummin": math.inf, "logcumsumexp": -math.inf}


def _values(found: Any) -> Tensor:
    # Indices are computed by both sides and not compared: those of the idiom point at dropped positions.
    values = found[0] if isinstance(found, tuple) else found
    assert isinstance(values, Tensor)
    return values


def _ours(name: str) -> Callable[[Masked], Call]:
    scan = getattr(mw, name)
    return lambda i: lambda: _values(scan(i.x, i.mask, i.dim))


def _ours_from_bool(name: str) -> Callable[[Masked], Call]:
    scan = getattr(mw, name)
    return lambda i: lambda: _values(scan(i.x, i.keep, i.dim))


def _where(name: str) -> Callable[[Masked], Call]:
    scan = getattr(torch, name)
    return lambda i: lambda: _values(scan(torch.where(i.keep, i.x, IDENTITY[name]), i.dim))


def _masked_fill(name: str) -> Callable[[Masked], Call]:
    scan = getattr(torch, name)

    def build(i: Masked) -> Call:
        # The mask is inverted once, outside: people who write masked_fill hold the mask in that convention.
        drop = ~i.keep
        return lambda: _values(scan(i.x.masked_fill(drop, IDENTITY[name]), i.dim))

    return build


def _torch_masked(name: str) -> Callable[[Masked], Call]:
    scan = getattr(torch.masked, name)

    def build(i: Masked) -> Call:
        keep = i.keep.expand_as(i.x)
        return lambda: _values(scan(i.x, i.dim, mask=keep))

    return build


def _unmasked(name: str) -> Callable[[Masked], Call]:
    scan = getattr(torch, name)
    return lambda i: lambda: _values(scan(i.x, i.dim))


def _sides(name: str, *, compile: bool) -> tuple[Side, ...]:
    sides = [
        Side(f"mw.{name}", _ours(name), kind="ours"),
        Side(f"masked_fill+{name}", _masked_fill(name)),
        Side(f"where+{name}", _where(name)),
    ]
    if hasattr(torch.masked, name):
        sides.append(Side(f"torch.masked.{name}", _torch_masked(name)))
    if compile:
        sides.append(compiled(f"where+{name}", _where(name)))
    return (*sides, Side(f"x.{name}", _unmasked(name), kind="floor"))


def _near_one(case: Case) -> Masked:
    inputs = masked_inputs(case)
    return replace(inputs, x=near_one(inputs.x))


def _broadcast(case: Case) -> Masked:
    inputs = masked_inputs(case, mask_shape=(1, *case.shape[1:]))
    return replace(inputs, x=near_one(inputs.x))


def _moved(case: Case) -> int:
    # Every value and every byte of the mask is read once, every result written once.
    return math.prod(case.shape) * (torch_dtype(case).itemsize + 1 + _written(case.function))


def _written(name: str) -> int:
    # Indices are 8 bytes each.
    return 4 + (8 if name in ("cummax", "cummin") else 0)


def measured() -> tuple[Measured, ...]:
    """Return the scans, each with the idiom that it replaces."""
    return tuple(
        Measured("scan", name, _ours_from_bool(name), _where(name), floor=_unmasked(name), written=_written(name))
        for name in IDENTITY
    )


def _case(name: str, variant: str, shape: tuple[int, ...], *, compile: bool = True, **more: Any) -> Case:
    more = {"setup": _near_one, "sides": _sides(name, compile=compile), "targets": (never_slower(),), **more}
    return Case("scan", name, variant, shape=shape, moved_bytes=_moved, **more)


def _of(name: str) -> tuple[Case, ...]:
    square, keep = (4096, 4096), (0.1, 0.5, 0.9)
    tiny = (replace(_sides(name, compile=False)[0], prepare=_ours_from_bool(name)), *_sides(name, compile=False)[1:])
    idiom = at_most(1.5, f"where+{name}")
    backward = tuple(with_backward(side) for side in _sides(name, compile=False))
    # The gradient of the idiom's product divides by x, and differs by what that rounds.
    close: dict[str, Any] = {"relative_tolerance": 1e-3}
    return (
        *(_case(name, f"4096x4096 dim=-1 keep={round(100 * d)}%", square, density=d, dim=-1) for d in keep),
        _case(name, "4096x4096 dim=0 keep=50%", square, density=0.5, dim=0),
        _case(name, "4096x4096 dim=-1 mask=1x4096", square, density=0.5, dim=-1, setup=_broadcast),
        _case(name, "64x512x256 dim=1 keep=50%", (64, 512, 256), density=0.5, dim=1),
        _case(name, "4096x4096 forward+backward", square, density=0.5, dim=-1, sides=backward, **close),
        replace(
            _case(name, "4x8", (4, 8), density=0.5, dim=-1, sides=tiny, targets=(idiom, never_slower())),
            moved_bytes=None,
        ),
        replace(
            _case(name, "4x8 forward+backward", (4, 8), density=0.5, dim=-1, sides=backward, **close), moved_bytes=None
        ),
    )


def cases() -> tuple[Case, ...]:
    """Return the cases of the scans."""
    return tuple(case for name in IDENTITY for case in _of(name))
