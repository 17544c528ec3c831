"""What was made of a weight and its gate, kept until either of them changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from maskwise.nn.gates import Gate
from maskwise.ops.torch_private import is_tracing, is_transformed

__all__ = ["Remembered"]

T = TypeVar("T")

#: How many values of the weight are looked at, for changes that leave no trace elsewhere.
SAMPLES = 61
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Remembered(Generic[T]):
    """One value that depends on a weight and a gate only, and is made again once either has changed.

    >>> from maskwise.nn.gates import Threshold
    >>> weight, gate, remembered = torch.ones(3), Threshold(0.5), Remembered()
    >>> count = lambda: remembered.get(weight, gate, None, lambda: int(gate.mask(weight).count()))
    >>> before = count()
    >>> _ = weight[0].zero_()
    >>> before, count()
    (3, 2)

    A change is noticed by the version that torch counts up with every in-place operation (an optimizer's step,
    load_state_dict, an init), and by the address of the data (``.to()``, ``weight.data = ...``). What is written
    through ``.data`` counts no version: for that, some of the weight's values are compared too, on the CPU, where this
    makes no device wait. `forget` is for a change in few places through ``.data``, which even this may not see.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: _Known | None = None

    def __reduce__(self) -> tuple[type[Remembered[T]], tuple[()]]:
        # Copies and pickles start anew: they have other tensors.
        return type(self), ()

    def forget(self) -> None:
        """Make the value again at the next call."""
        self._known = None

    def get(self, weight: Tensor, gate: Gate, bias: Tensor | None, make: Callable[[], T]) -> T | None:
        """The value, made by ``make`` if it is not known for what weight and gate are now.

        None stands for a weight that is a node of a graph which is being built, and not a fact: where a gradient of
        weight, gate or bias is asked for, the gate draws, or a transform is at work.
        """
        if torch.is_grad_enabled() and (
            weight.requires_grad
            or (bias is not None and bias.requires_grad)
            or ((gate._parameters or gate._modules) and any(each.requires_grad for each in gate.parameters()))
        ):
            return None
        if is_tracing() or is_transformed() or gate.random:
            return None
        place = _place(weight, gate)
        known = self._known
        same = known is not None and known.gate is gate and known.place == place
        if known is not None and same and (known.seen is None or torch.equal(known.sample, known.seen)):
            value: T = known.value
            return value
        return None if place is None else self._made(weight, gate, place, make)

    def _made(self, weight: Tensor, gate: Gate, place: list[int], make: Callable[[], T]) -> T | None:
        # Subclasses may have no data of their own.
        if type(weight) not in (Tensor, nn.Parameter):
            return None
        sample = _sample(weight)
        seen = None if sample is None else sample.clone()
        # Outside of inference mode, since what is made may meet an input that wants a gradient later.
        with torch.inference_mode(False), torch.no_grad():
            value = make()
        held = [tensor.detach() for tensor in (weight, *gate.parameters(), *gate.buffers())]
        # One assignment, for other threads.
        self._known = _Known(gate, place, sample, seen, value, held)
        return value


class _Known(NamedTuple):
    gate: Gate
    place: list[int]
    # Some of the weight's values, as a view of it and as they were.
    sample: Any
    seen: Tensor | None
    value: Any
    # Holding the tensors keeps their addresses from being given to others.
    held: list[Tensor]


def _place(weight: Tensor, gate: Gate) -> list[int] | None:
    """Where the data of weight and gate is, and how often it was changed; None if that is not counted."""
    try:
        place = [gate.training, weight.data_ptr(), weight._version]
        tensors = (*gate._buffers.values(), *gate._parameters.values())
        # Walking the tree takes longer than everything else here, and few gates have one.
        for tensor in (*gate.buffers(), *gate.parameters()) if gate._modules else tensors:
            if tensor is not None:
                place += (tensor.data_ptr(), tensor._version)
    except RuntimeError:
        # Inference tensors count no versions, and subclasses may have no data.
        return None
    return place


def _sample(weight: Tensor) -> Tensor | None:
    """A view of some values of the weight, as ints: NaN is not equal to itself."""
    ints = _INTS.get(weight.element_size())
    if weight.device.type != "cpu" or not weight.is_contiguous() or ints is None or not weight.numel():
        return None
    flat = weight.detach().reshape(-1).view(ints)
    return flat[:: max(1, weight.numel() // SAMPLES)]
