"""Gates: modules that make a weight's effective weight. The protocol, a given mask, and a threshold."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from maskwise.distributed.group import place_like, whole
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, fits, shape_hint
from maskwise.ops.primitives import fill_dropped
from maskwise.ops.torch_private import is_tracing

__all__ = [
    "Binary",
    "Gate",
    "Threshold",
    "check_device",
    "check_unbound",
    "check_weight",
    "expanded",
    "fill_gated",
    "gate_for",
]


class Gate(nn.Module):
    """A module that makes a weight's effective weight, which is 0 where the gate drops.

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
        return straight_through(weight, bits) if self.straight_through else fill_gated(weight, bits)

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
            return Mask(whole(self.bits(weight.detach())).clone())

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


# -- the effective weight ----------------------------------------------------------------------------------------------
#: Below this, torch's own where is done, gradient included, before the dispatcher would have looked at the call.
_FEW_WEIGHTS = 1 << 16
#: Anything else may be a DTensor, whose mask lies on the same ranks.
_PLAIN = (Tensor, nn.Parameter)


def fill_gated(
    weight: Tensor,  # any shape
    bits: Tensor,  # bool, weight's shape
) -> Tensor:
    """The weight where it is kept and 0 elsewhere, with a gradient where it is kept.

    >>> weight = torch.tensor([1.0, float("nan")], requires_grad=True)
    >>> out = fill_gated(weight, torch.tensor([True, False]))
    >>> out.tolist(), torch.autograd.grad(out.sum(), weight)[0].tolist()
    ([1.0, 0.0], [1.0, 0.0])
    """
    if type(weight) not in _PLAIN and not is_tracing():
        return torch.where(place_like(bits, weight), weight, 0.0)
    return torch.where(bits, weight, 0.0) if weight.numel() < _FEW_WEIGHTS else fill_dropped(weight, bits)


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bits: Tensor) -> Tensor:
        return torch.where(bits, weight, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _WithForwardMode(_StraightThrough):
    """The same with forward-mode AD, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].clone()


def straight_through(
    weight: Tensor,  # any shape
    bits: Tensor,  # bool, weight's shape
) -> Tensor:
    """The weight where it is kept and 0 elsewhere, with the gradient of the weight itself.

    >>> weight = torch.tensor([1.0, float("nan")], requires_grad=True)
    >>> out = straight_through(weight, torch.tensor([True, False]))
    >>> out.tolist(), torch.autograd.grad(out.sum(), weight)[0].tolist()
    ([1.0, 0.0], [1.0, 1.0])
    """
    if type(weight) not in _PLAIN and not is_tracing():
        bits = place_like(bits, weight)
    function = _StraightThrough if is_tracing() else _WithForwardMode
    # Torch's own apply carries no types.
    out: Tensor = function.apply(weight, bits)  # type: ignore[no-untyped-call]
    return out


# -- gates that do not choose ------------------------------------------------------------------------------------------
class Binary(Gate):
    """Keep what a given mask keeps.

    >>> import torch, maskwise as mw
    >>> gate = mw.nn.gates.Binary(mw.Mask.from_lengths([1, 2], max_len=3))
    >>> gate(torch.ones(2, 3))
    tensor([[1., 0., 0.],
            [1., 1., 0.]])

    Attached to a layer it holds the mask in weight's full shape, under ``kept`` in the state_dict.

    Args:
        mask: a Mask or a bool tensor that broadcasts to the weight; True means keep. The weight of
            ``nn.Linear(10, 5)`` is (5, 10).

    Raises:
        DtypeError: the mask is neither a Mask nor a bool tensor.
        ShapeError: the mask does not broadcast to the weight; the hint says what would.
    """

    kept: Tensor

    def __init__(self, mask: MaskLike) -> None:
        super().__init__()
        if not isinstance(mask, Mask) and not (isinstance(mask, Tensor) and mask.dtype is torch.bool):
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            hint = "Binary(mask != 0)" if isinstance(mask, Tensor) else "Binary(torch.as_tensor(mask).bool())"
            raise DtypeError(say("Binary", "mask", must="be a Mask or a bool tensor", got=got, hint=hint))
        # The gate owns its topology: a mask is a value, and what it was made of may be written into.
        bits = mask.to_bool() if isinstance(mask, Mask) else mask
        self.register_buffer("kept", bits.detach().clone())

    def bits(self, weight: Tensor) -> Tensor:
        """What is kept, of weight's shape."""
        return self.kept if self.kept.shape == weight.shape else expanded("Binary", "mask", self.kept, weight)

    @property
    def held(self) -> Tensor | None:
        """The mask, once it has weight's shape."""
        return self.kept if self.bound else None

    def bind(self, weight: Tensor) -> None:
        """Check that the mask fits, and hold it in weight's shape."""
        check_weight("Binary", weight)
        check_device("Binary", "mask", self.kept, weight)
        kept = expanded("Binary", "mask", self.kept, weight)
        super().bind(weight)
        self.kept = kept

    def extra_repr(self) -> str:
        """Shape and density, for print."""
        return f"{tuple(self.kept.shape)}, density={Mask(self.kept).density:.3g}"


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
    check_unbound(op, found)
    found.bind(weight)
    return found


def check_unbound(op: str, gate: Gate) -> None:
    """Raise for a gate that belongs to a weight."""
    if gate.bound:
        kind = type(gate).__name__
        must = "belong to no weight yet, since it holds the topology of one"
        raise ArgumentError(say(op, "gate", must=must, got=f"a {kind} that is attached", hint=f"a new {kind}(...)"))


# -- checks ------------------------------------------------------------------------------------------------------------
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


def expanded(
    op: str,
    argument: str,
    tensor: Tensor,  # broadcasts to weight
    weight: Tensor,  # any shape
) -> Tensor:
    """A copy of the tensor in weight's shape, or an error that says how it would fit."""
    if not fits(tensor.shape, weight.shape):
        must = f"broadcast to weight's shape {tuple(weight.shape)}"
        hint = _hint(tuple(tensor.shape), tuple(weight.shape)).replace("mask", argument).replace("x's", "weight's")
        raise ShapeError(say(op, argument, must=must, got=tuple(tensor.shape), hint=hint))
    return tensor.expand(weight.shape).clone()


def _hint(mask: tuple[int, ...], weight: tuple[int, ...]) -> str:
    """What to write instead: ``nn.Linear(10, 5)`` has a weight of (5, 10), and many expect (10, 5).

    >>> _hint((10, 5), (5, 10)), _hint((3, 8, 5, 5), (8, 3, 5, 5)), _hint((8,), (8, 3, 5, 5))
    ('mask.T', 'mask.transpose(0, 1)', 'mask[..., None, None, None]')
    """
    if len(mask) > 2 and fits((mask[1], mask[0], *mask[2:]), weight):
        return "mask.transpose(0, 1)"
    if len(mask) == len(weight) and fits(weight, mask):
        # An x can be expanded to its mask; a weight has the shape that it has.
        return "sizes line up from the right, and each is weight's size or 1"
    return shape_hint(mask, weight)
