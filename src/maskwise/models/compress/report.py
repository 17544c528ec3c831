"""The report of `mw.compress`: of each layer and of the whole model, before and after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch import nn

from maskwise.models.compress.candidates import Times
from maskwise.models.compress.live_units import LiveConv2d, LiveLinear
from maskwise.nn import SparseLinear
from maskwise.plan.explain import Tabular

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["CompressionReport", "LayerReport", "Measured", "flops_per_position"]


@dataclass(frozen=True)
class Measured:
    """The size and the speed of a layer or a model.

    Attributes:
        kind: the class, or the form that was chosen.
        parameters: the number of elements of its parameters.
        bytes: of its state_dict, indices and masks included; shared tensors count once.
        flops: per call on the example; a multiply-add is two.
        seconds: per call on the example, the best of several; None where nothing was compared.
    """

    kind: str
    parameters: int
    bytes: int
    flops: int
    seconds: float | None

    @classmethod
    def of(cls, kind: str, module: nn.Module, flops: int, times: Times | None) -> Measured:
        """The measurements of a module."""
        parameters = sum(parameter.numel() for parameter in module.parameters())
        distinct = {(tensor.data_ptr(), tensor.shape): tensor.nbytes for tensor in module.state_dict().values()}
        return cls(kind, parameters, sum(distinct.values()), flops, None if times is None else times.best)


@dataclass(frozen=True)
class LayerReport:
    """One layer before and after, and the reason for its form."""

    name: str
    before: Measured
    after: Measured
    reason: str


@dataclass(frozen=True)
class CompressionReport(Tabular):
    """What `mw.compress` did. Print it for a table, iterate it, or take ``to_json()``.

    Attributes:
        layers: every linear layer, every convolution and every gated module.
        before: the whole model before, in evaluation; FLOPs are those of the listed layers.
        after: the whole model after.
        difference: the largest difference between outputs for the example.
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
        from rich.markup import escape
        from rich.table import Table

        title = f"compressed: {self.speedup:.2f} × as fast, outputs within {self.difference:.1e}"
        table = Table(title=title, show_footer=True)
        whole = _cells(self.before, self.after)
        headings = ("layer", "before → after", "parameters", "bytes", "FLOPs", "time", "why")
        for heading, total in zip(headings, ("whole model", *whole, ""), strict=True):
            right = heading in headings[2:6]
            table.add_column(heading, total, justify="right" if right else "left", overflow="fold", no_wrap=right)
        for row in self.layers:
            # A reason may be an error's message, with brackets which rich takes for markup.
            cells = (row.name or "(the model)", *_cells(row.before, row.after), row.reason)
            table.add_row(*map(escape, cells))
        return table


def _cells(before: Measured, after: Measured) -> tuple[str, str, str, str, str]:
    return (
        _arrow(before.kind, after.kind),
        _arrow(_number(before.parameters), _number(after.parameters)),
        _arrow(_number(before.bytes), _number(after.bytes)),
        _arrow(_number(before.flops), _number(after.flops)),
        "" if before.seconds is None or after.seconds is None else _arrow(_time(before.seconds), _time(after.seconds)),
    )


def _arrow(before: object, after: object) -> str:
    return f"{before}" if before == after else f"{before} → {after}"


def _number(value: float) -> str:
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {letter}"
    return f"{value:g}"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def flops_per_position(module: nn.Module) -> int:
    """The FLOPs of a layer per token or pixel: two per multiplied weight."""
    if isinstance(module, SparseLinear):
        return 2 * module.values.numel()
    dense = module.small if isinstance(module, LiveLinear | LiveConv2d) else module
    weight = dense._parameters.get("weight")
    return 0 if weight is None else 2 * weight.numel()
