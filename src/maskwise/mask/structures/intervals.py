"""One run of kept positions per row: lengths, causal, windows, and their intersections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from maskwise.mask.structures.affine import Affine
from maskwise.mask.structures.base import Structure
from maskwise.mask.structures.constant import Constant

__all__ = ["Intervals"]


@dataclass(frozen=True, eq=False)
class Intervals(Structure):
    """Each row of the last dim keeps the positions in ``[start, end)``.

    Bounds are int64 tensors with one dim less than the mask, of size 1 where they broadcast; None means the row's own
    edge. They may lie outside of the row, and are clamped on use, because device values are never read. They may lie
    on the CPU while the mask is for another device: then facts are known without touching that device.
    """

    kind: ClassVar[str] = "intervals"
    along: ClassVar[int] = -1
    leaves: ClassVar[tuple[str, ...]] = ("starts", "ends")
    starts: Tensor | None
    ends: Tensor | None
    shape: tuple[int, ...]
    device: torch.device
    count: int | None = None

    @staticmethod
    def between(
        starts: Tensor | None,
        ends: Tensor | None,
        shape: tuple[int, ...],
        device: torch.device,
        count: int | None = None,
    ) -> Structure:
        """Return the structure for these bounds; with no bounds at all everything is kept."""
        if starts is None and ends is None:
            return Constant(shape, device, True)
        return Intervals(_aligned(starts, len(shape) - 1), _aligned(ends, len(shape) - 1), shape, device, count)

    @override
    def predicate(self, *index: Tensor) -> Tensor:
        *rows, position = index
        kept: Tensor | None = None
        for bound, is_end in ((self.starts, False), (self.ends, True)):
            if bound is not None:
                limit = _at(bound.to(position.device), rows)
                inside = position < limit if is_end else position >= limit
                kept = inside if kept is None else kept & inside
        assert kept is not None
        return kept

    @override
    def materialize(self) -> Tensor:
        position = torch.arange(self.shape[-1], device=self.device)
        kept: Tensor | None = None
        if self.ends is not None:
            kept = position < self.ends.to(self.device, non_blocking=True)[..., None]
        if self.starts is not None:
            late = position >= self.starts.to(self.device, non_blocking=True)[..., None]
            kept = late if kept is None else kept & late
        assert kept is not None
        return kept.expand(self.shape)

    @override
    def view(self, affine: Affine) -> Structure:
        start, step, axis = affine.terms[-1]
        if axis is None or axis != len(affine.shape) - 1 or step != 1:
            return super().view(affine)
        lead = Affine(affine.shape[:-1], affine.terms[:-1])
        shifted = [
            None if b is None else lead.apply(b) - start if start else lead.apply(b) for b in (self.starts, self.ends)
        ]
        same = start == 0 and affine.shape[-1] == self.shape[-1]
        repeats = affine.repeats(self.shape) if same and self.count is not None else None
        count = None if repeats is None or self.count is None else self.count * repeats
        return Intervals(shifted[0], shifted[1], affine.shape, self.device, count)

    @override
    def invert(self) -> Structure:
        count = None if self.count is None else self.numel() - self.count
        if self.starts is None:
            return Intervals(self.ends, None, self.shape, self.device, count)
        if self.ends is None:
            return Intervals(None, self.starts, self.shape, self.device, count)
        return super().invert()

    @override
    def bounds(self) -> tuple[Tensor | None, Tensor | None]:
        starts, ends = (None if b is None else b.unsqueeze(-1) for b in (self.starts, self.ends))
        return starts, ends

    @property
    @override
    def known_count(self) -> int | None:
        return self.count

    @property
    @override
    def known_prefix(self) -> bool | None:
        return True if self.starts is None else None

    @property
    @override
    def on_host(self) -> bool:
        return all(b is None or b.device.type == "cpu" for b in (self.starts, self.ends))

    @override
    def row_counts(self) -> Tensor:
        size = self.shape[-1]
        low: Tensor | int = 0 if self.starts is None else self.starts.clamp(0, size)
        high: Tensor | int = size if self.ends is None else self.ends.clamp(0, size)
        length = high - low
        assert isinstance(length, Tensor)
        return length.clamp(min=0)

    def starts_at_zero(self) -> Tensor:
        """Return, for each row, whether what it keeps is a leading run (an empty row is one)."""
        if self.starts is None:
            return torch.ones((), dtype=torch.bool)
        return (self.starts <= 0) | (self.row_counts() == 0)


def _aligned(bound: Tensor | None, ndim: int) -> Tensor | None:
    if bound is None or bound.ndim == ndim:
        return bound
    return bound.reshape((1,) * (ndim - bound.ndim) + tuple(bound.shape))


def _at(bound: Tensor, rows: list[Tensor]) -> Tensor:
    """Return a bound at the requested rows; a dim of size 1 has one answer for all of them.

    Such dims are squeezed: before torch 2.13 flex_attention traces an index of tensors alone.
    """
    key = tuple(row for size, row in zip(bound.shape, rows, strict=True) if size != 1)
    bound = bound.squeeze()
    return bound[key] if key else bound
