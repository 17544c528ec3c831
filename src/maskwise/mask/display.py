"""Drawing masks: on the terminal and in notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice, product
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from maskwise.errors import StaleMaskError
from maskwise.mask.structures import Structure
from maskwise.mask.structures.affine import subscript

if TYPE_CHECKING:
    from maskwise.mask.mask import Mask

__all__ = ["html", "text"]

_ROWS, _COLUMNS = 32, 64
# In notebooks: cells along the longer dim, and along the shorter one if there are so many positions; pixels of a cell.
_CELLS, _FEWEST, _SIDE, _WIDTH = 64, 8, 16, 512
_SLICES = 2
_SAMPLES = 4
_SHADES = "·░▒▓█"
# Counting more than this only to print a density would keep the terminal waiting; it is estimated instead.
_COUNTABLE = 1 << 26


def text(mask: Mask) -> str:
    """Draw a mask with block characters: a headline, the rows with their index, and a legend."""
    try:
        lines = [_headline(mask)]
        if not _drawable(mask):
            return lines[0]
        for name, structure in islice(_slices(mask), _SLICES):
            lines += ([name] if name else []) + _rows(_sample(structure), structure.shape)
    except StaleMaskError:
        return _stale(mask)
    return "\n".join([*lines, *_more(mask), _legend(mask)])


def html(mask: Mask) -> str:
    """Draw a mask as one self-contained piece of HTML: a caption and an SVG for each slice shown."""
    # Only notebooks need it, and its table of entities takes a while to load.
    from html import escape

    try:
        parts = [f"<code>{escape(_headline(mask))}</code>"]
        if _drawable(mask):
            for name, structure in islice(_slices(mask), _SLICES):
                parts.append(f"<div>{escape(name)}</div>{_svg(_sample(structure, _square(structure.shape)))}")
            parts += [f"<div>{line}</div>" for line in _more(mask)]
    except StaleMaskError:
        parts = [f"<code>{escape(_stale(mask))}</code>"]
    return f"<div>{''.join(parts)}</div>"


def _stale(mask: Mask) -> str:
    return f"Mask {tuple(mask.shape)}  stale: its bool tensor was changed in place"


def _more(mask: Mask) -> list[str]:
    hidden = _slice_count(mask) - _SLICES
    return [f"… and {hidden} more slice{'s' if hidden > 1 else ''}"] if hidden > 0 else []


def _headline(mask: Mask) -> str:
    facts = mask.facts
    head = f"Mask {tuple(mask.shape)}  {facts.kind}"
    if mask.device.type != "cpu":
        head += f"  {mask.device}"
    if not _visible(mask):
        return head
    if facts.count is not None or mask.numel() <= _COUNTABLE or mask._structure.closed_count() is not None:
        share = f" ({mask.density:.1%})".replace("%", " %") if mask.numel() else ""
        return f"{head}  {mask.count():,} of {mask.numel():,} kept{share}"
    looks = [
        _sample(structure).mean() for _, structure in islice(_slices(mask), 0, None, ceil(_slice_count(mask) / 16))
    ]
    share = f"{float(torch.stack(looks).mean()):.0%}".replace("%", " %")
    return f"{head}  about {share} of {mask.numel():,} kept"


def _visible(mask: Mask) -> bool:
    """Return whether there are values to look at: fake and meta tensors have none."""
    tensors = mask._structure.tensors
    real = all(type(t) is Tensor and t.device.type != "meta" for t in tensors)
    return real and (mask._structure.on_host or mask.device.type != "meta")


def _drawable(mask: Mask) -> bool:
    return _visible(mask) and mask.ndim > 0 and mask.numel() > 0


def _slice_count(mask: Mask) -> int:
    return mask.shape[:-2].numel()


def _slices(mask: Mask) -> Iterator[tuple[str, Structure]]:
    """Yield each matrix of the mask with its name; a mask of one dim is a matrix of one row."""
    structure = mask._structure.to(torch.device("cpu")) if mask._structure.on_host else mask._structure
    for lead in product(*(range(size) for size in structure.shape[:-2])):
        name = f"[{', '.join(str(i) for i in lead)}]" if lead else ""
        yield name, structure.view(subscript(structure.shape, lead)) if lead else structure


def _square(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many cells to draw along each dim, so that a position is as high as wide.

    A dim that would be left with next to nothing of its positions has a few cells all the same.

    >>> _square((128, 128)), _square((3, 5)), _square((4096, 1024)), _square((8, 512))
    ((64, 64), (3, 5), (64, 16), (8, 64))
    """
    scale = ceil(max(shape) / _CELLS)
    return tuple(max(ceil(size / scale), min(size, _FEWEST)) for size in shape)


