"""Small bar charts as SVG, written by hand: the same numbers give the same file, which tests can compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["OTHER", "OURS", "Bar", "bars"]

OURS, OTHER = "#0072B2", "#b8bfc7"
WIDTH, LINE = 760, 24
LETTER = 6.7
"""About how wide a letter of the labels is, in pixels."""


@dataclass(frozen=True)
class Bar:
    """One bar: what it is of, how long it is, and what is written at its end."""

    label: str
    value: float
    text: str
    ours: bool = False


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return the chart: a label, a bar from zero, and the text, a line each.

    >>> chart = bars("Times", [Bar("ours", 1.0, "1 ms", ours=True), Bar("theirs", 2.0, "2 ms")])
    >>> chart.count("<rect"), chart.count("2 ms")
    (3, 1)
    """
    left = round(max(len(row.label) for row in rows) * LETTER) + 16
    room = round(max(len(row.text) for row in rows) * LETTER) + 20
    longest = max(row.value for row in rows)
    height = LINE * len(rows) + 38
    # Where all are ours, there is nothing to stand out from.
    mixed = not all(row.ours for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="20" font-family="system-ui, sans-serif" font-size="13" fill="#222222">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        top = 32 + LINE * number
        length = max(1, round((WIDTH - left - room) * row.value / longest))
        weight = ' font-weight="bold"' if row.ours and mixed else ""
        middle = top + LINE // 2 + 2
        lines += [
            f'<text x="{left - 8}" y="{middle}" text-anchor="end" fill="#222222"{weight}>{escape(row.label)}</text>',
            f'<rect x="{left}" y="{top}" width="{length}" height="{LINE - 6}" rx="2" '
            f'fill="{OURS if row.ours else OTHER}"/>',
            f'<text x="{left + length + 6}" y="{middle}" fill="#222222"{weight}>{escape(row.text)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
