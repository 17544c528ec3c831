"""Calls so small that what is asked about them takes longer than what they do.

Such a call is handed to torch first, and checked by what comes back: a result of x's own shape can only come of
arguments that fit. Whatever torch refuses, or answers otherwise, goes the long way, where errors teach.
"""

from __future__ import annotations

from maskwise.plan.explain import listeners
from maskwise.plan.planner import forced, small
from maskwise.tracing import is_tracing, is_transformed

__all__ = ["REFUSED", "forced", "is_ordinary", "small"]

#: What torch raises for arguments that it cannot take.
REFUSED = (RuntimeError, TypeError, IndexError, ValueError)

# Bound here, because to find it anew takes as long as to call it.
_is_any_listening = listeners.any


def is_ordinary() -> bool:
    """Whether nobody listens for plans, and the call is neither traced nor transformed."""
    # In this order: the compiler does not trace context variables.
    return not is_tracing() and not _is_any_listening() and not is_transformed()
