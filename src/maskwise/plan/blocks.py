"""What holds inside of a ``with`` block, in the block's own context: the route of `mw.force`, the logs of `mw.explain`.

A context is that of `contextvars`: each thread has its own, and each asyncio task a copy of its creator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

__all__ = ["Blocks"]

Value = TypeVar("Value")


class _Block(Generic[Value]):
    """One block that was entered."""

    __slots__ = ("is_open", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.is_open = True


class Blocks(Generic[Value]):
    """The blocks of one kind that are open in the current context.

    >>> routes = Blocks[str]("routes")
    >>> with routes.opened("dense"), routes.opened("kernel"):
    ...     routes.values()
    ('dense', 'kernel')
    >>> routes.values()
    ()

    A block that has ended holds nowhere: neither in a context that was copied while it was open, nor after blocks that
    ended in another order than they began, as those of interleaved generators do.
    """

    def __init__(self, name: str) -> None:
        here: ContextVar[tuple[_Block[Value], ...]] = ContextVar(name, default=())
        self._here = here
        #: Falsy unless a block may be open. This is ContextVar.get itself, for calls that have 30 ns and no more.
        self.any: Callable[[], tuple[object, ...]] = here.get

    def values(self) -> tuple[Value, ...]:
        """What the open blocks hold, the innermost last."""
        return tuple(block.value for block in self._here.get() if block.is_open)

    @contextmanager
    def opened(self, value: Value) -> Iterator[Value]:
        """Open a block for as long as the ``with`` lasts."""
        block = _Block(value)
        self._here.set((*self._here.get(), block))
        try:
            yield value
        finally:
            block.is_open = False
            # Not a reset to what was before this block: another may have begun, or ended, in between.
            self._here.set(tuple(other for other in self._here.get() if other.is_open))
