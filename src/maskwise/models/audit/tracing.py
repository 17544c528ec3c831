"""Where a leak begins: the first module, and in it the first operation, that makes different outputs of equal inputs.

The first run records what every module gets and returns at kept positions, the second one is compared with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import maskwise.errors
from maskwise.models.audit.perturb import Probe
from maskwise.models.audit.positions import Positions, difference
from maskwise.models.audit.subject import Mode, Subject
from maskwise.models.compress.example import tensors_of

__all__ = ["Place", "locate"]

Rows = list[list[Tensor]]
_TORCH, _PACKAGE, _HERE = (str(Path(file).parent) for file in (torch.__file__, maskwise.errors.__file__, __file__))
#: What reads no values, and so cannot leak; and what only looks at them.
NO_VALUES = {
    "__get__", "__set__", "size", "dim", "numel", "is_floating_point", "type", "is_complex", "stride", "new_empty",
    "empty_like", "requires_grad_", "detach", "item", "__bool__", "__len__", "data_ptr", "get_device", "is_contiguous",
    "zeros_like", "ones_like", "register_hook", "__format__", "__repr__", "tolist", "new_zeros", "new_ones", "backward",
}  # fmt: skip


@dataclass
class Event:
    """One call of a module."""

    path: str
    module: nn.Module
    #: The index of the call that this one is in.
    parent: int | None
    inputs: Rows
    outputs: Rows = field(default_factory=list)
    #: In the order in which calls ended; children end before their parents.
    ended: int = -1


@dataclass(frozen=True)
class Place:
    """Where a leak begins.

    Attributes:
        path: the module; empty for the model itself.
        kind: its class.
        module: the module.
        operation: the function in its forward that reads what is dropped, or None where that is not found.
        line: the file and the line of it, if it is not in torch.
        difference: of its output at kept positions.
        route: the modules by which the change reaches the output, in order.
        is_input: whether what the module gets differs already, before any module has computed something.
        arguments: of the operation, other than tensors.
        options: of the operation, by name, other than tensors.
        is_inverted: whether a mask of the operation keeps just what is dropped.
    """

    path: str
    kind: str
    module: nn.Module
    operation: str | None
    line: str | None
    difference: float
    route: tuple[str, ...]
    is_input: bool = False
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    is_inverted: bool = False


class _Recorder:
    """Hooks on every module, which record a run or compare it with another one."""

    def __init__(self, model: nn.Module, positions: Positions) -> None:
        self.model, self.positions = model, positions
        self.events: list[Event] = []
        self.open: list[int] = []
        self.names = {module: name for name, module in model.named_modules()}
        #: Whether a hook reads a tensor: its operations are not the model's.
        self.is_reading = False
        #: Called when a call starts and when it ends.
        self.on_call: Callable[[int, bool], None] = lambda index, is_start: None

    def rows(self, values: Any) -> Rows:
        self.is_reading = True
        try:
            return [self.positions.rows(each) for each in tensors_of(values)]
        finally:
            self.is_reading = False

    @contextmanager
    def attached(self) -> Iterator[_Recorder]:
        handles = []
        for module in self.names:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=False))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        parent = self.open[-1] if self.open else None
        self.events.append(Event(self.names[module], module, parent, self.rows((list(args), dict(kwargs)))))
        self.open.append(len(self.events) - 1)
        self.on_call(self.open[-1], True)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.open or self.events[self.open[-1]].module is not module:
            return
        self.is_reading = True
        self.positions.through(module, args[0] if args else None, output)
        index = self.open.pop()
        self.events[index].outputs = self.rows(output)
        self.events[index].ended = sum(event.ended >= 0 for event in self.events)
        self.on_call(index, False)


def locate(subject: Subject, probe: Probe, *, training: Mode, noise: float) -> Place | None:
    """The first module whose output changes at kept positions while its inputs there do not."""
    before, after = _runs(subject, probe, training)
    if len(before) != len(after):
        before, after = before[: len(after)], after[: len(before)]

    def gap(old: Rows, new: Rows) -> float:
        pairs = zip(old, new, strict=False)
        options = {"across_shapes": probe.across_shapes, "noise": noise}
        return max((difference(a, b, **options) for a, b in pairs), default=0.0)  # type: ignore[arg-type]

    changed = [(gap(a.inputs, b.inputs), gap(a.outputs, b.outputs)) for a, b in zip(before, after, strict=True)]
    order = sorted(range(len(before)), key=lambda index: before[index].ended)
    route = tuple(dict.fromkeys(before[index].path for index in order if changed[index][1]))
    culprit = next((index for index in order if changed[index][1] and not changed[index][0]), None)
    positions = _position_lookup(before, changed)
    if positions is not None and (culprit is None or before[positions].parent == culprit or probe.kind == "amount"):
        event = before[positions]
        return Place(
            event.path, type(event.module).__name__, event.module, None, None, changed[positions][1], route, True
        )
    if culprit is None:
        return None
    event = before[culprit]
    skipped = {index for index in range(len(before)) if not changed[index][1] and index != culprit}
    found = _first_operation(subject, probe, training, culprit, skipped, noise)
    if found is None:
        return Place(event.path, type(event.module).__name__, event.module, None, None, changed[culprit][1], route)
    return Place(
        event.path, type(event.module).__name__, event.module, found.name, found.line, changed[culprit][1], route,
        arguments=found.arguments, options=found.options,
        is_inverted=any(_keeps_what_is_dropped(mask, probe.checked) for mask in found.masks),
    )  # fmt: skip


def _position_lookup(events: list[Event], changed: list[tuple[float, float]]) -> int | None:
    """The first embedding that looks up other integers at kept positions: they were counted from padding."""
    for index, event in enumerate(events):
        if isinstance(event.module, nn.Embedding) and changed[index][0] and changed[index][1]:
            return index
        if changed[index][1] and not changed[index][0] and not any(e.parent == index for e in events):
            return None
    return None


def _runs(subject: Subject, probe: Probe, training: Mode) -> tuple[list[Event], list[Event]]:
    found = []
    for batch, positions in zip((probe.before, probe.after), probe.positions(), strict=True):
        recorder = _Recorder(subject.model, positions)
        with recorder.attached():
            subject.forward(batch, training=training)
        found.append(recorder.events)
    return found[0], found[1]


# -- operations --------------------------------------------------------------------------------------------------------
@dataclass
class _Operation:
    name: str
    line: str | None
    inputs: Rows
    outputs: Rows
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    masks: tuple[Tensor, ...]


def _masks(values: Any) -> tuple[Tensor, ...]:
    """The masks among the arguments of a function, as bools: True where they keep; additive ones are 0 there."""
    found: list[Tensor] = []
    for each in values:
        if not isinstance(each, Tensor) or each.dim() < 2:
            continue
        if each.dtype is torch.bool:
            found.append(each)
        elif each.is_floating_point() and bool(((each == 0) | (each < -1e3)).all()):
            found.append(each == 0)
    return tuple(found)


def _keeps_what_is_dropped(mask: Tensor, keep: Tensor) -> bool:
    """Whether a mask of keys or of pairs keeps the dropped keys alone."""
    while mask.dim() > 2:
        mask = mask.any(1)
    return mask.shape == keep.shape and bool((~keep).any()) and torch.equal(mask, ~keep.to(mask.device))


class _Watch(TorchFunctionMode):
    """Records the functions of torch that a module calls, at kept positions."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder, self.active, self.found = recorder, False, list[_Operation]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not self.active or self.recorder.is_reading or name in NO_VALUES:
            return func(*args, **kwargs)
        with suppress(RuntimeError):
            inputs = self.recorder.rows((list(args), dict(kwargs)))
            out = func(*args, **kwargs)
            values = (*args, *kwargs.values())
            settings = tuple(each for each in values if not isinstance(each, Tensor))
            options = {name: each for name, each in kwargs.items() if not isinstance(each, Tensor)}
            self.found.append(
                _Operation(name, _line(), inputs, self.recorder.rows(out), settings, options, _masks(values))
            )
            return out
        return func(*args, **kwargs)


