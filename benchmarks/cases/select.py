"""Selection: ``mw.apply`` of a network, and ``mw.pack`` there and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import maskwise as mw
from benchmarks.case import Case, Side, at_most, never_slower
from benchmarks.cases.sides import Call

__all__ = ["cases"]


@dataclass(frozen=True)
class Rows:
    """A tensor of rows, which of them are kept, and those rows packed."""

    x: Tensor  # (B, L, D)
    keep: Tensor  # (B, L)
    mask: mw.Mask
    packed: mw.Packed
    fn: nn.Module | None = None


def _rows(case: Case, *, prefix: bool = False) -> Rows:
    """Exactly the case's density is kept: at random places, or as the leading run of every sequence."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(case.shape, generator=generator)
    count = math.prod(case.shape[:2])
    if prefix:
        lengths = torch.full(case.shape[:1], round((case.density or 0.0) * case.shape[1]))
        mask = mw.Mask.from_lengths(lengths, max_len=case.shape[1])
    else:
        keep = torch.zeros(count, dtype=torch.bool)
        keep[torch.randperm(count, generator=generator)[: round((case.density or 0.0) * count)]] = True
        mask = mw.Mask(keep.reshape(case.shape[:2]))
    return Rows(x, mask.to_bool(), mask, mw.pack(x, mask))


# -- apply -------------------------------------------------------------------------------------------------------------
def _rows_and_mlp(case: Case) -> Rows:
    torch.manual_seed(0)
    features = case.shape[-1]
    fn = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features)).eval()
    return replace(_rows(case), fn=fn)


def _mlp(i: Rows) -> nn.Module:
    assert i.fn is not None
    return i.fn


def _without_grad(call: Call) -> Call:
    return torch.no_grad()(call)


def _ours(i: Rows) -> Call:
    fn = _mlp(i)
    return _without_grad(lambda: mw.apply(fn, i.x, mask=i.mask))


def _dense(i: Rows) -> Call:
    fn = _mlp(i)
    return _without_grad(lambda: fn(i.x))


def _indexed(i: Rows) -> Call:
    fn = _mlp(i)

    def call() -> Tensor:
        out = torch.zeros_like(i.x)
        out[i.keep] = fn(i.x[i.keep])
        return out

    return _without_grad(call)


# The dense side computes what is dropped as well, and more than ours: it is there as the measure of both targets.
APPLY = (
    Side("mw.apply", _ours, kind="ours"),
    Side("x[mask]", _indexed),
    Side("dense", _dense, kind="floor"),
)


def _apply_cases() -> tuple[Case, ...]:
    # Matrix products of other sizes add in another order.
    base = Case("select", "apply", "", _rows_and_mlp, APPLY, (32, 256, 768), relative_tolerance=1e-3)
    some = (0.05, 0.2, 0.5, 0.9)
    return (
        *(
            replace(base, variant=f"MLP keep={round(100 * d)}%", density=d, targets=(at_most(1.1 * d, "dense"),))
            for d in some
        ),
        *(
            replace(base, variant=f"MLP keep={round(100 * d)}%", density=d, targets=(never_slower("dense"),))
            for d in (0.95, 1.0)
        ),
    )


# -- pack --------------------------------------------------------------------------------------------------------------
def _copy_of(elements: Callable[[Rows], int], *, fresh: bool) -> Callable[[Rows], Call]:
    """Copying this many elements: into memory that is there already, or into fresh memory as every new tensor is."""

    def build(i: Rows) -> Call:
        source = torch.ones(elements(i), device=i.x.device)
        target = torch.zeros(elements(i), device=i.x.device)
        return source.clone if fresh else lambda: target.copy_(source)

    return build


def _packed(i: Rows) -> int:
    return i.packed.values.numel()


def _unpacked(i: Rows) -> int:
    # A copy reads as much as it writes; unpacking reads what is kept and writes everything.
    return (i.packed.values.numel() + i.x.numel()) // 2


def _index_put(i: Rows) -> Call:
    return lambda: torch.zeros_like(i.x).index_put_((i.keep,), i.packed.values)


def _index_put_into(i: Rows) -> Call:
    out = torch.empty_like(i.x)
    return lambda: out.zero_().index_put_((i.keep,), i.packed.values)


def _pack_into(i: Rows) -> Call:
    out = torch.empty_like(i.packed.values)
    return lambda: mw.pack(i.x, i.mask, out=out).values


def _index_select(i: Rows) -> Call:
    flat, out = i.x.flatten(0, 1), torch.empty_like(i.packed.values)
    return lambda: torch.index_select(flat, 0, i.keep.flatten().nonzero().squeeze(1), out=out)


PACK = (
    Side("mw.pack", lambda i: lambda: mw.pack(i.x, i.mask).values, kind="ours"),
    Side("x[mask]", lambda i: lambda: i.x[i.keep]),
    Side("clone of as many bytes", _copy_of(_packed, fresh=True), kind="floor"),
    Side("copy_ of as many bytes", _copy_of(_packed, fresh=False), kind="floor"),
)
INTO = (
    Side("mw.pack(out=)", _pack_into, kind="ours"),
    Side("index_select(out=)", _index_select),
    *PACK[-1:],
)
UNPACK = (
    Side("unpack", lambda i: i.packed.unpack, kind="ours"),
    Side("index_put_", _index_put),
    Side("clone of as many bytes", _copy_of(_unpacked, fresh=True), kind="floor"),
    Side("copy_ of as many bytes", _copy_of(_unpacked, fresh=False), kind="floor"),
)


UNPACK_INTO = (
    Side("unpack(out=)", lambda i: partial(i.packed.unpack, out=torch.empty_like(i.x)), kind="ours"),
    Side("zero_().index_put_", _index_put_into),
    *UNPACK[-1:],
)


def _prefix_rows(case: Case) -> Rows:
    return _rows(case, prefix=True)


def _counted(setup: Callable[[Case], Rows]) -> Callable[[Case], Rows]:
    def build(case: Case) -> Rows:
        rows = setup(case)
        # Whoever holds an `out` of the right size has counted.
        rows.mask.count()
        return rows

    return build


def _pack_cases() -> tuple[Case, ...]:
    base = Case("select", "pack", "", _rows, PACK, (64, 512, 768), 0.5)
    # 80 % of the bandwidth, against fresh memory and against memory that is there already.
    targets = tuple(at_most(1.25, f"{how} of as many bytes") for how in ("clone", "copy_"))
    fresh, into = (*targets, never_slower()), (targets[-1], never_slower())
    return tuple(
        replace(
            base,
            function=function,
            sides=sides,
            targets=into if where else fresh,
            setup=_counted(setup) if where else setup,
            density=density,
            variant=f"{kind}{where} keep={share}%",
        )
        for function, where, sides in (
            ("pack", "", PACK),
            ("pack", " out=", INTO),
            ("unpack", "", UNPACK),
            ("unpack", " out=", UNPACK_INTO),
        )
        for kind, setup in (("prefix", _prefix_rows), ("random rows", _rows))
        for share, density in ((20, 0.2), (50, 0.5), (90, 0.9))
    )


def cases() -> tuple[Case, ...]:
    """Return the cases of selection."""
    return (*_apply_cases(), *_pack_cases())
