"""What was derived from a weight and its gate, cached until either of them changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from maskwise.nn.gates import Gate
from maskwise.ops.torch_private import is_tracing, is_transformed

__all__ = ["WeightCache"]

T = TypeVar("T")

#: How many values of the weight are compared, for changes that leave no trace elsewhere.
SAMPLES = 61
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightCache(Generic[T]):
    """One value that depends on a weight and a gate only, and is computed again once either has changed.

    >>> from maskwise.nn.gates import Threshold
    >>> weight, gate, cache = torch.ones(3), Threshold(0.5), WeightCache()
    >>> count = lambda: cache.get(weight, gate, None, lambda: int(gate.mask(weight).count()))
    >>> before = count()
    >>> _ = weight[0].zero_()
    >>> before, count()
    (3, 2)

    A change is noticed by the version that torch counts up with every in-place operation (an optimizer's step,
    load_state_dict, an init), and by the address of the data (``.to()``, ``weight.data = ...``). What is written
    through ``.data`` counts no version: for that, some of the weight's values are compared too, on the CPU, where this
    takes no host-device sync. `invalidate` is for a change in few places through ``.data``, which this may miss.
    """

    __slots__ = ("_entry",)

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def __reduce__(self) -> tuple[type[WeightCache[T]], tuple[()]]:
        # Copies and pickles start empty: they have other tensors.
        return type(self), ()

    def invalidate(self) -> None:
        """Compute the value again at the next call."""
        self._entry = None

    def get(self, weight: Tensor, gate: Gate, bias: Tensor | None, derive: Callable[[], T]) -> T | None:
        """The cached value, or what ``derive`` makes of weight and gate as they are now.

        None stands for a weight that is a node of a graph which is being built: where weight, gate or bias require
        grad, the gate draws, or a transform is active.
        """
        if torch.is_grad_enabled() and (
            weight.requires_grad
            or (bias is not None and bias.requires_grad)
            or ((gate._parameters or gate._modules) and any(each.requires_grad for each in gate.parameters()))
        ):
            return None
        if is_tracing() or is_transformed() or gate.random:
            return None
        state = _state(weight, gate)
        entry = self._entry
        if (
            entry is not None
            and entry.gate is gate
            and entry.state == state
            and (entry.values is None or torch.equal(entry.sample, entry.values))
        ):
            value: T = entry.value
            return value
        return None if state is None else self._derive(weight, gate, state, derive)

    def _derive(self, weight: Tensor, gate: Gate, state: list[int], derive: Callable[[], T]) -> T | None:
        # Subclasses may have no data of their own.
        if type(weight) not in (Tensor, nn.Parameter):
            return None
        sample = _sample(weight)
        values = None if sample is None else sample.clone()
        # Outside of inference mode, since a later input may require grad.
        with torch.inference_mode(False), torch.no_grad():
            value = derive()
        tensors = [tensor.detach() for tensor in (weight, *gate.parameters(), *gate.buffers())]
        # One assignment, for other threads.
        self._entry = _Entry(gate, state, sample, values, value, tensors)
        return value


class _Entry(NamedTuple):
    gate: Gate
    state: list[int]
    # Some of the weight's values, as a view of it and as they were.
    sample: Any
    values: Tensor | None
    value: Any
    # Holding the tensors keeps their addresses from being given to others.
    tensors: list[Tensor]


def _state(weight: Tensor, gate: Gate) -> list[int] | None:
    """Where the data of weight and gate is, and how often it was changed; None if that is not counted."""
    try:
        state = [gate.training, weight.data_ptr(), weight._version]
        tensors = (*gate._buffers.values(), *gate._parameters.values())
        # Walking the tree takes longer than everything else here, and few gates have one.
        for tensor in (*gate.buffers(), *gate.parameters()) if gate._modules else tensors:
            if tensor is not None:
                state += (tensor.data_ptr(), tensor._version)
    except RuntimeError:
        # Inference tensors count no versions, and subclasses may have no data.
        return None
    return state


def _sample(weight: Tensor) -> Tensor | None:
    """A view of some values of the weight, as ints: NaN is not equal to itself."""
    ints = _INTS.get(weight.element_size())
    if weight.device.type != "cpu" or not weight.is_contiguous() or ints is None or not weight.numel():
        return None
    flat = weight.detach().reshape(-1).view(ints)
    return flat[:: max(1, weight.numel() // SAMPLES)]
