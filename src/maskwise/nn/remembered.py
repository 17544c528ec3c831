"""What was made of a weight and its gate, kept until either of them changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from maskwise.nn.gates import Gate

__all__ = ["Remembered", "can_remember"]

T = TypeVar("T")

#: How many values of the weight are looked at, for changes that leave no trace elsewhere.
SAMPLES = 61
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Remembered(Generic[T]):
    """One value that depends on a weight and a gate only, and is made again once either has changed.

    >>> from maskwise.nn.gates import Threshold
    >>> weight, gate, remembered = torch.ones(3), Threshold(0.5), Remembered()
    >>> count = lambda: remembered.get(weight, gate, lambda: int(gate.mask(weight).count()))
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
        self._known: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[type[Remembered[T]], tuple[()]]:
        # Copies and pickles start anew: they have other tensors.
        return type(self), ()

    def forget(self) -> None:
        """Make the value again at the next call."""
        self._known = None

    def get(self, weight: Tensor, gate: Gate, make: Callable[[], T]) -> T:
        """The value, made by ``make`` if it is not known for what weight and gate are now."""
        tensors = _tensors(gate)
        key = [gate.training, weight.dtype]
        for tensor in (weight, *tensors):
            key += (tensor.data_ptr(), tensor._version)
        known = self._known
        if known is not None and known[0] == key and known[1] is gate:
            sample, seen = known[2], known[3]
            if sample is None or torch.equal(sample, seen):
                return known[4]  # type: ignore[no-any-return]
        sample = _sample(weight)
        seen = None if sample is None else sample.clone()
        # Outside of inference mode, since what is made may meet an input that wants a gradient later.
        with torch.inference_mode(False), torch.no_grad():
            value = make()
        # Holding the tensors keeps their addresses from being given to others. One assignment, for other threads.
        held = [tensor.detach() for tensor in (weight, *tensors)]
        self._known = (key, gate, sample, seen, value, held)
        return value


def can_remember(weight: Tensor, gate: Gate, *others: Tensor | None) -> bool:
    """Whether the effective weight is a fact, and not a node of a graph that is being built."""
    if torch.compiler.is_compiling() or gate.random:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return False
    tensors = (weight, *_tensors(gate), *others)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return False
    # Subclasses may have no data of their own, and inference tensors count no versions.
    return type(weight) in (Tensor, torch.nn.Parameter) and not weight.is_inference()


def _tensors(gate: Gate) -> list[Tensor]:
    if gate._modules:
        return [*gate.parameters(), *gate.buffers()]
    # The same without walking the tree, which would take longer than everything else here.
    return [tensor for tensor in (*gate._parameters.values(), *gate._buffers.values()) if tensor is not None]


def _sample(weight: Tensor) -> Tensor | None:
    """A view of some values of the weight, as ints: NaN is not equal to itself."""
    ints = _INTS.get(weight.element_size())
    if weight.device.type != "cpu" or not weight.is_contiguous() or ints is None or not weight.numel():
        return None
    flat = weight.detach().reshape(-1).view(ints)
    return flat[:: max(1, weight.numel() // SAMPLES)]
