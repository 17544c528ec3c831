"""Time over the kept fraction: a call must cost what its mask keeps.

With f the kept fraction and t(1) our own time with everything kept, measured in the same rounds, each kind of work has
a bound on t(f). A target's text names the kind of work, so that a run can be summed up kind by kind.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskwise as mw
from benchmarks.case import Case, Side, Target, never_slower
from benchmarks.cases import fill, masked_linear, order, reductions, scan, softmax
from benchmarks.cases.grid import Measured, Prepare
from benchmarks.cases.sides import Call, Masked, distinct, near_one, with_backward

__all__ = ["FAMILY", "FULL", "IDIOM", "UNMASKED", "Kept", "cases"]

FAMILY = "kept"
FULL, IDIOM, UNMASKED, WRITE, PADDED = "all kept", "idiom", "unmasked", "write", "padded"
FRACTIONS = (0.05, 0.2, 0.5, 0.9, 1.0)
SECONDS = 0.2
"""How long a row is timed; one that misses its target is timed again, longer."""

Shape = tuple[int, ...]
Dim = int | tuple[int, ...] | None
Bound = Callable[[float], Target]
"""The target at a kept fraction."""
SQUARE, BATCH, ORDERED, VOCABULARY = (4096, 4096), (64, 512, 256), (1024, 4096), (8192, 30522)


# -- targets -----------------------------------------------------------------------------------------------------------
def _share(slack: float, work: str) -> Bound:
    return lambda f: Target(FULL, f + slack, None, f"{work}: t(f) ≤ (f + {slack:.2f}) t(1)")


def _share_and_write(work: str, written: str) -> Bound:
    return lambda f: Target(FULL, f, None, f"{work}: t(f) ≤ f t(1) + {written}", plus=WRITE)


def _at_most(factor: float, side: str, work: str) -> Target:
    return Target(side, factor, None, f"{work}: ≤ {factor:g} x {side}")


INTERVALS = _share(0.05, "reductions, intervals")
BITS = _share(0.10, "reductions, bits")
ROWS_OF_LOSS = _share(0.05, "cross entropy forward+backward")
ORDER = _share(0.10, "sort, topk, median, quantile")
OUTPUTS = _share_and_write("softmax family, scans, fill", "writing what is dropped")
GRADIENTS = _share_and_write("reductions forward+backward, intervals", "one write of x's size")
EVERYTHING = _at_most(1.05, UNMASKED, "reductions, all kept")
LAYERS = _at_most(0.35, UNMASKED, "layers, 20 % kept")
APPLIED = _at_most(0.75, UNMASKED, "apply(layer_norm), 50 % kept")
SPARSE = _at_most(1.05, "SparseLinear", "MaskedLinear in evaluation")


# -- inputs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kept(Masked):
    """A tensor, the bool tensor that the idioms take, the mask that ours takes, and one like it that keeps all."""

    mask: Any
    full: Any


@lru_cache(maxsize=2)
def _values(shape: Shape, make: Callable[[Tensor], Tensor]) -> Tensor:
    # The rows of one work share it: to draw a vocabulary's logits takes longer than to time them.
    return make(torch.rand(shape, generator=torch.Generator().manual_seed(0)))


def _lengths(shape: Shape, f: float, side: str = "right") -> mw.Mask:
    """Lengths spread evenly around f of the row, in a random order; none below 2, so that no variance is NaN."""
    rows, size = shape[:2]
    fractions = f + min(f, 1 - f) * ((2 * torch.arange(rows) + 1) / rows - 1)
    lengths = (fractions * size).round().long().clamp(min(2, size), size)
    shuffled = lengths[torch.randperm(rows, generator=torch.Generator().manual_seed(1))]
    return mw.Mask.from_lengths(shuffled, max_len=size, side=side)


def _over(mask: mw.Mask, shape: Shape, dim: Dim) -> mw.Mask:
    """The intervals along the reduced dim."""
    if len(shape) == 3:
        return mask[..., None]
    return mask.T if dim == 0 else mask


def _random(shape: Shape, f: float) -> Tensor:
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < f
    keep[:, :2] = True
    return keep


def _runs(shape: Shape, f: float) -> Tensor:
    rows, size = shape
    run = min(64, size)
    keep = torch.rand(rows, size // run, generator=torch.Generator().manual_seed(1)) < f
    keep[:, 0] |= ~keep.any(1)
    return keep.repeat_interleave(run, 1)


def _rows(shape: Shape, f: float) -> Tensor:
    places = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
    return places < max(1, round(f * shape[0]))


MASKS: dict[str, Callable[[Shape, Dim, float], Any]] = {
    "lengths": lambda shape, dim, f: _over(_lengths(shape, f), shape, dim),
    "left": lambda shape, dim, f: _over(_lengths(shape, f, "left"), shape, dim),
    # The intervals along the dim that is not reduced.
    "across": lambda shape, dim, f: _lengths(shape, f),
    "causal": lambda shape, dim, f: mw.Mask.causal(shape[0]) if f < 1 else _lengths(shape, 1.0),
    "window": lambda shape, dim, f: mw.Mask.window(shape[0], left=255) if f < 1 else _lengths(shape, 1.0),
    "sequences": lambda shape, dim, f: _lengths(shape, f),
    "channels": lambda shape, dim, f: _lengths((shape[0], shape[2]), f),
    "positions": lambda shape, dim, f: _random(shape[:2], f)[..., None],
    "runs": lambda shape, dim, f: _runs(shape, f),
    "random": lambda shape, dim, f: _random(shape, f) if f < 1 else torch.ones(shape, dtype=torch.bool),
    "rows": lambda shape, dim, f: _rows(shape, f),
}


# -- works -------------------------------------------------------------------------------------------------------------
def _unmasked(function: Callable[..., Any]) -> Prepare:
    return lambda i: lambda: function(i.x, i.dim)


def _any(i: Masked) -> Call:
    positive = i.x > 0.5
    return lambda: positive.any(i.dim)


def _first(function: Callable[..., Any]) -> Prepare:
    return lambda i: lambda: function(i.x, dim=i.dim)[0]


#: The unmasked op of torch, where the other families have none.
FLOORS: dict[str, Prepare] = {
    "norm": lambda i: lambda: torch.linalg.vector_norm(i.x, 2.0, i.dim),
    "any": _any,
    "sort": _first(torch.sort),
    "topk": lambda i: lambda: torch.topk(i.x, min(order.K, i.x.shape[i.dim]), i.dim)[0],
    "median": _first(torch.median),
    "quantile": lambda i: lambda: torch.quantile(i.x, 0.25, i.dim),
}
#: What a work needs of its values: nothing that ends it early, and no two that are equal where positions are compared.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda x: x / 2,
    "cumprod": near_one,
    **dict.fromkeys(("argmax", "sort", "topk", "median"), distinct),
}


def _named(measured: tuple[Measured, ...], *names: str) -> list[Measured]:
    found = {each.name: replace(each, floor=each.floor or FLOORS.get(each.name)) for each in measured}
    return [found[name] for name in names] if names else list(found.values())


SUM = Measured(
    FAMILY,
    "sum",
    lambda i: lambda: mw.sum(i.x, i.keep, dim=i.dim),
    lambda i: lambda: torch.where(i.keep, i.x, 0.0).sum(i.dim),
    floor=_unmasked(torch.sum),
)
REDUCTIONS = [SUM, *_named(reductions.measured(), "mean", "var", "norm", "amax", "argmax", "logsumexp", "any")]
DIFFERENTIABLE = [work for work in REDUCTIONS if work.name in ("sum", "mean", "amax", "logsumexp")]


def _loss_target(i: Masked) -> Tensor:
    classes = torch.randint(0, i.x.shape[1], i.x.shape[:1], generator=torch.Generator().manual_seed(2))
    return classes.to(i.x.device)


def _cross_entropy(i: Masked) -> Call:
    target = _loss_target(i)
    return lambda: mw.loss(F.cross_entropy, i.x, target, i.keep)


def _cross_entropy_idiom(i: Masked) -> Call:
    target = _loss_target(i)
    return lambda: torch.where(i.keep, F.cross_entropy(i.x, target, reduction="none"), 0.0).sum() / i.keep.sum()


def _cross_entropy_unmasked(i: Masked) -> Call:
    target = _loss_target(i)
    return lambda: F.cross_entropy(i.x, target)


CROSS_ENTROPY = Measured(
    FAMILY, "cross_entropy", _cross_entropy, _cross_entropy_idiom, floor=_cross_entropy_unmasked, written=4
)


def _indexed(function: Callable[[Tensor], Tensor], channels: int = -1) -> Prepare:
    """A function of the kept rows, gathered and scattered by indexing."""

    def build(i: Masked) -> Call:
        def call() -> Tensor:
            out = torch.zeros_like(i.x)
            out.movedim(channels, -1)[i.keep] = function(i.x.movedim(channels, -1)[i.keep])
            return out

        return call

    return build


def _layer(ours: type[nn.Module], torchs: type[nn.Module], idiom: Prepare, channels: int = -1) -> Measured:
    """A layer of `mw.nn` with torch's own on everything as the floor, both without gradients."""

    def masked(i: Masked) -> Call:
        with i.x.device:
            layer = ours(i.x.shape[channels])
        return torch.no_grad()(lambda: layer(i.x, i.keep))

    def whole(i: Masked) -> Call:
        with i.x.device:
            layer = torchs(i.x.shape[channels])
        return torch.no_grad()(lambda: layer(i.x))

    return Measured(FAMILY, ours.__name__, masked, idiom, floor=whole)


