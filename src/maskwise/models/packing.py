"""Packed tokens: which of a padded batch are computed, how they are packed and unpacked, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from maskwise.mask import Mask
from maskwise.ops.attention import attend
from maskwise.ops.select.packed import Packed, collect

__all__ = ["PackedMask", "Packing", "Row"]


@dataclass(frozen=True)
class Row:
    """One sequence of the batch, in packed coordinates."""

    start: int
    stop: int
    first_key: int
    """Keys run from here to ``stop``; a query before it attends to the keys and is no key itself."""

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
            read the first column, masked or not.
    """

    keep: Tensor  # (B, L), bool
    lengths: list[int]
    watched: frozenset[int] = field(default=frozenset())

    @classmethod
    def of(cls, keep: Tensor, *, watch_first: bool = False) -> Packing:
        """Pack what a (B, L) bool tensor keeps.

        Args:
            keep: True where a token is real.
            watch_first: also compute the first token of each row, where it is dropped; no token attends to it.
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
        """The rows of each sequence."""
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


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The replacement of a (B, 1, L, L) attention mask for packed tokens.

    Attributes:
        packing: the positions of the sequences.
        is_causal: whether a token attends only to itself and those before it.
        seen: for each row the mask of its queries, a bool or additive (..., queries, keys), or None where that is all;
            None altogether where no row needs one.
    """

    packing: Packing
    is_causal: bool = False
    seen: Sequence[Tensor | None] | None = None

    def attend(
        self,
        q: Tensor,  # (N, H, D)
        k: Tensor,  # (N, Hkv, D)
        v: Tensor,  # (N, Hkv, D)
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        bias: Tensor | None = None,  # (H, L, L), added to the scores
    ) -> Tensor:
        """Attend within each sequence, (N, H, D). A query without keys gets 0, as from torch's own attention."""
        packing = self.packing
        if bias is None and self.seen is None and not packing.watched:
            return attend(q, k, v, packing.lengths, is_causal=self.is_causal, dropout_p=dropout_p, scale=scale)
        # Split and joined once each: a slice for each row would make a gradient of the full size for each.
        sizes = [row.stop - row.start for row in packing.rows]
        outputs = []
        for index, (row, one, keys, values) in enumerate(
            zip(packing.rows, *(each.split_with_sizes(sizes) for each in (q, k, v)), strict=True)
        ):
            if row.keys == 0:
                # Multiplied, not made, so that its gradient is a zero and not an absence.
                outputs.append(one * 0.0)
                continue
            seen, unseen = self._seen(index, row, bias), row.first_key - row.start
            out = functional.scaled_dot_product_attention(
                one.transpose(0, 1)[None],
                keys[unseen:].transpose(0, 1)[None],
                values[unseen:].transpose(0, 1)[None],
                attn_mask=seen,
                dropout_p=dropout_p,
                is_causal=self.is_causal and seen is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def _seen(self, index: int, row: Row, bias: Tensor | None) -> Tensor | None:
        """The mask of one row, (1 or H, queries, keys), or None where each query attends to every key."""
        seen = self.seen[index] if self.seen is not None else None
        columns = self.packing.columns
        queries, keys = columns[row.start : row.stop], columns[row.first_key : row.stop]
        if self.is_causal and seen is None and (row.first_key != row.start or bias is not None):
            seen = keys[None, :] <= queries[:, None]
        if bias is None:
            return seen
        shift = bias[:, queries][:, :, keys]
        if seen is None:
            return shift[None]
        added = seen if seen.is_floating_point() else shift.new_zeros(seen.shape).masked_fill(~seen, -torch.inf)
        return (shift + added)[None]
