"""What the gates of a model keep: a table, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import nan, prod
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils import parametrize

from maskwise.nn.gated import Gated, gated
from maskwise.nn.modules import check_module
from maskwise.nn.sparse_linear import SparseLinear
from maskwise.nn.weights import ungated
from maskwise.plan.explain import Tabular

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LeftOut", "Report", "Row", "report"]


@dataclass(frozen=True)
class Row:
    """One gated weight. FLOPs are those of one position: a token, a time step, an output pixel."""

    name: str
    layer: str
    gate: str
    shape: tuple[int, ...]
    total: int
    kept: int
    dense_flops: int
    flops: int

    @property
    def density(self) -> float:
        """The share that is kept; NaN of no weights."""
        return self.kept / self.total if self.total else nan


@dataclass(frozen=True)
class LeftOut:
    """One tensor of two dims or more that has no gate, and why `mw.nn.prune` gave it none."""

    name: str
    layer: str
    shape: tuple[int, ...]
    reason: str

    @property
    def total(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class Report(Tabular):
    """The gated weights of a model. Print it for a table, iterate it, or take ``to_json()``.

    Attributes:
        rows: the gated weights.
        left_out: what else has two dims or more, and why it has no gate. No sum counts it.
    """

    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def total(self) -> int:
        """How many weights have a gate."""
        return sum(row.total for row in self.rows)

    @property
    def kept(self) -> int:
        """How many of them are kept."""
        return sum(row.kept for row in self.rows)

    @property
    def density(self) -> float:
        """The share that is kept of all together; NaN of no weights."""
        return self.kept / self.total if self.total else nan

    def to_json(self) -> str:
        """The rows and their sums as a JSON object."""
        rows = [{**asdict(row), "density": row.density if row.total else None} for row in self.rows]
        sums = {"total": self.total, "kept": self.kept, "density": self.density if self.total else None}
        return json.dumps({"layers": rows, **sums, "left_out": [asdict(each) for each in self.left_out]})

    def table(self) -> Table:
        """The rows as a rich table, with a line of sums."""
        from rich.table import Table

        some = len(self.rows)
        title = f"{some} gated weight{'s' if some != 1 else ''}"
        table = Table(title=title, caption=self._caption(), caption_justify="left", show_footer=some > 1)
        sums = ("all", "", "", "", f"{self.density:.2%}", f"{self.kept:,} of {self.total:,}", "")
        headings = ("weight", "layer", "gate", "shape", "density", "kept", "FLOPs a position")
        for heading, total in zip(headings, sums, strict=True):
            justify = "right" if heading in headings[4:] else "left"
            table.add_column(heading, total, justify=justify)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(
                row.name,
                row.layer,
                row.gate,
                " × ".join(map(str, row.shape)),
                f"{row.density:.2%}",
                f"{row.kept:,} of {row.total:,}",
                f"{row.flops:,} of {row.dense_flops:,}",
            )
        return table

    def _caption(self) -> str | None:
        """What was left out, one line for each reason."""
        by_reason: dict[str, list[LeftOut]] = {}
        for each in self.left_out:
            by_reason.setdefault(each.reason, []).append(each)
        lines = []
        for reason, found in by_reason.items():
            names = ", ".join(each.name for each in found[:3]) + (", ..." if len(found) > 3 else "")
            lines.append(f"left out: {names} ({sum(each.total for each in found):,} numbers): {reason}")
        return "\n".join(lines) or None


def report(model: nn.Module) -> Report:
    """Tell what every gate of a model keeps: density, kept parameters, FLOPs.

    >>> import torch, maskwise as mw
    >>> model = torch.nn.Sequential(mw.nn.attach(torch.nn.Linear(8, 4), mw.nn.gates.NM(2, 4)))
    >>> row, = mw.nn.report(model)
    >>> row.name, row.density, row.kept, row.flops
    ('0.weight', 0.5, 16, 32)

    FLOPs are those of the weight at one position: a token for Linear, a time step for an RNN, an output pixel for a
    convolution, an input pixel for a transposed one. A multiplication and an addition are two. A bias is one addition;
    an embedding looks up, and computes nothing.

    A SparseLinear, which has no gate but only the weights that it keeps, has a row too. FLOPs of experts are those of
    all of them; a token goes to a few.

    What has two dims or more and no gate is listed in ``left_out``, with the reason:

    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 4))
    >>> [(each.name, each.reason) for each in mw.nn.report(mw.nn.prune(model, lambda: mw.nn.gates.NM(2, 4))).left_out]
    [('0.weight', 'a table that is looked up, not multiplied')]

    Args:
        model: any module.

    Returns:
        A Report, empty if nothing has a gate.

    Raises:
        DtypeError: ``model`` is not a module.
    """
    check_module("report", model)
    by_module: dict[nn.Module, list[Row]] = {}
    for found in gated(model):
        by_module.setdefault(found.module, []).append(_row(found))
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear):
            by_module[module] = [_sparse_row(f"{name}.values" if name else "values", module)]
    left_out = tuple(
        LeftOut(name, parametrize.type_before_parametrizations(module).__name__, shape, reason)
        for name, module, _, shape, reason in ungated(model)
    )
    return Report(tuple(row for module in model.modules() for row in by_module.get(module, ())), left_out)


def _sparse_row(name: str, layer: SparseLinear) -> Row:
    shape, kept = (layer.out_features, layer.in_features), layer.mask.count()
    assert isinstance(kept, int)
    return Row(name, "SparseLinear", "", shape, prod(shape), kept, 2 * prod(shape), 2 * kept)


def _row(found: Gated) -> Row:
    mask = found.mask()
    kind = parametrize.type_before_parametrizations(found.module)
    each = 0 if issubclass(kind, nn.Embedding | nn.EmbeddingBag) else 2 if mask.ndim > 1 else 1
    shape, kept = tuple(mask.shape), mask.count()
    assert isinstance(kept, int)
    total = prod(shape)
    gate = str(found.gate).replace("\n", " ")
    return Row(found.name, kind.__name__, gate, shape, total, kept, each * total, each * kept)