def _pool(ours: type[nn.Module], idiom: Prepare, unmasked: Callable[..., Tensor]) -> Measured:
    def masked(i: Masked) -> Call:
        layer = ours()
        return lambda: layer(i.x, i.keep)

    return Measured(FAMILY, ours.__name__, masked, idiom, floor=lambda i: lambda: unmasked(i.x, 1))


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _mean_idiom(i: Masked) -> Call:
    return lambda: torch.where(i.keep[..., None], i.x, 0.0).sum(1) / i.keep.sum(1, keepdim=True)


def _max_idiom(i: Masked) -> Call:
    return lambda: torch.where(i.keep[..., None], i.x, -math.inf).amax(1)


BATCH_NORM = _layer(
    mw.nn.MaskedBatchNorm1d,
    nn.BatchNorm1d,
    _indexed(lambda x: F.batch_norm(x, None, None, training=True), channels=1),
    channels=1,
)
LAYER_NORM = _layer(mw.nn.MaskedLayerNorm, nn.LayerNorm, _indexed(_layer_norm))
MEAN_POOL = _pool(mw.nn.MaskedMeanPool, _mean_idiom, torch.mean)
MAX_POOL = _pool(mw.nn.MaskedMaxPool, _max_idiom, torch.amax)

COUNT = Measured(
    FAMILY, "count", lambda i: lambda: mw.count(i.keep, dim=i.dim), lambda i: lambda: i.keep.sum(i.dim), gradient=False
)
APPLY_NORM = Measured(
    FAMILY,
    "apply(layer_norm)",
    lambda i: lambda: mw.apply(F.layer_norm, i.x, i.x.shape[-1:], mask=i.keep),
    _indexed(_layer_norm),
    floor=lambda i: lambda: _layer_norm(i.x),
)
APPLY_FUNCTION = Measured(
    FAMILY,
    "apply(function of layer_norm)",
    lambda i: lambda: mw.apply(_layer_norm, i.x, mask=i.keep),
    _indexed(_layer_norm),
    floor=lambda i: lambda: _layer_norm(i.x),
)
APPLY_TANH = Measured(
    FAMILY,
    "apply(tanh)",
    lambda i: lambda: mw.apply(torch.tanh, i.x, mask=i.keep),
    lambda i: lambda: torch.where(i.keep, torch.tanh(i.x), 0.0),
    floor=lambda i: i.x.tanh,
)


