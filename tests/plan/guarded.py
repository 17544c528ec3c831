"""Protected memory: a process that reads a dropped row of x is killed.

A row of x is a page, and the pages of dropped rows are protected from reading. This needs no clock: a route that reads
none of them ends, and one that reads dies. Run as a script, which forks for each case and prints what became of it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

import maskwise as mw
from tests.laws.functions import FUNCTIONS
from tests.laws.samples import needed

ROWS, PAGE = 64, mmap.PAGESIZE
KEPT = torch.arange(ROWS) % 4 == 1
ALONG, ACROSS = mw.Mask(KEPT), mw.Mask(KEPT[:, None])
#: As many rows, next to each other.
FIRST = torch.arange(ROWS) < int(KEPT.sum())
INTERVAL = mw.Mask.from_lengths([int(KEPT.sum())], ROWS)[0]
UNREAD = int((~KEPT).sum()) * PAGE
LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(dtype: torch.dtype = torch.float32, kept: torch.Tensor = KEPT) -> torch.Tensor:
    """X of one page a row, of which the dropped ones cannot be read."""
    memory = mmap.mmap(-1, ROWS * PAGE)
    x = torch.frombuffer(memory, dtype=dtype).reshape(ROWS, -1)
    x.copy_(torch.linspace(0.5, 1.5, x.numel()).reshape(x.shape))
    for row in torch.nonzero(~kept).flatten().tolist():
        if LIBC.mprotect(ctypes.c_void_p(x.data_ptr() + row * PAGE), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return x


def attention() -> None:
    """Keys and values of one page each."""
    k, v = guarded()[None, None], guarded()[None, None]
    mw.attention(torch.ones(1, 1, 32, k.shape[-1]), k, v, mw.Mask(KEPT[None]))


def forced(route: str) -> None:
    """A sum of rows by one route."""
    with mw.force(route):
        mw.sum(guarded(), ACROSS)


def differentiated(fn: Callable[..., torch.Tensor], kept: torch.Tensor, mask: mw.Mask) -> None:
    """A loss and the gradient of its input."""
    x = guarded(kept=kept).requires_grad_()
    target = torch.zeros(ROWS, dtype=torch.int64) if fn is F.cross_entropy else guarded(kept=kept)
    mw.loss(fn, x, target, mask).backward()


def both(name: str, dim: int) -> None:
    """A function by bits and by intervals."""
    for kept, mask in ((KEPT, ACROSS), (FIRST, INTERVAL[:, None])):
        getattr(mw, name)(guarded(kept=kept), mask, **needed(FUNCTIONS[name]), dim=dim)


def half_rows(kept: torch.Tensor) -> torch.Tensor:
    """X of two pages a row, of which the dropped one cannot be read."""
    return guarded(kept=kept).reshape(ROWS // 2, -1)


def blocks(call: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """A function by bits of which a page of each row is dropped, now the first and now the second."""
    kept = (torch.arange(ROWS) % 4 == 1) | (torch.arange(ROWS) % 4 == 2)
    x = half_rows(kept)
    bits = kept.reshape(ROWS // 2, 2).repeat_interleave(x.shape[1] // 2, 1)
    call(x, bits)


def normalized(layer: torch.nn.Module, *, is_interval: bool) -> None:
    """A norm of pages as the second half of each line of (N, C, L), or as whole entries of a batch."""
    if is_interval:
        x = half_rows(torch.arange(ROWS) % 2 == 0).reshape(-1, 4, 2 * PAGE // 4)
        mask = mw.Mask.from_lengths([x.shape[2] // 2] * len(x), x.shape[2])
        layer(x, mask)
    else:
        layer(guarded()[:, None], ACROSS)


def ragged(call: Callable[[torch.Tensor, mw.Mask], object]) -> None:
    """A function of lines of two pages, of which lengths keep both, one or none: shorter ones follow longer ones."""
    pages = torch.tensor([2, 1, 0, 1, 2, 0, 0, 1]).repeat(ROWS // 16)
    x = half_rows((torch.arange(2) < pages[:, None]).flatten())
    call(x, mw.Mask.from_lengths(pages * (x.shape[1] // 2), x.shape[1]))


def row_function(fn: Callable[..., torch.Tensor], *more: object) -> None:
    """A function of kept rows that ours compute where they lie, by bits and by intervals."""
    for kept, mask in ((KEPT, ALONG), (FIRST, INTERVAL)):
        mw.apply(fn, guarded(kept=kept), *more, mask=mask)


REDUCTIONS = [name for name, each in FUNCTIONS.items() if each.family == "reduce" and each.kernel]
CASES = {
    **{
        f"{name} of {which}": lambda name=name, dim=dim: getattr(mw, name)(guarded(), ACROSS, dim=dim)
        for name in REDUCTIONS
        for which, dim in (("rows", 1), ("columns", 0), ("all", None))
    },
    **{
        f"{name} of {which}": lambda name=name, dim=dim: both(name, dim)
        for name, each in FUNCTIONS.items()
        if each.family in ("order", "scan") and each.kernel
        for which, dim in (("rows", 1), ("columns", 0))
    },
    **{
        f"{name} of blocks of {which}": lambda name=name, dim=dim: blocks(
            lambda x, keep: getattr(mw, name)(x, keep, dim=dim)
        )
        for name in REDUCTIONS
        for which, dim in (("rows", 1), ("columns", 0), ("all", None))
    },
    "fill of blocks": lambda: blocks(lambda x, keep: mw.fill(x, keep, 0.0)),
    "mse_loss of blocks": lambda: blocks(lambda x, keep: mw.loss(F.mse_loss, x, x, keep)),
    "fill": lambda: mw.fill(guarded(), ACROSS, 0.0),
    "mse_loss": lambda: mw.loss(F.mse_loss, guarded(), guarded(), ACROSS),
    "cross_entropy": lambda: mw.loss(F.cross_entropy, guarded(), torch.zeros(ROWS, dtype=torch.int64), ALONG),
    "mse_loss with gradient": lambda: differentiated(F.mse_loss, KEPT, ACROSS),
    "mse_loss of an interval": lambda: differentiated(F.mse_loss, FIRST, INTERVAL[:, None]),
    "cross_entropy with gradient": lambda: differentiated(F.cross_entropy, KEPT, ALONG),
    "cross_entropy of an interval": lambda: differentiated(F.cross_entropy, FIRST, INTERVAL),
    "apply": lambda: mw.apply(lambda rows: rows * 2, guarded(), mask=ALONG),
    "pack": lambda: mw.pack(guarded(), ALONG),
    "attention": attention,
    "batch norm": lambda: normalized(mw.nn.MaskedBatchNorm1d(1), is_interval=False),
    "batch norm in evaluation": lambda: normalized(mw.nn.MaskedBatchNorm1d(1).eval(), is_interval=False),
    "batch norm of blocks": lambda: normalized(mw.nn.MaskedBatchNorm1d(4), is_interval=True),
    "batch norm in evaluation of blocks": lambda: normalized(mw.nn.MaskedBatchNorm1d(4).eval(), is_interval=True),
    "instance norm of blocks": lambda: normalized(mw.nn.MaskedInstanceNorm1d(4), is_interval=True),
    "batch norm of ragged lines": lambda: ragged(lambda x, mask: mw.nn.MaskedBatchNorm1d(1)(x[:, None], mask)),
    "batch norm in evaluation of ragged lines": lambda: ragged(
        lambda x, mask: mw.nn.MaskedBatchNorm1d(1).eval()(x[:, None], mask)
    ),
    "instance norm of ragged lines": lambda: ragged(lambda x, mask: mw.nn.MaskedInstanceNorm1d(1)(x[:, None], mask)),
    **{
        f"{name} of ragged lines": lambda name=name: ragged(lambda x, mask: getattr(mw, name)(x, mask, dim=-1))
        for name, each in FUNCTIONS.items()
        if each.family == "scan" and each.kernel
    },
    "sort of ragged lines": lambda: ragged(lambda x, mask: mw.sort(x, mask, dim=-1)),
    "topk of ragged lines": lambda: ragged(lambda x, mask: mw.topk(x, mask, 4, dim=-1)),
    "median of ragged lines": lambda: ragged(lambda x, mask: mw.median(x, mask, dim=-1)),
    "apply of softmax": lambda: row_function(torch.softmax, -1),
    "apply of layer_norm": lambda: row_function(F.layer_norm, (PAGE // 4,)),
    # These read everything, and show that reading is noticed.
    "torch": lambda: guarded().sum(),
    "dense": lambda: forced("dense"),
}


def run(name: str) -> dict[str, object]:
    """What became of a case in a process of its own: the signal that ended it, and the bytes that it reported."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with mw.explain() as log:
            CASES[name]()
        os.write(write, str(log.calls[0].skipped_bytes).encode())
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as report:
        return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, "skipped_bytes": report.read()}


if __name__ == "__main__":
    # One thread: a fork takes no others along.
    torch.set_num_threads(1)
    print(ALONG.count(), ACROSS.count(), INTERVAL.count(), INTERVAL[:, None].count(), file=sys.stderr)
    json.dump({name: run(name) for name in CASES}, sys.stdout)
