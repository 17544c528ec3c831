"""``mw.plan(fn, ...)``: the plan of a call, without the call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.plan.explain import listeners

if TYPE_CHECKING:
    from maskwise.plan.explain import Call
    from maskwise.plan.plan import Plan

__all__ = ["plan"]

#: Where the functions live that plan their calls.
_HOMES = ("maskwise.ops.", "maskwise.nn.")


class _Planned(BaseException):
    """Carries the plan up from where the call would have started. No function catches what is no Exception."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class _Asker:
    """Listens for the first plan that is made, and stops the call there."""

    def hear(self, plan: Plan, call: Call) -> None:
        raise _Planned(plan)


def plan(fn: Callable[..., Any], *arguments: Any, **options: Any) -> Plan:
    """Plan a call without running it: the route it would take, why, its predicted cost, and the routes refused.

    >>> import torch, maskwise as mw
    >>> x, mask = torch.rand(512, 512), mw.Mask.causal(512)
    >>> mw.plan(mw.softmax, x, mask, dim=-1).route
    'bare'
    >>> with mw.force("dense"):
    ...     mw.plan(mw.softmax, x, mask, dim=-1).reason
    'forced'

    Args:
        fn: a masked function, such as `mw.softmax`, or a masked layer.
        arguments: what it would be called with; wrong ones raise what the call would raise.
        options: its keyword arguments.

    Returns:
        A `Plan`, of the first step where the function takes several.

    Raises:
        DtypeError: ``fn`` is no masked function of maskwise.
        ArgumentError: ``fn`` has only one way, and so plans nothing.
    """
    name = _checked(fn)
    try:
        with listeners.opened(_Asker()):
            fn(*arguments, **options)
    except _Planned as planned:
        return planned.plan
    hint = "mw.plan(mw.softmax, x, mask, dim=-1)"
    raise ArgumentError(say("plan", "fn", must="have routes to choose from", got=f"{name}, which has one", hint=hint))


def _checked(fn: Any) -> str:
    """The name of a function that plans its calls, or raise."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    home = str(getattr(inner, "__module__", ""))
    if callable(inner) and home.startswith(_HOMES):
        return str(name)
    # Asked, not imported: the imports of these layers go one way.
    public = sys.modules["maskwise"].__all__
    hint = "with mw.explain() as log: ..., which tells the plans of everything inside"
    if name in public and home != "maskwise" and not home.startswith("maskwise."):
        hint = f"mw.{name}"
    got = f"{home}.{name}" if home and callable(fn) else repr(fn)
    raise DtypeError(say("plan", "fn", must="be a masked function of maskwise", got=got, hint=hint))
