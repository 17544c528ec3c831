"""Joins of masks, by torch's names. `Mask` carries each of these functions as a class method."""

# The first argument is the class, which the reader of a method never passes.
# ruff: noqa: D417

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.mask import views
from maskwise.mask.algebra import concatenate, same_device
from maskwise.mask.structures import Dense

if TYPE_CHECKING:
    from maskwise.mask.mask import Mask

__all__ = ["cat", "stack"]


def cat(cls: type[Mask], masks: Sequence[Mask], dim: int = 0) -> Mask:
    """Join masks along a dim that they have; length masks joined along rows stay length masks.

    >>> from maskwise import Mask
    >>> Mask.cat([Mask.from_lengths([2], 4), Mask.from_lengths([1, 3], 4)]).lengths
    tensor([2, 1, 3])

    Args:
        masks: masks of equal shape but for ``dim``.
        dim: the dim to join along.

    Raises:
        ArgumentError: there are no masks.
        ShapeError: the other dims differ.
        DeviceError: the devices differ.
        DtypeError: one is not a mask.
        OutOfRangeError: there is no such dim.

    """
    parts = _masks("Mask.cat", cls, masks)
    first = parts[0]
    dim = views.normalize_dim("Mask.cat", dim, first.ndim)
    for part in parts[1:]:
        if _without(part.shape, dim) != _without(first.shape, dim) or part.ndim != first.ndim:
            must, hint = f"agree with {tuple(first.shape)} in every dim but {dim}", "Mask.from_lengths(..., max_len=L)"
            raise ShapeError(say("Mask.cat", "masks", must=must, got=tuple(part.shape), hint=hint))
    shape = (*first.shape[:dim], sum(p.shape[dim] for p in parts), *first.shape[dim + 1 :])
    joined = concatenate([p._structure for p in parts], dim, shape)
    return cls._wrap(Dense(torch.cat([p.to_bool() for p in parts], dim)) if joined is None else joined)


def stack(cls: type[Mask], masks: Sequence[Mask], dim: int = 0) -> Mask:
    """Join masks along a new dim; this is what a DataLoader does with a batch of masks.

    >>> from maskwise import Mask
    >>> Mask.stack([Mask.from_lengths(2, 4), Mask.from_lengths(3, 4)]).lengths
    tensor([2, 3])

    Args:
        masks: masks of equal shape.
        dim: where the new dim is.

    Raises:
        ArgumentError: there are no masks.
        ShapeError: the shapes differ.
        DeviceError: the devices differ.
        DtypeError: one is not a mask.
        OutOfRangeError: there is no such dim.

    """
    parts = _masks("Mask.stack", cls, masks)
    for part in parts[1:]:
        if part.shape != parts[0].shape:
            must, hint = f"all be of shape {tuple(parts[0].shape)}", "Mask.from_lengths(..., max_len=L)"
            raise ShapeError(say("Mask.stack", "masks", must=must, got=tuple(part.shape), hint=hint))
    dim = views.normalize_dim("Mask.stack", dim, parts[0].ndim + 1)
    return cat(cls, [part.unsqueeze(dim) for part in parts], dim)


def _masks(op: str, cls: type[Mask], masks: Sequence[Mask]) -> list[Mask]:
    parts = list(masks)
    if not parts:
        raise ArgumentError(say(op, "masks", must="hold at least one mask", got="none", hint="Mask.none(shape)"))
    for part in parts:
        if not isinstance(part, cls):
            raise DtypeError(say(op, "masks", must="hold masks only", got=type(part).__name__, hint="Mask(t)"))
        if not same_device(part.device, parts[0].device):
            must = f"all be on {parts[0].device}"
            raise DeviceError(say(op, "masks", must=must, got=part.device, hint=f'mask.to("{parts[0].device}")'))
    return parts


def _without(shape: Sequence[int], dim: int) -> list[int]:
    return [size for axis, size in enumerate(shape) if axis != dim]
