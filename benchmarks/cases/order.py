"""Sorting and what rests on it, on the standard grid with shorter rows: the idioms take seconds on the long ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import maskwise as mw
from benchmarks.case import Case
from benchmarks.cases.grid import Measured, Prepare, grid
from benchmarks.cases.sides import Call, Masked, distinct

__all__ = ["cases", "measured"]

K = 8


def _sort(i: Masked) -> Call:
    drop = ~i.keep
    return lambda: torch.sort(i.x.masked_fill(drop, math.inf), i.dim)[0].masked_fill_(_tail(i), 0.0)


def _tail(i: Masked) -> Tensor:
    """Where the sorted row has run out of kept values; the idiom needs it to tell kept from dropped."""
    keep = i.keep.expand_as(i.x)
    size = i.x.shape[i.dim]
    places = torch.arange(size, device=i.x.device).reshape(
        [-1 if d == i.dim % i.x.dim() else 1 for d in range(i.x.dim())]
    )
    return places >= keep.sum(i.dim, keepdim=True)


def _argsort(i: Masked) -> Call:
    drop = ~i.keep
    return lambda: torch.argsort(i.x.masked_fill(drop, math.inf), i.dim).masked_fill_(_tail(i), -1)


def _topk(i: Masked) -> Call:
    drop = ~i.keep
    return lambda: torch.topk(i.x.masked_fill(drop, -math.inf), min(K, i.x.shape[i.dim]), i.dim)[0]


def _median(i: Masked) -> Call:
    drop = ~i.keep
    return lambda: torch.nanmedian(i.x.masked_fill(drop, math.nan), i.dim)[0]


def _quantile(i: Masked) -> Call:
    drop = ~i.keep
    return lambda: torch.nanquantile(i.x.masked_fill(drop, math.nan), 0.25, i.dim)


def measured() -> tuple[Measured, ...]:
    """Return sorting and what rests on it, each with the idiom that it replaces."""

    def of(name: str, ours: Prepare, idiom: Prepare, **more: Any) -> Measured:
        # The compiler has nothing to fuse into a sort.
        return Measured("order", name, ours, idiom, compiles=False, **more)

    return (
        of("sort", lambda i: lambda: mw.sort(i.x, i.keep, i.dim)[0], _sort, written=12),
        of("argsort", lambda i: lambda: mw.argsort(i.x, i.keep, i.dim), _argsort, written=8, gradient=False),
        of("topk", lambda i: lambda: mw.topk(i.x, i.keep, min(K, i.x.shape[i.dim]), i.dim)[0], _topk),
        of("median", lambda i: lambda: mw.median(i.x, i.keep, i.dim), _median, masked=None),
        of("quantile", lambda i: lambda: mw.quantile(i.x, i.keep, 0.25, i.dim), _quantile),
    )


def _distinct(case: Case) -> Case:
    def setup(case: Case) -> Masked:
        inputs: Masked = given(case)
        return replace(inputs, x=distinct(inputs.x))

    given = case.setup
    return replace(case, setup=setup)


def _shorter(case: Case) -> Case:
    if case.shape != (4096, 4096):
        return case
    return replace(case, shape=(1024, 4096), variant=case.variant.replace("4096x4096", "1024x4096"))


def cases() -> tuple[Case, ...]:
    """Return the cases of sorting."""
    return tuple(_distinct(_shorter(case)) for each in measured() for case in grid(each))
