"""Masks made of masks, for the pairs that no rule makes simpler."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from maskwise.mask.structures.affine import Affine
from maskwise.mask.structures.base import Structure

__all__ = ["Combination", "Not"]

_OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


@dataclass(frozen=True, eq=False)
class Combination(Structure):
    """Two structures of one shape under "and", "or" or "xor", evaluated where an answer is needed."""

    kind: ClassVar[str] = "combination"
    op: str
    left: Structure
    right: Structure

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.left.shape

    @property
    @override
    def device(self) -> torch.device:
        return self.left.device

    @property
    @override
    def along(self) -> int | None:
        if self.op != "and" or self.left.along is None or self.right.along is None:
            return None
        if self.left.along == self.right.along:
            return self.left.along
        # Whole lines that one drops leave one run of each line of the other, where its bounds are the same for a line.
        lines, rows = self._lines_and_rows()
        assert lines.along is not None
        is_same = all(b is None or b.shape[lines.along] == 1 for b in rows.bounds())
        return lines.along if is_same else None

    def _lines_and_rows(self) -> tuple[Structure, Structure]:
        """The part whose runs are along the last dim of both, and the other."""
        assert self.left.along is not None
        assert self.right.along is not None
        return (self.left, self.right) if self.left.along > self.right.along else (self.right, self.left)

    @override
    def bounds(self) -> tuple[Tensor | None, Tensor | None]:
        if self.left.along == self.right.along:
            (start, end), (other_start, other_end) = self.left.bounds(), self.right.bounds()
            return _tighter(start, other_start, torch.maximum), _tighter(end, other_end, torch.minimum)
        lines, rows = self._lines_and_rows()
        assert lines.along is not None
        assert rows.along is not None
        (start, end), (starts, ends) = rows.bounds(), lines.bounds()
        start, end, starts, ends = _on_one_device(start, end, starts, ends)
        device = next(b.device for b in (start, end, starts, ends) if b is not None)
        row = torch.arange(self.shape[rows.along], device=device).reshape((-1,) + (1,) * (-rows.along - 1))
        is_kept = torch.ones((), dtype=torch.bool, device=device)
        if start is not None:
            is_kept = is_kept & (start <= row)
        if end is not None:
            is_kept = is_kept & (row < end)
        return starts, torch.where(is_kept, self.shape[lines.along] if ends is None else ends, 0)

    @override
    def predicate(self, *index: Tensor) -> Tensor:
        return _OPERATORS[self.op](self.left.predicate(*index), self.right.predicate(*index))

    @override
    def materialize(self) -> Tensor:
        return _OPERATORS[self.op](self.left.materialize(), self.right.materialize())

    @override
    def view(self, affine: Affine) -> Structure:
        # The parts may know more about their view than a view of the whole would.
        return Combination(self.op, self.left.view(affine), self.right.view(affine))


def _tighter(a: Tensor | None, b: Tensor | None, pick: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    a, b = _on_one_device(a, b)
    assert a is not None
    assert b is not None
    return pick(a, b)


def _on_one_device(*bounds: Tensor | None) -> list[Tensor | None]:
    """Bounds that lie on the host and on a device, all on the device."""
    target = next((b.device for b in bounds if b is not None and b.device.type != "cpu"), None)
    return [b if b is None or target is None else b.to(target) for b in bounds]


@dataclass(frozen=True, eq=False)
class Not(Structure):
    """What another structure drops."""

    kind: ClassVar[str] = "not"
    base: Structure

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    @override
    def device(self) -> torch.device:
        return self.base.device

    @override
    def predicate(self, *index: Tensor) -> Tensor:
        return ~self.base.predicate(*index)

    @override
    def materialize(self) -> Tensor:
        return ~self.base.materialize()

    @override
    def view(self, affine: Affine) -> Structure:
        return self.base.view(affine).invert()

    @override
    def invert(self) -> Structure:
        return self.base

    @property
    @override
    def known_count(self) -> int | None:
        count = self.base.known_count
        return None if count is None else self.numel() - count

    @property
    @override
    def on_host(self) -> bool:
        return self.base.on_host

    @override
    def row_counts(self) -> Tensor | None:
        rows = self.base.row_counts()
        return None if rows is None else self.shape[-1] - rows
