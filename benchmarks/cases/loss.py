"""Losses: ``mw.loss`` against the unreduced loss, multiplied by the mask, over what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

import maskwise as mw
from benchmarks.case import Case, Side, at_most, never_slower
from benchmarks.cases.sides import Call, Masked, masked_inputs, with_backward

__all__ = ["cases"]

Loss = Callable[..., Tensor]


def _target(name: str, i: Masked) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if name == "cross_entropy":
        classes = torch.randint(0, i.x.shape[1], (i.x.shape[0], *i.x.shape[2:]), generator=generator)
        return classes.to(i.x.device)
    return torch.rand(i.x.shape, generator=generator).to(i.x.device)


def _keep(name: str, i: Masked) -> Tensor:
    # Classes are dim 1 of cross_entropy, which its mask has not.
    return i.keep[:, 0].contiguous() if name == "cross_entropy" else i.keep


def _ours(name: str) -> Callable[[Masked], Call]:
    fn: Loss = getattr(F, name)

    def build(i: Masked) -> Call:
        target, keep = _target(name, i), _keep(name, i)
        return lambda: mw.loss(fn, i.x, target, keep)

    return build


def _idiom(name: str) -> Callable[[Masked], Call]:
    fn: Loss = getattr(F, name)

    def build(i: Masked) -> Call:
        target, keep = _target(name, i), _keep(name, i)
        return lambda: (fn(i.x, target, reduction="none") * keep).sum() / keep.sum()

    return build


def _where(name: str) -> Callable[[Masked], Call]:
    fn: Loss = getattr(F, name)

    def build(i: Masked) -> Call:
        target, keep = _target(name, i), _keep(name, i)
        return lambda: torch.where(keep, fn(i.x, target, reduction="none"), 0.0).sum() / keep.sum()

    return build


def _inputs(case: Case) -> Masked:
    return masked_inputs(replace(case, dim=0))


def _of(name: str, shapes: tuple[tuple[int, ...], ...]) -> Iterator[Case]:
    """One loss at each shape, forward and forward+backward; at the largest also at other densities."""
    sides = (
        Side("mw.loss", _ours(name), kind="ours"),
        Side("idiom", _idiom(name)),
        Side("where idiom", _where(name)),
    )
    backward = tuple(with_backward(side) for side in sides)
    for shape in shapes:
        size = "x".join(map(str, shape))
        small = shape == shapes[0]
        targets = (at_most(1.5, "idiom"), never_slower()) if small else (never_slower(),)
        case = Case(
            "loss", "loss", f"{name} {size}", _inputs, sides, shape, 0.5, targets=targets, relative_tolerance=1e-3
        )
        if shape == shapes[-1]:
            yield from (replace(case, variant=f"{name} {size} keep={round(100 * d)}%", density=d) for d in (0.1, 0.9))
        yield case
        yield replace(case, variant=f"{name} {size} forward+backward", sides=backward, targets=(never_slower(),))


#: The first is the smallest, the last the one that is measured at several densities.
ELEMENTS = ((4, 8), (16, 16), (64, 64), (128, 128), (512, 512), (4096, 4096))
CLASSES = ((8, 10), (64, 100), (256, 1000), (8, 10, 16), (65536, 10), (32, 8000, 128), (4096, 1000))


def cases() -> tuple[Case, ...]:
    """Return the cases of the losses."""
    return (
        *_of("mse_loss", ELEMENTS),
        *_of("binary_cross_entropy_with_logits", ELEMENTS),
        *_of("cross_entropy", CLASSES),
    )
