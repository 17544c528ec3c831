"""How a call is run: the dispatcher, the costs it predicts, and the log that explains it.

``mw.plan`` is the function `maskwise.plan.dispatch.plan`; the package of that name is for ``from maskwise.plan...``.
"""

from __future__ import annotations

from maskwise.plan.dispatch import Plan as Plan
from maskwise.plan.dispatch import Skips as Skips
from maskwise.plan.dispatch import force as force
from maskwise.plan.explain import explain as explain

__all__ = ["Plan", "Skips", "explain", "force"]
