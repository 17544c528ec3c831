"""How packed tokens lie in the tensors of a Hugging Face model: rows of the model, folded from one long sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from maskwise.models.packing import Packing

__all__ = ["Layout", "flat", "folded"]


@dataclass(frozen=True, eq=False)
class Layout:
    """The kept tokens of a (B, L) batch as (rows, width), so that no row is longer than what the model takes.

    A row of the layout is not a sequence: a sequence may end in the next row. What follows the last token repeats the
    first one, and is dropped from every output.

    >>> import torch
    >>> layout = Layout.of(Packing.of(torch.tensor([[True, True, True], [True, False, True]])), limit=3)
    >>> layout.rows, layout.width
    (2, 3)
    >>> layout.fold(torch.arange(6).reshape(2, 3))
    tensor([[0, 1, 2],
            [3, 5, 0]])
    """

    packing: Packing
    rows: int
    width: int

    @classmethod
    def of(cls, packing: Packing, *, limit: int | None, spare: int = 0) -> Layout:
        """One row where the model takes it, else rows that are no longer than the padded batch is.

        Args:
            packing: which tokens are computed.
            limit: how many positions the model has; None where that is not known.
            spare: how many places to leave at the end at the least.
        """
        length, tokens = packing.keep.shape[1], packing.tokens + spare
        rows = 1 if tokens <= max(length, limit or 0) else -(-tokens // length)
        return cls(packing, rows, -(-tokens // rows))

    @property
    def tokens(self) -> int:
        """How many tokens are computed."""
        return self.packing.tokens

    @cached_property
    def size(self) -> int:
        """How many places there are, the spare ones included."""
        return self.rows * self.width

    def fold(self, x: Tensor, spare: Tensor | None = None) -> Tensor:
        """(B, L, *rest) to (rows, width, *rest), the places at the end filled with ``spare`` or the first token."""
        return folded(self.packing.pack(x), self.rows, self.width, spare)

    def unfold(self, x: Tensor) -> Tensor:
        """(rows, width, *rest) to (B, L, *rest), with 0 where nothing was computed."""
        return self.packing.unpack(flat(x, self.tokens))

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor lies in this layout, by its shape."""
        return x.dim() >= 2 and x.shape[:2] == (self.rows, self.width)


def flat(
    x: Tensor,  # (rows, width, *rest)
    tokens: int,
) -> Tensor:
    """The tokens one after the other, (N, *rest)."""
    return x.flatten(0, 1)[:tokens]


def folded(
    x: Tensor,  # (N, *rest)
    rows: int,
    width: int,
    spare: Tensor | None = None,  # (*rest), what the places after the last token hold; by default the first token
) -> Tensor:
    """The tokens in rows, (rows, width, *rest)."""
    missing = rows * width - x.shape[0]
    if missing:
        last = x[:1] if spare is None else spare[None]
        x = torch.cat([x, last.expand(missing, *x.shape[1:])])
    return x.reshape(rows, width, *x.shape[1:])
