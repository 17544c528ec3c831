"""A plan is a small immutable value: which way a call goes down, why, and what the other ways would have cost."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "Refusal"]

#: The ways down. ``plain``: leak-proof torch operations, differentiable by torch itself. ``bare``: the kernel, without
#: autograd around it. ``fused``: the kernel with autograd. ``kept``, ``filled`` and ``pieces`` are those of a loss: see
#: `maskwise.ops.loss.routes`. ``whole``, ``blocks``, ``sdpa`` and ``sequences`` are those of attention: see
#: `maskwise.ops.attention.routes`. ``sparse`` is that of linear: see `maskwise.ops.linear.routes`.
ROUTES = ("plain", "bare", "fused", "kept", "filled", "pieces", "whole", "blocks", "sdpa", "sequences", "sparse")


@dataclass(frozen=True)
class Refusal:
    """A route that was not taken, and the reason."""

    route: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """How one kind of call is run: a route, the reason for it, its predicted cost, and the routes refused."""

    op: str
    route: str
    reason: str
    microseconds: float
    refused: tuple[Refusal, ...] = ()
