"""Mistakes with audits: mw.audit, mw.optimize, mw.testing and the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

import maskwise as mw
from maskwise.cli import audit
from maskwise.errors import ArgumentError, DtypeError, ShapeError
from tests.errors.row import Row

X = torch.randn(4, 3)
LINEAR = nn.Linear(3, 2)
KEEP = mw.Mask.from_lengths([2, 1]).to_bool()
HERE = "tests/models/audit/targets.py"


def command(target: str, **options: Any) -> Callable[[], Any]:
    return lambda: audit.run(audit.Options(target, **options))


def padded() -> Any:
    model = nn.Sequential(nn.Embedding(9, 4), nn.AdaptiveAvgPool2d((1, 4)))
    mw.testing.assert_no_leak(model, torch.tensor([[1, 2], [3, 0]]), mask=KEEP)


def mean_of_means() -> None:
    keep = mw.Mask.from_lengths([3, 1, 2, 3]).to_bool()
    mw.testing.assert_split_invariant(lambda parts: sum(x[k].mean() for x, k in parts) / len(parts), (X, keep))


ROWS = [
    Row("mw.audit", lambda: mw.audit(nn.Linear, X), DtypeError, "Linear(...)"),
    Row("mw.audit", lambda: mw.audit(nn.LazyLinear(2), X), ArgumentError, "model(batch) once"),
    Row("mw.audit", lambda: mw.audit(LINEAR, 3), DtypeError, "what the model is called with"),
    Row("mw.audit", lambda: mw.audit(LINEAR, ["text"]), DtypeError, "[batch], of what the model takes"),
    Row("mw.audit", lambda: mw.audit(LINEAR, iter([])), ArgumentError, "next(iter(loader))"),
    Row("mw.audit", lambda: mw.audit(nn.Linear(2, 2, device="meta"), X), ArgumentError, "model.to_empty("),
    Row("mw.audit", lambda: mw.audit(torch.jit.trace(LINEAR, X), X), ArgumentError, "before torch.jit"),
    Row("mw.audit", lambda: mw.audit(LINEAR, X[:0]), ArgumentError, "of typical sizes"),
    Row("mw.audit", lambda: mw.audit(LINEAR, X, mask=X), DtypeError, "mask != 0"),
    Row("mw.audit", lambda: mw.audit(LINEAR, X, mask=KEEP), ShapeError, "mask[:, 0, 0]"),
    Row("mw.audit", lambda: mw.audit(LINEAR, X, loss=3), DtypeError, "loss=lambda output, batch:"),
    Row("mw.audit", lambda: mw.audit(LINEAR, X, loss=lambda out, x: out), ArgumentError, "F.cross_entropy(output,"),
    Row("mw.optimize", lambda: mw.optimize(nn.Linear, X), DtypeError, "Linear(...)"),
    Row("mw.optimize", lambda: mw.optimize(LINEAR, iter([])), ArgumentError, "next(iter(loader))"),
    Row("mw.optimize", lambda: mw.optimize(LINEAR, X, mask=X), DtypeError, "mask != 0"),
    Row("mw.optimize", lambda: mw.optimize(LINEAR, X, mask=KEEP), ShapeError, "mask[:, 0, 0]"),
    Row("mw.testing.assert_no_leak", padded, AssertionError, "mw.mean(x, mask[..., None], dim=1)"),
    Row(
        "mw.testing.assert_no_leak",
        lambda: mw.testing.assert_no_leak(LINEAR, X),
        ArgumentError,
        "mask=, of what is kept",
    ),
    Row("mw.testing.assert_split_invariant", mean_of_means, AssertionError, "mw.loss(..., denominator=window)"),
    Row(
        "mw.testing.assert_split_invariant",
        lambda: mw.testing.assert_split_invariant(len, X[:1]),
        ArgumentError,
        "a batch of several sequences",
    ),
    Row("mw.models.TrainerAudit.attach", lambda: mw.models.TrainerAudit().attach(LINEAR), DtypeError, "LightningAudit"),
    Row("TrainerAudit", lambda: mw.models.TrainerAudit().leeks, AttributeError, "an event, such as on_log, or leak"),
    # -- the command
    Row("maskwise audit", command("model"), typer.BadParameter, "training.py:example"),
    Row("maskwise audit", command("missing.py:model"), typer.BadParameter, "./training.py:example"),
    Row("maskwise audit", command("no_such_module:model"), typer.BadParameter, "or a file.py"),
    Row("maskwise audit", command(f"{HERE}:not_a_function"), typer.BadParameter, "return model, batch"),
    Row("maskwise audit", command(f"{HERE}:nothing"), typer.BadParameter, "return model, batch, or model, batch, loss"),
    Row("maskwise audit", command(f"{HERE}:no_model"), typer.BadParameter, "torch.nn.Sequential(...)"),
    Row("maskwise audit", command(f"{HERE}:clean", html=Path("missing/a.html")), typer.BadParameter, "mkdir -p"),
    Row("maskwise audit", command(f"{HERE}:leaky", fail_on="leaks"), typer.BadParameter, "leak,waste>30%."),
]
