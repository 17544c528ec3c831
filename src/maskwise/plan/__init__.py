"""How a call is run: plans, their costs, what each device can serve, and the log that explains them.

The package can be called: ``mw.plan(mw.softmax, x, mask, dim=-1)`` is the plan of a call that is not run. That is
`maskwise.plan.asking.plan`, which tells more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maskwise.plan.asking import plan as _plan
from maskwise.plan.explain import explain as explain
from maskwise.plan.plan import Plan as Plan
from maskwise.plan.plan import Skips as Skips
from maskwise.plan.planner import force as force

__all__ = ["Plan", "Skips", "explain", "force"]


class _Package(ModuleType):
    """A package with one function that has its name: whoever imports a module of it leaves ``mw.plan`` as it is."""

    def __call__(self, fn: Callable[..., Any], *arguments: Any, **options: Any) -> Plan:
        return _plan(fn, *arguments, **options)


_Package.__call__.__doc__ = _plan.__doc__
sys.modules[__name__].__class__ = _Package
