"""``with mw.explain() as log:`` collects the plan of every call inside the block."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch

from maskwise.mask import Mask
from maskwise.plan.dispatch import Observer, Plan, Skips, is_dry_run, observers

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Call", "Log", "Tabular", "explain", "in_bytes", "kept_elements", "record"]


class Tabular:
    """A value that prints as a rich table, in notebooks as HTML: the log of `mw.explain`, and reports of models."""

    def table(self) -> Table:
        """The value as a rich table."""
        raise NotImplementedError(f"{type(self).__name__} must override table(). Hint: return rich.table.Table(...).")

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()

    def _repr_html_(self) -> str:
        """The table as plain HTML, which notebooks show: a caption, a head, the rows and a line of totals."""
        # Only notebooks need it, and its table of entities takes a while to load.
        from html import escape

        from rich.text import Text

        table = self.table()

        def row(tag: str, cells: Iterable[object]) -> str:
            found = []
            for column, cell in zip(table.columns, cells, strict=True):
                text = Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)
                found.append(f'<{tag} style="text-align: {column.justify}">{escape(text)}</{tag}>')
            return f"<tr>{''.join(found)}</tr>"

        head = row("th", (column.header for column in table.columns))
        body = "".join(row("td", cells) for cells in zip(*(column.cells for column in table.columns), strict=True))
        foot = row("th", (column.footer for column in table.columns)) if table.show_footer else ""
        caption = f"<caption>{escape(str(table.title))}</caption>" if table.title else ""
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"


@dataclass(frozen=True)
class Call:
    """One call as it was planned.

    Attributes:
        op: the function.
        shape: of x.
        dtype: of x.
        device: of x.
        mask: the structure of the mask, and its shape.
        density: the fraction that is kept, or None where it is not counted yet.
        route: the route taken.
        reason: why.
        microseconds: the predicted time; 0 where nothing can be predicted.
        elements: of x; for attention, pairs of a query and a key; for linear maps, weights.
        computed: of these, the ones that the route computes, or None where they are not counted.
        read_bytes: bytes of x that the route may read, or None where they are not counted; those of dropped elements
            are left out only where the route is guaranteed not to read them.
        skipped: elements that the route does not compute, or None where they are not counted. A dropped element is not
            necessarily skipped: a route that reads a row and ignores a part of it skips nothing.
        skipped_flops: the FLOPs this saves; None where unknown, as for a function passed to `mw.apply`.
        skipped_bytes: bytes of x that the route is guaranteed not to read.
        refused: the other routes, each with the reason why not.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    mask: str
    density: float | None
    route: str
    reason: str
    microseconds: float
    elements: int
    computed: int | None
    read_bytes: int | None
    skipped: int | None
    skipped_flops: int | None
    skipped_bytes: int | None
    refused: tuple[tuple[str, str], ...]


