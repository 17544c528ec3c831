"""How a call runs: the dispatcher, its cost model, and the log of `mw.explain`.

``mw.plan`` is the function `maskwise.plan.dispatch.plan`; import from this package with ``from maskwise.plan...``.
"""

from __future__ import annotations

from maskwise.plan.dispatch import Plan as Plan
from maskwise.plan.dispatch import Skips as Skips
from maskwise.plan.dispatch import force as force
from maskwise.plan.explain import explain as explain

__all__ = ["Plan", "Skips", "explain", "force"]
