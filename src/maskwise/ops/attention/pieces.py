"""From a mask to the pieces of attention that are worth computing. All of it is work on the host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.mask.structures import Constant, Intervals, Segments, Structure, View
from maskwise.ops.attention.blocks import Piece
from maskwise.ops.attention.reference import causal

__all__ = ["Sizes", "bits_of", "pieces_of"]

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

#: How many queries a block has whose rows keep different keys.
_BLOCK = 128
#: From this many queries with the same keys on, they are a piece of their own, which needs no mask.
_RUN = 16


class Sizes(NamedTuple):
    """The sizes of an attention call."""

    batch: int
    heads: int
    queries: int
    keys: int


def pieces_of(mask: Mask | Tensor | None, is_causal: bool, sizes: Sizes) -> list[Piece]:
    """The pieces that hold everything kept, and as little else as blocks allow.

    >>> mask = Mask.from_lengths([2, 4])[:, None, None, :]
    >>> [(piece.batch, piece.rows, piece.keys) for piece in pieces_of(mask, False, Sizes(2, 8, 4, 4))]
    [((0, 1), (0, 4), (0, 2)), ((1, 2), (0, 4), (0, 4))]

    Args:
        mask: with four dims, each of size 1 or the call's, the keys always of the call's.
        is_causal: whether a query sees only the keys up to its own position, too.
        sizes: the call's.
    """
    bounds = _bounds(mask, is_causal, sizes)
    if bounds is not None:
        return list(_from_bounds(*bounds, sizes))
    bits = bits_of(mask, is_causal, sizes)
    assert bits is not None
    if bits.shape[1] == bits.shape[2] == 1:
        return list(_from_keys(bits[:, 0, 0].numpy(), sizes))
    return list(_from_bits(bits, sizes))


def bits_of(mask: Mask | Tensor | None, is_causal: bool, sizes: Sizes) -> Tensor | None:
    """What is kept as a bool tensor of four dims, each of size 1 or the call's; None for everything."""
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    if not is_causal:
        return bits
    below = causal(sizes.queries, sizes.keys, torch.device("cpu") if bits is None else bits.device)[None, None]
    return below if bits is None else bits & below


# -- one range of keys a query -----------------------------------------------------------------------------------------


def _bounds(mask: Mask | Tensor | None, is_causal: bool, sizes: Sizes) -> tuple[Ints, Ints] | None:
    """The first key and the one after the last that each query keeps, (batch or 1, queries or 1); None without such."""
    starts, ends = np.zeros((1, 1), np.int64), np.full((1, 1), sizes.keys, np.int64)
    if mask is not None:
        structure = _as_intervals(mask._structure) if isinstance(mask, Mask) else None
        if isinstance(structure, Constant):
            ends = ends if structure.value else starts
        elif isinstance(structure, Intervals) and structure.on_host:
            for bound in structure.bounds:
                if bound is not None and bound.shape[1] > 1:
                    return None
            if structure.starts is not None:
                starts = structure.starts[:, 0].numpy()
            if structure.ends is not None:
                ends = structure.ends[:, 0].numpy()
        else:
            return None
    if is_causal:
        ends = np.minimum(ends, np.arange(1, sizes.queries + 1)[None])
    starts, ends = np.broadcast_arrays(np.clip(starts, 0, sizes.keys), np.clip(ends, 0, sizes.keys))
    return starts, np.maximum(starts, ends)


def _as_intervals(structure: Structure) -> Structure:
    """Segments that stand in one run each are intervals, too."""
    if isinstance(structure, Segments):
        return structure.as_intervals() or structure
    if isinstance(structure, View) and isinstance(structure.base, Segments):
        runs = structure.base.as_intervals()
        return structure if runs is None else runs.view(structure.affine)
    return structure


def _from_bounds(starts: Ints, ends: Ints, sizes: Sizes) -> Iterator[Piece]:
    for first, last, row in _equal_batches(np.stack([starts, ends], -1), sizes):
        lo, hi = starts[row], ends[row]
        batch = (first, last)
        if len(lo) == 1:
            if lo[0] < hi[0]:
                yield Piece(batch, (0, sizes.queries), (int(lo[0]), int(hi[0])))
            continue
        for start, end in _cuts(lo, hi):
            yield from _chunk(batch, start, end, lo[start:end], hi[start:end])


