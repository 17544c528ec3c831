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
