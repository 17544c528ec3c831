"""A function in the place of a method of one module, which is copied and pickled along with the module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

__all__ = ["Bound", "bind", "is_bound", "unbind"]

REPLICATE = "_replicate_for_data_parallel"
"""How ``nn.DataParallel`` copies a module: a shallow copy, whose attributes are the original's."""


class Bound:
    """A function with the module that it gets first.

    ``copy.deepcopy`` and ``pickle`` take it along with its module. A bound method is unpickled as the class's own
    method; a closure not at all. What looks for ``__func__``, as accelerate does, finds the function.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module, name: str) -> None:
        self.__func__, self.__self__, self.__name__ = function, module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the module first."""
        # accelerate binds what it finds a second time.
        rest = args[1:] if args and args[0] is self.__self__ else args
        return self.__func__(self.__self__, *rest, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self.__self__), self.__name__).__get__(self.__self__))

    @property
    def __code__(self) -> CodeType:
        # torch.export names the graph after it.
        return self.__func__.__code__

    def __repr__(self) -> str:
        # Not that of the module, which is long and may print this one.
        return f"<{self.__func__.__module__}.{self.__func__.__qualname__} of {type(self.__self__).__name__}>"


def bind(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Put ``function`` in front of the module's own method of that name; it gets the module first.

    >>> import copy
    >>> def forward(self, x):
    ...     return x * self.factor
    >>> double = nn.Identity()
    >>> bind(double, "forward", forward)
    >>> double.factor = 2
    >>> twin = copy.deepcopy(double)
    >>> twin.factor = 3
    >>> double(1), twin(1), unbind(twin, "forward"), twin(1)
    (2, 3, None, 1)

    Args:
        module: the module that is changed.
        name: the method, such as ``"forward"``.
        function: of a module of the package or the user's, so that pickle finds it by its name.
    """
    setattr(module, name, Bound(function, module, name))
    setattr(module, REPLICATE, Bound(_replicate, module, REPLICATE))


def unbind(module: nn.Module, name: str) -> None:
    """Uncover the module's own method."""
    vars(module).pop(name, None)
    if [each for each, value in vars(module).items() if isinstance(value, Bound)] == [REPLICATE]:
        del vars(module)[REPLICATE]


def is_bound(module: nn.Module, name: str, function: Callable[..., Any]) -> bool:
    """Whether that function is what a call of the method runs."""
    found = vars(module).get(name)
    return isinstance(found, Bound) and found.__func__ is function


def _replicate(module: nn.Module) -> nn.Module:
    """A replica whose functions are bound to itself."""
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    for name, value in vars(module).items():
        if isinstance(value, Bound):
            vars(replica)[name] = Bound(value.__func__, replica, name)
    return replica
