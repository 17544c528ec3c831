"""Calls so small that what is asked about them takes longer than what they do.

Such a call is handed to torch first, and checked by what comes back: a result of x's own shape can only come of
arguments that fit. Whatever torch refuses, or answers otherwise, goes the long way, where errors teach.
"""

from __future__ import annotations

from maskwise.ops.torch_private import is_tracing, is_transformed
from maskwise.plan.dispatch import is_any_observing

__all__ = ["REFUSED", "is_ordinary"]

#: What torch raises for arguments that it cannot take.
REFUSED = (RuntimeError, TypeError, IndexError, ValueError)


def is_ordinary() -> bool:
    """Whether nobody listens for plans, and the call is neither traced nor transformed."""
    # In this order: the compiler does not trace context variables.
    return not is_tracing() and not is_any_observing() and not is_transformed()
