"""A linear layer with a gate on its weight, which runs what is kept the fastest way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskwise.mask import Mask
from maskwise.nn.gates import Gate
from maskwise.nn.gates.gradient import kept_only
from maskwise.nn.layer_gate import gate_for
from maskwise.nn.layer_input import check_features
from maskwise.nn.linear_forms import Forms
from maskwise.nn.modules import check_linear
from maskwise.nn.remembered import Remembered
from maskwise.ops.arguments import MaskLike
from maskwise.ops.linear import linear
from maskwise.ops.torch_private import is_tracing
from maskwise.plan.dispatch import is_observed
from maskwise.plan.explain import record

__all__ = ["MaskedLinear"]

#: Multiplications below which, in training, planning a sparse product takes longer than it could save.
WORTHWHILE = 1 << 23


class MaskedLinear(nn.Linear):
    """``torch.nn.Linear`` with a gate on its weight: same arguments, same parameters, one more module.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.MaskedLinear(4, 2, gate=mw.nn.gates.NM(2, 4))
    >>> list(layer.state_dict()), layer.mask.count()
    (['weight', 'bias', 'gate.kept'], 4)
    >>> layer(torch.ones(3, 4)).shape
    torch.Size([3, 2])

    The weight stays dense, and is trained by any optimizer; the layer computes with the effective weight, in which what
    the gate drops is 0 whatever an optimizer does to it. Where no gradient of the weight is asked for, what depends on
    weight and gate only is made once and kept until one of them changes, and the product takes the fastest exact way:
    dense on the effective weight, a smaller dense product without the inputs and outputs of which nothing is kept, or
    the sparse kernel. ``mw.explain()`` tells which. In training it is that of `mw.linear`, if the gate holds its mask.

    Args:
        in_features: the size of each input.
        out_features: the size of each output.
        bias: whether there is a bias.
        gate: a gate, or a mask (a Mask or a bool tensor that broadcasts to (out_features, in_features)); by default,
            a mask that keeps everything, for a state_dict to be loaded into.
        device: where the parameters are.
        dtype: of the parameters.

    Raises:
        DtypeError: ``gate`` is neither a gate nor a mask.
        ShapeError: the gate does not fit the weight; the hint says what would.
        ArgumentError: the gate belongs to another weight.
    """

    gate: Gate

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gate: Gate | MaskLike | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.gate = gate_for(type(self).__name__, gate, self.weight)
        self._forms: Remembered[Forms] = Remembered()

    @classmethod
    def from_linear(cls, linear: nn.Linear, gate: Gate | MaskLike | None = None) -> MaskedLinear:
        """A MaskedLinear with the parameters of a Linear: the same objects, so that an optimizer goes on as before.

        >>> import torch, maskwise as mw
        >>> linear = torch.nn.Linear(4, 2)
        >>> mw.nn.MaskedLinear.from_linear(linear, mw.nn.gates.TopK(0.5)).weight is linear.weight
        True

        Args:
            linear: a torch.nn.Linear.
            gate: as for the layer itself.

        Raises:
            DtypeError: ``linear`` is not a torch.nn.Linear, or ``gate`` neither a gate nor a mask.
            ShapeError: the gate does not fit the weight; the hint says what would.
            ArgumentError: the gate belongs to another weight, or the Linear is a lazy one that is not initialized.
        """
        check_linear(f"{cls.__name__}.from_linear", linear)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.gate = gate_for(cls.__name__, gate, layer.weight)
        layer._forms = Remembered()
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """A Linear with the effective weight of evaluation, copied: what is dropped is 0, and free to grow again.

        >>> import torch, maskwise as mw
        >>> layer = mw.nn.MaskedLinear(4, 2, gate=mw.nn.gates.TopK(0.5))
        >>> int((layer.to_linear().weight != 0).sum())
        4
        """
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, self.weight.device, self.weight.dtype
        )
        with torch.no_grad():
            linear.weight.copy_(evaluated(self.gate, self.weight))
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear.train(self.training)

    @property
    def mask(self) -> Mask:
        """What the gate keeps at the moment, of shape (out_features, in_features)."""
        return self.gate.mask(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """The product of (..., in_features) with the effective weight, plus the bias: (..., out_features).

        Raises:
            ShapeError: the input does not end in the layer's features.
            DtypeError: the input is not a tensor, or not of the layer's dtype.
            DeviceError: the input is on another device.
        """
        own = self._parameters
        # Attributes of a module take a microsecond each to look up, which a small layer would notice.
        weight = own["weight"] if "weight" in own else self.weight  # noqa: SIM401
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401
        gate = self._modules["gate"]
        assert isinstance(gate, Gate)
        assert weight is not None
        check_features("MaskedLinear", input, weight.shape[1], weight)
        forms = self._forms.get(weight, gate, bias, lambda: Forms(gate(weight), gate.bits(weight)))
        if forms is None:
            held = gate.held
            if held is None:
                return F.linear(input, gate(weight), bias)
            if is_tracing() or input.numel() * weight.shape[0] < WORTHWHILE:
                # What the gate itself would do, without the calls in between. A graph is not bound to a size of batch.
                return F.linear(input, kept_only(weight, held), bias)
            return linear(input, weight, held, bias)
        out, plan, computed = forms.run(input, bias)
        if is_observed():
            skipped = weight.numel() - computed
            return record(plan, weight, gate.bits(weight), skipped=skipped) or out  # type: ignore[return-value]
        return out

    def forget(self) -> None:
        """Make again what is kept of weight and gate; needed only after few values were written through ``.data``."""
        self._forms.forget()


def evaluated(gate: Gate, weight: Tensor) -> Tensor:
    """The effective weight as evaluation has it, whatever the mode of the gate is."""
    training = gate.training
    gate.eval()
    try:
        effective: Tensor = gate(weight)
        return effective
    finally:
        gate.train(training)
