"""A view of any structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from maskwise.mask.structures.affine import Affine
from maskwise.mask.structures.base import Structure
from maskwise.mask.structures.combination import Not

__all__ = ["View"]


@dataclass(frozen=True, eq=False)
class View(Structure):
    """A structure seen through an affine map of its indices; views of views are one view."""

    kind: ClassVar[str] = "view"
    base: Structure
    affine: Affine

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.affine.shape

    @property
    @override
    def device(self) -> torch.device:
        return self.base.device

    @property
    @override
    def along(self) -> int | None:
        if self.base.along is None:
            return None
        # A run stays one where the view walks its dim of the base in its own order, and nothing else with it.
        _, step, axis = self.affine.terms[self.base.along]
        if axis is None or step != 1 or sum(term.axis == axis for term in self.affine.terms) > 1:
            return None
        return axis - len(self.shape)

    @override
    def bounds(self) -> tuple[Tensor | None, Tensor | None]:
        assert self.base.along is not None
        first = self.affine.terms[self.base.along].start
        starts, ends = (None if b is None else self.affine.apply(b) - first for b in self.base.bounds())
        return starts, ends

    @override
    def predicate(self, *index: Tensor) -> Tensor:
        kept = self.base.predicate(*self.affine.index(index, self.device))
        return kept.expand(torch.broadcast_shapes(*[i.shape for i in index]))  # type: ignore[no-untyped-call]

    @override
    def materialize(self) -> Tensor:
        # Where all of the base is shown, viewing its bits is cheaper than computing every index.
        if self.affine.repeats(self.base.shape) is not None:
            return self.affine.apply(self.base.materialize()).expand(self.shape)
        return super().materialize()

    @override
    def view(self, affine: Affine) -> Structure:
        return self.base.view(self.affine.then(affine))

    @override
    def invert(self) -> Structure:
        # Only a base with a complement of its own kind is worth inverting.
        inverse = self.base.invert()
        return Not(self) if isinstance(inverse, Not) else inverse.view(self.affine)

    @property
    @override
    def known_count(self) -> int | None:
        count = self.base.known_count
        repeats = None if count is None else self.affine.repeats(self.base.shape)
        return None if repeats is None or count is None else count * repeats

    @override
    def closed_count(self) -> int | None:
        repeats = self.affine.repeats(self.base.shape)
        count = None if repeats is None else self.base.closed_count()
        return None if repeats is None or count is None else count * repeats
