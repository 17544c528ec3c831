"""How a call is run: plans, their costs, what each device can serve, and the log that explains them."""

from __future__ import annotations

from maskwise.plan.explain import explain as explain
from maskwise.plan.plan import Plan as Plan

__all__ = ["Plan", "explain"]
