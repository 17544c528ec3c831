"""Functions of torch that one of ours computes on kept rows where they lie: what `mw.apply` calls in place of them.

A family registers its own, beside the function. `mw.apply` reads each kept row once and writes it once then; any other
function gets the rows gathered, and its result is scattered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from maskwise.ops.arguments import MaskLike
from maskwise.ops.torch_private import has_output_hooks

__all__ = ["RowFunction", "find", "row_dim", "serve", "serve_module"]

Masked = Callable[[Tensor, MaskLike], Tensor]
"""A function of x and a mask that broadcasts to it."""
Bind = Callable[..., "Masked | None"]
"""``(x, row_dims, *arguments)`` of a torch function, as ours; None where ours does not take these."""


class RowFunction(NamedTuple):
    """A torch function with its arguments, as one of ours."""

    #: The op whose kernel computes it.
    op: str
    run: Masked


_binds: dict[Any, tuple[str, Bind]] = {}
_modules: dict[type[nn.Module], tuple[Any, Callable[[Any], tuple[Any, ...]]]] = {}


def serve(op: str, bind: Bind, *functions: Any) -> None:
    """Register functions of torch that ``op`` computes, if ``bind`` accepts their arguments."""
    _binds.update(dict.fromkeys(functions, (op, bind)))


def serve_module(kind: type[nn.Module], function: Any, arguments: Callable[[Any], tuple[Any, ...]]) -> None:
    """Register a module whose forward is a function that is served, with these arguments of the module."""
    _modules[kind] = function, arguments


def find(fn: Any, x: Tensor, row_dims: int, more: tuple[Any, ...]) -> RowFunction | None:
    """What computes ``fn(rows, *more)`` for rows of x, which have its last ``row_dims`` dims; None for most functions.

    Args:
        fn: a function of torch, one with keyword arguments bound by `functools.partial`, or a module without hooks.
        x: (*lead, *rest).
        row_dims: how many dims ``rest`` has.
        more: the further arguments.
    """
    keywords: dict[str, Any] = {}
    if isinstance(fn, nn.Module):
        # A subclass may compute something else.
        if type(fn) not in _modules or more or fn._forward_pre_hooks or has_output_hooks(fn):
            return None
        function, arguments = _modules[type(fn)]
        fn, more = function, arguments(fn)
    elif type(fn) is partial:
        if fn.args:
            return None
        fn, keywords = fn.func, fn.keywords
    try:
        op, bind = _binds[fn]
        run = bind(x, row_dims, *more, **keywords)
    except (KeyError, TypeError):
        # Not a function of the table, or not arguments of it: torch reports those.
        return None
    return None if run is None else RowFunction(op, run)


def row_dim(dim: Any, row_dims: int) -> int | None:
    """A dim of rows (n, *rest), counted from the right; None unless it is one of ``rest``.

    >>> row_dim(1, 2), row_dim(-1, 2), row_dim(0, 2), row_dim(-3, 2)
    (-2, -1, None, None)
    """
    if type(dim) is not int:
        return None
    dim = dim - 1 - row_dims if dim >= 0 else dim
    return dim if -row_dims <= dim < 0 else None
