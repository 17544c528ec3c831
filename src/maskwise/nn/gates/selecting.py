"""Gates that choose what to keep from the weight, and hold it: by magnitude, n of every m, or whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from maskwise.errors import ArgumentError, DtypeError, OutOfRangeError, ShapeError, say
from maskwise.nn.gates.gate import Gate, check_weight

__all__ = ["NM", "Block", "Selecting", "TopK", "check_density", "largest", "scores_of", "share"]


class Selecting(Gate):
    """A gate that chooses what to keep from the weight it meets, and holds it until `select` chooses again.

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
        """Keep this from now on. The buffer stays the same tensor, for those who hold a reference to it."""
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


class TopK(Selecting):
    """Keep a given share of the weights: those of the largest size.

    >>> import torch, maskwise as mw
    >>> mw.nn.gates.TopK(0.5)(torch.tensor([[0.1, -0.9], [0.7, 0.2]]))
    tensor([[ 0.0000, -0.9000],
            [ 0.7000,  0.0000]])

    Exactly ``round(density * weight.numel())`` are kept; of equal ones the first. `Selecting` says when the choice is
    made, and made again.

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


class NM(Selecting):
    """Keep the ``n`` largest of every ``m`` neighbours along the input, such as 2 of 4.

    >>> import torch, maskwise as mw
    >>> mw.nn.gates.NM(2, 4)(torch.tensor([[1.0, 4.0, -3.0, 2.0]]))
    tensor([[ 0.,  4., -3.,  0.]])

    Args:
        n: how many are kept of each group.
        m: the size of a group. The weight's size along ``dim`` must be a multiple of it.
        dim: the dim along which neighbours are grouped: 1 is the input of Linear, Conv and RNN weights.
        straight_through: whether dropped weights get gradients.

    Raises:
        ArgumentError: not ``0 <= n <= m``, or m is not positive.
        ShapeError: the weight cannot be parted into groups of m.
        OutOfRangeError: the weight has no such dim.
    """

    def __init__(self, n: int, m: int, dim: int = 1, straight_through: bool = False) -> None:
        super().__init__(straight_through)
        if not isinstance(n, int) or not isinstance(m, int) or not 0 <= n <= m or m < 1:
            raise ArgumentError(
                say("NM", "n", must="be an int from 0 to m, of m > 0", got=f"{n} of {m}", hint="NM(2, 4)")
            )
        self.n, self.m, self.dim = n, m, dim

    def choose(self, weight: Tensor) -> Tensor:
        """The n largest of each group; of equal ones the first."""
        if not -weight.dim() <= self.dim < weight.dim():
            must = f"be a dim of a weight of shape {tuple(weight.shape)}"
            raise OutOfRangeError(say("NM", "dim", must=must, got=self.dim, hint=f"NM({self.n}, {self.m}, dim=0)"))
        if weight.shape[self.dim] % self.m:
            must = f"have a size along dim {self.dim} that is a multiple of m = {self.m}"
            divisors = [m for m in range(self.m, 1, -1) if weight.shape[self.dim] % m == 0]
            hint = f"NM({min(self.n, divisors[0])}, {divisors[0]})" if divisors else "leave this layer out"
            raise ShapeError(say("NM", "weight", must=must, got=tuple(weight.shape), hint=hint))
        scores = scores_of(weight).movedim(self.dim, -1)
        groups = scores.reshape(*scores.shape[:-1], -1, self.m)
        # A stable sort, so that equal ones are taken in order on every device.
        order = groups.sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., : self.n], True)
        return kept.flatten(-2).movedim(-1, self.dim).contiguous()

    def extra_repr(self) -> str:
        """The arguments, for print."""
        return f"{self.n}, {self.m}" + (f", dim={self.dim}" if self.dim != 1 else "")


class Block(Selecting):
    """Keep a given share of the blocks of a weight: those whose weights are the largest on average.

    >>> import torch, maskwise as mw
    >>> weight = torch.tensor([[1.0, 9.0, 0.0, 2.0], [1.0, 9.0, 0.0, 0.0]])
    >>> mw.nn.gates.Block((2, 1), 0.25).mask(weight).to_bool().int()
    tensor([[0, 1, 0, 0],
            [0, 1, 0, 0]], dtype=torch.int32)

    The weight is taken as a matrix of outputs and everything else: a convolution's is (out, in * height * width).
    Blocks at the edges may be smaller. Exactly ``round(density * blocks)`` blocks are kept.

    Args:
        size: (rows, columns) of a block, or one number for both.
        density: the share of the blocks that is kept, between 0 and 1.
        straight_through: whether dropped weights get gradients.

    Raises:
        DtypeError: the density is not a number.
        ArgumentError: the size is not one or two positive ints, or the density is not between 0 and 1.
    """

    density: float

    def __init__(self, size: int | tuple[int, int], density: float, straight_through: bool = False) -> None:
        super().__init__(straight_through)
        rows_columns = (size, size) if isinstance(size, int) else tuple(size)
        if len(rows_columns) != 2 or not all(isinstance(s, int) and s > 0 for s in rows_columns):
            raise ArgumentError(
                say("Block", "size", must="be one or two positive ints", got=size, hint="Block((4, 1), 0.1)")
            )
        self.size: tuple[int, int] = (rows_columns[0], rows_columns[1])
        self.density = check_density("Block", density)

    def choose(self, weight: Tensor) -> Tensor:
        """The blocks of the largest mean size; of equal ones the first."""
        scores = scores_of(weight).clamp_min(0.0)
        matrix = scores.reshape(weight.shape[0], -1) if weight.dim() > 1 else scores.reshape(-1, 1)
        blocks, inside = self._sums(matrix), self._sums(torch.ones_like(matrix))
        means = blocks / inside
        kept = largest(means.reshape(-1), share(self.density, means.shape)).reshape(means.shape)
        rows, columns = self.size
        full = kept.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return full[: matrix.shape[0], : matrix.shape[1]].reshape(weight.shape)

    def _sums(self, matrix: Tensor) -> Tensor:
        """The sum of each block; values beyond the edge are 0."""
        rows, columns = self.size
        padded = F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))
        return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).sum((1, 3))

    def extra_repr(self) -> str:
        """The arguments, for print."""
        return f"{self.size}, {self.density:g}"


# -- scores, densities and choices -------------------------------------------------------------------------------------
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
        # Elsewhere kthvalue is not deterministic, and raises under torch.use_deterministic_algorithms.
        least = torch.topk(scores, count).values[-1]
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))


def check_density(op: str, density: object) -> float:
    """The density as a float between 0 and 1."""
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise DtypeError(say(op, "density", must="be a number", got=type(density).__name__, hint="density=0.1"))
    # Written so that NaN fails too.
    if not 0.0 <= density <= 1.0:
        hint = f"density={density / 100:g}" if 1.0 < density <= 100.0 else "density=0.1"
        raise ArgumentError(say(op, "density", must="be between 0 and 1", got=density, hint=hint))
    return float(density)


def share(density: float, shape: Sequence[int]) -> int:
    """How many of so many a density keeps.

    >>> share(0.1, (5, 10)), share(0.05, (3, 3))
    (5, 0)
    """
    count = 1
    for size in shape:
        count *= size
    return round(density * count)
