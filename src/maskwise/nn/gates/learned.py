"""Gates that are learned along with the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from maskwise.distributed.group import whole
from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.nn.gates.gate import Gate, check_device, check_weight, expanded, fill_gated

__all__ = ["HardConcrete", "Sigmoid"]


class _Learned(Gate):
    """A gate with one parameter for each weight, ``logits``, made when the gate meets its weight."""

    logits: Tensor | None

    def __init__(self, init: float | Tensor) -> None:
        super().__init__()
        name = type(self).__name__
        if isinstance(init, Tensor) and not init.is_floating_point():
            raise DtypeError(say(name, "init", must="be of a floating dtype", got=init.dtype, hint="init.float()"))
        if isinstance(init, bool) or not isinstance(init, int | float | Tensor):
            raise DtypeError(
                say(name, "init", must="be a number or a tensor", got=type(init).__name__, hint="init=2.0")
            )
        self._init = init.detach().clone() if isinstance(init, Tensor) else float(init)
        self.register_parameter("logits", None)

    def bind(self, weight: Tensor) -> None:
        """Make the parameter, of weight's shape and dtype."""
        check_weight(type(self).__name__, weight)
        init = self._init
        dtype = weight.abs().dtype
        if isinstance(init, Tensor):
            check_device(type(self).__name__, "init", init, weight)
            start = expanded(type(self).__name__, "init", init, weight).to(dtype)
        else:
            start = torch.full_like(weight, init, dtype=dtype, requires_grad=False)
        super().bind(weight)
        # What was learned on this weight stays when a gate is detached and attached again.
        if self.logits is None or self.logits.shape != weight.shape:
            self.logits = nn.Parameter(start)

    def opening(self, weight: Tensor) -> Tensor:
        """How open each gate is, from 0 to 1, in weight's shape."""
        kind = type(self).__name__
        raise NotImplementedError(f"{kind} must override opening(weight). Hint: return self.logits.sigmoid().")

    def forward(self, weight: Tensor) -> Tensor:
        """The weight times how open its gate is."""
        opening = self.opening(weight)
        # What a shut gate holds back must not meet its zero: 0 * NaN is NaN, there and in the backward pass.
        return fill_gated(weight, opening.detach() > 0) * opening.to(weight.dtype)

    def _logits(self, weight: Tensor) -> Tensor:
        if self.logits is None:
            self.bind(weight)
        assert self.logits is not None
        half = self.logits.dtype in (torch.bfloat16, torch.float16)
        return self.logits.float() if half else self.logits

    def extra_repr(self) -> str:
        """The start, for print."""
        return "init=tensor" if isinstance(self._init, Tensor) else f"init={self._init:g}"


class Sigmoid(_Learned):
    """A soft gate that is learned: the weight times ``sigmoid(logits)``.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.attach(torch.nn.Linear(10, 5), mw.nn.gates.Sigmoid(torch.randn(5, 10)))
    >>> layer(torch.randn(1, 10)).sum().backward()
    >>> layer.parametrizations.weight[0].logits.grad.shape
    torch.Size([5, 10])

    The hard mask is where the gate is more than half open. `penalty` shrinks what is not needed.

    Args:
        init: where the logits start: a number, or a tensor that broadcasts to the weight. ``sigmoid(2.0)`` is 0.88.

    Raises:
        DtypeError: ``init`` is not a number or a tensor of floats.
        ShapeError: ``init`` does not broadcast to the weight; the hint says what would.
    """

    def __init__(self, init: float | Tensor = 2.0) -> None:
        super().__init__(init)

    def opening(self, weight: Tensor) -> Tensor:
        """How open each gate is, from 0 to 1."""
        return self._logits(weight).sigmoid()

    def bits(self, weight: Tensor) -> Tensor:
        """Where the gate is more than half open."""
        return self._logits(weight).detach() > 0

    def penalty(self) -> Tensor:
        """The sum of how open the gates are, to be added to the loss.

        Raises:
            ArgumentError: the gate has no weight yet.
        """
        return whole(_parameter(self).sigmoid().sum())


class HardConcrete(_Learned):
    """A gate of zeros and ones that is learned: the L0 norm made differentiable, with exact zeros.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.attach(torch.nn.Linear(10, 5), mw.nn.gates.HardConcrete())
    >>> gate = layer.parametrizations.weight[0]
    >>> loss = layer(torch.randn(1, 10)).square().sum() + 1e-3 * gate.penalty()
    >>> loss.backward()
    >>> bool((gate.logits.grad != 0).all())
    True

    In training the opening is sampled at every call from a concrete distribution that is stretched beyond 0 and 1
    and cut off there (Louizos, Welling and Kingma, 2018). In evaluation it is its deterministic middle.

    Args:
        init: where the logits start: a number, or a tensor that broadcasts to the weight. The larger, the more open.
        temperature: of the concrete distribution; the smaller, the closer to 0 and 1 its draws.
        stretch: the interval (below 0, above 1) that the draws are stretched to.

    Raises:
        DtypeError: ``init`` is not a number or a tensor of floats.
        ArgumentError: the temperature is not positive, or the stretch does not reach beyond 0 and 1.
        ShapeError: ``init`` does not broadcast to the weight; the hint says what would.
    """

    def __init__(
        self, init: float | Tensor = 2.0, temperature: float = 2 / 3, stretch: tuple[float, float] = (-0.1, 1.1)
    ) -> None:
        super().__init__(init)
        if not temperature > 0:
            raise ArgumentError(
                say("HardConcrete", "temperature", must="be positive", got=temperature, hint="temperature=2 / 3")
            )
        if not (stretch[0] < 0.0 and stretch[1] > 1.0):
            must = "reach below 0 and above 1, or no gate would ever be shut"
            raise ArgumentError(say("HardConcrete", "stretch", must=must, got=stretch, hint="stretch=(-0.1, 1.1)"))
        self.temperature, self.stretch = temperature, stretch

    def opening(self, weight: Tensor) -> Tensor:
        """How open each gate is: drawn in training, the middle in evaluation."""
        logits = self._logits(weight)
        if self.training:
            # Strictly between 0 and 1, or the logarithms are infinite.
            tiny = torch.finfo(logits.dtype).eps
            draw = torch.rand_like(logits).clamp(tiny, 1 - tiny)
            logits = (draw.log() - (-draw).log1p() + logits) / self.temperature
        return self._stretched(logits)

    def bits(self, weight: Tensor) -> Tensor:
        """Where the gate is not shut in evaluation."""
        return self._stretched(self._logits(weight).detach()) > 0

    def penalty(self) -> Tensor:
        """The expected number of weights that are kept, to be added to the loss.

        Raises:
            ArgumentError: the gate has no weight yet.
        """
        low, high = self.stretch
        return whole((_parameter(self) - self.temperature * math.log(-low / high)).sigmoid().sum())

    @property
    def random(self) -> bool:
        """Whether openings are drawn: in training."""
        return self.training

    def _stretched(self, logits: Tensor) -> Tensor:
        low, high = self.stretch
        return (logits.sigmoid() * (high - low) + low).clamp(0.0, 1.0)


def _parameter(gate: _Learned) -> Tensor:
    if gate.logits is None:
        name = type(gate).__name__
        hint = "mw.nn.attach(module, gate)"
        raise ArgumentError(say(f"{name}.penalty", "gate", must="belong to a weight", got="one without", hint=hint))
    return gate.logits
