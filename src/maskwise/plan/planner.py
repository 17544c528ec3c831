"""The planner: from static facts (op, shape, dtype, device, whether a gradient is asked for) to a route.

It is pure arithmetic: it never sees a tensor, so it never makes a device wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch

from maskwise.errors import ArgumentError, say
from maskwise.plan import calibration
from maskwise.plan.blocks import Blocks
from maskwise.plan.capability import can_serve
from maskwise.plan.cost import Work, microseconds
from maskwise.plan.plan import ROUTES, Plan, Refusal
from maskwise.tracing import is_exporting

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
    "make",
    "on_forget",
    "rates_for",
    "small",
    "with_cost",
]

#: How an op family tells its work: (route, elements, bytes an element, gradient) -> Work.
Describe = Callable[[str, int, int, bool], Work]

_work: dict[str, Describe] = {}
_routes = Blocks[str | None]("maskwise.force")
_forgetters: list[Callable[[], None]] = []
_era = 0

#: What can be forced, beside the routes of single families: all of them have a dense way, and most a kernel.
NAMES = ("dense", "kernel")
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
    for each in _forgetters:
        each()


@contextmanager
def force(route: str | None) -> Iterator[None]:
    """Take one way down inside the block, wherever it can be taken: for experiments, and to see what a route is worth.

    >>> import torch, maskwise as mw
    >>> x, mask = torch.rand(512, 512), mw.Mask.causal(512)
    >>> with mw.force("dense"), mw.explain() as log:
    ...     total = mw.sum(x, mask)
    >>> log.calls[0].route
    'plain'

    Args:
        route: ``"dense"`` (or ``"plain"``), the leak-proof torch operations that every function has; ``"kernel"``, our
            own kernel also where it is predicted to be the slower one; or a route of one family, such as ``"kept"`` of
            `mw.apply` or ``"blocks"`` of `mw.attention`, which leaves the other families alone. None plans as usual,
            inside of a block that forces.

    Raises:
        ArgumentError: there is no such route.

    It holds in its own context (see `contextvars`): in its thread or asyncio task, and in tasks that are started inside
    of the block, until the block ends. A generator that yields inside of the block leaves it open for its consumer. A
    backward pass on the CPU runs in the thread that starts it, so what is forced there holds; on a GPU it runs in
    threads of torch, where nothing is forced. Compiled graphs keep what they were traced with.
    """
    if route is not None and route not in (*NAMES, *ROUTES):
        known = ", ".join((*NAMES, *ROUTES))
        raise ArgumentError(say("force", "route", must=f"be one of {known}", got=repr(route), hint='mw.force("dense")'))
    with _routes.opened("plain" if route == "dense" else route):
        yield


def forced() -> str | None:
    """The route that `force` requires in this context, or None. It is a part of the key of every cache of decisions.

    An export requires the plain one: a graph that leaves this process holds torch's own operators only.
    """
    return "plain" if is_exporting() else _forced_here()


def _forced_here() -> str | None:
    if not is_any_forced():
        return None
    routes = _routes.values()
    return routes[-1] if routes else None


#: Falsy where no route is forced: for calls that have 30 ns for the question, and no more.
is_any_forced = _routes.any
# What torch.compiler.assume_constant_result sets, which would import the compiler: a graph keeps what it was traced
# with, and the compiler does not trace context variables.
_forced_here._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_kernel(op: str, dtype: torch.dtype, device: str) -> bool:
    """Whether a kernel serves this op, dtype and device."""
    return forced() != "plain" and can_serve(op, device, dtype)[0]


@lru_cache(maxsize=256)
def is_served(op: str, dtype: torch.dtype, forced: str | None) -> bool:
    """The same for the CPU and what is `forced`, cached: for calls whose time is what is asked about them."""
    return forced != "plain" and can_serve(op, "cpu", dtype)[0]


on_forget(is_served.cache_clear)


def make(
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    *,
    grad: bool,
    transformed: bool = False,
) -> Plan:
    """Make the plan of a call from its static facts alone."""
    kernel = "fused" if grad else "bare"
    works, costs = _predicted(op, kernel, prod(shape), dtype.itemsize, device, grad)
    ok, why = can_serve(op, device, dtype)
    required = forced()
    if required == "plain":
        route, reason, refused = "plain", "forced", (Refusal(kernel, "another is forced"),)
    elif transformed or not ok:
        reason = _TRANSFORMED if transformed else why
        route, refused = "plain", (Refusal(kernel, reason),)
    elif required in ("kernel", "bare", "fused"):
        route, reason, refused = kernel, "forced", (Refusal("plain", "another is forced"),)
    else:
        return cheapest(op, works, costs)
    return Plan(op, route, reason, costs[route], refused, works[route], works["plain"])


@lru_cache(maxsize=256)
def small(op: str, dtype: torch.dtype, forced: str | None) -> int:
    """Up to how many elements on the CPU, 65,536 at most, the plain way of an op is the predicted best; 0 where another
    is `forced`. It is asked before anything else is known of a call, and holds where no gradient is asked for.
    """
    if forced is not None and forced != "plain":
        return 0
    elements = 1 << 16
    with force(forced):
        while elements and make(op, (elements,), dtype, "cpu", grad=False).route != "plain":
            elements >>= 1
    return elements


on_forget(small.cache_clear)


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
