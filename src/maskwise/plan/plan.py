"""A plan is a small immutable value: which way a call goes down, why, and what the other ways would have cost."""

from __future__ import annotations

from dataclasses import dataclass

from maskwise.plan.cost import Work, saved

__all__ = ["ROUTES", "Plan", "Refusal"]

#: The ways down. ``plain``: leak-proof torch operations, differentiable by torch itself. ``bare``: the kernel, without
#: autograd around it. ``fused``: the kernel with autograd. ``kept``: what is kept is moved together first. ``filled``
#: and ``pieces`` are those of a loss: see `maskwise.ops.loss.routes`. ``whole``, ``blocks``, ``sdpa`` and ``sequences``
#: are those of attention: see `maskwise.ops.attention.routes`. ``sparse`` is that of linear: see
#: `maskwise.ops.linear.routes`.
ROUTES = ("plain", "bare", "fused", "kept", "filled", "pieces", "whole", "blocks", "sdpa", "sequences", "sparse")


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
    """

    op: str
    route: str
    reason: str
    microseconds: float
    refused: tuple[Refusal, ...] = ()
    work: Work | None = None
    dense: Work | None = None

    @property
    def saved(self) -> tuple[int, int] | None:
        """The FLOPs and bytes that the route leaves undone, compared with the dense way; None where nobody knows."""
        if self.work is None or self.dense is None:
            return None
        return saved(self.dense, self.work)
