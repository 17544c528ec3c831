"""A batch sampler for ``DataLoader(batch_sampler=...)`` whose batches have a budget of tokens, not of sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.utils.data import Sampler

from maskwise.data.packing import bucket, first_fit
from maskwise.errors import ArgumentError, DtypeError, ShapeError, say

__all__ = ["TokenBudgetSampler", "Waste"]

_METHODS = {"first_fit": first_fit, "bucket": bucket}


@dataclass(frozen=True)
class Waste:
    """What the batches of an epoch hold beside tokens.

    >>> print(Waste(batches=2, tokens=15, padded=20, budget=24))
    2 batches of 15 tokens: 25.0 % of the padded places are padding, 37.5 % of the budget is unused

    Attributes:
        batches: how many batches there are.
        tokens: how many tokens they hold.
        padded: how many places they take when each batch is padded to its longest sequence.
        budget: how many places they take when each is as large as the budget.
    """

    batches: int
    tokens: int
    padded: int
    budget: int

    @property
    def padding(self) -> float:
        """The share of places that is padding when each batch is padded to its longest sequence."""
        return 1.0 - self.tokens / self.padded if self.padded else 0.0

    @property
    def unused(self) -> float:
        """The share of the budget that holds no token: what a packed batch of a fixed capacity wastes."""
        return 1.0 - self.tokens / self.budget if self.budget else 0.0

    def __str__(self) -> str:
        return (
            f"{self.batches} batches of {self.tokens} tokens: {100 * self.padding:.1f} % of the padded places are "
            f"padding, {100 * self.unused:.1f} % of the budget is unused"
        )


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of as many sequences as fit into a budget of tokens.

    >>> import torch, maskwise as mw
    >>> sampler = mw.TokenBudgetSampler([3, 6, 4, 5, 9], budget=9, shuffle=False)
    >>> list(sampler)
    [[4], [1, 0], [3, 2]]
    >>> print(sampler.waste)
    3 batches of 27 tokens: 12.9 % of the padded places are padding, 0.0 % of the budget is unused

    Hand it to ``torch.utils.data.DataLoader(dataset, batch_sampler=sampler)``, and call ``set_epoch`` before each
    epoch. The batches follow from the lengths, the seed and the epoch alone: every process that has the same ones makes
    the same batches, and of these each takes its share.

    Args:
        lengths: how many tokens each sequence of the dataset has: a list or a tensor of ints, (n,).
        budget: how many tokens a batch may hold.
        method: "first_fit" is for batches that are packed: the lengths of a batch add up to at most ``budget``, and
            first-fit decreasing leaves little of it unused. "bucket" is for batches that are padded: neighbours by
            length, of which the longest times their number is at most ``budget``.
        max_sequences: the most sequences in a batch; any number by default.
        pool: batches are made within random groups of this many sequences, so that they differ more from epoch to
            epoch, and wasting a little more; by default within all of them.
        shuffle: whether batches come in a random order, and sequences of equal length in random company.
        seed: of the shuffling; the same in every process.
        num_replicas: how many processes share the batches, as for torch's DistributedSampler: by default what
            torch.distributed says where it is initialized, else 1. Pass 1 where something else shards the batches.
        rank: which of them this is.
        drop_last: every process gets the same number of batches. Where they do not share out evenly, some are dropped,
            or by default some come twice.

    Raises:
        ArgumentError: a sequence is longer than the budget, or a number is out of its range.
        DtypeError: the lengths are not ints.
        ShapeError: the lengths have not one dim.
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
        self._made: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from which with the seed the shuffling follows: the same epoch, the same batches."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in self._share()])

    def __len__(self) -> int:
        """How many batches this process gets in this epoch."""
        return len(self._share())

    @property
    def waste(self) -> Waste:
        """What the batches of this epoch hold beside tokens, over all processes and each batch once."""
        sizes = [self.lengths[batch] for batch in self._batches()]
        return Waste(
            batches=len(sizes),
            tokens=sum(int(size.sum()) for size in sizes),
            padded=sum(int(size.max()) * len(size) for size in sizes),
            budget=len(sizes) * self.budget,
        )

    def _share(self) -> list[list[int]]:
        """The batches of this process. All processes get the same number, since a step of training waits for all."""
        batches, parts = self._batches(), self.num_replicas
        spare = len(batches) % parts
        if spare and self.drop_last:
            batches = batches[: len(batches) - spare]
        elif spare:
            # More than once around where there are fewer batches than processes.
            missing = parts - spare
            batches = batches + (batches * -(-missing // len(batches)))[:missing]
        return batches[self.rank :: parts]

    def _batches(self) -> list[list[int]]:
        """The batches of this epoch over all processes; remembered, for ``len``, ``waste`` and the iterator."""
        if self._made is None or self._made[0] != self.epoch:
            self._made = self.epoch, self._make()
        return self._made[1]

    def _make(self) -> list[list[int]]:
        count = len(self.lengths)
        generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch))
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        # A sequence of no tokens is a row all the same: as if it had one.
        costs = self.lengths.clamp(min=1)
        batches: list[Tensor] = []
        size = self.pool or max(count, 1)
        for start in range(0, count, size):
            group = order[start : start + size]
            found = _METHODS[self.method](costs[group], self.budget, self.max_sequences)
            batches += [group[batch] for batch in found]
        places = torch.randperm(len(batches), generator=generator) if self.shuffle else torch.arange(len(batches))
        return [batches[place].tolist() for place in places.tolist()]


_OP = "TokenBudgetSampler"


def _mixed(seed: int, epoch: int) -> int:
    """One seed of two: seed 1 in epoch 0 must not be seed 0 in epoch 1."""
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
            longer = f"truncate or leave out what is longer, or budget={int(found.max())}"
            hint = longer if found[at] > 0 else "lengths.clamp(min=0), or [len(tokens) for tokens in dataset]"
            raise ArgumentError(say(_OP, "lengths", must=must, got=f"{int(found[at])} at index {at}", hint=hint))
    return found
