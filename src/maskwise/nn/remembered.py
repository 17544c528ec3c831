"""What was made of a weight and its gate, kept until either of them changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from maskwise.nn.gates import Gate

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
        if torch.is_grad_enabled() and weight.requires_grad:
            return None
        if (
            torch.compiler.is_compiling()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or forward_ad._current_level >= 0
            or gate.random
        ):
            return None
        tensors = _tensors(weight, gate)
        if torch.is_grad_enabled() and (
            (bias is not None and bias.requires_grad) or any(tensor.requires_grad for tensor in tensors)
        ):
            return None
        known = self._known
        if known is not None and known.gate is gate and known.training is gate.training:
            # Addresses first: inference tensors count no versions, but are never at these.
            same = [tensor.data_ptr() for tensor in tensors] == known.addresses
            same = same and [tensor._version for tensor in tensors] == known.versions
            if same and (known.seen is None or known.sample is None or torch.equal(known.sample, known.seen)):
                value: T = known.value
                return value
        return self._made(weight, gate, tensors, make)

    def _made(self, weight: Tensor, gate: Gate, tensors: list[Tensor], make: Callable[[], T]) -> T | None:
        # Subclasses may have no data of their own.
        if type(weight) not in (Tensor, nn.Parameter) or any(tensor.is_inference() for tensor in tensors):
            return None
        sample = _sample(weight)
        seen = None if sample is None else sample.clone()
        # Outside of inference mode, since what is made may meet an input that wants a gradient later.
        with torch.inference_mode(False), torch.no_grad():
            value = make()
        # One assignment, for other threads.
        self._known = _Known(
            gate,
            gate.training,
            [tensor.data_ptr() for tensor in tensors],
            [tensor._version for tensor in tensors],
            sample,
            seen,
            value,
            [tensor.detach() for tensor in tensors],
        )
        return value


class _Known(NamedTuple):
    gate: Gate
    training: bool
    addresses: list[int]
    versions: list[int]
    sample: Tensor | None
    seen: Tensor | None
    value: Any
    # Holding the tensors keeps their addresses from being given to others.
    held: list[Tensor]


def _tensors(weight: Tensor, gate: Gate) -> list[Tensor]:
    if gate._modules:
        return [weight, *gate.parameters(), *gate.buffers()]
    # The same without walking the tree, which would take longer than everything else here.
    tensors = [weight, *gate._parameters.values(), *gate._buffers.values()]
    return [tensor for tensor in tensors if tensor is not None]


def _sample(weight: Tensor) -> Tensor | None:
    """A view of some values of the weight, as ints: NaN is not equal to itself."""
    ints = _INTS.get(weight.element_size())
    if weight.device.type != "cpu" or not weight.is_contiguous() or ints is None or not weight.numel():
        return None
    flat = weight.detach().reshape(-1).view(ints)
    return flat[:: max(1, weight.numel() // SAMPLES)]
