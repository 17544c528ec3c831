"""Real processes, connected by gloo over the loopback: started once, and given one function after the other."""

import os
import queue
import socket
import traceback

import torch
import torch.distributed as dist

#: Seconds that a function may take on a busy machine before the ranks count as hung.
TIMEOUT = 300


def _serve(rank, world, port, calls, results):
    """Run what is sent, until None is."""
    torch.set_num_threads(1)
    # As torchrun does, which trainers of other libraries look at.
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in where.items()})
    dist.init_process_group("gloo")
    while (call := calls.get()) is not None:
        function, arguments = call
        try:
            results.put((rank, function(*arguments), None))
        except Exception:
            results.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """``world`` processes of one process group."""

    def __init__(self, world):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = torch.multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.calls = [context.Queue() for _ in range(world)]
        self.workers = [
            context.Process(target=_serve, args=(rank, world, port, calls, self.results), daemon=True)
            for rank, calls in enumerate(self.calls)
        ]
        for worker in self.workers:
            worker.start()

    def run(self, function, *arguments):
        """What a function of an importable module returns on each rank; an error on any of them, or a hang, fails."""
        for calls in self.calls:
            calls.put((function, arguments))
        found = {}
        while len(found) < len(self.workers):
            try:
                rank, result, error = self.results.get(timeout=TIMEOUT)
            except queue.Empty:
                self.kill()
                missing = sorted({*range(len(self.workers))} - {*found})
                raise AssertionError(f"ranks {missing} hang in {function.__name__}{arguments}") from None
            if error is not None:
                # The other ranks may wait for this one for ever.
                self.kill()
                raise AssertionError(f"rank {rank}:\n{error}")
            found[rank] = result
        return [found[rank] for rank in range(len(self.workers))]

    def close(self):
        """End the processes; those that do not end by themselves are killed."""
        for calls in self.calls:
            calls.put(None)
        for worker in self.workers:
            worker.join(timeout=30)
        self.kill()

    def kill(self):
        for worker in self.workers:
            if worker.is_alive():
                worker.kill()
                worker.join(timeout=30)
