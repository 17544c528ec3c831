"""The routes of an unpadded module's calls: packed, or padded for a reason, which a warning names where it can change.

An unpadded forward collects why a call cannot run packed (a `Padded`, or None), `dispatch` decides between the two
routes of its kind, and `mw.explain()` lists the call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from maskwise.errors import caller_level
from maskwise.ops.torch_private import is_tracing, mark_constant_in_graphs
from maskwise.plan.dispatch import (
    Facts,
    Route,
    Skips,
    cache,
    decide,
    decide_in_graph,
    forced,
    is_any_forced,
    is_any_observing,
)
from maskwise.plan.explain import record

__all__ = ["Padded", "PaddedRunWarning", "Routes", "clear_warnings", "dispatch", "routes", "warn_once", "warnings_of"]

WARNED = "_maskwise_warned"
"""The attribute that holds why a module has warned, and what to change; it is copied and pickled with the module."""


class Padded(NamedTuple):
    """Why a call runs padded, and what its caller can change about it, if anything."""

    reason: str
    change: str | None = None


Routes = tuple[Route, Route]


def routes(
    packed: Callable[..., Any],
    padded: Callable[..., Any],
    *,
    name: str = "packed",
    reason: str = "only kept tokens are computed",
) -> Routes:
    """The routes of one kind of module, in order of preference; both functions take the same arguments."""
    return (
        Route(name, packed, _why_padded, reason=reason, skips=Skips.COMPUTING),
        Route("padded", padded, transforms=True),
    )


def _why_padded(facts: Facts) -> str | None:
    padded: Padded | None = facts.detail
    return None if padded is None else padded.reason


def dispatch(module: nn.Module, routes: Routes, x: Tensor, mask: Any, padded: Padded | None) -> Callable[..., Any]:
    """Decide one call, record it, and warn where it runs padded for a reason that its caller can change.

    Args:
        module: the module that is called.
        routes: those of its kind.
        x: its input.
        mask: the mask that it is called with.
        padded: why the call cannot run packed, or None where it can.

    Returns:
        What runs.
    """
    op = f"unpad {type(module).__name__}"
    if not isinstance(x, Tensor) or x.is_nested:
        # It has no shape to report. The padded route raises what is wrong with it.
        return routes[-1].run
    if is_tracing():
        run = decide_in_graph(Facts(op, (), x.dtype, x.device.type, traced=True, detail=padded), routes)
    else:
        # Nothing else of a call, its shape for one, decides anything. A class may be served by one adapter in one model
        # and by another in the next: the routes are a part of the key.
        key = (op, type(module), routes[0].run, padded, x.dtype, x.device.type, is_any_forced() and forced())
        decision = cache.get(key)
        if decision is None:
            decision = cache[key] = decide(Facts(op, (), x.dtype, x.device.type, detail=padded), routes)
        if is_any_observing():
            record(decision.plan, x, mask)
        run = decision.run
    # Not where `mw.force` requires the padded route of a call that could run packed.
    if padded is not None and padded.change is not None:
        warn_once(module, padded.reason, padded.change)
    return run


class PaddedRunWarning(UserWarning):
    """An unpadded module ran padded, for a reason that its caller can change.

    >>> import warnings, torch, maskwise as mw
    >>> attention = mw.unpad(torch.nn.MultiheadAttention(8, 2, batch_first=True))
    >>> x, padding = torch.ones(2, 3, 8), mw.Mask.from_lengths([3, 1]).to_key_padding()
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     for _ in range(2):
    ...         out, weights = attention(x, x, x, key_padding_mask=padding)
    >>> [each.category.__name__ for each in caught]
    ['PaddedRunWarning']
    """


@mark_constant_in_graphs  # A compiled graph holds no warning: it is given while the graph is made.
def warn_once(module: nn.Module, reason: str, change: str) -> None:
    """Warn that an unpadded module runs padded: once for each module and reason, its copies included.

    Only where the caller can change it: a batch of which nothing is dropped is no reason to warn.

    >>> import warnings
    >>> encoder = nn.Linear(2, 2)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     for _ in range(2):
    ...         warn_once(encoder, "a cache is requested", "use_cache=False")
    >>> [str(each.message) for each in caught]
    ['unpad: this Linear runs padded, because a cache is requested. Hint: use_cache=False.']

    Args:
        module: the module that `mw.unpad` changed and that was called.
        reason: why the call runs padded, the same words for each call of a kind.
        change: what to write instead, for the call to run packed.
    """
    warned: dict[str, str] = vars(module).setdefault(WARNED, {})
    if reason in warned:
        return
    # Before the warning, which may be an error: it is given once.
    warned[reason] = change
    message = f"unpad: this {type(module).__name__} runs padded, because {reason}. Hint: {change}."
    warnings.warn(message, PaddedRunWarning, stacklevel=caller_level())


def warnings_of(module: nn.Module) -> tuple[Padded, ...]:
    """Why calls of a module ran padded so far, where their caller can change it."""
    return tuple(Padded(reason, change) for reason, change in vars(module).get(WARNED, {}).items())


def clear_warnings(module: nn.Module) -> None:
    """Let a module warn again: it is not unpadded any more."""
    vars(module).pop(WARNED, None)
