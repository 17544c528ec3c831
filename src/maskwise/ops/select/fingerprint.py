"""What decides on what a function does, by which `mw.apply` finds the verdict of a function again."""

from __future__ import annotations

import functools
import numbers
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Parts"]

#: Types of values that are compared as such.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device})
#: Functions and objects are looked into from the function itself to those that it uses, and no further.
_DEEPEST = 1


class Parts:
    """The objects that a function consists of, and a key of them with the values that change what they do.

    A lambda is a new object whenever its line runs, and its code is not: of a function, the first part is its code.
    Then come what it holds, its defaults and the globals that it names: functions, modules with all submodules and
    their modes, objects with their attributes; numbers, bools and strings, in tuples and dicts too. Those in lists and
    sets are left out: they are logs more often than settings. Tensors only take part.
    """

    __slots__ = ("key", "objects", "seen")

    def __init__(self, fn: Any) -> None:
        self.objects: list[Any] = []
        self.key: list[Any] = []
        self.seen: set[int] = set()
        self._add_callable(fn)

    def _add_callable(self, fn: Any) -> None:
        if isinstance(fn, functools.partial):
            self._add_callable(fn.func)
            self._add_all(fn.args, 1)
            self._add_named(fn.keywords, 1)
        elif isinstance(fn, types.MethodType):
            self._add_callable(fn.__func__)
            self._add(fn.__self__, 0)
        elif isinstance(fn, types.FunctionType):
            self._add_object(fn.__code__)
            self._add_function(fn, 1)
        else:
            self._add(fn, 0)
            call = type(fn).__call__
            if isinstance(call, types.FunctionType):
                self._add_function(call, 1)

    def _add_function(self, fn: types.FunctionType, depth: int) -> None:
        """What a function holds and names."""
        names = fn.__globals__
        if names.get("__name__", "").startswith("torch."):
            return
        for cell in fn.__closure__ or ():
            self._add(_contents(cell), depth)
        if fn.__defaults__:
            self._add_all(fn.__defaults__, depth)
        if fn.__kwdefaults__:
            self._add_named(fn.__kwdefaults__, depth)
        for name in fn.__code__.co_names:
            if name in names:
                self.key.append(name)
                self._add(names[name], depth)

    def _add_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._add(value, depth)

    def _add_named(self, values: Mapping[Any, Any], depth: int) -> None:
        for name, value in values.items():
            if type(name) in _PLAIN:
                self.key.append(name)
            self._add(value, depth)

    def _add(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.key += (kind, value)
        elif isinstance(value, Tensor | types.ModuleType):
            self.key.append(kind)
        elif id(value) in self.seen:
            self.key.append(id(value))
        elif isinstance(value, nn.Module):
            self._add_modules(value)
        elif isinstance(value, dict):
            self.seen.add(id(value))
            self._add_named(value, depth)
        elif isinstance(value, tuple):
            self._add_all(value, depth)
        elif isinstance(value, list | set | frozenset):
            self._add_objects_in(value, depth)
        elif kind.__weakrefoffset__ or not self.objects:
            self._add_object(value)
            if depth > _DEEPEST or isinstance(value, type):
                return
            if kind is types.FunctionType:
                self._add_function(value, depth + 1)
            elif kind.__dictoffset__:
                self._add_named(value.__dict__, depth + 1)
        elif isinstance(value, numbers.Number):
            # Those of numpy.
            self.key += (kind, value)

    def _add_objects_in(self, values: Any, depth: int) -> None:
        """What a list or a set holds, without what is only logged there: values, shapes, tensors."""
        self.seen.add(id(values))
        for value in values.values() if isinstance(values, dict) else values:
            if isinstance(value, list | tuple | set | frozenset | dict):
                if id(value) not in self.seen:
                    self._add_objects_in(value, depth)
            elif type(value).__weakrefoffset__ and not isinstance(value, Tensor):
                self._add(value, depth)

    def _add_object(self, value: Any) -> None:
        self.seen.add(id(value))
        self.objects.append(value)
        self.key.append(id(value))

    def _add_modules(self, root: nn.Module) -> None:
        """The module and all in it, each with its mode. `nn.Module.modules` makes their names, and takes far longer."""
        walked: list[Any] = [root]
        # It grows while it is walked.
        for module in walked:
            if module is not None and module._modules:
                walked += module._modules.values()
        found = [module for module in walked if module is not None]
        self.seen.add(id(root))
        self.objects += found
        self.key += map(id, found)
        self.key += [module.training for module in found]


def _contents(cell: types.CellType) -> Any:
    """What a variable of an enclosing function holds; the type of cells where it is not yet assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return types.CellType
