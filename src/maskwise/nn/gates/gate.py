"""What every gate has in common: the effective weight, the mask, and what it takes from the weight it is bound to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maskwise.errors import DeviceError, DtypeError, say
from maskwise.mask import Mask
from maskwise.nn.gates.gradient import kept_only, straight_through

__all__ = ["Gate"]


class Gate(nn.Module):
    """A module that turns a weight into its effective weight, which is 0 where the gate drops.

    >>> import torch, maskwise as mw
    >>> class Positive(mw.nn.gates.Gate):
    ...     def bits(self, weight):
    ...         return weight > 0
    >>> weight = torch.tensor([[1.0, -2.0], [float("nan"), 3.0]])
    >>> Positive()(weight)
    tensor([[1., 0.],
            [0., 3.]])
    >>> Positive().mask(weight).count()
    2

    The protocol, which `mw.nn.attach`, `mw.nn.MaskedLinear` and `mw.nn.report` go by:

    - ``gate(weight)`` is the effective weight, of weight's shape and dtype. What is dropped is exactly 0 there,
      whatever the weight holds. The gradient reaches the weight where it is kept; with ``straight_through`` it reaches
      all of it. Parameters of the gate always get theirs.
    - ``gate.mask(weight)`` is the hard mask of the moment, a `Mask` of weight's shape.
    - ``gate.bind(weight)`` is called once, when the gate meets the weight it is for. It checks that both fit, and makes
      buffers and parameters of weight's shape, so that the state_dict holds the topology.
    - ``gate.random`` says whether two calls with the same weight may differ.

    A new hard gate overrides `bits` alone.
    """

    #: Whether dropped weights get gradients too, as if they had been kept.
    straight_through: bool = False
    #: Whether the gate belongs to a weight.
    bound: bool = False

    def bits(
        self,
        weight: Tensor,  # any shape
    ) -> Tensor:
        """What is kept: a bool tensor of weight's shape. It may be the gate's own buffer: do not write into it."""
        raise NotImplementedError(f"{type(self).__name__} must override bits(weight). Hint: return weight.abs() > 0.1.")

    def forward(self, weight: Tensor) -> Tensor:
        """The effective weight: the weight where it is kept, 0 elsewhere."""
        bits = self.bits(weight.detach())
        return straight_through(weight, bits) if self.straight_through else kept_only(weight, bits)

    def mask(self, weight: Tensor) -> Mask:
        """The hard mask of the moment. It is a value: it stays what it is when the gate changes afterwards.

        >>> import torch, maskwise as mw
        >>> mw.nn.gates.Threshold(0.5).mask(torch.tensor([0.1, -0.9])).to_bool()
        tensor([False,  True])

        Args:
            weight: the weight that the gate is for.

        Returns:
            A Mask of weight's shape, True where the weight is kept.

        Raises:
            DtypeError: the weight is not a tensor of floats.
        """
        check_weight(type(self).__name__, weight)
        with torch.no_grad():
            return Mask(self.bits(weight.detach()).clone())

    def bind(self, weight: Tensor) -> None:
        """Belong to this weight: check that it fits, and make what has its shape.

        Raises:
            DtypeError: the weight is not a tensor of floats.
            ShapeError: the gate does not fit the weight.
            DeviceError: the gate has tensors on another device.
        """
        check_weight(type(self).__name__, weight)
        self.bound = True

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What to store when ``module.weight = weight`` is written: the weight itself. The topology stays."""
        return weight

    @property
    def held(self) -> Tensor | None:
        """The mask that the gate holds, if its effective weight is nothing but the weight where that mask keeps it."""
        return None

    @property
    def random(self) -> bool:
        """Whether two calls with the same weight may give different effective weights."""
        return False


def check_weight(op: str, weight: object) -> None:
    """Raise unless the weight is a tensor that can be gated."""
    if not isinstance(weight, Tensor):
        hint = "gate(module.weight)"
        raise DtypeError(say(op, "weight", must="be a tensor", got=type(weight).__name__, hint=hint))
    if not (weight.is_floating_point() or weight.is_complex()):
        raise DtypeError(say(op, "weight", must="be of a floating dtype", got=weight.dtype, hint="weight.float()"))


def check_device(op: str, argument: str, tensor: Tensor, weight: Tensor) -> None:
    """Raise unless a tensor of the gate is where the weight is."""
    if tensor.device != weight.device:
        hint = f"{argument}.to({str(weight.device)!r})"
        raise DeviceError(
            say(op, argument, must=f"be on weight's device {weight.device}", got=tensor.device, hint=hint)
        )
