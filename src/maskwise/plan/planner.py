"""The planner: from static facts (op, shape, dtype, device, whether a gradient is asked for) to a route.

It is pure arithmetic: it never sees a tensor, so it never makes a device wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import torch

from maskwise.plan.capability import can_serve
from maskwise.plan.cost import RATES, Work, microseconds
from maskwise.plan.plan import Plan, Refusal

__all__ = ["describe", "force", "forced", "has_kernel", "make", "on_forget"]

#: How an op family tells its work: (route, elements, bytes an element, gradient) -> Work.
Describe = Callable[[str, int, int, bool], Work]

_work: dict[str, Describe] = {}
_forced: str | None = None
_forgetters: list[Callable[[], None]] = []


def describe(op: str, work: Describe) -> None:
    """Enter how much work each route of ``op`` is."""
    _work[op] = work


def on_forget(forget: Callable[[], None]) -> None:
    """Name a function that empties a cache of plans; it is called when plans that were made stop being right."""
    _forgetters.append(forget)


@contextmanager
def force(route: str) -> Iterator[None]:
    """Make every plan inside the block take ``route``, ``"plain"`` or ``"kernel"``, wherever it can be taken."""
    global _forced
    before, _forced = _forced, route
    for forget in _forgetters:
        forget()
    try:
        yield
    finally:
        _forced = before
        for forget in _forgetters:
            forget()


def forced() -> str | None:
    """The route that `force` asks for at the moment, or None."""
    return _forced


def has_kernel(op: str, dtype: torch.dtype, device: str) -> bool:
    """Whether a kernel serves this op, dtype and device."""
    return _forced != "plain" and can_serve(op, device, dtype)[0]


def make(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, *, grad: bool, transformed: bool = False
) -> Plan:
    """Make the plan of a call from its static facts alone."""
    if _forced == "plain":
        return Plan(op, "plain", "forced", 0.0)
    if transformed:
        reason = "torch.func transforms and forward-mode AD see through plain torch operations only"
        return Plan(op, "plain", reason, 0.0, (Refusal("fused", reason),))
    ok, why = can_serve(op, device, dtype)
    if not ok:
        return Plan(op, "plain", why, 0.0, (Refusal("fused" if grad else "bare", why),))
    kernel = "fused" if grad else "bare"
    if _forced == "kernel":
        return Plan(op, kernel, "forced", 0.0)
    elements, size, rates = prod(shape), dtype.itemsize, RATES.get(device, RATES["cpu"])
    work = _work[op]
    by_kernel = work(kernel, elements, size, grad)
    if device != "cpu":
        # There every gradient has a kernel of its own.
        by_kernel = replace(by_kernel, calls=1)
    costs = {
        "plain": microseconds(work("plain", elements, size, grad), rates.plain_call, rates)
        + (rates.plain_backward if grad else 0.0),
        kernel: microseconds(by_kernel, getattr(rates, f"{kernel}_call"), rates)
        + (rates.fused_backward if grad else 0.0),
    }
    best = min(costs, key=lambda route: costs[route])
    refused = tuple(
        Refusal(route, f"predicted {cost:.0f} µs against {costs[best]:.0f} µs")
        for route, cost in costs.items()
        if route != best
    )
    return Plan(op, best, f"predicted fastest of {len(costs)}", costs[best], refused)
