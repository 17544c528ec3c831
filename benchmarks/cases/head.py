"""The loss head on kept rows: ``mw.linear_cross_entropy``, forward and backward, against logits of all rows.

A step of the largest head takes tens of seconds and gigabytes, so the family runs only when it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import maskwise as mw
from benchmarks.case import Case, Side, Target, at_most, never_slower

__all__ = ["FAMILY", "SIDES", "SIZES", "Head", "cases", "head"]

FAMILY = "head"
#: (tokens, features, classes) with the kept fraction: BERT's head on masked tokens, and Llama 3's on answers.
SIZES = (((8192, 384, 30522), 0.15), ((4096, 1024, 128256), 0.5))
PLAIN, TORCH, TORCH_CHUNKED = "plain", "F.linear_cross_entropy", "F.linear_cross_entropy in chunks"
BY_HAND, BY_HAND_CHUNKED = "rows by hand", "rows by hand in chunks"
IGNORED = -100


@dataclass(frozen=True)
class Head:
    """Hidden states and a weight, both of which need a gradient; classes; which rows are kept."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    keep: Tensor


def head(shape: tuple[int, ...], density: float) -> Head:
    """Random inputs of a head; without temporaries, which would be a part of the peak."""
    tokens, features, classes = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.empty(tokens, features).normal_(generator=generator).requires_grad_()
    weight = torch.empty(classes, features).normal_(std=0.02, generator=generator).requires_grad_()
    target = torch.randint(classes, (tokens,), generator=generator)
    keep = torch.randperm(tokens, generator=generator) < max(1, round(density * tokens))
    return Head(hidden, weight, target, keep)


def _plain(i: Head) -> Tensor:
    return F.cross_entropy(F.linear(i.hidden, i.weight), i.target.where(i.keep, IGNORED))


def _torch(i: Head) -> Tensor:
    return F.linear_cross_entropy(i.hidden, i.weight, i.target.where(i.keep, IGNORED))


def _chunks() -> torch.nn.LinearCrossEntropyOptions:
    return torch.nn.LinearCrossEntropyOptions()


def _torch_chunked(i: Head) -> Tensor:
    return F.linear_cross_entropy(i.hidden, i.weight, i.target.where(i.keep, IGNORED), options=_chunks())


def _by_hand(i: Head) -> Tensor:
    rows = i.keep.nonzero().squeeze(1)
    return F.cross_entropy(F.linear(i.hidden[rows], i.weight), i.target[rows])


def _by_hand_chunked(i: Head) -> Tensor:
    rows = i.keep.nonzero().squeeze(1)
    return F.linear_cross_entropy(i.hidden[rows], i.weight, i.target[rows], options=_chunks())


def _ours(i: Head) -> Tensor:
    return mw.linear_cross_entropy(i.hidden, i.weight, i.target, i.keep)


#: The loss by each side.
SIDES: dict[str, Callable[[Head], Tensor]] = {
    "mw.linear_cross_entropy": _ours,
    PLAIN: _plain,
    TORCH: _torch,
    TORCH_CHUNKED: _torch_chunked,
    BY_HAND: _by_hand,
    BY_HAND_CHUNKED: _by_hand_chunked,
}


def _missing() -> str | None:
    return None if hasattr(F, "linear_cross_entropy") else "this torch has no F.linear_cross_entropy"


def _side(name: str, loss: Callable[[Head], Tensor]) -> Side:
    def prepare(i: Head) -> Callable[[], object]:
        def step() -> tuple[Tensor, Tensor, Tensor]:
            out = loss(i)
            of_hidden, of_weight = torch.autograd.grad(out, (i.hidden, i.weight))
            # All of it would be held for every side, to compare.
            return out.detach(), of_hidden, of_weight[:64].clone()

        return step

    kind = "ours" if loss is _ours else "peer"
    uses_torch = name in (TORCH, TORCH_CHUNKED, BY_HAND_CHUNKED)
    return Side(name, prepare, kind=kind, unavailable=_missing if uses_torch else lambda: None)


def _share(kept: float) -> Target:
    return Target(PLAIN, kept + 0.05, None, f"at most (kept + 0.05) = {kept + 0.05:.2f} of the time of {PLAIN}")


def cases() -> Iterator[Case]:
    """Return the cases of the loss head."""
    sides = tuple(_side(name, loss) for name, loss in SIDES.items())
    for shape, kept in SIZES:
        tokens, features, classes = shape
        yield Case(
            FAMILY,
            "linear_cross_entropy",
            f"{tokens} tokens, {features} to {classes}, keep={round(100 * kept)}% forward+backward",
            lambda case: head(case.shape, case.density or 0.0),
            sides,
            shape,
            kept,
            targets=(_share(kept), at_most(1.0, BY_HAND), never_slower()),
            # Thousands of terms are added in other orders, and the gradient of a mean is small.
            relative_tolerance=1e-3,
            absolute_tolerance=1e-6,
        )
