"""The gate that a layer is made with."""

from __future__ import annotations

from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.mask import Mask
from maskwise.nn.gates import Binary, Gate
from maskwise.ops.arguments import MaskLike

__all__ = ["gate_for"]


def gate_for(op: str, gate: Gate | MaskLike | None, weight: Tensor) -> Gate:
    """The gate bound to the layer's weight; a mask becomes a Binary, and nothing a mask that keeps everything.

    >>> import torch
    >>> gate_for("MaskedLinear", None, torch.ones(2, 3))
    Binary((2, 3), density=1)
    """
    if gate is None:
        gate = Mask.full(tuple(weight.shape), device=weight.device)
    found = Binary(gate) if isinstance(gate, Mask | Tensor) else gate
    if not isinstance(found, Gate):
        must = "be a gate of mw.nn.gates, or a mask"
        raise DtypeError(say(op, "gate", must=must, got=type(gate).__name__, hint="gate=mw.nn.gates.TopK(0.1)"))
    if found.bound:
        kind = type(found).__name__
        must = "belong to no weight yet, since it holds the topology of one"
        raise ArgumentError(say(op, "gate", must=must, got=f"a {kind} that is attached", hint=f"{kind}(...) anew"))
    found.bind(weight)
    return found
