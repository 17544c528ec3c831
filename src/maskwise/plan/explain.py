"""``with mw.explain() as log:`` collects the plan of every call inside the block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch

from maskwise.mask import Mask
from maskwise.plan.tabular import Tabular

if TYPE_CHECKING:
    from rich.table import Table

    from maskwise.plan.plan import Plan

__all__ = ["Call", "Log", "explain"]

#: The logs that listen now. Almost always empty, so that a call costs one truth test.
listeners: list[Log] = []


@dataclass(frozen=True)
class Call:
    """One call as it was planned."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    mask: str
    route: str
    reason: str
    microseconds: float
    elements: int
    skipped: int | None
    refused: tuple[tuple[str, str], ...]


@dataclass
class Log(Tabular):
    """The calls seen so far. Print it for a table, or take it as JSON."""

    calls: list[Call] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def to_json(self) -> str:
        """The calls as a JSON array of objects."""
        return json.dumps([asdict(call) for call in self.calls])

    def table(self) -> Table:
        """The calls as a rich table."""
        from rich.table import Table

        table = Table(title=f"{len(self.calls)} masked call{'s' if len(self.calls) != 1 else ''}")
        for heading in ("op", "x", "mask", "route", "why", "predicted", "skipped", "refused"):
            table.add_column(heading)
        for call in self.calls:
            table.add_row(
                call.op,
                f"{call.shape} {call.dtype} {call.device}",
                call.mask,
                call.route,
                call.reason,
                f"{call.microseconds:.0f} µs",
                "unknown" if call.skipped is None else f"{call.skipped:,} of {call.elements:,}",
                "; ".join(f"{route}: {reason}" for route, reason in call.refused),
            )
        return table


@contextmanager
def explain() -> Iterator[Log]:
    """Collect the plan of every masked call made inside the block.

    >>> import torch, maskwise as mw
    >>> x, mask = torch.ones(2, 3), torch.tensor([True, False, True])
    >>> with mw.explain() as log:
    ...     total = mw.sum(x, mask)
    >>> [(call.op, call.shape) for call in log]
    [('sum', (2, 3))]

    Returns a `Log`: iterate it, print it for a table, or take ``log.to_json()``. Calls inside a compiled graph are
    planned when the graph is traced and do not appear.
    """
    log = Log()
    listeners.append(log)
    try:
        yield log
    finally:
        # By identity: two empty logs are equal.
        listeners[:] = [other for other in listeners if other is not log]


def record(plan: Plan, x: torch.Tensor, mask: object) -> None:
    """Tell every listening log of one call."""
    if isinstance(mask, Mask):
        known = mask.facts
        described, kept = f"{known.kind} {tuple(mask.shape)}", known.count
        # Kept places repeat along the dims that the mask broadcasts over.
        repeated = x.numel() // max(mask.numel(), 1)
        skipped = None if kept is None else x.numel() - kept * repeated
    else:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else ()
        described, skipped = f"bool tensor {shape}", None
    call = Call(
        op=plan.op,
        shape=tuple(x.shape),
        dtype=str(x.dtype).removeprefix("torch."),
        device=str(x.device),
        mask=described,
        route=plan.route,
        reason=plan.reason,
        microseconds=plan.microseconds,
        elements=x.numel(),
        skipped=skipped,
        refused=tuple((refusal.route, refusal.reason) for refusal in plan.refused),
    )
    for log in listeners:
        log.calls.append(call)
