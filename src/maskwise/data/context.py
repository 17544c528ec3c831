"""Packed sequences divided over the ranks of context parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, say

__all__ = ["context_shares"]


def context_shares(
    lengths: Sequence[int] | Tensor,  # (n,) ints
    ranks: int,
) -> list[Tensor]:
    """Divide the tokens of packed sequences over ranks, so that each has about as many, and as much causal attention.

    >>> from maskwise.data import context_shares
    >>> [share.tolist() for share in context_shares([8, 4], 2)]
    [[0, 1, 6, 7, 9, 10], [2, 3, 4, 5, 8, 11]]

    Every sequence is cut into ``2 * ranks`` pieces, of which a rank has one from the front and its counterpart from the
    back: a token attends to those before it, and so the first piece costs least and the last most. Which rank has the
    outermost pieces changes from sequence to sequence. In a batch of `mw.TokenBudgetSampler`, all ranks of a context
    group get the same sequences: pass it the number of groups as ``num_replicas``, and this rank's group as ``rank``.

    Args:
        lengths: the number of tokens of each sequence, in the order in which they are packed.
        ranks: the number of ranks that share them.

    Returns:
        For each rank, the positions of its tokens in the packed sequences, in order: together, every token once.

    Raises:
        ArgumentError: ``ranks`` is not positive.
        DtypeError: the lengths are not ints.
    """
    sizes = torch.as_tensor(lengths)
    if sizes.numel() and (sizes.is_floating_point() or sizes.is_complex() or sizes.dtype is torch.bool):
        hint = "[len(tokens) for tokens in batch]"
        raise DtypeError(say("context_shares", "lengths", must="be ints", got=sizes.dtype, hint=hint))
    if ranks < 1:
        raise ArgumentError(say("context_shares", "ranks", must="be at least 1", got=ranks, hint="ranks=1"))
    sizes = sizes.long().reshape(-1)
    sequence = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    place = torch.arange(len(sequence)) - (sizes.cumsum(0) - sizes)[sequence]
    piece = place * (2 * ranks) // sizes[sequence]
    holder = (torch.minimum(piece, 2 * ranks - 1 - piece) + sequence) % ranks
    return [(holder == rank).nonzero().squeeze(1) for rank in range(ranks)]
