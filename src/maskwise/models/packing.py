"""Packing: which tokens of a padded batch are computed, and the way there and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.select.packed import Packed, collect

__all__ = ["Packing", "Row"]


@dataclass(frozen=True)
class Row:
    """One sequence of the batch, in packed coordinates."""

    start: int
    stop: int
    first_key: int
    """Keys run from here to ``stop``; a query before it sees the keys and is seen by nobody."""

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.stop - self.first_key


@dataclass(frozen=True, eq=False)
class Packing:
    """The kept tokens of a padded batch, row after row.

    >>> import torch
    >>> from maskwise.models import Packing
    >>> packing = Packing.of(torch.tensor([[True, True, False], [False, True, True]]))
    >>> packing.lengths, packing.tokens
    ([2, 2], 4)
    >>> packing.pack(torch.arange(6).reshape(2, 3))
    tensor([0, 1, 4, 5])
    >>> packing.unpack(torch.tensor([7, 8, 9, 5]))
    tensor([[7, 8, 0],
            [0, 9, 5]])

    Attributes:
        keep: what is computed, (B, L).
        lengths: how many keys each row keeps.
        watched: the rows whose first token is dropped and computed all the same, as a query only: heads and poolers
            read the first column, whatever the mask says of it.
    """

    keep: Tensor  # (B, L), bool
    lengths: list[int]
    watched: frozenset[int] = field(default=frozenset())

    @classmethod
    def of(cls, keep: Tensor, *, watch_first: bool = False) -> Packing:
        """Pack what a (B, L) bool tensor keeps.

        Args:
            keep: True where a token is real.
            watch_first: also compute the first token of each row, where it is dropped, without letting it be seen.
        """
        lengths: list[int] = keep.sum(1).tolist()
        if watch_first and not bool(keep[:, 0].all()):
            watched = frozenset((~keep[:, 0]).nonzero()[:, 0].tolist())
            keep = keep.clone()
            keep[:, 0] = True
            return cls(keep, lengths, watched)
        return cls(keep, lengths)

    @cached_property
    def mask(self) -> Mask:
        """What is computed, as a Mask."""
        return Mask(self.keep)

    @property
    def tokens(self) -> int:
        """How many tokens are computed."""
        return sum(self.lengths) + len(self.watched)

    @cached_property
    def rows(self) -> list[Row]:
        """Where each sequence lies."""
        rows, start = [], 0
        for index, length in enumerate(self.lengths):
            extra = int(index in self.watched)
            rows.append(Row(start, start + extra + length, start + extra))
            start += extra + length
        return rows

    @cached_property
    def columns(self) -> Tensor:
        """The column that each token stood in, (N,)."""
        index = torch.arange(self.keep.shape[1], device=self.keep.device)
        return self.pack(index.expand(self.keep.shape))

    def pack(self, x: Tensor) -> Tensor:
        """The kept rows of x: (B, L, *rest) to (N, *rest)."""
        return collect(x, self.mask).values

    def unpack(self, x: Tensor) -> Tensor:
        """The padded layout: (N, *rest) to (B, L, *rest), with 0 where nothing was computed."""
        return Packed(x, self.mask).unpack()
