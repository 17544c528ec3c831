"""Indexing, views and moves of masks, by torch's names. `Mask` has each of these functions as a method."""

# The first argument is the mask itself, which the reader of a method never passes.
# ruff: noqa: D417

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, ShapeError, say
from maskwise.mask.checks import need_data
from maskwise.mask.structures import Constant, Dense, Intervals, affine
from maskwise.mask.structures.base import Structure, assemble, take_apart

if TYPE_CHECKING:
    from maskwise.mask.mask import Mask

__all__ = [
    "clone",
    "contiguous",
    "cpu",
    "cuda",
    "expand",
    "expand_as",
    "flatten",
    "last_two_swapped",
    "movedim",
    "permute",
    "pin_memory",
    "reshape",
    "reversed_dims",
    "size",
    "squeeze",
    "subscript",
    "to",
    "transpose",
    "unsqueeze",
]


def subscript(mask: Mask, key: Any) -> Mask:
    """Index as a bool tensor is indexed: ints, slices, None and Ellipsis are views, tensors and lists gather.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([2, 4])[:, None, :].shape
    torch.Size([2, 1, 4])

    Raises:
        OutOfRangeError: an int is outside of its dim, or there are too many.
        ArgumentError: a slice has a negative step.

    """
    if mask._bits is not None:
        return mask._wrap(Dense(_gather(mask, key)))
    if affine.is_basic(key):
        return mask._wrap(mask._structure.view(affine.subscript(mask._structure.shape, key)))
    return mask._wrap(Dense(_gather(mask, key)))


@overload
def size(mask: Mask, dim: None = None) -> torch.Size: ...
@overload
def size(mask: Mask, dim: int) -> int: ...
def size(mask: Mask, dim: int | None = None) -> torch.Size | int:
    """Return the shape, or the size of one dim.

    >>> from maskwise import Mask
    >>> Mask.causal(2, 3).size(-1)
    3

    Args:
        dim: the dim; None for the whole shape.

    Raises:
        OutOfRangeError: there is no such dim.

    """
    return mask.shape if dim is None else mask.shape[affine.normalize_dim("Mask.size", dim, mask.ndim)]


def unsqueeze(mask: Mask, dim: int) -> Mask:
    """Return a view with a new dim of size 1 at ``dim``.

    >>> from maskwise import Mask
    >>> Mask.full((2, 3)).unsqueeze(-1).shape
    torch.Size([2, 3, 1])

    Args:
        dim: where the new dim is.

    Raises:
        OutOfRangeError: there is no such dim.
    """
    return mask._wrap(mask._structure.view(affine.unsqueeze(mask._structure.shape, dim)))


def squeeze(mask: Mask, dim: int | Sequence[int] | None = None) -> Mask:
    """Return a view without the dims of size 1, or without those of ``dim`` that are of size 1.

    >>> from maskwise import Mask
    >>> Mask.full((1, 3, 1)).squeeze(0).shape
    torch.Size([3, 1])

    Args:
        dim: the dim or dims to take away; None for all of size 1.

    Raises:
        OutOfRangeError: there is no such dim.
    """
    return mask._wrap(mask._structure.view(affine.squeeze(mask._structure.shape, dim)))


def expand(mask: Mask, *sizes: int | Sequence[int]) -> Mask:
    """Return a view broadcast to ``sizes``; -1 keeps a size.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([2, 4])[:, None, :].expand(-1, 8, -1).shape
    torch.Size([2, 8, 4])

    Args:
        sizes: the new sizes, one by one or as one sequence. New dims come in front.

    Raises:
        ShapeError: a size other than 1 would change.

    """
    return mask._wrap(mask._structure.view(affine.expand(mask._structure.shape, _flat(sizes))))


def expand_as(mask: Mask, other: Tensor | Mask) -> Mask:
    """Return a view broadcast to the shape of ``other``.

    >>> import torch
    >>> from maskwise import Mask
    >>> Mask.full(4).expand_as(torch.zeros(2, 4)).shape
    torch.Size([2, 4])

    Args:
        other: a tensor or a Mask.

    Raises:
        ShapeError: a size other than 1 would change.
    """
    return expand(mask, *other.shape)


