"""A batch sampler for ``DataLoader(batch_sampler=...)`` whose batches have a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.utils.data import Sampler

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say

__all__ = ["TokenBudgetSampler", "Waste", "bucket", "first_fit"]


# -- bin packing: pure functions of lengths ----------------------------------------------------------------------------
def first_fit(
    lengths: Tensor,  # (n,) int64, each in 1..budget
    budget: int,
    most: int | None = None,
) -> list[Tensor]:
    """First-fit decreasing: the longest first, each into the first batch with enough budget left.

    >>> [batch.tolist() for batch in first_fit(torch.tensor([3, 6, 4, 5]), 9)]
    [[1, 0], [3, 2]]

    Args:
        lengths: the number of tokens of each sequence.
        budget: the maximum number of tokens of a batch.
        most: the maximum number of sequences of a batch; no limit by default.

    Returns:
        The batches, each the indices of its sequences, longest first; ties by index.

    Vectorized over sequences of equal length, with the free budget of all batches as a tensor: the result equals that
    of the loop over single sequences, in as many steps as there are distinct lengths.
    """
    if lengths.numel() == 0:
        return []
    order = torch.argsort(lengths, descending=True, stable=True)
    distinct, counts = torch.unique(lengths, return_counts=True)
    # The tokens and the sequences that each batch can still take.
    free_tokens = torch.empty(0, dtype=torch.int64)
    free_slots = torch.empty(0, dtype=torch.int64)
    shortest = int(distinct[0])
    # The indices of batches that are not full.
    usable = torch.empty(0, dtype=torch.int64)
    batch_of = []
    for length, count in zip(distinct.flip(0).tolist(), counts.flip(0).tolist(), strict=True):
        fit = torch.minimum(free_tokens[usable] // length, free_slots[usable])
        before = fit.cumsum(0) - fit
        taken = torch.minimum(fit, (count - before).clamp(min=0))
        free_tokens[usable] -= taken * length
        free_slots[usable] -= taken
        batch_of.append(torch.repeat_interleave(usable, taken))
        left = count - int(taken.sum())
        if left:
            # The remaining sequences of this length fill new batches, one after the other.
            each = min(budget // length, left if most is None else most)
            filled = torch.full((-(-left // each),), each)
            filled[-1] = left - each * (len(filled) - 1)
            added = torch.arange(len(free_tokens), len(free_tokens) + len(filled))
            free_tokens = torch.cat([free_tokens, budget - filled * length])
            free_slots = torch.cat([free_slots, (lengths.numel() if most is None else most) - filled])
            usable = torch.cat([usable, added])
            batch_of.append(torch.repeat_interleave(added, filled))
        usable = usable[(free_tokens[usable] >= shortest) & (free_slots[usable] > 0)]
    batches = torch.cat(batch_of)
    grouped = order[torch.argsort(batches, stable=True)]
    ends = [0, *torch.bincount(batches).cumsum(0).tolist()]
    return [grouped[begin:end] for begin, end in pairwise(ends)]


def bucket(
    lengths: Tensor,  # (n,) int64, each in 1..budget
    budget: int,
    most: int | None = None,
) -> list[Tensor]:
    """Bucket by length: as many sequences as fit when padded to the longest of them.

    >>> [batch.tolist() for batch in bucket(torch.tensor([3, 6, 4, 5]), 12)]
    [[1, 3], [2, 0]]

    Args:
        lengths: the number of tokens of each sequence.
        budget: the maximum number of tokens of a batch, padding included.
        most: the maximum number of sequences of a batch; no limit by default.

    Returns:
        The batches, each the indices of its sequences, longest first; ties by index.
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


_METHODS = {"first_fit": first_fit, "bucket": bucket}


