"""Which way `mw.apply` goes, and what moving rows together costs.

``kept``: fn runs on the kept rows, which are moved together and back. ``plain``: fn runs on all rows, with a kept one
in the place of each that is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.torch_private import is_tracing
from maskwise.plan import Plan, planner
from maskwise.plan.cost import Work, microseconds
from maskwise.plan.dispatch import Refusal, Skips

__all__ = ["ELEMENTWISE", "choose", "declared", "is_few", "pack_plan"]

#: From this density on, moving rows together costs more than it saves: for a 768-3072-768 network, 2 % of its time.
_NEARLY_ALL = 0.98
#: The same for elementwise functions that are differentiated, of an x whose rows lie apart in memory.
_APART = 0.9
#: A row is moved in the time of this many elements at least.
_LEAST = 6
#: Functions of single elements. They cost about what moving an element does, and what a dropped place holds reaches
#: no other.
ELEMENTWISE = frozenset(
    {torch.abs, torch.neg, torch.exp, torch.log, torch.log1p, torch.expm1, torch.sqrt, torch.rsqrt, torch.square}
    | {torch.relu, torch.sigmoid, torch.tanh, torch.sin, torch.cos, torch.add, torch.sub, torch.mul, torch.div}
    | {torch.nn.functional.relu, torch.nn.functional.gelu, torch.nn.functional.silu, torch.reciprocal}
)

# Made once: a plan of what fn costs nobody can make, so these predict no time and hold for every call.
_KEPT = Plan("apply", "kept", "fn runs on kept rows only", 0.0, (Refusal("plain", "fn would run on dropped rows"),))
_FORCED = Plan("apply", "kept", "forced", 0.0, (Refusal("plain", "another is forced"),))
_DENSE = {
    name: Plan("apply", "plain", reason, 0.0, (Refusal("kept", reason),))
    for name, reason in {
        "forced": "forced",
        "static": "how many rows are kept must not decide on shapes in a graph or a transform",
        "not counted": "nobody has counted what is kept, and the device is not waited for",
        "cheap": "fn is as cheap as moving rows together is",
        "nearly all": "nearly all is kept",
    }.items()
}


def choose(fn: Callable[..., Any], x: Tensor, lead: Mask, *, learns: bool) -> Plan:
    """The plan of one call of apply, of which ``learns`` tells whether a gradient is asked for; never waits for a
    device to find out.
    """
    if is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None:
        return _DENSE["static"]
    forced = planner.forced()
    if forced == "plain":
        return _DENSE["forced"]
    on_host = lead.device.type == "cpu"
    if not on_host and lead.facts.count is None:
        return _DENSE["not counted"]
    if forced in ("kept", "kernel"):
        return _FORCED
    count, total = lead.facts.count, lead.numel()
    if count is not None and count == total > 0:
        return _DENSE["nearly all"]
    if fn in ELEMENTWISE and not learns and on_host:
        # Few elements are not worth a count.
        return _DENSE["cheap"] if is_few(x) else _elementwise(x.numel(), x.element_size(), total, lead.count())
    if total == 0 or is_few(x) or lead.density < _APART:
        return _KEPT
    if fn in ELEMENTWISE:
        # The dense way has two passes more, with a stand-in before fn and a choice after it.
        return _KEPT if x.is_contiguous() else _DENSE["cheap"]
    return _KEPT if lead.density < _NEARLY_ALL else _DENSE["nearly all"]


@lru_cache(maxsize=4096)
def _elementwise(
    elements: int,  # of x
    size: int,  # bytes of each
    rows: int,  # of x, kept or not
    kept: int,  # of those
) -> Plan:
    """The plan of an elementwise function without a gradient, whose cost is known: reading and writing."""
    moved = size * elements * kept // max(rows, 1)
    # fn reads and writes everything, which takes as long again as it computes, and the filling after it does too.
    dense = Work(calls=2, streamed=(6 * size + 1) * elements)
    # Both moves read the mask twice; all of the result is written.
    together = Work(
        calls=3,
        streamed=4 * rows + size * elements + 4 * moved,
        gathered=4 * size * kept * max(elements // max(rows, 1), _LEAST),
    )
    rates = planner.rates_for("cpu")
    works = {"plain": dense, "kept": together}
    return planner.cheapest(
        "apply", works, {route: microseconds(work, rates.plain_call, rates) for route, work in works.items()}
    )


planner.on_forget(_elementwise.cache_clear)


def is_few(x: Tensor) -> bool:
    """Whether so little is to be moved that torch's own indexing is quicker than a call of our kernel."""
    # Tensor.nbytes says the same, and takes as long as all the rest.
    return x.numel() * x.element_size() < _few_bytes(planner.forced()) and x.is_cpu


@lru_cache(maxsize=16)
def _few_bytes(forced: str | None) -> float:
    """Bytes on the CPU that torch's own indexing moves in the time in which our kernel is called."""
    if forced in ("kernel", "kept"):
        return 0.0
    rates = planner.rates_for("cpu")
    # Indexing takes two calls, and what our kernel does to each byte is next to nothing beside it.
    return rates.indexed * (rates.fused_call - 2 * rates.plain_call)


planner.on_forget(_few_bytes.cache_clear)


#: Bytes that memory hands out together: of a row that is shorter, a neighbour's reading reads a part.
_LINE = 64


def declared(plan: Plan, x: Tensor, lead: Mask) -> Plan:
    """The plan of apply for those who listen, with what is left out for a dropped row; fn's FLOPs nobody can know."""
    return plan if plan.route == "plain" else replace(plan, skips=_row_skips(x, lead))


def _row_skips(x: Tensor, lead: Mask) -> Skips:
    """What moving kept rows together leaves out: dropped rows are passed over, if they are rows and not elements."""
    row = x.element_size() * (x.numel() // max(lead.numel(), 1))
    return Skips.READING if row >= _LINE and x.is_contiguous() else Skips.COMPUTING


def pack_plan(x: Tensor, lead: Mask) -> Plan:
    """The plan of `mw.pack`, which has one way: what is kept is copied together."""
    work, rates = _moved(x, lead), planner.rates_for(x.device.type)
    dense = Work(calls=1, streamed=x.nbytes, fresh=x.nbytes)
    cost = microseconds(work, rates.bare_call, rates)
    return Plan("pack", "kept", "kept rows are copied together", cost, (), work, dense, _row_skips(x, lead), 0)


def _moved(x: Tensor, lead: Mask) -> Work:
    """What it is to move the kept rows, each read and written once; all of them, where nobody has counted."""
    density = lead.facts.density
    return Work(calls=1, streamed=lead.numel(), gathered=round(2 * x.nbytes * (1.0 if density is None else density)))
