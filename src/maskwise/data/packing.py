"""Which sequences share a batch. Pure functions of lengths: no randomness, no state."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["bucket", "first_fit"]


def first_fit(
    lengths: Tensor,  # (n,) int64, each in 1..budget
    budget: int,
    most: int | None = None,
) -> list[Tensor]:
    """First-fit decreasing: the longest first, each into the first batch whose sum of lengths leaves room for it.

    >>> [batch.tolist() for batch in first_fit(torch.tensor([3, 6, 4, 5]), 9)]
    [[1, 0], [3, 2]]

    Args:
        lengths: how many tokens each sequence has.
        budget: how many tokens a batch holds.
        most: how many sequences a batch holds; any number by default.

    Returns:
        The batches, each the indices of its sequences, longest first; among equals the earlier first.

    Equal lengths are placed together, with the room of all batches at hand: the result is that of the loop over single
    sequences, in a number of steps that is the number of distinct lengths.
    """
    if lengths.numel() == 0:
        return []
    order = torch.argsort(lengths, descending=True, stable=True)
    distinct, counts = torch.unique(lengths, return_counts=True)
    room = torch.empty(0, dtype=torch.int64)
    places = torch.empty(0, dtype=torch.int64)
    shortest = int(distinct[0])
    # The batches that a sequence may still go to, by their number: those that are full are not looked at again.
    usable = torch.empty(0, dtype=torch.int64)
    batch_of = []
    for length, count in zip(distinct.flip(0).tolist(), counts.flip(0).tolist(), strict=True):
        fit = torch.minimum(room[usable] // length, places[usable])
        before = fit.cumsum(0) - fit
        taken = torch.minimum(fit, (count - before).clamp(min=0))
        room[usable] -= taken * length
        places[usable] -= taken
        batch_of.append(torch.repeat_interleave(usable, taken))
        left = count - int(taken.sum())
        if left:
            # New batches are filled one after the other with what is left of this length.
            each = min(budget // length, left if most is None else most)
            filled = torch.full((-(-left // each),), each)
            filled[-1] = left - each * (len(filled) - 1)
            fresh = torch.arange(len(room), len(room) + len(filled))
            room = torch.cat([room, budget - filled * length])
            places = torch.cat([places, (lengths.numel() if most is None else most) - filled])
            usable = torch.cat([usable, fresh])
            batch_of.append(torch.repeat_interleave(fresh, filled))
        usable = usable[(room[usable] >= shortest) & (places[usable] > 0)]
    batches = torch.cat(batch_of)
    grouped = order[torch.argsort(batches, stable=True)]
    ends = [0, *torch.bincount(batches).cumsum(0).tolist()]
    return [grouped[begin:end] for begin, end in pairwise(ends)]


def bucket(
    lengths: Tensor,  # (n,) int64, each in 1..budget
    budget: int,
    most: int | None = None,
) -> list[Tensor]:
    """Neighbours by length: as many as fit when all are padded to the longest of them.

    >>> [batch.tolist() for batch in bucket(torch.tensor([3, 6, 4, 5]), 12)]
    [[1, 3], [2, 0]]

    Args:
        lengths: how many tokens each sequence has.
        budget: how many tokens a batch holds, those of its padding included.
        most: how many sequences a batch holds; any number by default.

    Returns:
        The batches, each the indices of its sequences, longest first; among equals the earlier first.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    longest = lengths[order].tolist()
    batches = []
    start = 0
    while start < len(longest):
        count = budget // longest[start]
        batches.append(order[start : start + (count if most is None else min(count, most))])
        start += len(batches[-1])
    return batches
