"""Packed tokens: which of a padded batch are computed, how they are packed and unpacked, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from maskwise.mask import Mask
from maskwise.ops.attention import attend, attention
from maskwise.ops.attention.bias import ScoreMod, StructuredBias
from maskwise.ops.flops import on_kept_rows
from maskwise.ops.select.packed import Packed, collect

__all__ = ["PackedMask", "Packing", "Row", "on_kept_tokens"]


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
    def is_contiguous(self) -> bool:
        """Whether the tokens of each row stand in consecutive columns."""
        keep = self.keep
        return bool(((keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0] <= 1).all())

    @cached_property
    def key_rows(self) -> Tensor:
        """Which tokens are keys, (M,): all but the first tokens that are queries only."""
        kept = torch.ones(self.tokens, dtype=torch.bool, device=self.keep.device)
        kept[[self.rows[index].start for index in self.watched]] = False
        return kept.nonzero()[:, 0]

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


def on_kept_tokens(packing: Packing) -> AbstractContextManager[Any]:
    """Let `mw.FlopCounter` know that the products of a block compute these tokens only."""
    total, length = packing.keep.numel(), packing.keep.shape[1]
    return on_kept_rows(packing.tokens, total, (sum(n * n for n in packing.lengths), total * length))


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The replacement of a (B, 1, L, L) attention mask for packed tokens.

    Attributes:
        packing: the positions of the sequences.
        is_causal: whether a token attends only to itself and those before it.
        seen: for each row the mask of its queries, a bool or additive (..., queries, keys), or None where that is all;
            None altogether where no row needs one.
        keys: the positions of the keys, where they are tokens of other sequences, as in cross attention.
    """

    packing: Packing
    is_causal: bool = False
    seen: Sequence[Tensor | None] | None = None
    keys: Packing | None = None

    def attend(
        self,
        q: Tensor,  # (N, H, D)
        k: Tensor,  # (M, Hkv, D)
        v: Tensor,  # (M, Hkv, D)
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        bias: Tensor | StructuredBias | None = None,  # (H, L, L), added to the scores
        softcap: float | None = None,
        sinks: Tensor | None = None,
        by_column: bool = True,
    ) -> Tensor:
        """Attend within each sequence, (N, H, D). A query without keys gets 0, as from torch's own attention.

        Args:
            q: the queries.
            k: the keys: as many as queries, or as many as ``keys`` has tokens.
            v: the values.
            dropout_p: the probability with which a weight is dropped.
            scale: what scores are multiplied by; by default 1 / sqrt(D).
            bias: what is added to scores: for each pair of columns, or by their distance.
            softcap: scores become ``softcap * tanh(score / softcap)``.
            sinks: a logit for each head that takes part in every softmax, (H,).
            by_column: whether a bias counts distances between columns; otherwise between kept tokens.
        """
        changes = bias is not None or softcap is not None or sinks is not None
        on_host = not changes or q.device.type == "cpu"
        if (
            isinstance(bias, Tensor)
            or self.seen is not None
            or not on_host
            or (self.is_causal and self.packing.watched)
        ):
            return self._by_rows(q, k, v, (dropout_p, scale), ScoreMod(bias, softcap, sinks), by_column)
        lengths, key_lengths = self._lengths()
        if self.keys is None and self.packing.watched:
            # Queries that are no keys.
            k, v = (x.index_select(0, self.packing.key_rows) for x in (k, v))
        return attend(
            q,
            k,
            v,
            lengths,
            key_lengths=key_lengths,
            is_causal=self.is_causal,
            dropout_p=dropout_p,
            scale=scale,
            mod=ScoreMod(bias, softcap, sinks) if changes else None,
            places=None if bias is None or not by_column else self._places(),
        )

    def _lengths(self) -> tuple[list[int], list[int]]:
        """How many queries and keys each sequence has."""
        keys = self.packing if self.keys is None else self.keys
        return [row.stop - row.start for row in self.packing.rows], keys.lengths

    def _places(self) -> tuple[Tensor, Tensor] | None:
        """The columns of all queries and of all keys; None where distances within a sequence are those of columns."""
        packing = self.packing
        if self.keys is not None:
            return packing.columns, self.keys.columns
        if packing.is_contiguous and not packing.watched:
            return None
        return packing.columns, packing.columns[packing.key_rows] if packing.watched else packing.columns

    def _by_rows(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: tuple[float, float | None],
        mod: ScoreMod,
        by_column: bool,
    ) -> Tensor:
        """One call for each sequence."""
        packing, (dropout_p, scale) = self.packing, options
        sources = packing if self.keys is None else self.keys
        # Split and joined once each: a slice for each row would make a gradient of the full size for each.
        sizes, key_sizes = ([row.stop - row.start for row in each.rows] for each in (packing, sources))
        parts = (x.split_with_sizes(n) for x, n in ((q, sizes), (k, key_sizes), (v, key_sizes)))
        outputs = []
        for index, (row, source, one, keys, values) in enumerate(zip(packing.rows, sources.rows, *parts, strict=True)):
            if source.keys == 0:
                # Multiplied, not made, so that its gradient is a zero and not an absence.
                outputs.append(one * 0.0)
                continue
            seen, unseen = self._seen(index, row, source, mod.bias, by_column), source.first_key - source.start
            a, b, c = (x.transpose(0, 1)[None] for x in (one, keys[unseen:], values[unseen:]))
            is_causal = self.is_causal and seen is None
            if mod.softcap is None and mod.sinks is None:
                out = functional.scaled_dot_product_attention(
                    a,
                    b,
                    c,
                    attn_mask=seen,
                    dropout_p=dropout_p,
                    is_causal=is_causal,
                    scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            else:
                out = attention(
                    a,
                    b,
                    c,
                    attn_mask=seen,
                    softcap=mod.softcap,
                    sinks=mod.sinks,
                    is_causal=is_causal,
                    dropout_p=dropout_p,
                    scale=scale,
                )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def _seen(
        self, index: int, row: Row, source: Row, bias: Tensor | StructuredBias | None, by_column: bool
    ) -> Tensor | None:
        """The mask of one row, (1 or H, queries, keys), or None where each query attends to every key."""
        seen = self.seen[index] if self.seen is not None else None
        columns, key_columns = self.packing.columns, (self.packing if self.keys is None else self.keys).columns
        queries, keys = columns[row.start : row.stop], key_columns[source.first_key : source.stop]
        if self.is_causal and seen is None and (row.first_key != row.start or bias is not None):
            seen = keys[None, :] <= queries[:, None]
        if bias is None:
            return seen
        if isinstance(bias, StructuredBias):
            if not by_column:
                queries, keys = (torch.arange(x.shape[0], device=x.device) for x in (queries, keys))
            shift = bias.between(queries, keys)
        else:
            shift = bias[:, queries][:, :, keys]
        if seen is None:
            return shift[None]
        added = seen if seen.is_floating_point() else shift.new_zeros(seen.shape).masked_fill(~seen, -torch.inf)
        return (shift + added)[None]
