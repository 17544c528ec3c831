"""Softmax and its friends, on the standard grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import maskwise as mw
from benchmarks.case import Case, at_least, never_slower
from benchmarks.cases.grid import Measured, Prepare, grid
from benchmarks.cases.sides import Call, Masked

__all__ = ["cases", "measured"]


def _ours(name: str) -> Prepare:
    function = getattr(mw, name)
    return lambda i: lambda: function(i.x, i.keep, dim=i.dim)


def _filled(function: Callable[..., Tensor], value: float) -> Prepare:
    def build(i: Masked) -> Call:
        # The mask is inverted once, outside: people who write masked_fill hold the mask in that convention.
        drop = ~i.keep
        return lambda: function(i.x.masked_fill(drop, value), dim=i.dim)

    return build


def _masked(name: str) -> Prepare:
    function = getattr(torch.masked, name)

    def build(i: Masked) -> Call:
        keep = i.keep.expand_as(i.x)
        # torch.masked leaves what it likes in dropped places; the others have zeros or -inf there.
        rest = -math.inf if name == "log_softmax" else 0.0
        return lambda: torch.where(keep, function(i.x, i.dim, mask=keep), rest)

    return build


def _unmasked(function: Callable[..., Tensor]) -> Prepare:
    return lambda i: lambda: function(i.x, dim=i.dim)


def _standardize(i: Masked) -> Call:
    def call() -> Tensor:
        count = i.keep.expand_as(i.x).sum(i.dim, keepdim=True)
        mean = torch.where(i.keep, i.x, 0.0).sum(i.dim, keepdim=True) / count
        centred = torch.where(i.keep, i.x - mean, 0.0)
        return centred / (centred.square().sum(i.dim, keepdim=True) / count + 1e-5).sqrt()

    return call


def measured() -> tuple[Measured, ...]:
    """Return softmax and its friends, each with the idiom that it replaces."""

    def of(name: str, idiom: Prepare, **more: Any) -> Measured:
        return Measured("softmax", name, _ours(name), idiom, written=4, **more)

    promise: dict[str, Any] = {"at_floor": 1.15, "backward_factor": 2.0}
    return (
        of(
            "softmax",
            _filled(torch.softmax, -math.inf),
            masked=_masked("softmax"),
            floor=_unmasked(torch.softmax),
            targets=(at_least(1.8, "best peer"),),
            **promise,
        ),
        of(
            "log_softmax",
            _filled(torch.log_softmax, -math.inf),
            masked=_masked("log_softmax"),
            floor=_unmasked(torch.log_softmax),
            targets=(never_slower(),),
            **promise,
        ),
        of("softmin", _filled(F.softmin, math.inf), masked=_masked("softmin"), floor=_unmasked(F.softmin)),
        of("normalize", _filled(F.normalize, 0.0), floor=_unmasked(F.normalize)),
        of("standardize", _standardize),
    )


def cases() -> tuple[Case, ...]:
    """Return the cases of softmax and its friends."""
    return tuple(case for each in measured() for case in grid(each))