def permute(mask: Mask, *dims: int | Sequence[int]) -> Mask:
    """Return a view with the dims in the order of ``dims``.

    >>> from maskwise import Mask
    >>> Mask.full((2, 3, 4)).permute(2, 0, 1).shape
    torch.Size([4, 2, 3])

    Args:
        dims: every dim once, one by one or as one sequence.

    Raises:
        ArgumentError: a dim is missing, or named twice.
        OutOfRangeError: there is no such dim.
    """
    return mask._wrap(mask._structure.view(affine.permute(mask._structure.shape, _flat(dims))))


def transpose(mask: Mask, dim0: int, dim1: int) -> Mask:
    """Return a view with two dims swapped.

    >>> from maskwise import Mask
    >>> Mask.causal(2).transpose(0, 1).to_bool().int().tolist()
    [[1, 1], [0, 1]]

    Args:
        dim0: the one dim.
        dim1: the other.

    Raises:
        OutOfRangeError: there is no such dim.
    """
    order = list(range(mask.ndim))
    first, second = (affine.normalize_dim("Mask.transpose", d, mask.ndim) for d in (dim0, dim1))
    order[first], order[second] = order[second], order[first]
    return permute(mask, order)


def reversed_dims(mask: Mask) -> Mask:
    """The mask with its dims reversed.

    >>> from maskwise import Mask
    >>> Mask.full((2, 3)).T.shape
    torch.Size([3, 2])
    """
    return permute(mask, *reversed(range(mask.ndim)))


def last_two_swapped(mask: Mask) -> Mask:
    """The mask with its last two dims swapped.

    >>> from maskwise import Mask
    >>> Mask.full((2, 3, 4)).mT.shape
    torch.Size([2, 4, 3])
    """
    return transpose(mask, -2, -1)


def movedim(mask: Mask, source: int, destination: int) -> Mask:
    """Return a view with one dim moved to another place.

    >>> from maskwise import Mask
    >>> Mask.full((2, 3, 4)).movedim(0, -1).shape
    torch.Size([3, 4, 2])

    Args:
        source: the dim to move.
        destination: where it goes.

    Raises:
        OutOfRangeError: there is no such dim.
    """
    start, end = (affine.normalize_dim("Mask.movedim", d, mask.ndim) for d in (source, destination))
    order = [d for d in range(mask.ndim) if d != start]
    order.insert(end, start)
    return permute(mask, order)


def reshape(mask: Mask, *shape: int | Sequence[int]) -> Mask:
    """Return the mask in another shape; intervals stay intervals where the dim that they lie along keeps its size.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([2, 4]).reshape(2, 1, 4).facts.kind
    'intervals'
    >>> Mask.causal(4).expand(2, 8, 4, 4).flatten(0, 2).facts.kind
    'intervals'
    >>> Mask.from_lengths([2, 4]).reshape(-1).shape
    torch.Size([8])

    Args:
        shape: the new sizes, one by one or as one sequence; one of them may be -1.

    Raises:
        ShapeError: the number of positions would change.

    """
    old = mask._structure.shape
    sizes = list(_flat(shape))
    if sizes.count(-1) == 1:
        others = -prod(sizes)
        sizes[sizes.index(-1)] = prod(old) // others if others else 0
    if prod(sizes) != prod(old) or any(size < 0 for size in sizes):
        must = f"hold as many positions as {tuple(old)}, {prod(old)}"
        raise ShapeError(say("Mask.reshape", "shape", must=must, got=_flat(shape), hint="mask.reshape(-1)"))
    return mask._wrap(_in_shape(mask._structure, tuple(sizes)) or Dense(mask.to_bool().reshape(sizes)))


def _in_shape(structure: Structure, shape: tuple[int, ...]) -> Structure | None:
    """The structure in another shape of as many positions, without its bits; None where they are needed."""
    old = structure.shape
    view = affine.reshape_ones(old, shape)
    if view is not None:
        return structure.view(view)
    if isinstance(structure, Constant):
        return Constant(shape, structure.device, structure.value)
    if structure.along != -1 or shape[-1:] != old[-1:] or prod(shape[:-1]) != prod(old[:-1]):
        return None
    starts, ends = (
        None if b is None else b.squeeze(-1).expand(old[:-1]).reshape(shape[:-1]) for b in structure.bounds()
    )
    return Intervals.between(starts, ends, shape, structure.device, structure.known_count)