@dataclass(frozen=True)
class Waste:
    """The padding and the unused budget of the batches of an epoch.

    >>> print(Waste(batches=2, tokens=15, padded=20, budget=24))
    2 batches of 15 tokens: 25.0 % of the padded positions are padding, 37.5 % of the budget is unused

    Attributes:
        batches: the number of batches.
        tokens: the number of valid tokens.
        padded: the number of positions when each batch is padded to its longest sequence.
        budget: the number of positions when each batch has the size of the budget.
    """

    batches: int
    tokens: int
    padded: int
    budget: int

    @property
    def padding(self) -> float:
        """The fraction of positions that is padding when each batch is padded to its longest sequence."""
        return 1.0 - self.tokens / self.padded if self.padded else 0.0

    @property
    def unused(self) -> float:
        """The fraction of the budget without a token: what packed batches of a fixed capacity waste."""
        return 1.0 - self.tokens / self.budget if self.budget else 0.0

    def __str__(self) -> str:
        return (
            f"{self.batches} batches of {self.tokens} tokens: {100 * self.padding:.1f} % of the padded positions are "
            f"padding, {100 * self.unused:.1f} % of the budget is unused"
        )


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of as many sequences as fit into a token budget.

    >>> import torch, maskwise as mw
    >>> sampler = mw.TokenBudgetSampler([3, 6, 4, 5, 9], budget=9, shuffle=False)
    >>> list(sampler)
    [[4], [1, 0], [3, 2]]
    >>> print(sampler.waste)
    3 batches of 27 tokens: 12.9 % of the padded positions are padding, 0.0 % of the budget is unused

    Pass it to ``torch.utils.data.DataLoader(dataset, batch_sampler=sampler)``, and call ``set_epoch`` before each
    epoch. The batches are a deterministic function of the lengths, the seed and the epoch: every rank computes the same
    batches, and takes its shard of them.

    Args:
        lengths: the number of tokens of each sequence of the dataset: a list or a tensor of ints, (n,).
        budget: the maximum number of tokens of a batch.
        method: "first_fit" is for packed batches: the lengths of a batch add up to at most ``budget``, and first-fit
            decreasing leaves little of it unused. "bucket" is for padded batches: sequences of similar length, whose
            number times the longest length is at most ``budget``.
        max_sequences: the maximum number of sequences of a batch; no limit by default.
        pool: batches are made within random groups of this many sequences, so that they vary more between epochs, at
            the cost of a little more waste; by default within the whole dataset.
        shuffle: whether to shuffle the batches, and sequences of equal length among them.
        seed: of the shuffling; the same in every process.
        num_replicas: the number of processes that share the batches, as for torch's DistributedSampler: by default the
            world size where torch.distributed is initialized, else 1. Pass 1 where something else shards the batches.
        rank: of this process.
        drop_last: every process gets the same number of batches. Where they do not divide evenly, the rest is dropped;
            by default some batches are repeated instead.

    Raises:
        ArgumentError: a sequence is longer than the budget, or a number is out of its range.
        DtypeError: the lengths are not ints.
        ShapeError: the lengths are not 1-D.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        budget: int,
        *,
        method: Literal["first_fit", "bucket"] = "first_fit",
        max_sequences: int | None = None,
        pool: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        _at_least("budget", budget, 1)
        for name, value in (("max_sequences", max_sequences), ("pool", pool), ("num_replicas", num_replicas)):
            if value is not None:
                _at_least(name, value, 1)
        if method not in _METHODS:
            must, hint = (
                f"be one of {', '.join(map(repr, _METHODS))}",
                'method="first_fit" for packed batches, "bucket" for padded',
            )
            raise ArgumentError(say(_OP, "method", must=must, got=repr(method), hint=hint))
        shared = distributed.is_available() and distributed.is_initialized()
        self.num_replicas = num_replicas or (distributed.get_world_size() if shared else 1)
        self.rank = rank if rank is not None else distributed.get_rank() if shared and num_replicas is None else 0
        if not 0 <= self.rank < self.num_replicas:
            must = f"be in [0, {self.num_replicas - 1}] for {self.num_replicas} replicas"
            raise ArgumentError(
                say(_OP, "rank", must=must, got=self.rank, hint=f"num_replicas={self.rank + 1}, or another rank")
            )
        if rank is None and num_replicas is not None and num_replicas > 1:
            must, hint = "be given with num_replicas", "rank=torch.distributed.get_rank()"
            raise ArgumentError(say(_OP, "rank", must=must, got=None, hint=hint))
        self.lengths = _checked(lengths, budget)
        self.budget = budget
        self.method = method
        self.max_sequences = max_sequences
        self.pool = pool
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._cached: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which with the seed determines the shuffling."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in self._share()])

    def __len__(self) -> int:
        """The number of batches of this process in this epoch."""
        return len(self._share())

    @property
    def waste(self) -> Waste:
        """The waste of this epoch, over all processes, each batch counted once."""
        sizes = [self.lengths[batch] for batch in self._batches()]
        return Waste(
            batches=len(sizes),
            tokens=sum(int(size.sum()) for size in sizes),
            padded=sum(int(size.max()) * len(size) for size in sizes),
            budget=len(sizes) * self.budget,
        )

    def _share(self) -> list[list[int]]:
        """The batches of this process. All processes get the same number, since a training step synchronizes them."""
        batches, parts = self._batches(), self.num_replicas
        remainder = len(batches) % parts
        if remainder and self.drop_last:
            batches = batches[: len(batches) - remainder]
        elif remainder:
            # Repeated several times where there are fewer batches than processes.
            missing = parts - remainder
            batches = batches + (batches * -(-missing // len(batches)))[:missing]
        return batches[self.rank :: parts]

    def _batches(self) -> list[list[int]]:
        """The batches of this epoch over all processes; cached for ``len``, ``waste`` and the iterator."""
        if self._cached is None or self._cached[0] != self.epoch:
            self._cached = self.epoch, self._make()
        return self._cached[1]

    def _make(self) -> list[list[int]]:
        count = len(self.lengths)
        generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch))
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        # An empty sequence still takes a row, so it counts as one token.
        costs = self.lengths.clamp(min=1)
        batches: list[Tensor] = []
        size = self.pool or max(count, 1)
        for start in range(0, count, size):
            group = order[start : start + size]
            found = _METHODS[self.method](costs[group], self.budget, self.max_sequences)
            batches += [group[batch] for batch in found]
        permutation = torch.randperm(len(batches), generator=generator) if self.shuffle else torch.arange(len(batches))
        return [batches[i].tolist() for i in permutation.tolist()]


