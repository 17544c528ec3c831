"""Some processes on gloo, started once, that call functions on every rank: for benchmarks, and for tests."""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import distributed

__all__ = ["Ranks"]

#: Seconds until somebody who waits for a rank gives up.
PATIENCE = 300
#: What most functions need. A server imports it once, and the ranks of every pool are forks of that server.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "maskwise.distributed",
    "maskwise.nn",
    "maskwise.models",
]


class Ranks:
    """So many processes of one thread each. ``run(function, *args)`` calls a function of a module on each of them."""

    def __init__(self, count: int) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        port = _free_port()
        for rank in range(count):
            ours, theirs = context.Pipe()
            store = f"file://{self._folder.name}/store"
            process = context.Process(target=_serve, args=(rank, count, store, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def folder(self) -> str:
        """A directory that is removed with the processes."""
        return self._folder.name

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on every rank and return what each returns, by rank.

        An error on one of them, or a rank that does not answer, ends all of them: the others may wait for it for ever.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        found: dict[int, Any] = {}
        end = time.monotonic() + PATIENCE
        while missing := [rank for rank in range(len(self._pipes)) if rank not in found]:
            ready = wait([self._pipes[rank] for rank in missing], max(0.0, end - time.monotonic()))
            if not ready:
                self.kill()
                raise AssertionError(f"ranks {missing} hang in {function.__name__}{args}")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    is_error, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    is_error, value = True, f"rank {rank} has ended"
                if is_error:
                    self.kill()
                    raise AssertionError(value)
                found[rank] = value
        return [found[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join(timeout=10)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _serve(rank: int, count: int, store: str, port: int, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # As torchrun does, which trainers of other libraries look at.
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=count, timeout=datetime.timedelta(seconds=PATIENCE / 2)
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
