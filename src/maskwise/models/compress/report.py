"""What compressing a model has done: a table, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from maskwise.plan.tabular import Tabular

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["CompressionReport", "LayerReport", "Measured"]


@dataclass(frozen=True)
class Measured:
    """A layer, or a model, at one time.

    Attributes:
        kind: the class, or the form that was chosen.
        parameters: how many numbers its parameters have.
        bytes: those of its state_dict, indices and masks included.
        flops: for one call on the example; a multiplication and an addition are two.
        seconds: for one call on the example, the best of several; None where nothing was to be compared.
    """

    kind: str
    parameters: int
    bytes: int
    flops: int
    seconds: float | None


@dataclass(frozen=True)
class LayerReport:
    """One layer before and after, and why it is what it is."""

    name: str
    before: Measured
    after: Measured
    reason: str


@dataclass(frozen=True)
class CompressionReport(Tabular):
    """What `mw.compress` did. Print it for a table, iterate it, or take ``to_json()``.

    Attributes:
        layers: every linear layer, every convolution and everything that was gated.
        before: the whole model as it was, in evaluation; FLOPs are those of the listed layers.
        after: the whole model as it is.
        difference: the largest between outputs for the example.
    """

    layers: tuple[LayerReport, ...]
    before: Measured
    after: Measured
    difference: float

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def __getitem__(self, name: str) -> LayerReport:
        """The row of a layer, by its name."""
        for row in self.layers:
            if row.name == name:
                return row
        raise KeyError(f"CompressionReport: no layer is named {name!r}. Hint: [row.name for row in report].")

    @property
    def speedup(self) -> float:
        """How many times faster the whole model runs the example."""
        assert self.before.seconds is not None
        assert self.after.seconds is not None
        return self.before.seconds / self.after.seconds

    def to_json(self) -> str:
        """The rows and the totals as a JSON object."""
        return json.dumps({**asdict(self), "speedup": self.speedup})

    def table(self) -> Table:
        """The rows as a rich table, with a line for the whole model."""
        from rich.table import Table

        title = f"compressed: {self.speedup:.2f} × as fast, outputs within {self.difference:.1e}"
        table = Table(title=title, show_footer=True)
        whole = _cells(self.before, self.after)
        headings = ("layer", "before → after", "parameters", "bytes", "FLOPs", "time", "why")
        for heading, total in zip(headings, ("whole model", *whole, ""), strict=True):
            right = heading in headings[2:6]
            table.add_column(heading, total, justify="right" if right else "left", overflow="fold", no_wrap=right)
        for row in self.layers:
            table.add_row(row.name or "(the model)", *_cells(row.before, row.after), row.reason)
        return table


def _cells(before: Measured, after: Measured) -> tuple[str, str, str, str, str]:
    kinds = before.kind if before.kind == after.kind else f"{before.kind} → {after.kind}"
    times = "" if before.seconds is None or after.seconds is None else _arrow(before.seconds, after.seconds, _time)
    return (
        kinds,
        _arrow(before.parameters, after.parameters, _number),
        _arrow(before.bytes, after.bytes, _number),
        _arrow(before.flops, after.flops, _number),
        times,
    )


def _arrow(before: float, after: float, words: object) -> str:
    assert callable(words)
    one, two = words(before), words(after)
    return one if one == two else f"{one} → {two}"


def _number(value: float) -> str:
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {letter}"
    return f"{value:g}"


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.0f} µs"
        if seconds < 1e-3
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
    )
