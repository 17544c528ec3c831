"""Some processes on gloo, started once, that call functions on every rank: for benchmarks, and for tests."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

__all__ = ["Ranks"]

#: Seconds until somebody who waits for a rank gives up.
PATIENCE = 240


class Ranks:
    """So many processes of one thread each. ``run(function, *args)`` calls a function of a module on each of them."""

    def __init__(self, count: int, folder: str) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.folder = folder
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on every rank and return what each returns, by rank; raise what one of them has raised."""
        for pipe in self._pipes:
            pipe.send((function, args))
        found = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE):
                self.close()
                raise TimeoutError(f"rank {rank} has not answered in {PATIENCE} s")
            found.append(pipe.recv())
        for is_error, value in found:
            if is_error:
                raise AssertionError(value)
        return [value for _, value in found]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, count: int, folder: str, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=PATIENCE / 2),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            answer = (False, function(*args))
        except BaseException:
            answer = (True, f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send(answer)
    distributed.destroy_process_group()
