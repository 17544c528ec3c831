"""Gates that choose their topology from the weight, and then hold it."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.nn.gates.gate import Gate, check_weight

__all__ = ["Selecting", "largest", "scores_of"]


class Selecting(Gate):
    """A gate that chooses what to keep from the weight it meets, and holds it until it is told to choose again.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.attach(torch.nn.Linear(4, 4), mw.nn.gates.TopK(0.25))
    >>> gate = layer.parametrizations.weight[0]
    >>> gate.kept.sum()
    tensor(4)

    Attached, the choice is the bool buffer ``kept`` in the state_dict: a step of an optimizer with momentum cannot
    bring a dropped weight back, and a forward pass costs no search. `select` chooses again; so do `mw.nn.reselect` for
    a whole model and the schedules. A gate that is not attached to anything has no weight to hold on to, and chooses
    from whatever it is given.

    A new gate of this kind overrides `choose` alone.
    """

    kept: Tensor | None
    #: The share that is kept; gates whose pattern fixes it leave this None.
    density: float | None = None

    def __init__(self, straight_through: bool = False) -> None:
        super().__init__()
        self.straight_through = straight_through
        self.register_buffer("kept", None)

    def choose(
        self,
        weight: Tensor,  # any shape
    ) -> Tensor:
        """What to keep of this weight: a bool tensor of its shape."""
        kind = type(self).__name__
        raise NotImplementedError(f"{kind} must override choose(weight). Hint: return weight > weight.mean().")

    @torch.no_grad()
    def select(self, weight: Tensor) -> None:
        """Choose again, from what the weight is now.

        >>> import torch, maskwise as mw
        >>> gate, weight = mw.nn.gates.TopK(0.5), torch.tensor([1.0, 2.0])
        >>> gate.bind(weight)
        >>> gate.select(weight.flip(0))
        >>> gate.kept
        tensor([ True, False])
        """
        self.hold(self.choose(weight.detach()))

    @torch.no_grad()
    def hold(
        self,
        bits: Tensor,  # bool, weight's shape
    ) -> None:
        """Keep this from now on. The buffer stays the same tensor, for whoever has a hold of it."""
        if self.kept is None:
            self.kept = bits.clone()
        else:
            self.kept.copy_(bits)

    def bits(self, weight: Tensor) -> Tensor:
        """What is held; for a gate without a weight of its own, the choice from this one."""
        if self.kept is not None:
            return self.kept
        with torch.no_grad():
            return self.choose(weight)

    @property
    def held(self) -> Tensor | None:
        """The choice, unless dropped weights get gradients too."""
        return None if self.straight_through else self.kept

    def bind(self, weight: Tensor) -> None:
        """Choose from this weight, and hold it."""
        check_weight(type(self).__name__, weight)
        with torch.no_grad():
            bits = self.choose(weight.detach())
        super().bind(weight)
        self.kept = None
        self.hold(bits)


def scores_of(weight: Tensor) -> Tensor:
    """How much each weight counts: its size, in a dtype that can be ordered anywhere. A NaN counts least."""
    size = weight.abs()
    if size.dtype in (torch.bfloat16, torch.float16):
        size = size.float()
    return torch.where(size.isnan(), -1.0, size)


def largest(
    scores: Tensor,  # (n,), no NaN
    count: int,
) -> Tensor:
    """The largest ``count`` of the scores as bools: exactly so many, and the first ones where scores are equal.

    >>> largest(torch.tensor([3.0, 1.0, 3.0, 3.0]), 2)
    tensor([ True, False,  True, False])
    """
    n = scores.numel()
    if count <= 0 or count >= n:
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    if scores.device.type == "cpu":
        least = torch.kthvalue(scores, n - count + 1).values
    else:
        # Elsewhere kthvalue is not deterministic, and refuses where that is asked for.
        least = torch.topk(scores, count).values[-1]
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))
