"""The sweep that holds the fourth law: every public function, from tiny to large, sparse to dense, contiguous or not.

Masks are bool tensors, and intervals of every origin: lengths over the whole grid, the others at half kept. A case is
timed for a tenth of a second, against the plain idiom at its best and by each of our own routes. So it measures two
things: whether a function is slower than what it replaces, and whether dispatch chose the best route. It plans with the
rates that ``maskwise calibrate`` has measured, where ``MASKWISE_CACHE_DIR`` points to some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import maskwise as mw
from benchmarks.case import Case, Side, never_slower
from benchmarks.cases import reductions
from benchmarks.cases.sides import Call, Masked, distinct, masked_inputs, near_one

__all__ = ["FAMILY", "SWEPT", "cases"]

FAMILY = "sweep"
SIZES = ((8, 16), (64, 128), (256, 1024), (16, 100_000), (32, 128, 256))
#: (batch, heads, length, features)
HEADS = ((1, 2, 16, 16), (4, 4, 64, 32), (4, 8, 256, 64))
DENSITIES = (0.02, 0.5, 0.98)
#: How x lies in memory under a mask of bits; and a contiguous x under a mask of lengths.
LAYOUTS = ("contiguous", "strided", "lengths")
#: A contiguous x under intervals of other origins, at half kept: what differs from lengths is where a line begins.
ORIGINS = ("left", "causal", "window", "segments")
SECONDS = 0.1
K = 8

Ask = Callable[[Any], tuple[Any, ...]]
Idiom = Callable[[Any], Any]


@dataclass(frozen=True)
class Swept:
    """One function: how it is called, the idiom that it replaces, and the routes that it can be forced to take."""

    name: str
    #: (function, arguments ...), with a dict of keyword arguments last.
    ask: Ask
    idiom: Callable[[Any], Call]
    routes: tuple[str, ...] = ("plain", "kernel")
    leaky: Callable[[Any], Call] | None = None
    #: What is made of x and the mask, once and outside of the timing.
    ready: Callable[[Masked], Any] = lambda i: i
    sizes: tuple[tuple[int, ...], ...] = SIZES
    setup: Callable[[Case, str], Any] | None = None
    value: Callable[[Any], Any] = lambda out: out

    def sides(self) -> tuple[Side, ...]:
        """Ours as planned, the idiom, and ours by each route."""
        found = [Side(f"mw.{self.name}", self._ours, kind="ours"), Side("idiom", self.idiom)]
        if self.leaky is not None:
            found.append(Side("where", self.leaky, kind="leaky"))
        return (*found, *(Side(f"route {r}", self._ours, kind="route", force=r) for r in self.routes))

    def _ours(self, inputs: Any) -> Call:
        fn, *arguments, options = self.ask(inputs)
        value = self.value
        if self.name in ("cummax", "cummin", "sort", "topk", "pack"):
            return lambda: value(fn(*arguments, **options))
        return lambda: fn(*arguments, **options)

    def route(self, inputs: Any) -> str:
        """The side of the route that dispatch chooses for a call that has been made before."""
        fn, *arguments, options = self.ask(inputs)
        taken = mw.plan(fn, *arguments, **options).route
        return f"route {'kernel' if taken in ('bare', 'fused', 'sparse') else taken}"


def _inputs(case: Case, layout: str) -> Masked:
    """Values and a mask of the case's density; where it is strided, the last two dims of x lie exchanged in memory."""
    i = masked_inputs(replace(case, dim=-1))
    if layout == "strided":
        return replace(i, x=i.x.transpose(-1, -2).contiguous().transpose(-1, -2))
    if layout in ("lengths", *ORIGINS):
        mask = _intervals(case, layout, case.shape[:-1], case.shape[-1])
        return replace(i, keep=mask.to_bool().expand(case.shape).clone(), mask=mask)
    return i


