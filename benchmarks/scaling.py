"""Padding, imbalance and communication on up to thousands of ranks, by simulation on real lengths and by a model.

``python -m benchmarks.scaling`` prints the tables of docs/distributed.md; ``--write`` also stores what was
simulated in ``results/scaling.json``, which takes some minutes. No process group is needed: a sampler computes the
batches of all ranks.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from math import ceil, log2
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import maskwise as mw

__all__ = ["ALL_REDUCE", "Network", "Row", "communication", "real_lengths", "simulate", "tables"]

RESULTS = Path(__file__).parent / "results" / "scaling.json"
RANKS = (8, 64, 256, 1024)
BUDGETS = (2048, 8192)
STEPS = 4
"""So many steps of each budget are simulated; a longer epoch wastes a smaller part."""
SIZES = (8, 64, 512, 1024, 4096, 8192)
Text = Literal["paragraphs", "topics"]
LONGEST: dict[Text, int] = {"paragraphs": 512, "topics": 2048}
"""Where texts are cut off, as a tokenizer does."""
Method = Literal["padded", "bucket", "first_fit"]
METHODS: tuple[Method, ...] = ("padded", "bucket", "first_fit")


# -- padding and imbalance, by simulation ------------------------------------------------------------------------------
def real_lengths(text: Text, count: int) -> Tensor:
    """So many lengths, drawn from those of the paragraphs or the topics of Python's documentation, in words.

    >>> found = real_lengths("paragraphs", 1000)
    >>> found.shape, bool((found > 0).all()), bool((found <= 512).all())
    (torch.Size([1000]), True, True)
    """
    from pydoc_data.topics import topics

    texts = [topics[each] for each in sorted(topics)]
    if text == "paragraphs":
        texts = [part for each in texts for part in each.split("\n\n")]
    found = torch.tensor([len(each.split()) for each in texts])
    found = found[found > 0].clamp(max=LONGEST[text])
    return found[torch.randint(len(found), (count,), generator=torch.Generator().manual_seed(0))]


@dataclass(frozen=True)
class Row:
    """What an epoch wastes: ``padding`` of its positions, the slowest rank's over the mean, and what that leaves."""

    text: Text
    method: Method
    ranks: int
    budget: int
    steps: int
    padding: float
    imbalance: float

    @property
    def efficiency(self) -> float:
        """Tokens over the positions that all ranks would compute in the time of the slowest of each step.

        >>> round(Row("topics", "bucket", 8, 2048, 4, padding=0.1, imbalance=1.2).efficiency, 3)
        0.75
        """
        return (1.0 - self.padding) / self.imbalance


def simulate(text: Text, method: Method, ranks: int, budget: int, steps: int = STEPS) -> Row:
    """The waste of about so many steps.

    >>> row = simulate("paragraphs", "first_fit", 4, 2048)
    >>> row.padding, row.imbalance < 1.01
    (0.0, True)
    """
    lengths = real_lengths(text, int(steps * ranks * budget / real_lengths(text, 100_000).double().mean()))
    if method == "padded":
        # Rows in a random order, as many in a batch as have the budget's tokens on average; each padded to its longest.
        rows = max(1, round(budget / lengths.double().mean().item()))
        count = len(lengths) // (rows * ranks)
        batches = lengths[: count * rows * ranks].reshape(count, ranks, rows)
        positions = batches.amax(-1) * rows
        return _row(text, method, budget, batches.sum(-1), positions)
    sampler = mw.TokenBudgetSampler(lengths, budget, method=method, num_replicas=ranks, rank=0)
    waste = sampler.waste
    padding = waste.padding if method == "bucket" else 0.0
    return Row(text, method, ranks, budget, len(sampler), round(padding, 4), round(waste.imbalance, 4))


def _row(text: Text, method: Method, budget: int, tokens: Tensor, positions: Tensor) -> Row:
    steps, ranks = positions.shape
    imbalance = ranks * positions.amax(1).sum().item() / positions.sum().item()
    padding = 1.0 - tokens.sum().item() / positions.sum().item()
    return Row(text, method, ranks, budget, steps, round(padding, 4), round(imbalance, 4))


# -- communication, by a model -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Network:
    """The latency of a message in seconds, and the bytes a second of a link."""

    latency: float = 5e-6
    bandwidth: float = 25e9

    def all_reduce(self, size: int, ranks: int) -> float:
        """Seconds: a tree's depth of latencies, up and down, and every byte sent and received about once.

        >>> round(1e6 * Network().all_reduce(64, 8), 1)
        30.0
        """
        return 2 * ceil(log2(ranks)) * self.latency + 2 * (ranks - 1) / ranks * size / self.bandwidth

    def broadcast(self, size: int, ranks: int) -> float:
        """Seconds: a tree's depth of latencies, and every byte received once."""
        return ceil(log2(ranks)) * self.latency + size / self.bandwidth