def _sample(structure: Structure, limits: tuple[int, ...] = (_ROWS, _COLUMNS)) -> Tensor:
    """Return the kept share of each cell: (rows, columns) between 0 and 1."""
    limits = limits[-len(structure.shape) :]
    positions = [_positions(size, limit) for size, limit in zip(structure.shape, limits, strict=True)]
    index = [p.flatten().to(structure.device) for p in positions]
    if len(index) == 1:
        kept = structure.predicate(index[0]).view(1, 1, *positions[0].shape)
    else:
        grid = structure.predicate(index[0][:, None], index[1][None, :])
        kept = grid.expand(len(index[0]), len(index[1])).reshape(*positions[0].shape, *positions[1].shape)
    return kept.float().mean((1, 3)).cpu()


def _positions(size: int, limit: int) -> Tensor:
    """Return which positions speak for each cell: (cells, samples)."""
    cells = min(size, limit)
    edges = torch.arange(cells + 1) * size // cells
    samples = min(_SAMPLES, ceil(size / cells))
    return edges[:-1, None] + (edges.diff()[:, None] * torch.arange(samples)) // samples


def _rows(cells: Tensor, shape: tuple[int, ...]) -> list[str]:
    drawn = ["".join(_shade(share) for share in row) for row in cells.tolist()]
    if len(shape) == 1:
        return drawn
    labels = [str(row * shape[0] // len(drawn)) for row in range(len(drawn))]
    width = len(labels[-1])
    return [f"{label:>{width}} {row}" for label, row in zip(labels, drawn, strict=True)]


def _shade(share: float) -> str:
    """Return full and empty only for a cell that is wholly so."""
    if share in (0.0, 1.0):
        return _SHADES[-1] if share else _SHADES[0]
    return _SHADES[1 + min(2, int(share * 3))]


def _legend(mask: Mask) -> str:
    shape = tuple(mask.shape[-2:]) if mask.ndim > 1 else (1, mask.shape[0])
    rows, columns = ceil(shape[0] / _ROWS), ceil(shape[1] / _COLUMNS)
    if rows == 1 and columns == 1:
        return "█ kept  · dropped"
    return f"█ kept  ▓▒░ in part  · dropped   a cell samples up to {rows} x {columns} positions"


def _svg(cells: Tensor) -> str:
    side = min(_SIDE, _WIDTH // max(cells.shape))
    height, width = cells.shape[0] * side, cells.shape[1] * side
    runs = []
    for y, row in enumerate(cells.tolist()):
        x = 0
        for share, run in groupby(row):
            length = len(list(run))
            if share:
                place = f'x="{x * side}" y="{y * side}" width="{length * side}" height="{side}"'
                runs.append(f'<rect {place} fill-opacity="{share:.2f}"/>')
            x += length
    # Lines between cells, where these are large enough to count.
    lines = "".join(f"M{x} 0V{height}" for x in range(side, width, side))
    lines += "".join(f"M0 {y}H{width}" for y in range(side, height, side))
    grid = f'<path d="{lines}" stroke="gray" stroke-opacity="0.3"/>' if lines and side == _SIDE else ""
    inside = f'x="0.5" y="0.5" width="{width - 1}" height="{height - 1}"'
    frame = f'<rect {inside} fill="none" stroke="gray"/>'
    # In the colour of the page's text, so that it is seen on a dark page too.
    size = f'width="{width}" height="{height}"'
    return f'<svg {size} fill="currentColor" shape-rendering="crispEdges">{"".join(runs)}{grid}{frame}</svg>'
