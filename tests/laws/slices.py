"""What every function is measured against: a loop over slices, in float64, that sees only what is kept.

Each family brings its loop bodies in ``tests/ops/<family>/law_cases.py``, as ``LAWS[name].body``:
- a reduction: ``(kept, **kwargs) -> scalar``, where ``kept`` are the kept values, at least one;
- a position: ``(slice, keep) -> position in the slice``, which has at least one kept value;
- anything else: ``(row, keep, **kwargs) -> row or tuple of rows``, where ``row`` and ``keep`` are whole slices and the
  values of ``row`` that ``keep`` drops are NaN, so that a loop body that looks at them fails too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Law:
    """What holds for a function."""

    #: How it treats dims: a "reduction" removes them; a "position" too, one or all of them, and returns indices; a
    #: "rowwise" function works along one of them and keeps it; an "elementwise" one has none.
    kind: str
    #: What a slice with nothing kept gives (law 3).
    empty: float
    #: How often it can be differentiated: 0 not at all, 2 twice (and so, for smooth functions, any number of times).
    gradient: int
    body: Callable[..., Any]
    #: Whether it takes integers that torch cannot order: uint16, uint32 and uint64.
    unsigned: bool = False
    #: Whether it has a kernel; False for one that plain torch operations serve alone.
    kernel: bool = True


def laws_of(family: str) -> dict[str, Law]:
    """The laws of a family, by function."""
    return importlib.import_module(f"tests.ops.{family}.law_cases").LAWS


def law_cases(function):
    """The module with a family's laws and keyword arguments."""
    return importlib.import_module(f"tests.ops.{function.family}.law_cases")


def expected(function, x, mask, **kwargs):
    """The result of ``function``, one slice after the other; a tensor, or a tuple of them."""
    mask = mask.expand(x.shape)
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    body = laws_of(function.family)[function.name].body
    if function.kind == "reduction":
        return _reduce(body, function.empty, wide, mask, **kwargs)
    if function.kind == "position":
        return _reduce(body, function.empty, wide, mask, whole=True, **kwargs)
    return _map(body, wide, mask, **kwargs)


def _reduce(body, empty, x, mask, dim=None, keepdim=False, whole=False, **kwargs):
    dims = (
        list(range(x.dim())) if dim is None else sorted(d % x.dim() for d in ([dim] if isinstance(dim, int) else dim))
    )
    others = [d for d in range(x.dim()) if d not in dims]
    sizes = [x.shape[d] for d in others]
    rows = x.permute(*others, *dims).reshape(*sizes, -1)
    bits = mask.permute(*others, *dims).reshape(rows.shape)
    rows, bits = rows.reshape(-1, rows.shape[-1]), bits.reshape(-1, bits.shape[-1])
    outs = [
        torch.as_tensor(body(*((row, kept) if whole else (row[kept],)), **kwargs) if kept.any() else empty).double()
        for row, kept in zip(rows, bits, strict=True)
    ]
    out = torch.stack(outs).reshape(sizes)
    for d in dims if keepdim else []:
        out = out.unsqueeze(d)
    return out


def _map(body, x, mask, dim=-1, **kwargs):
    rows, bits = x.movedim(dim, -1), mask.movedim(dim, -1)
    flat = torch.where(bits, rows, torch.nan).reshape(-1, rows.shape[-1])
    outs = [body(row, kept, **kwargs) for row, kept in zip(flat, bits.reshape(flat.shape), strict=True)]
    joined = [
        torch.stack(parts).reshape(*rows.shape[:-1], -1).movedim(-1, dim)
        for parts in zip(*[out if isinstance(out, tuple) else (out,) for out in outs], strict=True)
    ]
    return tuple(joined) if isinstance(outs[0], tuple) else joined[0]
