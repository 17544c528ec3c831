"""Order: ``mw.sort``, ``argsort``, ``topk``, ``median``, ``quantile``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import maskwise as mw
from maskwise.benchmarks.case import Case, Side, at_most, never_slower
from maskwise.benchmarks.cases.sides import Masked, masked_inputs, torch_dtype

__all__ = ["cases"]

Call = Callable[[], Tensor]
Run = Callable[[Tensor, Any, int], Tensor]

TOPK = 10
# What a dropped element is filled with, so that the unmasked function passes over it.
FILL = {"sort": math.inf, "argsort": math.inf, "topk": -math.inf, "median": math.nan, "quantile": math.nan}


def _front(found: Tensor, dim: int) -> Tensor:
    # Behind what is kept ours has zeros and the idiom has what it filled in; the front of both is the same.
    return found.narrow(dim, 0, 1)


def _k(x: Tensor, dim: int) -> int:
    return min(TOPK, x.shape[dim])


OURS: dict[str, Run] = {
    "sort": lambda x, mask, dim: _front(mw.sort(x, mask, dim).values, dim),
    "argsort": lambda x, mask, dim: _front(mw.argsort(x, mask, dim), dim),
    "topk": lambda x, mask, dim: mw.topk(x, mask, _k(x, dim), dim).values,
    "median": mw.median,
    "quantile": lambda x, mask, dim: mw.quantile(x, mask, 0.3, dim),
}
THEIRS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sort": lambda x, dim: _front(x.sort(dim).values, dim),
    "argsort": lambda x, dim: _front(x.argsort(dim), dim),
    "topk": lambda x, dim: x.topk(_k(x, dim), dim).values,
    "median": lambda x, dim: x.nanmedian(dim).values,
    "quantile": lambda x, dim: x.nanquantile(0.3, dim),
}


def _ours(name: str) -> Callable[[Masked], Call]:
    return lambda i: lambda: OURS[name](i.x, i.mask, i.dim)


def _ours_from_bool(name: str) -> Callable[[Masked], Call]:
    return lambda i: lambda: OURS[name](i.x, i.keep, i.dim)


def _masked_fill(name: str) -> Callable[[Masked], Call]:
    def build(i: Masked) -> Call:
        # The mask is inverted once, outside: people who write masked_fill hold the mask in that convention.
        drop = ~i.keep
        return lambda: THEIRS[name](i.x.masked_fill(drop, FILL[name]), i.dim)

    return build


def _where(name: str) -> Callable[[Masked], Call]:
    return lambda i: lambda: THEIRS[name](torch.where(i.keep, i.x, FILL[name]), i.dim)


def _unmasked(name: str) -> Callable[[Masked], Call]:
    return lambda i: lambda: THEIRS[name](i.x, i.dim)


def _sides(name: str, *, floor: bool = True) -> tuple[Side, ...]:
    sides = (
        Side(f"mw.{name}", _ours(name), kind="ours"),
        Side(f"masked_fill+{name}", _masked_fill(name)),
        Side(f"where+{name}", _where(name)),
    )
    return (*sides, Side(f"x.{name}", _unmasked(name), kind="floor")) if floor else sides


def _with_backward(side: Side) -> Side:
    def build(i: Masked) -> Call:
        x = i.x.clone().requires_grad_()
        forward: Callable[[], Any] = side.prepare(replace(i, x=x))
        above = torch.rand(forward().shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
        return lambda: torch.autograd.grad(forward(), x, above)[0]

    return replace(side, prepare=build)


def _inputs(case: Case, mask_shape: tuple[int, ...] | None = None) -> Masked:
    # Every slice keeps its first element: what an empty one gives is not the same for ours and the idiom.
    inputs = masked_inputs(case, mask_shape)
    keep = inputs.keep.clone()
    keep.select(inputs.dim, 0).fill_(True)
    return replace(inputs, keep=keep, mask=mw.Mask(keep))


def _broadcast(case: Case) -> Masked:
    return _inputs(case, mask_shape=(1, *case.shape[1:]))


def _moved(case: Case) -> int:
    # Every value and every byte of the mask is read once; a sort also writes a value and an index of 8 bytes for each.
    size = torch_dtype(case).itemsize
    written = {"sort": size + 8, "argsort": 8}.get(case.function, 0)
    return math.prod(case.shape) * (size + 1 + written)


def _case(name: str, variant: str, shape: tuple[int, ...], **more: Any) -> Case:
    more = {"setup": _inputs, "sides": _sides(name), "targets": (never_slower(),), "moved_bytes": _moved, **more}
    return Case("order", name, variant, shape=shape, density=more.pop("density", 0.5), **more)


def _of(name: str) -> tuple[Case, ...]:
    # torch.quantile takes fewer than 16 million elements.
    rows = 4032 if name == "quantile" else 4096
    square, size = (rows, 4096), f"{rows}x4096"
    tiny = (replace(_sides(name)[0], prepare=_ours_from_bool(name)), *_sides(name)[1:])
    idiom = at_most(1.5, f"masked_fill+{name}")
    backward = tuple(_with_backward(side) for side in _sides(name, floor=False))
    cases = [
        *(_case(name, f"{size} dim=-1 keep={round(100 * d)}%", square, density=d, dim=-1) for d in (0.1, 0.5, 0.9)),
        *(_case(name, f"{size} dim=0 keep={round(100 * d)}%", square, density=d, dim=0) for d in (0.1, 0.5, 0.9)),
        _case(name, f"{size} dim=-1 mask=1x4096", square, dim=-1, setup=_broadcast),
        _case(name, f"{rows // 64}x512x256 dim=1 keep=50%", (rows // 64, 512, 256), dim=1),
        _case(name, "4x8", (4, 8), dim=-1, sides=tiny, targets=(idiom, never_slower()), moved_bytes=None),
    ]
    if name != "argsort":
        cases += [
            _case(name, f"{size} forward+backward", square, dim=-1, sides=backward, moved_bytes=None),
            _case(name, "4x8 forward+backward", (4, 8), dim=-1, sides=backward, moved_bytes=None),
        ]
    return tuple(cases)


def cases() -> tuple[Case, ...]:
    """Return the cases of the order family."""
    return tuple(case for name in FILL for case in _of(name))
