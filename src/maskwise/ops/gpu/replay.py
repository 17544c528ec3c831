"""Launches of an op, cached by the static facts of its operands: a repeated call computes no geometry and no grid.

The first call runs the launcher, and its launches are recorded: which argument is an operand, which one is memory that
the launcher allocates, and which are numbers. A call with operands of the same shapes, strides, dtypes and alignment
allocates the same memory and starts the same compiled kernels. A launcher that does anything else than allocate, view
and launch is not replayed.

The recorded launches are in the one cache of `maskwise.plan.dispatch`, beside the decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from maskwise.ops.gpu import launch as launching
from maskwise.ops.torch_private import TorchDispatchMode
from maskwise.plan import dispatch

__all__ = ["replayed"]

_NOT_SEEN = object()
_ALLOCATES = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
#: Operations that start no kernel, beside views, which their schema marks.
_FREE = {"aten::detach", "aten::alias", "aten::_reshape_alias"}


#: Reads a number: that of an operand on the host is a part of the key.
_NUMBER = "aten::_local_scalar_dense"


class Source(NamedTuple):
    """Where an argument of a kernel comes from, and its place among the kernel's parameters."""

    place: int
    kind: str  # "operand", a tensor or a number; "memory" or "counters"
    number: int  # of the operand or of the memory; or how many counters
    dtype: torch.dtype | None  # where it is viewed as another


class Step(NamedTuple):
    """One launch: what starts it, its arguments without tensors, and where the tensors come from."""

    start: Callable[..., Any]
    arguments: tuple[Any, ...]
    sources: tuple[Source, ...]


class Memory(NamedTuple):
    """Memory that a launcher allocates."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Result(NamedTuple):
    """What a call returns: memory that it has allocated, or a view of it."""

    memory: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()


class Recording(NamedTuple):
    """The launches of a call, and what it returns: one result, or several as a tuple."""

    device: torch.device
    memory: tuple[Memory, ...]
    steps: tuple[Step, ...]
    returned: Result | tuple[Result | None, ...]

    def run(self, operands: tuple[Any, ...]) -> Any:
        """Start the launches for other operands."""
        device = self.device
        made = [torch.empty_strided(m.size, m.stride, dtype=m.dtype, device=device) for m in self.memory]
        with launching.on(device):
            for start, arguments, sources in self.steps:
                given = list(arguments)
                for place, kind, index, dtype in sources:
                    if kind == "operand":
                        tensor = operands[index]
                    else:
                        tensor = made[index] if kind == "memory" else launching.current_counters(operands[0], index)
                    given[place] = tensor if dtype is None else tensor.view(dtype)
                start(*given)
        if isinstance(self.returned, Result):
            return _result(self.returned, made)
        return tuple(None if result is None else _result(result, made) for result in self.returned)


def _result(result: Result, made: list[Tensor]) -> Tensor:
    whole = made[result.memory]
    return whole if result.size is None else whole.as_strided(result.size, result.stride)


def replayed(name: str, launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher of an op, of which repeated calls are replayed; for numbers see `launching.run_time`."""
    numbers: dict[int, str] = getattr(launcher, "run_time", {})

    def run(*operands: Any) -> Any:
        if launching.is_recording():
            return launcher(*operands)
        try:
            if numbers:
                facts = [x == 0 if i in numbers else _fact(x) for i, x in enumerate(operands)]
                key = ("launch", name, *facts)
            else:
                key = ("launch", name, *map(_fact, operands))
            found = dispatch.cache.get(key, _NOT_SEEN)
        except TypeError:
            # Not plain tensors, or something that cannot be a key.
            return launcher(*operands)
        if found is None:
            return launcher(*operands)
        if found is not _NOT_SEEN:
            return found.run(operands)
        out, dispatch.cache[key] = _record(launcher, operands, {its: i for i, its in numbers.items()})
        return out

    return run