ALL_REDUCE, BROADCAST = "all-reduce", "broadcast"


@dataclass(frozen=True)
class Message:
    """One collective: its kind, how many bytes each rank gives, and how many steps it is for."""

    kind: str
    size: int
    every: int = 1

    def seconds(self, ranks: int, network: Network) -> float:
        """The time a step, on so many ranks."""
        collective = network.broadcast if self.kind == BROADCAST else network.all_reduce
        return collective(self.size, ranks) / self.every


def communication() -> dict[str, list[Message]]:
    """What each part of the library sends, for examples of a size that is named.

    >>> [message.size for message in communication()["SyncMaskedBatchNorm, 256 channels"]]
    [4096, 2048, 4096]
    """
    channels, outputs, inputs, density = 256, 4096, 4096, 0.1
    kept = round(density * outputs * inputs)
    exchanged = [Message(BROADCAST, 8 * (kept - round(0.3 * kept) + kept), 100)]
    check = [Message(BROADCAST, 16, 100), Message(ALL_REDUCE, 8, 100)]
    return {
        "`mw.accumulate`, one window": [Message(ALL_REDUCE, 64), Message(ALL_REDUCE, 24)],
        "SyncMaskedBatchNorm, 256 channels": [
            Message(ALL_REDUCE, 2 * 8 * channels),
            Message(ALL_REDUCE, 8 * channels),
            Message(ALL_REDUCE, 2 * 8 * channels),
        ],
        "SET, 4096 x 4096 at 10 %, every 100 steps": [*check, *exchanged],
        "RigL, 4096 x 4096 at 10 %, every 100 steps": [
            *check,
            Message(ALL_REDUCE, 4 * (outputs * inputs + 1), 100),
            *exchanged,
        ],
        "for scale: gradients of 100 M float32 parameters": [Message(ALL_REDUCE, 4 * 100_000_000)],
    }


# -- tables ------------------------------------------------------------------------------------------------------------
NAMES = {"padded": "padded rows", "bucket": '`method="bucket"`', "first_fit": '`"first_fit"` and `mw.unpad`'}


def tables(rows: list[Row]) -> Iterator[str]:
    """The tables of the documentation, in Markdown."""
    lines = ["| text | budget | ranks | " + " | ".join(NAMES.values()) + " |", "|" + "---|" * 6]
    places = dict.fromkeys((row.text, row.budget, row.ranks) for row in rows)
    for text, budget, ranks in places:
        found = {row.method: row for row in rows if (row.text, row.budget, row.ranks) == (text, budget, ranks)}
        cells = [
            f"{found[method].padding:.1%}, {found[method].imbalance:.2f}, **{found[method].efficiency:.0%}**"
            for method in METHODS
        ]
        lines.append(f"| {text} | {budget:,} | {ranks:,} | " + " | ".join(cells) + " |")
    yield "\n".join(lines)
    lines = ["| what | collectives per step | bytes per step | " + " | ".join(f"{each:,}" for each in SIZES) + " |"]
    lines.append("|" + "---|" * (3 + len(SIZES)))
    for name, messages in communication().items():
        count = sum(1 / message.every for message in messages)
        size = sum(message.size / message.every for message in messages)
        times = [sum(message.seconds(each, Network()) for message in messages) for each in SIZES]
        cells = " | ".join(f"{1e6 * each:,.0f} µs" if each < 1e-2 else f"{1e3 * each:,.0f} ms" for each in times)
        lines.append(f"| {name} | {count:.2g} | {size:,.0f} | {cells} |")
    yield "\n".join(lines)


def read() -> list[Row]:
    """The rows of the committed run."""
    return [Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]]


def main() -> None:
    """Print the tables, of the committed run or of a new one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="simulate anew, and store the result")
    if parser.parse_args().write:
        rows = []
        for text, budget, ranks, method in product(LONGEST, BUDGETS, RANKS, METHODS):
            rows.append(simulate(text, method, ranks, budget))
            print(rows[-1], file=sys.stderr, flush=True)
        made: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "steps": STEPS}
        RESULTS.write_text(
            json.dumps({**made, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8"
        )
    print("\n\n".join(tables(read())))


if __name__ == "__main__":
    main()
