"""Calls so small that what is asked about them takes longer than what they do.

Such a call is handed to torch first, and checked by what comes back: a result of x's own shape can only come of
arguments that fit. Whatever torch refuses, or answers otherwise, goes the long way, where errors teach.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from maskwise.plan.explain import listeners
from maskwise.plan.planner import forced, small

__all__ = ["REFUSED", "forced", "is_ordinary", "small"]

#: What torch raises for arguments that it cannot take.
REFUSED = (RuntimeError, TypeError, IndexError, ValueError)

# Bound here, because to find them anew takes as long as to ask them.
_is_compiling, _transform = torch.compiler.is_compiling, torch._C._functorch.peek_interpreter_stack
_is_any_listening = listeners.any


def is_ordinary() -> bool:
    """Whether nobody listens for plans, and the call is neither traced nor transformed."""
    # In this order: the compiler does not trace context variables.
    return not _is_compiling() and not _is_any_listening() and _transform() is None and forward_ad._current_level < 0
