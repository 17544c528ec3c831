"""Launches in a compiled graph: what ``torch.library.triton_op`` does, for kernels whose arguments are tuples.

While AOTAutograd traces an op that has a kernel, its launcher runs on fake tensors, and each launch becomes a node of
the graph, which Inductor and AOTInductor compile into their own code. They take no tuples, so a kernel with tuples
among its arguments is called by a generated one that takes their elements.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["flatten", "is_tracing_launches", "launch_in_graph", "launching_into_graph"]


class _State(threading.local):
    is_on = False


_state = _State()


@contextmanager
def launching_into_graph() -> Iterator[None]:
    """Make the launches inside of the block nodes of the graph that is traced."""
    before, _state.is_on = _state.is_on, True
    try:
        yield
    finally:
        _state.is_on = before


def is_tracing_launches() -> bool:
    """Whether launches are nodes of a graph: tensors have neither data nor an address."""
    return _state.is_on


def launch_in_graph(kernel: Any, programs: int, arguments: Mapping[str, Any], warps: int) -> None:
    """Make a launch a node of the graph."""
    flat, passed = flatten(kernel, arguments)
    if isinstance(passed.get("mask"), Tensor):
        # Addresses depend on what functions of the kernel read of it, which torch takes for a write to it: a graph that
        # writes to its inputs is not captured as a CUDA graph.
        passed["mask"] = passed["mask"].clone()
    torch.library.wrap_triton(flat)[(programs,)](**passed, num_warps=warps)


def flatten(kernel: Any, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A kernel that takes the elements of tuples, and the arguments for it.

    >>> flatten(None, {"x": 1, "n": 2})
    (None, {'x': 1, 'n': 2})
    """
    sizes = tuple((name, len(value)) for name, value in arguments.items() if isinstance(value, tuple))
    if not sizes:
        return kernel, dict(arguments)
    passed: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, tuple):
            passed |= {f"{name}_{i}": each for i, each in enumerate(value)}
        else:
            passed[name] = value
    return _flat(kernel, tuple(sorted(sizes))), passed


@lru_cache(512)
def _flat(kernel: Any, sizes: tuple[tuple[str, int], ...]) -> Any:
    """The kernel of these sizes of tuples: a function that makes the tuples and calls the other."""
    # The module of the kernel has imported it.
    triton = sys.modules["triton"]
    of = dict(sizes)
    constants = {p.name for p in kernel.params if p.is_constexpr}
    untouched = {p.name for p in kernel.params if p.do_not_specialize}
    parameters, calls = [], []
    for name in kernel.arg_names:
        elements = [f"{name}_{i}" for i in range(of[name])] if name in of else [name]
        parameters += [f"{each}: tl.constexpr" if name in constants else each for each in elements]
        calls.append(f"({', '.join(elements)}{',' if len(elements) == 1 else ''})" if name in of else name)
    title = f"{kernel.__name__}_of_{'_'.join(str(size) for _, size in sizes)}"
    source = f"def {title}({', '.join(parameters)}):\n    {kernel.__name__}({', '.join(calls)})\n"
    path = f"<maskwise {title}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    space: dict[str, Any] = {"tl": triton.language, "triton": triton, kernel.__name__: kernel, "__name__": __name__}
    exec(compile(source, path, "exec"), space)
    return triton.jit(space[title], do_not_specialize=[name for name in untouched if name not in of])


def in_graph(
    launcher: Callable[..., Any], dtypes: frozenset[torch.dtype], mode: Any, op: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    """Trace a call of an op into a graph: by its launcher, where that takes the call."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    # Of symbols neither a grid nor a tile can be computed: then the op stays one call.
    is_static = not any(isinstance(x, torch.SymInt) for x in args)
    is_static = is_static and all(type(size) is int for x in tensors for size in (*x.shape, *x.stride()))
    is_served = bool(tensors) and all(x.is_cuda for x in tensors) and tensors[0].dtype in dtypes
    if not (is_static and is_served) or kwargs:
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode, launching_into_graph():
        return launcher(*args)
