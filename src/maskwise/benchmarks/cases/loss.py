"""Losses: ``mw.loss`` against the unreduced loss, multiplied by the mask, over what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import maskwise as mw
from maskwise.benchmarks.case import Case, Side, at_most, never_slower
from maskwise.benchmarks.cases.sides import Call, Masked, masked_inputs, with_backward

__all__ = ["cases"]

Loss = Callable[..., Tensor]


def _target(name: str, i: Masked) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if name == "cross_entropy":
        return torch.randint(0, i.x.shape[1], i.x.shape[:1], generator=generator)
    return torch.rand(i.x.shape, generator=generator)


def _keep(name: str, i: Masked) -> Tensor:
    # Classes are dim 1 of cross_entropy: its mask has one value a row.
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


def _inputs(case: Case) -> Masked:
    return masked_inputs(replace(case, dim=0))


def _of(name: str) -> tuple[Case, ...]:
    sides = (Side("mw.loss", _ours(name), kind="ours"), Side("idiom", _idiom(name)))
    backward = tuple(with_backward(side) for side in sides)
    large = Case("loss", "loss", "", _inputs, sides, (4096, 4096), 0.5, relative_tolerance=1e-3)
    large = replace(large, targets=(never_slower(),))
    tiny: dict[str, Any] = {"shape": (4, 8), "targets": (at_most(1.5, "idiom"), never_slower())}
    return (
        *(replace(large, variant=f"{name} 4096x4096 keep={round(100 * d)}%", density=d) for d in (0.1, 0.5, 0.9)),
        replace(large, variant=f"{name} 4096x4096 forward+backward", sides=backward),
        replace(large, variant=f"{name} 4x8", **tiny),
        replace(
            large, variant=f"{name} 4x8 forward+backward", sides=backward, **{**tiny, "targets": (never_slower(),)}
        ),
    )


def cases() -> tuple[Case, ...]:
    """Return the cases of the losses."""
    return tuple(
        case for name in ("mse_loss", "binary_cross_entropy_with_logits", "cross_entropy") for case in _of(name)
    )
