"""Training on two gloo ranks: padded batches, batches of a token budget, and those of an unpadded model.

A call trains once through the same paragraphs, so that times compare as global tokens per second do.
``python -m benchmarks.cases.distributed`` prints those.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from importlib import import_module
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed, nn

import maskwise as mw
from benchmarks.case import Case, Side, at_least
from benchmarks.cases.sides import Call
from benchmarks.ranks import Ranks
from maskwise.cli.demo import paragraphs

__all__ = ["cases"]

RANKS = 2
ROWS = 16
"""Rows of a padded batch on one rank."""
LONGEST = 256
WIDTH, LAYERS = 128, 2
PADDED, BUDGETS = "padded batches", "token budgets, padded"


def lengths(count: int) -> list[int]:
    """The numbers of words of so many paragraphs.

    >>> len(lengths(3)), max(lengths(512)) == LONGEST
    (3, True)
    """
    return [min(LONGEST, len(text.split())) for text in paragraphs(count)]


def batches(kind: str, sizes: list[int], rank: int) -> list[list[int]]:
    """The rows of each batch of a rank; all together have every row once.

    >>> sizes = lengths(40)
    >>> sorted(i for rank in range(2) for batch in batches("unpadded", sizes, rank) for i in batch) == list(range(40))
    True
    """
    if kind == "padded":
        # As a DistributedSampler does; the last batches may be smaller.
        own = list(range(rank, len(sizes), RANKS))
        return [own[i : i + ROWS] for i in range(0, len(own), ROWS)]
    # As many tokens as a padded batch has on average.
    budget = max(LONGEST, ROWS * sum(sizes) // len(sizes))
    method: Any = "bucket" if kind == "budgets" else "first_fit"
    return list(mw.TokenBudgetSampler(sizes, budget, method=method, num_replicas=RANKS, rank=rank))


# -- on a rank ---------------------------------------------------------------------------------------------------------
_MODELS: dict[str, nn.Module] = {}


def model(kind: str) -> nn.Module:
    """The model of this rank in DistributedDataParallel, made once."""
    if kind not in _MODELS:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        encoder: nn.Module = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        encoder = mw.unpad(encoder) if kind == "unpadded" else encoder
        _MODELS[kind] = nn.parallel.DistributedDataParallel(encoder)
    return _MODELS[kind]


def epoch(kind: str, count: int) -> float:
    """Train once through so many paragraphs; the sum of the loss over all tokens of all ranks."""
    sizes, network = lengths(count), model(kind)
    # A rate of 0: every step is taken, and every call starts from the same weights.
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    total = torch.zeros((), dtype=torch.float64)
    table = torch.randn(LONGEST, WIDTH, generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(-1.0, 1.0, WIDTH)
    own = batches(kind, sizes, distributed.get_rank())
    for batch in own:
        rows = [sizes[i] for i in batch]
        mask = torch.arange(max(rows)) < torch.tensor(rows)[:, None]
        # The same tokens for a row in any batch.
        x = torch.stack([table[: max(rows)].roll(i, 1) for i in batch])
        optimizer.zero_grad()
        out = network(x, src_key_padding_mask=~mask)
        loss = (torch.where(mask[..., None], out, 0.0) * weights).square().sum()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    distributed.all_reduce(total)
    return float(total)


# -- in the process that measures --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cluster:
    """The ranks, and how many paragraphs they train on."""

    ranks: Ranks
    count: int


def _cluster(case: Case) -> Cluster:
    ranks = Ranks(RANKS)
    found = Cluster(ranks, case.shape[0])
    weakref.finalize(found, ranks.close)
    return found


def _trained(i: Cluster, kind: str) -> Call:
    def run() -> Tensor:
        return torch.tensor(i.ranks.run(epoch, kind, i.count)[0])

    return run


CASE = Case(
    "distributed",
    "TokenBudgetSampler",
    "512 paragraphs on 2 gloo ranks, training",
    _cluster,
    (
        Side("token budgets, mw.unpad", lambda i: _trained(i, "unpadded"), "ours"),
        Side(BUDGETS, lambda i: _trained(i, "budgets")),
        Side(PADDED, lambda i: _trained(i, "padded")),
    ),
    (512,),
    targets=(at_least(1.5, PADDED),),
    # Sums of squares of float32 over thousands of tokens.
    relative_tolerance=1e-4,
    absolute_tolerance=1e-3,
    unavailable=lambda: None if distributed.is_available() else "needs torch.distributed",
)


def cases() -> tuple[Case, ...]:
    """Return the cases on several ranks."""
    return (CASE,)


def main(count: int = CASE.shape[0], rounds: int = 5) -> None:
    """Print the tokens per second of both ranks together: the median of some rounds, in which all sides take turns."""
    kinds = {"padded": PADDED, "budgets": BUDGETS, "unpadded": CASE.ours.name}
    tokens = sum(lengths(count))
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    cluster = _cluster(replace(CASE, shape=(count,)))
    for at in range(rounds + 1):
        for kind in kinds:
            start = perf_counter()
            cluster.ranks.run(epoch, kind, count)
            # The first round makes the models.
            taken[kind] += [perf_counter() - start] if at else []
    for kind, name in kinds.items():
        print(f"{name:26} {tokens / median(taken[kind]):10,.0f} tokens/s")


if __name__ == "__main__":
    # By its name, under which the ranks find it: here it is __main__.
    import_module("benchmarks.cases.distributed").main()