def _equal_batches(rows: NDArray[Any], sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Consecutive batch entries with the same rows: the first, the one after the last, and the index of their rows."""
    if len(rows) == 1:
        yield 0, sizes.batch, 0
        return
    flat = rows.reshape(len(rows), -1)
    changes = [0, *((flat[1:] != flat[:-1]).any(1).nonzero()[0] + 1).tolist(), len(rows)]
    for first, last in pairwise(changes):
        yield first, last, first


def _cuts(lo: Ints, hi: Ints) -> list[tuple[int, int]]:
    """Ranges of queries that are best looked at together."""
    count = len(lo)
    changed = (lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1])
    edges = np.concatenate([[0], changed.nonzero()[0] + 1, [count]])
    long = np.diff(edges) >= _RUN
    cut = np.zeros(count + 1, bool)
    cut[edges[:-1]] = long
    cut[edges[1:]] |= long
    # Nothing is in common with the query before: another segment.
    cut[1:count] |= lo[1:] >= hi[:-1]
    cut[[0, count]] = True
    places = cut.nonzero()[0].tolist()
    return list(pairwise(places))


def _chunk(batch: tuple[int, int], start: int, end: int, lo: Ints, hi: Ints) -> Iterator[Piece]:
    """The pieces of queries start to end, whose keys are given."""
    same_start = bool((lo == lo[0]).all())
    if same_start and bool((hi == hi[0]).all()):
        if lo[0] < hi[0]:
            yield Piece(batch, (start, end), (int(lo[0]), int(hi[0])))
        return
    triangle = same_start and bool((hi - lo == np.arange(1, len(lo) + 1)).all())
    for first in range(0, len(lo), _BLOCK):
        last = min(first + _BLOCK, len(lo))
        low, high = lo[first:last], hi[first:last]
        keys = int(low.min()), int(high.max())
        rows = (start + first, start + last)
        if keys[0] >= keys[1]:
            continue
        if triangle and first == 0:
            yield Piece(batch, rows, keys, is_causal=True)
            continue
        place = np.arange(*keys)
        bits = (place >= low[:, None]) & (place < high[:, None])
        yield Piece(batch, rows, keys, torch.from_numpy(bits)[None, None])


# -- any keys ----------------------------------------------------------------------------------------------------------


def _from_keys(rows: NDArray[np.bool_], sizes: Sizes) -> Iterator[Piece]:
    """Every query of a batch entry keeps the same keys: (batch or 1, keys)."""
    for first, last, row in _equal_batches(rows, sizes):
        places = rows[row].nonzero()[0]
        if not len(places):
            continue
        start, end = int(places[0]), int(places[-1]) + 1
        keys = (start, end) if end - start == len(places) else torch.from_numpy(places)
        yield Piece((first, last), (0, sizes.queries), keys)


def _from_bits(bits: Tensor, sizes: Sizes) -> Iterator[Piece]:
    """Queries of a batch entry keep different keys: blocks of queries, each with the range that they keep."""
    batches = [(b, b + 1) for b in range(sizes.batch)] if bits.shape[0] > 1 else [(0, sizes.batch)]
    step = _BLOCK if bits.shape[2] > 1 else sizes.queries
    for start in range(0, sizes.queries, step):
        rows = (start, min(start + step, sizes.queries))
        strip = bits[:, :, rows[0] : rows[1]] if bits.shape[2] > 1 else bits
        some = strip.any(2).any(1).numpy()
        every = strip.all(2).all(1).numpy()
        for b, batch in enumerate(batches):
            places = some[b].nonzero()[0]
            if not len(places):
                continue
            first, last = int(places[0]), int(places[-1]) + 1
            full = bool(every[b, first:last].all())
            yield Piece(batch, rows, (first, last), None if full else strip[b : b + 1, :, :, first:last])
