"""The planner: from static facts (op, shape, dtype, device, whether a gradient is asked for) to a route.

It is pure arithmetic: it never sees a tensor, so it never makes a device wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from maskwise.plan import calibration, dispatch
from maskwise.plan.cost import Work, microseconds
from maskwise.plan.dispatch import Plan, Refusal, force, forced, is_any_forced

__all__ = [
    "cheapest",
    "describe",
    "era",
    "force",
    "forced",
    "forget",
    "has_kernel",
    "is_any_forced",
    "is_served",
    "on_forget",
    "rates_for",
    "with_cost",
]

#: How an op family tells its work: (route, elements, bytes an element, gradient) -> Work.
Describe = Callable[[str, int, int, bool], Work]

_work: dict[str, Describe] = {}
_forgetters: list[Callable[[], None]] = []
_era = 0

_TRANSFORMED = "torch.func transforms and forward-mode AD see through plain torch operations only"

rates_for = calibration.rates_for


def describe(op: str, work: Describe) -> None:
    """Enter how much work each route of ``op`` is."""
    _work[op] = work


def on_forget(forget: Callable[[], None]) -> None:
    """Name a function that empties a cache of plans; it is called when plans that were made stop being right."""
    _forgetters.append(forget)


def era() -> int:
    """How often plans were forgotten: for what is remembered where no one can find it to forget it, as with a mask."""
    return _era


def forget() -> None:
    """Make every plan anew from here on."""
    global _era
    _era += 1
    dispatch.invalidate()
    for each in _forgetters:
        each()


def has_kernel(op: str, dtype: torch.dtype, device: str) -> bool:
    """Whether a kernel serves this op, dtype and device."""
    from maskwise.ops.backends import why_not_served

    return forced() != "plain" and why_not_served(op, device, dtype) is None


@lru_cache(maxsize=256)
def is_served(op: str, dtype: torch.dtype, forced: str | None) -> bool:
    """The same for the CPU and what is `forced`, cached: for calls whose time is what is asked about them."""
    from maskwise.ops.backends import why_not_served

    return forced != "plain" and why_not_served(op, "cpu", dtype) is None


on_forget(is_served.cache_clear)


def with_cost(plan: Plan, x: torch.Tensor, *, grad: bool) -> Plan:
    """A plan that was made otherwise, with what its way and the dense one cost by the work that its op describes."""
    kernel = "fused" if grad else "bare"
    works, costs = _predicted(plan.op, kernel, x.numel(), x.dtype.itemsize, x.device.type, grad)
    route = "plain" if plan.route == "plain" else kernel
    return replace(plan, microseconds=costs[route], work=works[route], dense=works["plain"])


def _predicted(
    op: str, kernel: str, elements: int, size: int, device: str, grad: bool
) -> tuple[dict[str, Work], dict[str, float]]:
    """The work of the plain way and of the kernel, and their times in microseconds."""
    rates = rates_for(device)
    works = {}
    for route in ("plain", kernel):
        work = _work[op](route, elements, size, grad)
        # One operation for each element in every step: a kernel has one step.
        steps = work.calls if route == "plain" else 1
        works[route] = replace(work, flops=elements * steps) if not work.flops else work
    if device != "cpu":
        # There every gradient has a kernel of its own.
        works[kernel] = replace(works[kernel], calls=1)
    costs = {
        "plain": microseconds(works["plain"], rates.plain_call, rates) + (rates.plain_backward if grad else 0.0),
        kernel: microseconds(works[kernel], getattr(rates, f"{kernel}_call"), rates)
        + (rates.fused_backward if grad else 0.0),
    }
    return works, costs


def cheapest(op: str, works: Mapping[str, Work], costs: Mapping[str, float], reason: str = "") -> Plan:
    """The plan with the lowest predicted cost; the first of ``works`` is the dense way.

    >>> cheapest("sum", {"plain": Work(calls=2), "bare": Work(calls=1)}, {"plain": 6.0, "bare": 4.0}).refused
    (Refusal(route='plain', reason='predicted 6 µs against 4 µs'),)
    """
    best = min(costs, key=lambda route: costs[route])
    refused = tuple(
        Refusal(route, f"predicted {cost:.0f} µs against {costs[best]:.0f} µs")
        for route, cost in costs.items()
        if route != best
    )
    dense = works[next(iter(works))]
    told = reason or f"predicted fastest of {len(costs)}"
    return Plan(op, best, told, costs[best], refused, works[best], dense)
