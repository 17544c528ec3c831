"""Mistakes with windows: what is counted, groups, and denominators."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed

import maskwise as mw
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from tests.errors.row import Row

X = torch.ones(2, 3)
BITS = X > 0


@contextmanager
def process_group() -> Iterator[None]:
    """A world of this process alone."""
    store = distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def counting(masks: Any, **options: Any) -> Callable[[], Any]:
    return lambda: mw.accumulate(masks, **options)


def of_group(group: Any) -> Callable[[], Any]:
    def call() -> None:
        with process_group():
            mw.accumulate([BITS], group)

    return call


def opened(use: Callable[[Any], Any], masks: Any = (BITS,)) -> Callable[[], Any]:
    def call() -> None:
        with mw.accumulate(masks) as window:
            use(window)

    return call


def twice() -> None:
    window = mw.accumulate([BITS])
    for _ in range(2):
        with window:
            pass


def loss(denominator: Any, reduction: str = "mean") -> Callable[[], Any]:
    return lambda: mw.loss(F.mse_loss, X, X, BITS, reduction, denominator=denominator)


def windows(size: Any = 2, count: Any = len, batches: Any = (X,)) -> Callable[[], Any]:
    return lambda: mw.distributed.Windows(batches, size, count)


TRAINER = "mw.distributed.trainer_loss"
SCALE, NOT_IN = "mw.distributed.Window.scale", distributed.GroupMember.NON_GROUP_MEMBER
ROWS = [
    # -- what is counted
    Row("mw.accumulate", counting([X]), DtypeError, "ignore_index=-100 for labels, Mask.from_attention_mask(mask)"),
    Row("mw.accumulate", counting([X.long()]), DtypeError, "ignore_index=-100 for labels"),
    Row("mw.accumulate", counting(None), DtypeError, "mw.accumulate([mask, ...])"),
    Row("mw.accumulate", counting([True]), DtypeError, "mw.accumulate([mask, ...])"),
    Row("mw.accumulate", counting([4, -1]), ArgumentError, "int(mask.sum())"),
    Row("mw.accumulate", counting([X.to_sparse()]), ArgumentError, "masks.to_dense()"),
    Row("mw.accumulate", counting([BITS.to("meta")]), DeviceError, "masks on the device of the micro-batches"),
    Row("mw.accumulate", counting([X.long()], ignore_index=0.5), DtypeError, "ignore_index=-100"),
    Row("mw.accumulate", counting([BITS], average="mean"), ArgumentError, 'average="ranks"'),
    Row("mw.accumulate", counting([BITS], average=2**24), ArgumentError, 'average="ranks"'),
    # -- groups
    Row("mw.accumulate", counting([BITS], group=object()), ArgumentError, "group=None"),
    Row("mw.accumulate", of_group([0, 1]), DtypeError, "torch.distributed.new_group(ranks)"),
    Row("mw.accumulate", of_group(NOT_IN), ArgumentError, "group=None, or a mesh's own dim"),
    Row("mw.accumulate", of_group(SimpleNamespace(get_group=None, ndim=2)), ArgumentError, "mesh['dp']"),
    # -- windows
    Row("mw.accumulate", twice, ArgumentError, "anew for each step of the optimizer"),
    Row(SCALE, lambda: mw.accumulate([BITS]).scale(X.sum()), ArgumentError, "with mw.accumulate(masks) as window"),
    Row(SCALE, opened(lambda window: window.scale(3.0)), DtypeError, 'reduction="sum"'),
    Row(SCALE, opened(lambda window: window.scale(X)), ShapeError, "total.sum()"),
    Row(SCALE, opened(lambda window: window.scale(X.sum().to("meta"))), DeviceError, "on the device of its batches"),
    Row(SCALE, opened(lambda window: window.scale(X.sum(), "row")), ArgumentError, 'kind="token"'),
    Row(SCALE, opened(lambda window: window.scale(X.sum(), "sequence"), 3), ArgumentError, "of the masks themselves"),
    Row("mw.distributed.Window.count", opened(lambda window: window.count("row")), ArgumentError, 'kind="token"'),
    Row("mw.distributed.Window.result", opened(lambda window: window.result()), ArgumentError, "window.result() after"),
    Row("mw.distributed.Window.value", opened(lambda window: window.value()), ArgumentError, "after the block"),
    Row("mw.distributed.Windows", windows(size=1.5), DtypeError, "size=4"),
    Row("mw.distributed.Windows", windows(size=0), ArgumentError, "size=1"),
    Row("mw.distributed.Windows", windows(count="mask"), DtypeError, 'count=lambda batch: batch["mask"]'),
    Row("mw.distributed.Windows", lambda: len(windows(batches=iter([X]))()), DtypeError, "without len"),
    Row(TRAINER, lambda: mw.distributed.trainer_loss("mse"), DtypeError, "trainer_loss(F.cross_entropy)"),
    Row(TRAINER, lambda: mw.distributed.trainer_loss()({"logits": X}, None), DtypeError, 'the key "labels"'),
    Row(
        "mw.distributed.LightningMixin.micro_step",
        lambda: mw.distributed.LightningMixin().micro_step(X, mw.accumulate([1])),
        ArgumentError,
        "def micro_step(self, batch, window)",
    ),
    # -- denominators
    Row("mw.loss", loss(4, "sum"), ArgumentError, 'reduction="mean", which is the sum / denominator'),
    Row("mw.loss", loss(4, "none"), ArgumentError, 'reduction="mean", which is the sum / denominator'),
    Row("mw.loss", loss(-1), ArgumentError, "denominator=mask.sum()"),
    Row("mw.loss", loss(float("nan")), ArgumentError, "denominator=mask.sum()"),
    Row("mw.loss", loss("4"), DtypeError, "denominator=mask.sum()"),
    Row("mw.loss", loss(torch.tensor(True)), DtypeError, "denominator=mask.sum()"),
    Row("mw.loss", loss(torch.ones(2)), ShapeError, "denominator.sum()"),
    Row("mw.loss", loss(torch.ones((), device="meta")), DeviceError, "denominator.to(input.device)"),
]