def flatten(mask: Mask, start_dim: int = 0, end_dim: int = -1) -> Mask:
    """Return the mask with the dims from ``start_dim`` to ``end_dim`` made one.

    >>> from maskwise import Mask
    >>> Mask.full((2, 3, 4)).flatten(1).shape
    torch.Size([2, 12])

    Args:
        start_dim: the first dim of those.
        end_dim: the last of them.

    Raises:
        ArgumentError: ``start_dim`` comes after ``end_dim``.
        OutOfRangeError: there is no such dim.
    """
    if not mask.ndim:
        return reshape(mask, 1)
    first, last = (affine.normalize_dim("Mask.flatten", d, mask.ndim) for d in (start_dim, end_dim))
    if first > last:
        must = f"not come after end_dim={end_dim}"
        raise ArgumentError(say("Mask.flatten", "start_dim", must=must, got=start_dim, hint="mask.flatten()"))
    shape = mask.shape
    return reshape(mask, *shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])


def to(mask: Mask, device: torch.device | str | int | Tensor) -> Mask:
    """Return the mask for another device. What was built from host data stays on the host until it is needed.

    What was counted before is not counted again there: the count moves along.

    >>> import torch
    >>> from maskwise import Mask
    >>> Mask.from_lengths([2, 4]).to("meta").count()
    6

    Args:
        device: a device, or a tensor whose device is meant.

    Raises:
        DeviceError: the mask is on the meta device, which holds no values.

    """
    target = device.device if isinstance(device, Tensor) else torch.device(device)
    if target == mask.device:
        return mask
    need_data("Mask.to", mask._local.device)
    moved = mask._wrap(mask._structure.to(target))
    moved._cache.update({name: fact for name in ("count", "is_prefix") if (fact := mask._cache.get(name)) is not None})
    return moved


def cpu(mask: Mask) -> Mask:
    """Return the mask for the CPU.

    >>> from maskwise import Mask
    >>> Mask.full(3).cpu().device
    device(type='cpu')
    """
    return to(mask, "cpu")


def cuda(mask: Mask, device: torch.device | str | int | None = None) -> Mask:
    """Return the mask for a CUDA device, by default the current one.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([2, 4]).cuda().count()
    6

    Args:
        device: which one.
    """
    return to(mask, "cuda" if device is None else device)


def pin_memory(mask: Mask) -> Mask:
    """Return the mask with its host tensors in pinned memory, as DataLoader(pin_memory=True) requires."""
    tensors, skeleton = take_apart(mask._structure)
    return mask._wrap(assemble(skeleton, [t.pin_memory() if t.device.type == "cpu" else t for t in tensors]))


def clone(mask: Mask) -> Mask:
    """Return a mask that shares no memory with this one.

    >>> import torch
    >>> from maskwise import Mask
    >>> bits = torch.tensor([True, False])
    >>> mask = Mask(bits).clone()
    >>> _ = bits.fill_(True)
    >>> mask.count()
    1
    """
    tensors, skeleton = take_apart(mask._structure)
    return mask._wrap(assemble(skeleton, [t.clone() for t in tensors]))


def contiguous(mask: Mask) -> Mask:
    """Return the mask with its bool tensor materialised and contiguous.

    >>> from maskwise import Mask
    >>> Mask.causal(3).contiguous().facts.kind
    'dense'
    """
    return mask._wrap(Dense(mask.to_bool().contiguous()))


def _gather(mask: Mask, key: Any) -> Tensor:
    """Return the bool tensor at ``key``; for a basic key that torch refuses, the message is our own."""
    parts = key if isinstance(key, tuple) else (key,)
    plain = tuple([part.to_bool() if isinstance(part, type(mask)) else part for part in parts])
    try:
        return mask.to_bool()[plain]
    except (IndexError, ValueError):
        if affine.is_basic(key):
            affine.subscript(tuple(mask.shape), key)
        raise


def _flat(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes that were given one by one, or as one sequence."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else tuple(sizes)
