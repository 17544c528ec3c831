"""Keep the largest weights."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from maskwise.errors import ArgumentError, say
from maskwise.nn.gates.fitting import check_density, share
from maskwise.nn.gates.selecting import Selecting, largest, scores_of

__all__ = ["TopK"]


class TopK(Selecting):
    """Keep a given share of the weights: those of the largest size.

    >>> import torch, maskwise as mw
    >>> mw.nn.gates.TopK(0.5)(torch.tensor([[0.1, -0.9], [0.7, 0.2]]))
    tensor([[ 0.0000, -0.9000],
            [ 0.7000,  0.0000]])

    Exactly ``round(density * weight.numel())`` are kept; of equal ones the first. When the choice is made, and made
    again, is told in `Selecting`.

    Args:
        density: the share that is kept, between 0 and 1.
        scope: ``"layer"`` takes the share of each weight by itself. ``"global"`` takes it of all the weights of a model
            that have such a gate together, so that layers which matter keep more: see `mw.nn.prune`.
        straight_through: whether dropped weights get gradients, for those who choose again later.

    Raises:
        DtypeError: the density is not a number.
        ArgumentError: the density is not between 0 and 1, or the scope is neither of both.
    """

    density: float

    def __init__(
        self, density: float, scope: Literal["layer", "global"] = "layer", straight_through: bool = False
    ) -> None:
        super().__init__(straight_through)
        self.density = check_density("TopK", density)
        if scope not in ("layer", "global"):
            raise ArgumentError(
                say("TopK", "scope", must='be "layer" or "global"', got=repr(scope), hint='scope="layer"')
            )
        self.scope = scope

    def choose(self, weight: Tensor) -> Tensor:
        """The largest of this weight alone."""
        kept = largest(scores_of(weight).reshape(-1), share(self.density, weight.shape))
        return kept.reshape(weight.shape)

    def extra_repr(self) -> str:
        """The arguments, for print."""
        return f"{self.density:g}, scope={self.scope!r}"
