"""Affine views: how the index of a view turns into the index of what it views."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Affine", "Term"]


class Term(NamedTuple):
    """One dim of the base: its index is ``start + step * index[axis]``, or just ``start`` where axis is None."""

    start: int
    step: int
    axis: int | None


@dataclass(frozen=True)
class Affine:
    """A view as data: the shape it shows, and one Term for each dim of its base.

    Unsqueeze, expand, permute, int and slice indexing are all of this form, and so is any chain of them.

    >>> rows_of_a_matrix = Affine((3,), (Term(5, 0, None), Term(0, 2, 0)))  # matrix[5, 0:6:2]
    >>> rows_of_a_matrix.then(Affine((), (Term(1, 0, None),)))              # matrix[5, 0:6:2][1]
    Affine(shape=(), terms=(Term(start=5, step=0, axis=None), Term(start=2, step=0, axis=None)))
    """

    shape: tuple[int, ...]
    terms: tuple[Term, ...]

    def then(self, outer: Affine) -> Affine:
        """Return the one view that equals this view, viewed through ``outer``."""
        terms = []
        for start, step, axis in self.terms:
            if axis is None:
                terms.append(Term(start, 0, None))
            else:
                inner = outer.terms[axis]
                terms.append(Term(start + step * inner.start, step * inner.step, inner.axis))
        return Affine(outer.shape, tuple(terms))

    def index(self, index: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Turn index tensors of the view into index tensors of the base."""
        where = index[0].device if index else device
        out = []
        for start, step, axis in self.terms:
            if axis is None:
                out.append(torch.full((), start, dtype=torch.int64, device=where))
            elif step == 1 and start == 0:
                out.append(index[axis])
            else:
                out.append(index[axis] * step + start)
        return tuple(out)

    def apply(self, tensor: Tensor) -> Tensor:
        """View a tensor that has the base's dims, some perhaps of size 1 where it broadcasts.

        The result has the view's dims; those that nothing in the tensor depends on have size 1.
        """
        axes: list[int] = []
        for dim in reversed(range(len(self.terms))):
            start, step, axis = self.terms[dim]
            if axis is None or tensor.shape[dim] == 1:
                tensor = tensor.select(dim, 0 if tensor.shape[dim] == 1 else start)
            else:
                size = self.shape[axis]
                stop = start + step * (size - 1) + 1 if size else start
                tensor = tensor[(slice(None),) * dim + (slice(start, stop, step),)]
                axes.insert(0, axis)
        tensor = tensor.permute(sorted(range(len(axes)), key=axes.__getitem__))
        for axis in range(len(self.shape)):
            if axis not in axes:
                tensor = tensor.unsqueeze(axis)
        return tensor

    def repeats(self, base: tuple[int, ...]) -> int | None:
        """Return how often each element of the base is shown, where that is the same for all of them; else None."""
        for size, (start, step, axis) in zip(base, self.terms, strict=True):
            whole = size == 1 if axis is None else (start == 0 and step == 1 and self.shape[axis] == size)
            if not whole:
                return None
        shown = prod([self.shape[axis] for _, _, axis in self.terms if axis is not None])
        return prod(self.shape) // shown if shown else None
