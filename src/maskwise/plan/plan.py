"""A plan is a small immutable value: which way a call goes down, why, and what the other ways would have cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from maskwise.plan.cost import Work

__all__ = ["ROUTES", "Plan", "Refusal", "Skips"]

#: The ways down. ``plain``: leak-proof torch operations, differentiable by torch itself. ``bare``: the kernel, without
#: autograd around it. ``fused``: the kernel with autograd. ``kept``: what is kept is moved together first. ``filled``
#: and ``pieces`` are those of a loss: see `maskwise.ops.loss.routes`. ``whole``, ``blocks``, ``sdpa`` and ``sequences``
#: are those of attention: see `maskwise.ops.attention.routes`. ``sparse`` is that of linear: see
#: `maskwise.ops.linear.routes`.
ROUTES = ("plain", "bare", "fused", "kept", "filled", "pieces", "whole", "blocks", "sdpa", "sequences", "sparse")


class Skips(Enum):
    """What a route leaves out for a dropped element. It is declared with the route, and never more than is certain."""

    #: Nothing: it is read and computed as a kept one, and its result is thrown away.
    NOTHING = 0
    #: Nothing is computed of it, though its memory may be read.
    COMPUTING = 1
    #: It is neither read nor computed.
    READING = 2


@dataclass(frozen=True)
class Refusal:
    """A route that was not taken, and the reason."""

    route: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """How one kind of call is run: a route, the reason for it, its predicted cost, and the routes refused.

    >>> import torch, maskwise as mw
    >>> plan = mw.plan(mw.sum, torch.ones(512, 512), mw.Mask.causal(512), dim=-1)
    >>> plan.op, plan.route, [refusal.route for refusal in plan.refused]
    ('sum', 'bare', ['plain'])

    Attributes:
        op: the function.
        route: the way it goes down; see `ROUTES`.
        reason: why that one.
        microseconds: the predicted time; 0 where nothing can be predicted.
        refused: the other ways, each with the reason why not.
        work: what the route has to do, where that is known.
        dense: what the dense way would have to do.
        skips: what the route leaves out for a dropped element.
        flops: how many floating point operations an element takes that is not left out; None where nobody knows.
    """

    op: str
    route: str
    reason: str
    microseconds: float
    refused: tuple[Refusal, ...] = ()
    work: Work | None = None
    dense: Work | None = None
    skips: Skips = Skips.NOTHING
    flops: int | None = None
