"""The other reductions, on the standard grid. `sum` has its own file, with its own promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import maskwise as mw
from benchmarks.case import Case, at_least
from benchmarks.cases.grid import Measured, Prepare, grid
from benchmarks.cases.sides import Call, Masked, masked_inputs, near_one

__all__ = ["cases", "measured"]


def _ours(name: str) -> Prepare:
    function = getattr(mw, name)
    return lambda i: lambda: function(i.x, i.keep, dim=i.dim)


def _filled(name: str, value: float) -> Prepare:
    function = getattr(torch, name)
    return lambda i: lambda: function(torch.where(i.keep, i.x, value), i.dim)


def _masked(name: str) -> Prepare:
    function = getattr(torch.masked, name)

    def build(i: Masked) -> Call:
        keep = i.keep.expand_as(i.x)
        # torch.masked gives positions as floats.
        positions = name in ("argmax", "argmin")
        return lambda: function(i.x, i.dim, mask=keep).long() if positions else function(i.x, i.dim, mask=keep)

    return build


def _unmasked(name: str) -> Prepare:
    function = getattr(torch, name)
    return lambda i: lambda: function(i.x, i.dim)


def _mean(i: Masked) -> Call:
    return lambda: torch.where(i.keep, i.x, 0.0).sum(i.dim) / i.keep.expand_as(i.x).sum(i.dim)


def _moments(power: Callable[[Any], Any]) -> Prepare:
    def build(i: Masked) -> Call:
        def call() -> Any:
            count = i.keep.expand_as(i.x).sum(i.dim, keepdim=True)
            mean = torch.where(i.keep, i.x, 0.0).sum(i.dim, keepdim=True) / count
            centred = torch.where(i.keep, i.x - mean, 0.0)
            return power(centred.square().sum(i.dim) / (count.squeeze(i.dim) - 1))

        return call

    return build


def _norm(i: Masked) -> Call:
    return lambda: torch.linalg.vector_norm(torch.where(i.keep, i.x, 0.0), 2.0, i.dim)


def _masked_norm(i: Masked) -> Call:
    keep = i.keep.expand_as(i.x)
    return lambda: torch.masked.norm(i.x, 2.0, i.dim, mask=keep)


def _ours_bool(name: str) -> Prepare:
    function = getattr(mw, name)

    def build(i: Masked) -> Call:
        positive = i.x > 0.5
        return lambda: function(positive, i.keep, i.dim)

    return build


def _any(i: Masked) -> Call:
    positive = i.x > 0.5
    return lambda: (positive & i.keep).any(i.dim)


def _all(i: Masked) -> Call:
    positive = i.x > 0.5
    return lambda: (positive | ~i.keep).all(i.dim)


def _near_one(case: Case, mask_shape: tuple[int, ...] | None = None) -> Masked:
    inputs = masked_inputs(case, mask_shape)
    return replace(inputs, x=near_one(inputs.x))


PROMISE = (at_least(1.8, "best peer"),)


def measured() -> tuple[Measured, ...]:
    """Return the reductions other than sum, each with the idiom that it replaces."""

    def of(name: str, idiom: Prepare, **more: Any) -> Measured:
        found = {"masked": _masked(name) if hasattr(torch.masked, name) else None, "floor": _unmasked(name), **more}
        return Measured("reduce", name, _ours(name), idiom, **found)

    return (
        of("mean", _mean, targets=PROMISE),
        of("var", _moments(lambda v: v), targets=PROMISE),
        of("std", _moments(torch.sqrt)),
        of("prod", _filled("prod", 1.0), setup=_near_one),
        of("norm", _norm, masked=_masked_norm, floor=None),
        of("amax", _filled("amax", -math.inf), targets=PROMISE),
        of("amin", _filled("amin", math.inf)),
        of("argmax", _filled("argmax", -math.inf), gradient=False),
        of("argmin", _filled("argmin", math.inf), gradient=False),
        of("logsumexp", _filled("logsumexp", -math.inf), targets=PROMISE),
        replace(of("any", _any, gradient=False, floor=None), ours=_ours_bool("any")),
        replace(of("all", _all, gradient=False, floor=None), ours=_ours_bool("all")),
    )


def cases() -> tuple[Case, ...]:
    """Return the cases of the reductions other than sum."""
    return tuple(case for each in measured() for case in grid(each))
