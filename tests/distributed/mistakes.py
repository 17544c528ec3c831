"""What each rank of the tests runs to see that a mistake on one of them is an error on all, and no hang."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import maskwise as mw
from maskwise.distributed.accumulate import _Readback as Readback
from tests.distributed.splits import group

KEEP = torch.tensor([[True, False, True]])


def told(call):
    """What a call raises, or returns; the ranks must still understand each other after it."""
    try:
        found = call()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == dist.get_world_size()
    return found


def enter(masks, *args, **options):
    with mw.accumulate(masks, *args, **options) as window:
        window.scale(torch.tensor(float(dist.get_rank())))
    return window.result().mean.item()


def different_numbers():
    return told(lambda: enter([KEEP] * (2 + (dist.get_rank() == 1))))


def one_bad_mask():
    return told(lambda: enter([KEEP, KEEP.float() if dist.get_rank() == 2 else KEEP]))


def one_without_data():
    return told(lambda: enter([KEEP.to("meta") if dist.get_rank() == 2 else KEEP]))


def one_negative_count():
    return told(lambda: enter([torch.tensor(-1 if dist.get_rank() == 2 else 1)]))


def one_bad_index():
    return told(lambda: enter([KEEP.long()], ignore_index="0" if dist.get_rank() == 2 else 0))


def one_bad_average():
    return told(lambda: enter([KEEP], average="mean" if dist.get_rank() == 3 else "ranks"))


def different_averages(averages):
    return told(lambda: enter([KEEP], average=averages[dist.get_rank()]))


def loaders_of_different_averages():
    def run():
        average = "none" if dist.get_rank() == 1 else "ranks"
        for window, _ in mw.distributed.Windows([KEEP], 1, torch.as_tensor, average=average):
            window.__enter__()

    return told(run)


def outside_of_the_group():
    return told(lambda: enter([KEEP], group(3), "none"))


def outside_of_the_mesh():
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return told(lambda: enter([KEEP], meshes)), told(lambda: enter([KEEP], meshes["data"]))


def twice_and_outside():
    window = mw.accumulate([KEEP])
    early = told(lambda: window.scale(torch.ones(())))
    with window:
        inside = told(lambda: window.result())
    late = told(lambda: window.scale(torch.ones(())))
    return early, inside, late, told(lambda: window.__enter__())


def rows_that_one_rank_does_not_know():
    def scale():
        with mw.accumulate([2 if dist.get_rank() == 0 else KEEP]) as window:
            window.scale(torch.ones(()), "sequence")

    return told(scale)


def numbers_that_arrive_late():
    """As on a GPU: the host does not know the counts before the window is left, when it waits for them."""
    arrived, calls, scaled = Readback.values, [], []

    def late(self, wait):
        calls.append(wait)
        return None if len(calls) < 3 else arrived(self, wait)

    def step():
        with mw.accumulate([KEEP] * (1 + dist.get_rank())) as window:
            scaled.append(window.scale(torch.ones(())).item())

    with patch.object(Readback, "values", late):
        return told(step), scaled, calls


def loaders(lengths, fails=None, size=2):
    """Windows over loaders of these lengths; of one rank, the loader fails. What came out before the error, and it."""
    rank, seen = dist.get_rank(), []

    def load():
        for index in range(lengths[rank]):
            if rank == fails and index == 2:
                raise OSError("disk full")
            yield torch.full((index + 1,), float(rank + 1))

    def run():
        for window, batches in mw.distributed.Windows(load(), size, len):
            with window:
                for x in batches:
                    window.scale(x.sum())
            seen.append((len(batches), window.result().mean.item()))

    return seen, told(run)


def one_reader():
    """The result is read on one rank alone; an error inside of a window starts no collective."""
    with mw.accumulate([KEEP]) as window:
        window.scale(torch.tensor(float(dist.get_rank())))
    read = window.result().sum.item() if dist.get_rank() == 0 else None

    made = []

    def fail():
        with mw.accumulate([KEEP]) as broken:
            made.append(broken)
            raise ZeroDivisionError

    return read, told(fail), told(lambda: made[0].result())