def _intervals(case: Case, origin: str, shape: tuple[int, ...], n: int) -> mw.Mask:
    """Intervals along the last dim of (*shape, n) around the case's density, of two at least; they may broadcast."""
    rows, density = shape[-1], case.density or 0.0
    if origin == "causal":
        # The last rows of a square would keep nearly all.
        return mw.Mask.causal(rows, n, offset=max(1, (n - rows) // 2))
    if origin == "window":
        return mw.Mask.window(rows, left=max(1, int(density * n / 2)), right=max(1, int(density * n / 2)), k=n)
    if origin == "segments":
        first = (n - rows) // 2
        return mw.Mask.from_segments((torch.arange(n) * 2) // n)[first : first + rows]
    around = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5
    lengths = (around * density * n).long().clamp(min(2, n), n)
    return mw.Mask.from_lengths(lengths, n, side="left" if origin == "left" else "right")


def _given(i: Masked) -> Tensor | mw.Mask:
    """The mask as it is passed: intervals as a Mask, bits as a bool tensor."""
    return i.mask if i.mask.operand == "intervals" else i.keep


def _near_one(i: Masked) -> Masked:
    return replace(i, x=near_one(i.x))


def _distinct(i: Masked) -> Masked:
    return replace(i, x=distinct(i.x))


# -- what is replaced --------------------------------------------------------------------------------------------------
def _filled(function: Callable[..., Any], value: float) -> Callable[[Masked], Call]:
    return lambda i: lambda: function(torch.where(i.keep, i.x, value), -1)


def _first(function: Callable[..., Any], value: float) -> Callable[[Masked], Call]:
    return lambda i: lambda: function(torch.where(i.keep, i.x, value), -1)[0]


def _standardize(i: Masked) -> Call:
    def call() -> Tensor:
        count = i.keep.sum(-1, keepdim=True)
        mean = torch.where(i.keep, i.x, 0.0).sum(-1, keepdim=True) / count
        centred = torch.where(i.keep, i.x - mean, 0.0)
        return centred / (centred.square().sum(-1, keepdim=True) / count + 1e-5).sqrt()

    return call


def _tail(i: Masked) -> Tensor:
    return torch.arange(i.x.shape[-1], device=i.x.device) >= i.keep.sum(-1, keepdim=True)


def _sort(i: Masked) -> Call:
    return lambda: torch.sort(torch.where(i.keep, i.x, math.inf), -1)[0].masked_fill_(_tail(i), 0.0)


def _argsort(i: Masked) -> Call:
    return lambda: torch.argsort(torch.where(i.keep, i.x, math.inf), -1).masked_fill_(_tail(i), -1)


def _topk(i: Masked) -> Call:
    return lambda: torch.topk(torch.where(i.keep, i.x, -math.inf), K, -1)[0]


def _indexed(fn: Callable[[Tensor], Tensor]) -> Callable[[Masked], Call]:
    def build(i: Masked) -> Call:
        def call() -> Tensor:
            out = torch.zeros_like(i.x)
            out[i.keep] = fn(i.x[i.keep])
            return out

        return call

    return build


def _mse(i: Masked) -> Call:
    target = torch.flip(i.x, (0,)).clone()
    return lambda: torch.where(i.keep, F.mse_loss(i.x, target, reduction="none"), 0.0).sum() / i.keep.sum()


def _weights(i: Masked) -> tuple[Tensor, Tensor, mw.Mask]:
    """An input, a weight of as many outputs as x has rows, but not more than 256, and what is kept of it."""
    x = i.x.flatten(0, -2)
    mask = (i.mask if i.mask.operand == "intervals" else mw.Mask(i.keep)).expand(i.x.shape).flatten(0, -2)[:256]
    weight = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)).to(x.device)
    return x[:64], weight, mask


def _linear(i: tuple[Tensor, Tensor, mw.Mask]) -> Call:
    x, weight, mask = i
    keep = mask.to_bool()
    return lambda: F.linear(x, torch.where(keep, weight, 0.0))


def _heads(case: Case, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor | mw.Mask]:
    batch, heads, length, features = case.shape
    generator = torch.Generator().manual_seed(0)
    shape = (batch, length, heads, features) if layout == "strided" else case.shape
    q, k, v = (torch.rand(shape, generator=generator) for _ in range(3))
    if layout in ("causal", "window", "segments"):
        return q, k, v, _intervals(case, layout, (length,), length)
    if layout in ("lengths", "left"):
        return q, k, v, _intervals(case, layout, (batch,), length)[:, None, None, :]
    if layout == "strided":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    keep = torch.rand(batch, 1, 1, length, generator=generator) < (case.density or 0.0)
    keep[..., :2] = True
    return q, k, v, keep


def _attention(i: tuple[Tensor, Tensor, Tensor, Tensor | mw.Mask]) -> Call:
    q, k, v, mask = i
    keep = mask.to_bool() if isinstance(mask, mw.Mask) else mask
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


# -- every public function ---------------------------------------------------------------------------------------------
def _one(name: str, idiom: Callable[[Any], Call], *more: Any, **given: Any) -> Swept:
    """A function of x, a mask, and perhaps something between the mask and the dim."""
    function = getattr(mw, name)
    return Swept(name, lambda i: (function, i.x, _given(i), *more, {"dim": -1}), idiom, **given)


def _of_bool(i: Masked) -> Masked:
    return replace(i, x=i.x > 0.5)


def _values(out: Any) -> Any:
    return out[0]


#: What some reductions need of their inputs.
READY = {"prod": _near_one, "argmax": _distinct, "argmin": _distinct, "any": _of_bool, "all": _of_bool}
SWEPT: tuple[Swept, ...] = (
    _one("sum", _filled(torch.sum, 0.0)),
    *(_one(each.name, each.idiom, ready=READY.get(each.name, lambda i: i)) for each in reductions.measured()),
    Swept("count", lambda i: (mw.count, _given(i), {"dim": -1}), lambda i: lambda: i.keep.sum(-1)),
    _one("median", _first(torch.nanmedian, math.nan), ready=_distinct),
    _one("quantile", lambda i: lambda: torch.nanquantile(torch.where(i.keep, i.x, math.nan), 0.25, -1), 0.25),
    _one("sort", _sort, ready=_distinct, value=_values),
    _one("argsort", _argsort, ready=_distinct),
    _one("topk", _topk, K, ready=_distinct, value=_values),
    _one("softmax", _filled(torch.softmax, -math.inf)),
    _one("log_softmax", _filled(torch.log_softmax, -math.inf)),
    _one("softmin", _filled(F.softmin, math.inf)),
    _one("normalize", lambda i: lambda: F.normalize(torch.where(i.keep, i.x, 0.0), 2.0, -1)),
    _one("standardize", _standardize),
    _one("cumsum", _filled(torch.cumsum, 0.0)),
    _one("cumprod", _filled(torch.cumprod, 1.0), ready=_near_one),
    _one("cummax", _first(torch.cummax, -math.inf), value=_values),
    _one("cummin", _first(torch.cummin, math.inf), value=_values),
    _one("logcumsumexp", _filled(torch.logcumsumexp, -math.inf)),
    Swept("fill", lambda i: (mw.fill, i.x, _given(i), -1.0, {}), lambda i: lambda: torch.where(i.keep, i.x, -1.0)),
    Swept("loss", lambda i: (mw.loss, F.mse_loss, i.x, torch.flip(i.x, (0,)).clone(), _given(i), {}), _mse),
    Swept(
        "apply",
        lambda i: (mw.apply, torch.exp, i.x, {"mask": i.mask}),
        _indexed(torch.exp),
        routes=("plain", "kept"),
        leaky=lambda i: lambda: torch.where(i.keep, torch.exp(i.x), 0.0),
    ),
    Swept(
        "pack",
        lambda i: (mw.pack, i.x, i.mask, {}),
        lambda i: lambda: i.x[i.keep],
        routes=(),
        value=lambda packed: packed.values,
    ),
    Swept(
        "linear",
        lambda i: (mw.linear, *i, {}),
        _linear,
        ready=_weights,
    ),
    Swept(
        "attention",
        lambda i: (mw.attention, *i, {}),
        _attention,
        routes=("whole", "blocks", "kernel"),
        sizes=HEADS,
        setup=_heads,
    ),
)


def _setup(swept: Swept, layout: str) -> Callable[[Case], Any]:
    make = swept.setup or _inputs
    return lambda case: swept.ready(make(case, layout))


def _of(swept: Swept) -> Iterator[Case]:
    for shape in swept.sizes:
        for density in DENSITIES:
            for layout in (*LAYOUTS, *(ORIGINS if density == 0.5 else ())):
                size = "x".join(map(str, shape))
                yield Case(
                    FAMILY,
                    swept.name,
                    f"sweep {size} keep={round(100 * density)}% {layout}",
                    _setup(swept, layout),
                    swept.sides(),
                    shape,
                    density,
                    -1,
                    targets=(never_slower("idiom"),),
                    # Long products and sums add up in other orders, and cancel to values near zero.
                    relative_tolerance=2e-3,
                    absolute_tolerance=1e-4,
                    route=swept.route if swept.routes else None,
                    budget=SECONDS,
                )


def cases() -> tuple[Case, ...]:
    """Return the cases of the sweep."""
    return tuple(case for swept in SWEPT for case in _of(swept))
