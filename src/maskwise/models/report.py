"""What an unpadded module did with a batch: for ``mw.explain()``, and a warning where a batch runs padded."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from torch import Tensor, nn

from maskwise.errors import caller_level
from maskwise.plan.dispatch import Plan, Skips, is_observed
from maskwise.plan.explain import record

__all__ = ["Padded", "PaddedRunWarning", "forget_warnings", "tell", "warn_once"]

WARNED = "_maskwise_warned"
"""The attribute that holds the reasons for which a module has warned; it is copied and pickled with the module."""


class Padded(NamedTuple):
    """Why a call runs padded, and what its caller can change about it, if anything."""

    reason: str
    change: str | None = None


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


def tell(module: nn.Module, x: Tensor, mask: Any, padded: str | None, change: str | None = None) -> None:
    """Record one call: packed, or padded for the reason that is given; and warn where the caller can change that."""
    if padded is not None and change is not None:
        warn_once(module, padded, change)
    if is_observed():
        route, reason = ("packed", "only kept tokens are computed") if padded is None else ("padded", padded)
        skips = Skips.COMPUTING if padded is None else Skips.NOTHING
        record(Plan(f"unpad {type(module).__name__}", route, reason, 0.0, skips=skips), x, mask)


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
    warned = vars(module).setdefault(WARNED, set())
    if reason in warned:
        return
    # Before the warning, which may be an error: it is given once.
    warned.add(reason)
    message = f"unpad: this {type(module).__name__} runs padded, because {reason}. Hint: {change}."
    warnings.warn(message, PaddedRunWarning, stacklevel=caller_level())


# A graph that is being compiled holds no warning: it is given while the graph is made. This is what
# torch.compiler.assume_constant_result does, which would import all of torch._dynamo.
warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget_warnings(module: nn.Module) -> None:
    """Let a module warn again: it is not unpadded any more."""
    vars(module).pop(WARNED, None)
