"""Train a tiny language model on two ranks, and compare each step with one process on the whole batch.

    python examples/distributed_denominator.py

Two processes, connected by gloo, hold sequences of different lengths. With means of their own, which
DistributedDataParallel averages, the parameters depend on the split. With the denominator of a window, they do not.
"""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import maskwise as mw

RANKS, MICRO, ROWS, LENGTH, WORDS, STEPS = 2, 3, 4, 32, 50, 5


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """The micro-batches of all ranks: words, next words, and a mask. Later ones are shorter."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(RANKS * MICRO):
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
        lengths = torch.randint(1, LENGTH // (1 + index) + 1, (ROWS,), generator=generator)
        made.append((words[:, :-1], words[:, 1:], mw.Mask.from_lengths(lengths, max_len=LENGTH).to_bool()))
    return made


def model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, WORDS)).double()


def train(net: nn.Module, own: list[tuple[Tensor, Tensor, Tensor]], windows: bool) -> list[Tensor]:
    """Some steps on the micro-batches of this rank; the parameters after them."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with mw.accumulate([mask for _, _, mask in own]) as window:
            for index, (words, following, mask) in enumerate(own):
                silent = isinstance(net, nn.parallel.DistributedDataParallel) and index < len(own) - 1
                with net.no_sync() if silent else nullcontext():
                    logits = net(words)
                    if windows:
                        loss = mw.loss(F.cross_entropy, logits, following, mask, denominator=window)
                    else:
                        loss = mw.loss(F.cross_entropy, logits, following, mask) / len(own)
                    loss.backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def rank_main(rank: int, port: int, results: Any) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    distributed.init_process_group("gloo")
    own = batches()[rank * MICRO : (rank + 1) * MICRO]
    for windows in (False, True):
        found = train(nn.parallel.DistributedDataParallel(model()), own, windows)
        if rank == 0:
            # Lists, since a tensor would live in memory that ends with this process.
            results.put([p.tolist() for p in found])
    distributed.destroy_process_group()


def main() -> None:
    """Train both ways on two ranks, and once in this process on the whole batch."""
    whole = [torch.cat(parts) for parts in zip(*batches(), strict=True)]
    wanted = train(model(), [(whole[0], whole[1], whole[2])], windows=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=rank_main, args=(rank, port, results), daemon=True) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    kept = [int(mask.sum()) for _, _, mask in batches()]
    print(f"{RANKS} ranks, {MICRO} micro-batches each, {kept} tokens; {STEPS} steps")
    for name in ("means of micro-batches and ranks", "one denominator"):
        found = [torch.tensor(p, dtype=torch.float64) for p in results.get(timeout=300)]
        difference = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
        print(f"  {name + ':':34} parameters differ from one process by at most {difference:.1e}")
    for worker in workers:
        worker.join(timeout=60)


if __name__ == "__main__":
    main()
