"""A batch sampler for ``DataLoader(batch_sampler=...)`` whose batches have a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, distributed
from torch.utils.data import Sampler

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say

__all__ = ["TokenBudgetSampler", "Waste", "bucket", "even_buckets", "even_fit", "first_fit"]


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
        count = max(1, budget // longest[start])
        batches.append(order[start : start + (count if most is None else min(count, most))])
        start += len(batches[-1])
    return batches


def even_fit(
    lengths: Tensor,  # (n,) int64, each in 1..budget
    budget: int,
    parts: int,
    most: int | None = None,
) -> list[Tensor] | None:
    """So many batches of about as many tokens each: the longest sequence first, each into the lightest batch.

    >>> [batch.tolist() for batch in even_fit(torch.tensor([3, 6, 4, 5]), 9, 3)]
    [[1], [3], [2, 0]]

    Args:
        lengths: the number of tokens of each sequence.
        budget: the maximum number of tokens of a batch.
        parts: the number of batches.
        most: the maximum number of sequences of a batch; no limit by default.

    Returns:
        The batches, none of which is empty; or None where that many do not take all, or cannot be filled.
    """
    if lengths.numel() < parts:
        return None
    order = torch.argsort(lengths, descending=True, stable=True)
    lightest = [(0, part) for part in range(parts)]
    heapify(lightest)
    batches: list[list[int]] = [[] for _ in range(parts)]
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if not lightest or lightest[0][0] + length > budget:
            return None
        tokens, part = heappop(lightest)
        batches[part].append(index)
        if most is None or len(batches[part]) < most:
            heappush(lightest, (tokens + length, part))
    return [torch.tensor(batch) for batch in batches]


def even_buckets(
    lengths: Tensor,  # (n,) int64, each in 1..budget
    budget: int,
    parts: int,
    most: int | None = None,
) -> list[Tensor] | None:
    """So many batches of similar lengths, whose largest has as few padded tokens as possible.

    >>> [batch.tolist() for batch in even_buckets(torch.tensor([3, 6, 4, 5]), 12, 3)]
    [[1], [3], [2, 0]]

    Args and returns are those of `even_fit`; here ``budget`` includes padding.
    """
    if lengths.numel() < parts or len(bucket(lengths, budget, most)) > parts:
        return None
    # Below the longest, which is then alone in its batch.
    least, enough = 1, budget
    while least < enough:
        middle = (least + enough) // 2
        if len(bucket(lengths, middle, most)) > parts:
            least = middle + 1
        else:
            enough = middle
    batches = bucket(lengths, enough, most)
    return _split([(int(lengths[batch[0]]) * len(batch), batch) for batch in batches], parts)


def _split(batches: list[tuple[int, Tensor]], parts: int) -> list[Tensor]:
    """Halve batches, the heaviest first, until there are so many, or each has one sequence: longest first in each.

    >>> [batch.tolist() for batch in _split([(9, torch.tensor([1, 0, 4])), (7, torch.tensor([3, 2]))], 4)]
    [[1], [3], [0, 4], [2]]
    """
    found = [batch for _, batch in batches]
    splittable = [(-cost, i) for i, (cost, batch) in enumerate(batches) if len(batch) > 1]
    heapify(splittable)
    while len(found) < parts and splittable:
        cost, i = heappop(splittable)
        batch = found[i]
        half = len(batch) // 2
        found[i] = batch[:half]
        found.append(batch[half:])
        for j in (i, len(found) - 1):
            if len(found[j]) > 1:
                heappush(splittable, (cost * len(found[j]) // len(batch), j))
    return found


_METHODS = {"first_fit": (first_fit, even_fit), "bucket": (bucket, even_buckets)}
#: Batches of the same number of tokens, within this factor of the mean of a step, are balanced well enough.
_EVEN = 1.01
#: A batch, and how many positions it takes.
Weighed: TypeAlias = tuple[int, Tensor]
#: One batch for each rank.
Step: TypeAlias = list[list[int]]
#: How many steps of an epoch were taken with how many ranks, in order.
History: TypeAlias = tuple[tuple[int, int], ...]


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
        imbalance: the positions of the slowest rank of each step over the mean of its ranks, over all steps: 1.0 where
            no rank waits for another. Padding counts for "bucket", and squares of lengths for ``balance="attention"``.
    """

    batches: int
    tokens: int
    padded: int
    budget: int
    imbalance: float = 1.0

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
            + (f", the slowest rank has {self.imbalance:.3f} x the mean" if self.imbalance > 1.0 else "")
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
    epoch. The batches are a deterministic function of the lengths, the seed and the epoch, and so every rank computes
    the same ones, and takes its share. Each gets the same number of batches, every sequence comes once, and the batches
    of a step have about as many tokens on every rank:

    >>> lengths = [9, 5, 4, 3, 3, 3]
    >>> for step in zip(*(mw.TokenBudgetSampler(lengths, 9, num_replicas=2, rank=rank) for rank in range(2))):
    ...     print([sum(lengths[i] for i in batch) for batch in step])
    [5, 6]
    [7, 9]

    A run that was interrupted goes on with ``load_state_dict(state_dict())``, on any number of ranks.

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
        drop_last: where batches do not divide evenly by processes, the rest is dropped; by default, sequences are moved
            from full batches to more of them. Only a dataset of fewer sequences than processes repeats some.
        balance: what the batches of a step have about as much of: "tokens", or "attention", the squares of lengths, for
            long sequences, as those of context parallelism are.

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
        balance: Literal["tokens", "attention"] = "tokens",
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
        if balance not in ("tokens", "attention"):
            must, hint = 'be "tokens" or "attention"', 'balance="tokens"'
            raise ArgumentError(say(_OP, "balance", must=must, got=repr(balance), hint=hint))
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
        self.balance = balance
        self.epoch = 0
        # What the current iteration goes by, what it has handed out, and where the next one starts.
        self._history: History = ()
        self._taken = 0
        self._resumed: tuple[History, int] | None = None
        self._cached: tuple[tuple[int, History], list[Step]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which with the seed determines the shuffling. Another one starts from its beginning."""
        if epoch != self.epoch:
            self._history, self._taken, self._resumed = (), 0, None
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        (self._history, self._taken), self._resumed = self._resumed or ((), 0), None
        return self._hand_out(self._steps(self._history)[self._taken :])

    def _hand_out(self, steps: list[Step]) -> Iterator[list[int]]:
        for step in steps:
            self._taken += 1
            yield list(step[self.rank])

    def __len__(self) -> int:
        """The number of batches of this process in this epoch, or in what another number of ranks has left of it."""
        return len(self._steps(self._resumed[0] if self._resumed else self._history))

    # -- interrupted runs ----------------------------------------------------------------------------------------------
    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where this epoch is: the same on every rank, and small.

        >>> import maskwise as mw
        >>> sampler = mw.TokenBudgetSampler([3, 6, 4, 5, 9], budget=9)
        >>> trained = [batch for batch, _ in zip(sampler, range(1))]
        >>> again = mw.TokenBudgetSampler([3, 6, 4, 5, 9], budget=9)
        >>> again.load_state_dict(sampler.state_dict(batches=1))
        >>> trained + list(again) == list(sampler)
        True

        Args:
            batches: how many batches of this epoch were trained; by default, all that were handed out. A DataLoader
                with workers takes more than it gives.

        Raises:
            ArgumentError: the epoch does not have so many batches.
        """
        history, taken = self._resumed or (self._history, self._taken)
        taken = taken if batches is None else batches
        if not 0 <= taken <= len(self._steps(history)):
            must = f"be at least 0 and at most the {len(self._steps(history))} of this epoch"
            raise ArgumentError(say(f"{_OP}.state_dict", "batches", must=must, got=taken, hint="len(sampler)"))
        steps = [*history, (self.num_replicas, taken)]
        return {"epoch": self.epoch, "steps": [list(each) for each in steps], "arguments": self._arguments()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with as many ranks or with another number.

        The next iteration has what is left of that epoch: with as many ranks the batches that were still to come; with
        another number, new batches of the sequences that were. ``set_epoch`` of the same epoch changes nothing.

        Raises:
            DtypeError: the state is not a dict of `state_dict`.
            ArgumentError: the state is that of a sampler with other lengths or arguments.
        """
        if not isinstance(state, Mapping) or not {"epoch", "steps", "arguments"} <= state.keys() or not state["steps"]:
            must, hint = "be a dict of TokenBudgetSampler.state_dict", "sampler.load_state_dict(other.state_dict())"
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise DtypeError(say(f"{_OP}.load_state_dict", "state", must=must, got=got, hint=hint))
        theirs, ours = state["arguments"], self._arguments()
        for name, value in ours.items():
            if theirs.get(name) != value:
                must = f"be of a sampler with the same {name}, {value}"
                hint = "the same dataset and arguments; num_replicas and rank may differ"
                raise ArgumentError(say(f"{_OP}.load_state_dict", "state", must=must, got=theirs.get(name), hint=hint))
        *history, (replicas, taken) = [(int(ranks), int(steps)) for ranks, steps in state["steps"]]
        if replicas != self.num_replicas:
            # In the order of that number of ranks; what is left is divided anew.
            history, taken = [*history, (replicas, taken)] if taken else history, 0
        self.epoch = int(state["epoch"])
        self._history, self._taken, self._resumed = (), 0, (tuple(history), taken)

    def _arguments(self) -> dict[str, Any]:
        """What the batches depend on, but for the epoch and the ranks."""
        places = torch.arange(1, len(self.lengths) + 1)
        names = ("budget", "method", "max_sequences", "pool", "shuffle", "seed", "drop_last", "balance")
        # A sum that another order of the lengths has not.
        lengths = [len(self.lengths), int((self.lengths * places % 2**31).sum())]
        return {"lengths": lengths, **{name: getattr(self, name) for name in names}}

    @property
    def waste(self) -> Waste:
        """The waste of this epoch, over all processes."""
        steps = self._steps(self._resumed[0] if self._resumed else self._history)
        batches = [self.lengths[batch] for step in steps for batch in step]
        positions = [[self._positions(batch) for batch in step] for step in steps]
        total = sum(map(sum, positions))
        return Waste(
            batches=len(batches),
            tokens=sum(int(batch.sum()) for batch in batches),
            padded=sum(int(batch.max()) * len(batch) for batch in batches),
            budget=len(batches) * self.budget,
            imbalance=self.num_replicas * sum(map(max, positions)) / total if total else 1.0,
        )

    # -- batches and steps ---------------------------------------------------------------------------------------------
    def _positions(self, batch: Sequence[int] | Tensor) -> int:
        """How many positions a batch takes: its tokens, or for "bucket" those of its padded rows; or their squares."""
        lengths = self.lengths[batch].clamp(min=1)
        if self.balance == "attention":
            lengths = lengths * (lengths.max() if self.method == "bucket" else lengths)
        return int(lengths.max()) * len(lengths) if self.method == "bucket" else int(lengths.sum())

    def _steps(self, history: History) -> list[Step]:
        """The steps of this epoch that follow on others; cached for ``len``, ``waste`` and the iterator."""
        key = (self.epoch, history)
        if self._cached is None or self._cached[0] != key:
            left = torch.arange(len(self.lengths))
            for before, (ranks, taken) in enumerate(history):
                done = [i for step in self._deal(left, ranks, before)[:taken] for batch in step for i in batch]
                is_left = torch.ones(len(self.lengths), dtype=torch.bool)
                is_left[done] = False
                left = left[is_left[left]]
            self._cached = key, self._deal(left, self.num_replicas, len(history))
        return self._cached[1]

    def _deal(self, left: Tensor, ranks: int, before: int) -> list[Step]:
        """Steps of a batch for each of so many ranks, of what is left of the dataset."""
        count = len(left)
        generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch + (before << 40)))
        order = left[torch.randperm(count, generator=generator)] if self.shuffle else left
        # An empty sequence still takes a row, so it counts as one token.
        costs = self.lengths.clamp(min=1)
        batches: list[Tensor] = []
        size = self.pool or max(count, 1)
        for start in range(0, count, size):
            group = order[start : start + size]
            found = _METHODS[self.method][0](costs[group], self.budget, self.max_sequences)
            batches += [group[batch] for batch in found]
        permutation = torch.randperm(len(batches), generator=generator) if self.shuffle else torch.arange(len(batches))
        batches = [batches[i] for i in permutation.tolist()]
        if ranks == 1:
            return [[batch.tolist()] for batch in batches]
        steps = self._balanced(batches, ranks)
        permutation = torch.randperm(len(steps), generator=generator) if self.shuffle else torch.arange(len(steps))
        found_steps: list[Step] = []
        for at, i in enumerate(permutation.tolist()):
            # The heaviest batch of a step is not always that of the same rank.
            turn = int(torch.randint(ranks, (), generator=generator)) if self.shuffle else at % ranks
            step = [batch.tolist() for batch in steps[i]]
            found_steps.append(step[turn:] + step[:turn])
        return found_steps

    def _balanced(self, batches: list[Tensor], ranks: int) -> list[list[Tensor]]:
        """Steps of batches with about as many positions each, one for each rank."""
        missing = -len(batches) % ranks
        if self.drop_last and missing:
            batches, missing = batches[: len(batches) // ranks * ranks], 0
        # Those of about as many positions are a step. The last batches of an epoch are not full: the last steps are
        # dealt anew, as many of them as it takes.
        weighed, total, tail = self._weighed(batches), len(batches) + missing, (1 + (missing > 0)) * ranks
        found = None if missing else weighed
        while total and (found is None or _worst(found, ranks) > _EVEN):
            kept = max(0, total - tail)
            even = self._spread(torch.cat([batch for _, batch in weighed[kept:]]), total - kept)
            if even is not None:
                dealt = _heaviest_first(weighed[:kept] + self._weighed(even))
                if found is None or _worst(dealt, ranks) < _worst(found, ranks):
                    found = dealt
            if not kept:
                break
            tail *= 2
        if found is None:
            found = self._weighed(_split(weighed, total))
            # Fewer sequences than places for them.
            found += (found * ranks)[: total - len(found)]
        return [[batch for _, batch in found[i : i + ranks]] for i in range(0, len(found), ranks)]

    def _weighed(self, batches: list[Tensor]) -> list[Weighed]:
        return _heaviest_first([(self._positions(batch), batch) for batch in batches])

    def _spread(self, sequences: Tensor, parts: int) -> list[Tensor] | None:
        even = _METHODS[self.method][1]
        found = even(self.lengths[sequences].clamp(min=1), self.budget, parts, self.max_sequences)
        return None if found is None else [sequences[batch] for batch in found]


def _heaviest_first(batches: list[Weighed]) -> list[Weighed]:
    return sorted(batches, key=lambda batch: batch[0], reverse=True)


def _worst(batches: list[Weighed], ranks: int) -> float:
    """The most positions of a batch over the mean of its step, in the worst step."""
    positions = [count for count, _ in batches]
    steps = [positions[i : i + ranks] for i in range(0, len(positions), ranks)]
    return max((ranks * max(step) / sum(step) for step in steps), default=1.0)


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