def _fact(operand: Any) -> Any:
    """What a launch depends on."""
    kind = type(operand)
    if kind is Tensor or kind is Parameter:
        if operand.dim() == 0 and operand.device.type == "cpu":
            # A number of the host, which launchers pass by value.
            return operand.dtype, operand.item()
        # Vectors are loaded where 16 divides the address, which a compiled kernel relies on.
        return operand.shape, operand.stride(), operand.dtype, operand.device, operand.data_ptr() & 15
    if kind is list:
        return tuple(operand)
    if isinstance(operand, Tensor):
        raise TypeError
    # 1 and 1.0 and True are equal, and compile differently.
    return kind, operand


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a launcher allocates, and whether it does anything else than allocate, view and launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []
        self.is_plain = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if launching.is_internal():
            return out
        if name in _ALLOCATES:
            self.made.append(out)
        elif not func.is_view and name not in _FREE and not (name == _NUMBER and args[0].device.type == "cpu"):
            self.is_plain = False
        return out


def _record(
    launcher: Callable[..., Any], operands: tuple[Any, ...], numbers: dict[str, int]
) -> tuple[Any, Recording | None]:
    """The result of a call, and its recording; None where it cannot be replayed."""
    with launching.started() as launches, _Watch() as watch:
        out = launcher(*operands)
    tensors = {i: x for i, x in enumerate(operands) if isinstance(x, Tensor)}
    places = {x.data_ptr(): ("operand", i) for i, x in tensors.items() if x.numel()}
    # Operands that share memory may not share it the next time.
    if not watch.is_plain or not launches or len(places) < len(tensors):
        return out, None
    places |= {x.data_ptr(): ("memory", i) for i, x in enumerate(watch.made) if x.numel()}
    steps = [_step(started, places, operands, watch.made, numbers) for started in launches]
    returned = _returned(out, watch.made)
    if returned is None or None in steps:
        return out, None
    memory = tuple(Memory(tuple(x.shape), x.stride(), x.dtype) for x in watch.made)
    found = tuple(step for step in steps if step is not None)
    return out, Recording(next(iter(tensors.values())).device, memory, found, returned)


def _step(
    started: launching.Started,
    places: dict[int, tuple[str, int]],
    operands: tuple[Any, ...],
    made: list[Tensor],
    numbers: dict[str, int],
) -> Step | None:
    """One launch with its tensors taken out; None where one of them is neither an operand nor allocated."""
    arguments, sources = [], []
    for place, name in enumerate(started.names):
        value = started.arguments[name]
        arguments.append(None if isinstance(value, Tensor) else value)
        if not isinstance(value, Tensor):
            if name in numbers:
                sources.append(Source(place, "operand", numbers[name], None))
            continue
        if any(value is counter for counter in started.counters):
            sources.append(Source(place, "counters", started.wanted, None))
            continue
        kind, index = places.get(value.data_ptr(), ("", 0))
        if not kind:
            return None
        like = operands[index] if kind == "operand" else made[index]
        sources.append(Source(place, kind, index, value.dtype if value.dtype is not like.dtype else None))
    return Step(started.again, tuple(arguments), tuple(sources))


def _returned(out: Any, made: list[Tensor]) -> Result | tuple[Result | None, ...] | None:
    """What a call returns, in terms of what it has allocated; None where that is something else."""
    whole = {x.data_ptr(): i for i, x in enumerate(made) if x.numel()}

    def find(x: Any) -> Result | None:
        index = whole.get(x.data_ptr()) if isinstance(x, Tensor) else None
        if index is None or x.dtype is not made[index].dtype:
            return None
        like = made[index]
        is_whole = x.shape == like.shape and x.stride() == like.stride()
        return Result(index) if is_whole else Result(index, tuple(x.shape), x.stride())

    if not isinstance(out, tuple):
        return find(out)
    found = tuple(map(find, out))
    return found if all(x is None or each is not None for x, each in zip(out, found, strict=True)) else None