@dataclass
class Log(Tabular, Observer):
    """The calls recorded so far. Print it for a table, or take it as JSON."""

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
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=f"{len(self.calls)} masked call{'s' if len(self.calls) != 1 else ''}")
        for heading in ("op", "x", "mask", "route", "why", "predicted", "reads", "skips", "refused"):
            table.add_column(heading)
        for call in self.calls:
            cells = (
                call.op,
                f"{call.shape} {call.dtype} {call.device}",
                call.mask if call.density is None else f"{call.mask} {call.density:.0%} kept",
                call.route,
                call.reason,
                f"{call.microseconds:.0f} µs" if call.microseconds else "–",
                "–" if call.read_bytes is None else in_bytes(call.read_bytes),
                _skips(call),
                "; ".join(f"{route}: {reason}" for route, reason in call.refused),
            )
            # A reason may have brackets, which rich takes for markup.
            table.add_row(*map(escape, cells))
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
    planned when the graph is traced and do not appear. A log records its own context (see `contextvars`): the calls of
    its thread or asyncio task, and of tasks that are started inside of the block, not of other threads.
    """
    log = Log()
    with observers.entered(log):
        yield log


def _skips(call: Call) -> str:
    """A short description of the skipped work.

    >>> from dataclasses import replace
    >>> call = Call("sum", (4, 6), "float32", "cpu", "", None, "bare", "", 1.0, 24, 10, 40, 14, 24, 96, ())
    >>> _skips(call)
    '58 % (14 of 24 elements), 24 FLOPs, 96 bytes'
    >>> _skips(replace(call, skipped=0, skipped_flops=0, skipped_bytes=0))
    'nothing'
    >>> _skips(replace(call, skipped=None, skipped_flops=2_500_000, skipped_bytes=None))
    'elements not counted, 2.5 MFLOPs'
    """
    if call.skipped == 0 and not call.skipped_bytes:
        return "nothing"
    parts = ["elements not counted"]
    if call.skipped is not None:
        share = 100 * call.skipped // max(call.elements, 1)
        parts = [f"{share} % ({call.skipped:,} of {call.elements:,} elements)"]
    if call.skipped_flops is not None:
        parts.append(f"{_short(call.skipped_flops)}FLOPs")
    if call.skipped_bytes is not None:
        parts.append(in_bytes(call.skipped_bytes))
    return ", ".join(parts)


def in_bytes(number: int) -> str:
    """A number of bytes.

    >>> in_bytes(96), in_bytes(2_500_000)
    ('96 bytes', '2.5 MB')
    """
    short = _short(number)
    return f"{short}bytes" if number < 1000 else f"{short}B"


def _short(number: int) -> str:
    """A number with an SI prefix.

    >>> _short(999), _short(2_500_000)
    ('999 ', '2.5 M')
    """
    for size, prefix in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number} "


def kept_elements(x: torch.Tensor, mask: object) -> int | None:
    """How many elements of x a mask keeps, or None where that is not known: no bool tensor is counted for it.

    >>> kept_elements(torch.ones(2, 4, 3), Mask.from_lengths([1, 3], max_len=4)[..., None])
    12
    """
    if not isinstance(mask, Mask):
        return None
    count = mask.facts.count
    if count is None and mask.operand == "intervals" and mask.device.type == "cpu":
        # The bounds of each line are enough.
        count = mask.count()
    # Counts repeat along the dims that the mask broadcasts over.
    return None if count is None else count * (x.numel() // max(mask.numel(), 1))


def record(
    plan: Plan, x: torch.Tensor, mask: object, *, skipped: int | None = None, skipped_bytes: int | None = None
) -> Plan | None:
    """Record one call in every open log, or return its plan in a dry run (see `mw.plan`).

    Args:
        plan: the plan of the call; its `Skips` decide what is reported as skipped.
        x: the input.
        mask: its mask.
        skipped: elements that are not computed, where that is not every dropped one.
        skipped_bytes: bytes that are not read, where that is not the bytes of the skipped elements of x.
    """
    if is_dry_run():
        return plan
    if isinstance(mask, Mask):
        kept, facts = kept_elements(x, mask), mask.facts
        described, density = f"{facts.kind} {tuple(mask.shape)}", facts.density
        dropped = None if kept is None else x.numel() - kept
    else:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else ()
        described = f"bool tensor {shape}" if isinstance(mask, torch.Tensor) else "none"
        dropped = density = None
    if plan.skips is Skips.NOTHING:
        skipped = skipped_bytes = 0
    elif skipped is None:
        skipped = dropped
    if skipped_bytes is None:
        by_size = None if skipped is None else skipped * x.element_size()
        skipped_bytes = by_size if plan.skips is Skips.READING else 0
    flops = 0 if skipped == 0 else None if skipped is None or plan.flops is None else skipped * plan.flops
    call = Call(
        op=plan.op,
        shape=tuple(x.shape),
        dtype=str(x.dtype).removeprefix("torch."),
        device=str(x.device),
        mask=described,
        density=density,
        route=plan.route,
        reason=plan.reason,
        microseconds=plan.microseconds,
        elements=x.numel(),
        computed=None if skipped is None else x.numel() - skipped,
        read_bytes=None if skipped_bytes is None else x.numel() * x.element_size() - skipped_bytes,
        skipped=skipped,
        skipped_flops=flops,
        skipped_bytes=skipped_bytes,
        refused=tuple((refusal.route, refusal.reason) for refusal in plan.refused),
    )
    for observer in observers.values():
        if isinstance(observer, Log):
            observer.calls.append(call)
    return None