_OP = "TokenBudgetSampler"


def _mixed(seed: int, epoch: int) -> int:
    """A combined seed: seed 1 in epoch 0 must differ from seed 0 in epoch 1."""
    return (seed * 0x9E3779B97F4A7C15 + epoch) % 2**63


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise DtypeError(say(_OP, name, must="be an int", got=type(value).__name__, hint=f"{name}=int({name})"))
    if value < least:
        raise ArgumentError(say(_OP, name, must=f"be at least {least}", got=value, hint=f"{name}={least}"))


def _checked(lengths: Sequence[int] | Tensor, budget: int) -> Tensor:
    try:
        found = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        hint = "[len(tokens) for tokens in dataset]"
        raise DtypeError(say(_OP, "lengths", must="be ints", got=type(lengths).__name__, hint=hint)) from None
    if found.dim() != 1:
        hint = "lengths.flatten()"
        raise ShapeError(say(_OP, "lengths", must="have one dim", got=tuple(found.shape), hint=hint))
    if found.numel() and (found.dtype.is_floating_point or found.dtype.is_complex or found.dtype is torch.bool):
        raise DtypeError(
            say(_OP, "lengths", must="be ints", got=found.dtype, hint="[len(tokens) for tokens in dataset]")
        )
    found = found.to(torch.int64, copy=True)
    for wrong, must in ((found < 0, "be at least 0"), (found > budget, f"be at most the budget {budget}")):
        if wrong.any():
            at = int(wrong.to(torch.uint8).argmax())
            longer = f"truncate or drop longer sequences, or budget={int(found.max())}"
            hint = longer if found[at] > 0 else "lengths.clamp(min=0), or [len(tokens) for tokens in dataset]"
            raise ArgumentError(say(_OP, "lengths", must=must, got=f"{int(found[at])} at index {at}", hint=hint))
    return found