def _line() -> str | None:
    """The file and the line of the first frame outside of torch and of this package, in the call of the model."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith((_TORCH, _PACKAGE, "<")):
        if frame.f_back is None or frame.f_code.co_filename.startswith(_HERE):
            return None
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _first_operation(
    subject: Subject, probe: Probe, training: Mode, culprit: int, skipped: set[int], noise: float
) -> _Operation | None:
    """The first function in a call whose kept inputs agree and whose output does not."""
    runs: list[list[_Operation]] = []
    for batch, positions in zip((probe.before, probe.after), probe.positions(), strict=True):
        recorder = _Recorder(subject.model, positions)
        watch = _Watch(recorder)
        depth: list[int] = []

        def on_call(
            index: int,
            is_start: bool,
            watch: _Watch = watch,
            depth: list[int] = depth,
            open_: list[int] = recorder.open,
        ) -> None:
            if is_start and (index == culprit or (depth and index in skipped)):
                depth.append(index)
            elif not is_start and depth and depth[-1] == index:
                depth.pop()
            watch.active = bool(depth) and depth[-1] == culprit and len(depth) == 1

        recorder.on_call = on_call
        with recorder.attached(), watch:
            subject.forward(batch, training=training)
        runs.append(watch.found)
    options: dict[str, Any] = {"across_shapes": probe.across_shapes, "noise": noise}
    for old, new in zip(runs[0], runs[1], strict=False):
        if old.name != new.name:
            break
        inputs = max((difference(a, b, **options) for a, b in zip(old.inputs, new.inputs, strict=False)), default=0.0)
        outputs = max(
            (difference(a, b, **options) for a, b in zip(old.outputs, new.outputs, strict=False)), default=0.0
        )
        if outputs and not inputs:
            return old
    return None
