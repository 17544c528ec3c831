"""Affine views: the map from an index of the view to an index of its base, and the functions of torch that are such."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, OutOfRangeError, ShapeError, say

__all__ = [
    "Affine",
    "Term",
    "expand",
    "is_basic",
    "normalize_dim",
    "permute",
    "reshape_ones",
    "squeeze",
    "subscript",
    "unsqueeze",
]


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
        """Map index tensors of the view to index tensors of the base."""
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


# -- views by torch's names: each takes a shape, and gives the map ----------------------------------------------------
Shape = tuple[int, ...]


def normalize_dim(op: str, dim: int, ndim: int) -> int:
    """Return ``dim`` counted from the front, or raise OutOfRangeError."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -ndim <= dim < ndim:
        must = (
            f"be an int between {-ndim} and {ndim - 1} for {ndim} dims"
            if ndim
            else "not be given for a mask of no dims"
        )
        raise OutOfRangeError(say(op, "dim", must=must, got=repr(dim), hint="dim=-1" if ndim else "mask[None]"))
    return dim % ndim


def expand(shape: Shape, to: Sequence[int]) -> Affine:
    """View ``shape`` broadcast to ``to``; -1 keeps a size."""
    new = len(to) - len(shape)
    if new < 0:
        must, hint = f"have at least the mask's {len(shape)} dims", f"mask.expand({', '.join(['-1'] * len(shape))})"
        raise ShapeError(say("Mask.expand", "sizes", must=must, got=tuple(to), hint=hint))
    sizes, terms = [], []
    for axis, wanted in enumerate(to):
        size = shape[axis - new] if axis >= new else None
        if wanted == -1 and size is None:
            hint = "a size instead of -1, which keeps the size of a dim that is there"
            raise ShapeError(say("Mask.expand", "sizes", must="not be -1 for a new dim", got=tuple(to), hint=hint))
        target = size if wanted == -1 and size is not None else wanted
        if size is not None and size not in (target, 1):
            must, hint = (
                f"keep every size of {shape} that is not 1",
                "-1 keeps one; mask[..., None] adds a dim of size 1",
            )
            raise ShapeError(say("Mask.expand", "sizes", must=must, got=tuple(to), hint=hint))
        sizes.append(target)
        if size is not None:
            terms.append(Term(0, 1, axis) if size == target else Term(0, 0, None))
    return Affine(tuple(sizes), tuple(terms))


def permute(shape: Shape, dims: Sequence[int], op: str = "Mask.permute") -> Affine:
    """View with the dims in another order."""
    order = [normalize_dim(op, d, len(shape)) for d in dims]
    if sorted(order) != list(range(len(shape))):
        must, hint = f"name each of the {len(shape)} dims once", f"mask.permute{tuple(range(len(shape)))[::-1]}"
        raise ArgumentError(say(op, "dims", must=must, got=tuple(dims), hint=hint))
    terms = [Term(0, 1, order.index(dim)) for dim in range(len(shape))]
    return Affine(tuple(shape[d] for d in order), tuple(terms))


def unsqueeze(shape: Shape, dim: int) -> Affine:
    """View with a new dim of size 1 at ``dim``."""
    dim = normalize_dim("Mask.unsqueeze", dim, len(shape) + 1)
    terms = [Term(0, 1, axis + (axis >= dim)) for axis in range(len(shape))]
    return Affine((*shape[:dim], 1, *shape[dim:]), tuple(terms))


def squeeze(shape: Shape, dim: int | Sequence[int] | None) -> Affine:
    """View without the dims of size 1, or without those of ``dim`` that are of size 1."""
    named = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {normalize_dim("Mask.squeeze", d, len(shape)) for d in named}
    return reshape_ones(shape, [s for d, s in enumerate(shape) if d not in gone or s != 1]) or _whole(shape)


def reshape_ones(shape: Shape, to: Sequence[int]) -> Affine | None:
    """View reshaped to ``to`` where that only adds or removes dims of size 1; else None."""
    real = [axis for axis, size in enumerate(to) if size != 1]
    if [shape_size for shape_size in shape if shape_size != 1] != [to[axis] for axis in real]:
        return None
    axes = iter(real)
    terms = [Term(0, 0, None) if size == 1 else Term(0, 1, next(axes)) for size in shape]
    return Affine(tuple(to), tuple(terms))


def is_basic(key: Any) -> bool:
    """Return whether an index is made of ints, slices, None and Ellipsis only, so that it is a view."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(p is None or p is ... or isinstance(p, slice) or (_is_int(p)) for p in parts)


def subscript(shape: Shape, key: Any) -> Affine:
    """View as ``mask[key]`` gives it, for a basic key."""
    parts = list(key) if isinstance(key, tuple) else [key]
    used = sum(p is not None and p is not ... for p in parts)
    if used > len(shape):
        must, hint = f"have at most {len(shape)} entries for shape {shape}", "mask[..., None] adds a dim"
        raise OutOfRangeError(say("Mask[...]", "index", must=must, got=used, hint=hint))
    if sum(p is ... for p in parts) > 1:
        raise ArgumentError(
            say("Mask[...]", "index", must="hold at most one Ellipsis", got=key, hint="mask[..., 0], or mask[:, 0, :]")
        )
    rest = [slice(None)] * (len(shape) - used)
    at = next((i for i, p in enumerate(parts) if p is ...), len(parts))
    parts[at : at + 1] = rest
    sizes: list[int] = []
    terms: list[Term] = []
    for part in parts:
        if part is None:
            sizes.append(1)
        elif isinstance(part, slice):
            start, step, size = _slice(part, shape[len(terms)])
            terms.append(Term(start, step, len(sizes)))
            sizes.append(size)
        else:
            terms.append(Term(_position(int(part), shape[len(terms)], len(terms)), 0, None))
    return Affine(tuple(sizes), tuple(terms))


def _whole(shape: Shape) -> Affine:
    return Affine(shape, tuple(Term(0, 1, axis) for axis in range(len(shape))))


def _is_int(part: Any) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)


def _slice(part: slice, size: int) -> tuple[int, int, int]:
    if part.step is not None and part.step < 1:
        raise ArgumentError(
            say(
                "Mask[...]", "step", must="be positive, as in torch", got=part.step, hint="Mask(mask.to_bool().flip(0))"
            )
        )
    # Not part.indices(size): before torch 2.13, torch.compile does not trace it.
    start, stop = _bound(part.start, 0, size), _bound(part.stop, size, size)
    step = 1 if part.step is None else part.step
    return start, step, max(0, (stop - start + step - 1) // step)


def _bound(at: int | None, default: int, size: int) -> int:
    if at is None:
        return default
    at = operator.index(at)
    return max(at + size, 0) if at < 0 else min(at, size)


def _position(index: int, size: int, dim: int) -> int:
    if not -size <= index < size:
        must = f"be between {-size} and {size - 1} in dim {dim}" if size else f"not be an int in dim {dim}, of size 0"
        hint = "-1 for the last one" if size else ":"
        raise OutOfRangeError(say("Mask[...]", "index", must=must, got=index, hint=hint))
    return index + size if index < 0 else index
