"""Attention over packed tokens: each sequence sees itself only, with what masks and biases the model asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from maskwise.models.packing import Packing, Row
from maskwise.ops.attention import attend

__all__ = ["PackedMask"]


@dataclass(frozen=True, eq=False)
class PackedMask:
    """What stands for a (B, 1, L, L) attention mask when the tokens are packed.

    Attributes:
        packing: where the sequences lie.
        is_causal: whether a token sees only itself and those before it.
        seen: for each row what its queries see, a bool or additive (..., queries, keys), or None where that is all;
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
        pieces = []
        for index, (row, one, keys, values) in enumerate(
            zip(packing.rows, *(each.split_with_sizes(sizes) for each in (q, k, v)), strict=True)
        ):
            if row.keys == 0:
                # Multiplied, not made, so that its gradient is a zero and not an absence.
                pieces.append(one * 0.0)
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
            pieces.append(out[0].transpose(0, 1))
        return torch.cat(pieces)

    def _seen(self, index: int, row: Row, bias: Tensor | None) -> Tensor | None:
        """The mask of one row, (1 or H, queries, keys), or None where each query sees every key alike."""
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
