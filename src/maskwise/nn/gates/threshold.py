"""Keep what passes a threshold."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.nn.gates.gate import Gate

__all__ = ["Threshold"]


class Threshold(Gate):
    """Keep weights whose size, or whose value, is above a threshold.

    >>> import torch, maskwise as mw
    >>> weight = torch.tensor([0.25, -0.75, 2.0], requires_grad=True)
    >>> out = mw.nn.gates.Threshold(0.5)(weight)
    >>> out.tolist(), torch.autograd.grad(out.sum(), weight)[0].tolist()
    ([0.0, -0.75, 2.0], [1.0, 1.0, 1.0])

    What is kept follows the weight at every step. With ``straight_through``, dropped weights get gradients as if they
    had been kept, so that one which is needed can grow back; without, a weight that falls below stays there. A NaN is
    above nothing: it is dropped.

    Args:
        t: the threshold; weights must be greater. It is the buffer ``threshold``, in the state_dict, and may be
            changed between steps: ``gate.threshold.fill_(0.1)``.
        by: ``"magnitude"`` compares the absolute value, ``"value"`` the value.
        straight_through: whether dropped weights get gradients.

    Raises:
        DtypeError: ``t`` is not a number.
        ArgumentError: ``t`` is NaN, or ``by`` is neither of both.
    """

    threshold: Tensor

    def __init__(
        self, t: float, by: Literal["magnitude", "value"] = "magnitude", straight_through: bool = True
    ) -> None:
        super().__init__()
        if isinstance(t, bool) or not isinstance(t, int | float):
            raise DtypeError(say("Threshold", "t", must="be a number", got=type(t).__name__, hint="Threshold(0.01)"))
        if t != t:
            raise ArgumentError(
                say("Threshold", "t", must="be a number that weights can exceed", got=t, hint="Threshold(0.01)")
            )
        if by not in ("magnitude", "value"):
            raise ArgumentError(
                say("Threshold", "by", must='be "magnitude" or "value"', got=repr(by), hint='by="magnitude"')
            )
        self.by = by
        self.straight_through = straight_through
        # Until there is a weight, whose dtype it takes: 0.1 in float32 is another number than 0.1 in float64.
        self.register_buffer("threshold", torch.tensor(float(t), dtype=torch.float64))

    def bits(self, weight: Tensor) -> Tensor:
        """What is above the threshold."""
        level = weight.abs() if self.by == "magnitude" else weight
        return level > self.threshold.to(level.dtype)

    def bind(self, weight: Tensor) -> None:
        """Hold the threshold in weight's dtype, where the weight is."""
        super().bind(weight)
        self.threshold = self.threshold.to(device=weight.device, dtype=weight.abs().dtype)

    def extra_repr(self) -> str:
        """The arguments, for print."""
        return f"{self.threshold.item():g}, by={self.by!r}, straight_through={self.straight_through}"