# -- rows --------------------------------------------------------------------------------------------------------------
def _setup(work: Measured, mask: str) -> Callable[[Case], Kept]:
    def setup(case: Case) -> Kept:
        kept, full = (MASKS[mask](case.shape, case.dim, f) for f in (case.density or 0.0, 1.0))
        keep = kept.to_bool() if isinstance(kept, mw.Mask) else kept
        x = _values(case.shape, VALUES.get(work.name, Tensor.contiguous))
        return Kept(x, keep, kept, case.dim, full)

    return setup


def _write(share: float, written: float) -> Side:
    """A write into fresh memory, of so many bytes for each element of a share of x."""

    def build(i: Masked) -> Call:
        size = 4 * max(1, round(share * written * i.x.numel() / 4))
        if i.x.device.type != "cpu":
            # A device's allocator keeps its memory, for every side alike.
            return lambda: torch.empty(size // 4, device=i.x.device).fill_(0.5)

        def call() -> Tensor:
            # Neither memory that an allocator kept, nor small pages where the system has huge ones.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=torch.float32).fill_(0.5)

        return call

    return Side(WRITE, build, kind="memory")


def _row(
    work: Measured,
    mask: str,
    shape: Shape,
    dim: Dim,
    f: float,
    bounds: tuple[Target, ...] = (),
    *,
    backward: bool = False,
) -> Case:
    """One row: ours, ours with everything kept, the idiom, the unmasked op, and a write where a target allows one."""
    sides = [Side(f"mw.{work.name}", lambda i: work.ours(replace(i, keep=i.mask)), kind="ours")]
    if f < 1:
        sides.append(Side(FULL, lambda i: work.ours(replace(i, keep=i.full)), kind="full"))
    sides.append(Side(IDIOM, work.idiom))
    if work.floor is not None:
        sides.append(Side(UNMASKED, work.floor, kind="floor"))
    if backward:
        sides = [with_backward(side) for side in sides]
    if any(target.plus == WRITE for target in bounds):
        # A gradient is as large as x; an output's kept part is in t(1).
        sides.append(_write(1.0, 4) if backward else _write(1 - f, work.written))
    size = "x".join(map(str, shape))
    over = "" if dim is None else f" dim={'+'.join(map(str, dim)) if isinstance(dim, tuple) else dim}"
    return Case(
        FAMILY,
        work.name,
        f"{mask} {size}{over}{' forward+backward' if backward else ''} keep={round(100 * f)}%",
        _setup(work, mask),
        tuple(sides),
        shape,
        f,
        dim,
        targets=(*bounds, never_slower(IDIOM)),
        # Sums of millions add up in other orders.
        relative_tolerance=2e-3,
        absolute_tolerance=1e-4,
        budget=SECONDS,
    )


def _curve(
    work: Measured, mask: str, shape: Shape, dim: Dim, bound: Bound, at_one: tuple[Target, ...] = (), **more: Any
) -> Iterator[Case]:
    """The rows of one work over all kept fractions."""
    for f in FRACTIONS:
        yield _row(work, mask, shape, dim, f, (bound(f),) if f < 1 else at_one, **more)


def _reductions() -> Iterator[Case]:
    one = (EVERYTHING,)
    for work in REDUCTIONS:
        dims = ((SQUARE, -1), (SQUARE, 0), (BATCH, 1), *(((BATCH, (1, 2)),) if work.name != "argmax" else ()))
        for shape, dim in dims:
            yield from _curve(work, "lengths", shape, dim, INTERVALS, one)
        yield from (_row(work, "left", SQUARE, -1, f, (INTERVALS(f),)) for f in (0.2, 0.5))
        if work.name in ("sum", "amax"):
            yield _row(work, "across", SQUARE, 0, 0.2, (INTERVALS(0.2),))
        if work.name != "var":
            # The variance of the single value that the first row keeps is NaN.
            yield _row(work, "causal", SQUARE, -1, 0.5, (INTERVALS(0.5),))
            yield _row(work, "window", SQUARE, -1, 0.06, (INTERVALS(0.0606),))
        for shape, dim in dims[2:]:
            yield from _curve(work, "positions", shape, dim, BITS, one)
        for dim in (-1, 0):
            yield from _curve(work, "runs", SQUARE, dim, BITS, one)
        yield from (_row(work, "random", SQUARE, -1, f) for f in (0.02, 0.1, 0.5))
    # Intervals are counted by their bounds, whatever is kept; bits one by one, so that only intervals have a bound.
    for f in FRACTIONS:
        bound = Target(IDIOM, f + 0.05, None, "count, intervals: ≤ (f + 0.05) x mask.sum")
        yield _row(COUNT, "lengths", SQUARE, -1, f, (bound,))


def _outputs() -> Iterator[Case]:
    for work in (*_named(softmax.measured()), fill.measured(), *scan.measured()):
        dim = None if work.name == "fill" else -1
        yield from _curve(work, "lengths", SQUARE, dim, OUTPUTS)
        if work.name not in ("cumprod", "cummax", "cummin", "logcumsumexp"):
            yield from _curve(work, "lengths", BATCH, None if dim is None else 1, OUTPUTS)
        if work.name != "standardize":
            yield _row(work, "causal", SQUARE, dim, 0.5, (OUTPUTS(0.5),))
    for work in _named(order.measured(), "sort", "topk", "median", "quantile"):
        yield from _curve(work, "lengths", ORDERED, -1, ORDER)


def _gradients() -> Iterator[Case]:
    for work in DIFFERENTIABLE:
        for shape, dim in ((SQUARE, -1), (BATCH, 1)):
            yield from _curve(work, "lengths", shape, dim, GRADIENTS, backward=True)
    yield from _curve(CROSS_ENTROPY, "rows", VOCABULARY, None, ROWS_OF_LOSS, backward=True)


def _layers() -> Iterator[Case]:
    yield _row(BATCH_NORM, "channels", BATCH, None, 0.2, (LAYERS,))
    for work in (LAYER_NORM, MEAN_POOL, MAX_POOL):
        yield _row(work, "sequences", BATCH, None, 0.2, (LAYERS,))
    yield _row(APPLY_NORM, "sequences", BATCH, None, 0.5, (APPLIED,))
    yield _row(APPLY_FUNCTION, "sequences", BATCH, None, 0.5, (APPLIED,))
    for shape in ((8, 16), (64, 256)):
        yield _row(APPLY_TANH, "random", shape, None, 0.5)


# -- per-sequence operations, and layers of weights --------------------------------------------------------------------
def _packed() -> Iterator[Case]:
    for work in (*DIFFERENTIABLE, *_named(softmax.measured(), "softmax")):
        name = work.name

        def ours(i: Kept, name: str = name) -> Call:
            operation: Call = getattr(mw.pack(i.x, i.mask[..., 0]), name)
            return operation

        row = _row(work, "lengths", (64, 512, 64), 1, 0.5)
        padded = Side(PADDED, row.ours.prepare)
        others = tuple(side for side in row.sides if side.kind in ("peer", "floor"))
        target = replace(never_slower(PADDED), text="Packed: never slower than padded")
        yield replace(
            row,
            function=f"Packed.{name}",
            sides=(Side(f"Packed.{name}", ours, kind="ours"), padded, *others),
            targets=(target, never_slower(IDIOM)),
        )


def _after_ten_calls(layer: type[mw.nn.MaskedLinear] | type[mw.nn.SparseLinear]) -> Callable[[Any], Call]:
    return lambda i: masked_linear.frozen(i, layer.from_linear(i.dense, i.kept).eval(), calls=10)


def _weights() -> Iterator[Case]:
    sides = (
        Side("mw.nn.MaskedLinear", _after_ten_calls(mw.nn.MaskedLinear), kind="ours"),
        Side("SparseLinear", _after_ten_calls(mw.nn.SparseLinear)),
        Side(IDIOM, masked_linear.times_mask),
        Side(UNMASKED, lambda i: masked_linear.frozen(i, i.dense, calls=10), kind="floor"),
    )
    for batch in (1, 16, 64, 512):
        for f in (0.1, 0.3, 0.5):
            yield Case(
                FAMILY,
                "MaskedLinear",
                f"{batch}x768->3072 evaluation keep={round(100 * f)}%",
                masked_linear.inputs,
                sides,
                (batch, 768, 3072),
                f,
                targets=(SPARSE, never_slower(IDIOM)),
                # Sums of hundreds of products of both signs, in another order.
                absolute_tolerance=1e-3,
                budget=SECONDS,
            )


def cases() -> tuple[Case, ...]:
    """Return the rows of the family."""
    return (*_reductions(), *_outputs(), *_gradients(), *_layers(), *_packed(), *_weights())
