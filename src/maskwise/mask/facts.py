"""What a mask knows: counts, lengths, whether it is full, empty or a prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskwise.mask.structures import Intervals, Structure
from maskwise.mask.views import subscript

__all__ = ["Facts", "count_all", "is_prefix", "row_counts"]

# Larger masks are looked at piece by piece, so that counting never takes more than this many bytes.
_PIECE = 1 << 26


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a mask at no cost: reading it computes nothing and waits for no device.

    Attributes:
        kind: the kind of structure: "dense", "constant", "intervals", "indices", "segments", "function", ...
        numel: how many positions there are.
        count: how many are kept, or None where nobody has counted yet.
        is_prefix: whether each row keeps a leading run, or None where nobody has looked yet.
        on_host: whether counting would read host memory only, never a device.

    """

    kind: str
    numel: int
    count: int | None
    is_prefix: bool | None
    on_host: bool

    @property
    def density(self) -> float | None:
        """The share that is kept, or None where it is not known."""
        return None if self.count is None or not self.numel else self.count / self.numel


def row_counts(structure: Structure, bits: Tensor | None = None) -> Tensor:
    """Return how many each row of the last dim keeps: int64, broadcastable to shape[:-1].

    It lies where the structure's own tensors lie, so for host data it is on the host.
    """
    closed = structure.row_counts()
    if closed is not None:
        return closed
    if bits is not None:
        return bits.sum(-1)
    if structure.numel() <= _PIECE or len(structure.shape) < 2:
        return structure.materialize().sum(-1)
    # Halve the first dim that can be halved; in the end every piece is small, or a single row.
    dim = next((d for d, size in enumerate(structure.shape[:-1]) if size > 1), None)
    if dim is None:
        return structure.materialize().sum(-1)
    middle = structure.shape[dim] // 2
    halves = [slice(0, middle), slice(middle, None)]
    before = (slice(None),) * dim
    pieces = [structure.view(subscript(structure.shape, (*before, half))) for half in halves]
    return torch.cat([row_counts(p).expand(p.shape[:-1]) for p in pieces], dim)


def count_all(structure: Structure, bits: Tensor | None = None) -> int:
    """Return how many positions are kept in all."""
    closed = structure.closed_count()
    if closed is not None:
        return closed
    if not structure.shape:
        return int(structure.materialize() if bits is None else bits)
    return int(row_counts(structure, bits).sum())


def is_prefix(structure: Structure, bits: Tensor | None = None) -> bool:
    """Return whether each row keeps a leading run, which may be empty or the whole row."""
    known = structure.known_prefix
    if known is not None:
        return known
    if isinstance(structure, Intervals):
        return bool(structure.starts_at_zero().all())
    if not structure.shape:
        return True
    bits = structure.materialize() if bits is None else bits
    # A leading run never turns from dropped to kept.
    return not bool((~bits[..., :-1] & bits[..., 1:]).any())
