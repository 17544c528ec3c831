"""``maskwise draw``: a mask on the terminal, as JSON or as a picture."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from maskwise.cli.expressions import ExpressionError, parse_mask
from maskwise.cli.terminal import check_picture, show_picture
from maskwise.mask import Mask
from maskwise.plan.calibration import atomic_path

__all__ = ["Options", "run"]

#: The most positions that JSON lists, and that a picture shows; and the most slices of a picture.
LISTED = 1 << 16
SHOWN = 1 << 24
SLICES = 8


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    expression: str
    json: bool = False
    plot: Path | None = None
    open: bool = False


def run(options: Options) -> int:
    """Draw the mask and return the exit code: 0, or 2 for an invalid expression."""
    check_picture(options.plot, options.open)
    try:
        mask = parse_mask(options.expression)
        if options.plot is not None:
            _check_size(options.expression, mask)
    except ExpressionError as error:
        # Not wrapped: carets must stay below what they point at.
        typer.echo(f"error: {error}", err=True)
        return 2
    if options.plot is not None:
        write_picture(options.plot, mask, options.expression)
    if options.json:
        typer.echo(json_module.dumps(as_data(mask, options.expression)))
    else:
        Console().print(str(mask), markup=False, highlight=False, soft_wrap=True)
        if options.plot is not None:
            Console().print(f"wrote {options.plot}", soft_wrap=True)
    show_picture(options.plot, options.open)
    return 0


def as_data(mask: Mask, expression: str) -> dict[str, Any]:
    """The mask as plain data; positions are 1 where kept and 0 where dropped, or None if there are too many.

    >>> as_data(Mask.causal(2), "causal(2)")["positions"]
    [[1, 0], [1, 1]]
    """
    few = mask.numel() <= LISTED
    countable = mask.numel() <= SHOWN or mask.facts.count is not None
    return {
        "expression": expression,
        "shape": list(mask.shape),
        "kind": mask.facts.kind,
        "numel": mask.numel(),
        "kept": mask.count() if countable else None,
        "density": mask.density if countable and mask.numel() else None,
        "positions": mask.to_bool().int().tolist() if few else None,
    }


def write_picture(path: Path, mask: Mask, title: str) -> None:
    """Plot the mask, kept positions dark: one panel per slice, of the first few."""
    from matplotlib.figure import Figure

    bits = mask.to_bool()
    while bits.dim() < 2:
        bits = bits.unsqueeze(0)
    slices = bits.flatten(0, -3) if bits.dim() > 2 else bits.unsqueeze(0)
    shown = slices[:SLICES]
    columns = min(4, max(1, shown.shape[0]))
    rows = -(-max(1, shown.shape[0]) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.2 * rows + 0.5), layout="constrained")
    for place, cells in enumerate(shown):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.imshow(cells.numpy(), cmap="Blues", vmin=0, vmax=1.25, interpolation="nearest", aspect="equal")
        if shown.shape[0] > 1:
            axes.set_title(f"[{place}]", fontsize=9)
        axes.tick_params(labelsize=7)
    hidden = slices.shape[0] - shown.shape[0]
    figure.suptitle(f"{title}   {tuple(mask.shape)}" + (f", first {SLICES} slices" if hidden > 0 else ""), fontsize=10)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150)


def _check_size(expression: str, mask: Mask) -> None:
    if not 0 < mask.numel() <= SHOWN:
        what = f"a picture shows 1 to {SHOWN:,} positions, the mask has {mask.numel():,}"
        hint = "without --plot; the terminal shows a sample of a large mask"
        raise ExpressionError(expression, 0, len(expression), what, hint)
