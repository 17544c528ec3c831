"""Keep patterns that hardware and kernels like: n of every m, and whole blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from maskwise.errors import ArgumentError, OutOfRangeError, ShapeError, say
from maskwise.nn.gates.fitting import check_density, share
from maskwise.nn.gates.selecting import Selecting, largest, scores_of

__all__ = ["NM", "Block"]


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

    The weight is seen as a matrix of outputs and everything else: a convolution's is (out, in * height * width). Blocks
    at the edges may be smaller. Exactly ``round(density * blocks)`` blocks are kept.

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
        """The sum of each block; what lies over the edge is 0."""
        rows, columns = self.size
        padded = F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))
        return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).sum((1, 3))

    def extra_repr(self) -> str:
        """The arguments, for print."""
        return f"{self.size}, {self.density:g}"
