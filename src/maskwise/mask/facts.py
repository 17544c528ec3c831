"""What a mask knows: counts, lengths, whether it is full, empty or a prefix."""

# The first argument of a method is the mask itself, which its reader never passes.
# ruff: noqa: D417

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, say
from maskwise.mask.checks import need_data
from maskwise.mask.structures import Indices, Intervals, Structure
from maskwise.mask.structures.affine import normalize_dim, subscript
from maskwise.ops.torch_private import is_tracing

if TYPE_CHECKING:
    from maskwise.mask.mask import Mask

__all__ = [
    "Facts",
    "all",
    "any",
    "count",
    "count_all",
    "cumulative",
    "equal",
    "facts",
    "indices",
    "is_prefix",
    "row_counts",
    "sum",
]

# Larger masks are looked at piece by piece, so that counting never takes more than this many bytes.
_PIECE = 1 << 26


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a mask at no cost: reading it computes nothing, and takes no host-device sync.

    Attributes:
        kind: the kind of structure: "dense", "constant", "intervals", "indices", "segments", "function", ...
        numel: how many positions there are.
        count: how many are kept, or None where it was not counted yet.
        is_prefix: whether each row keeps a leading run, or None where it was not computed yet.
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


def facts(mask: Mask) -> Facts:
    """Return what is known of a mask, by its structure or from its cache."""
    cache, structure = mask._cache, mask._structure
    here: Facts | None = cache.get("facts")
    if here is None:
        count, prefix = cache.get("count"), cache.get("is_prefix")
        here = Facts(
            structure.kind,
            structure.numel(),
            structure.known_count if count is None else count[0],
            structure.known_prefix if prefix is None else prefix[0],
            structure.on_host,
        )
        if not is_tracing():
            cache["facts"] = here
    return here


def cumulative(lengths: Tensor) -> Tensor:
    """Return the ends of all rows when they lie one after the other, from 0 on: int32."""
    return torch.nn.functional.pad(lengths.reshape(-1).cumsum(0), (1, 0)).to(torch.int32)


def bounds(structure: Structure) -> Tensor:
    """Return the starts and ends of a structure of intervals, as one tensor.

    >>> from maskwise import Mask
    >>> bounds(Mask.from_lengths([2, 4], max_len=5)._structure).tolist()
    [[[0], [0]], [[2], [4]]]
    """
    assert structure.along is not None
    starts, ends = structure.bounds()
    if ends is None:
        assert starts is not None
        ends = torch.full_like(starts, structure.shape[structure.along])
    if starts is None:
        starts = torch.zeros_like(ends)
    if starts.device != ends.device:
        device = starts.device if ends.device.type == "cpu" else ends.device
        starts, ends = starts.to(device), ends.to(device)
    return torch.stack(torch.broadcast_tensors(starts, ends))  # type: ignore[no-untyped-call]


def count_lines(bounds: Tensor, along: int, shape: Sequence[int], dims: list[int]) -> Tensor:
    """Return how many are kept along ``dims``, by the bounds of each line alone; counted dims have size 1.

    >>> count_lines(torch.tensor([[[0], [1]], [[2], [3]]]), -1, (2, 4), [0]).tolist()
    [[1, 2, 1, 0]]
    """
    line, size = len(shape) + along, shape[along]
    starts, ends = bounds.clamp(0, size).unbind()
    others = [d for d in dims if d != line]
    repeated = prod([shape[d] for d in others if starts.shape[d] != shape[d]])
    if line in dims:
        kept = (ends - starts).clamp(min=0)
        kept = kept.sum(others, keepdim=True) if others else kept
    else:
        # One more from each start on, and one less from each end on, of all lines that are added up.
        order = [d for d in range(len(shape)) if d != line and d not in others] + others + [line]
        sizes = [starts.shape[d] for d in order[: len(shape) - len(others) - 1]]
        starts, ends = (b.permute(order).reshape(*sizes, prod(b.shape[d] for d in others)) for b in (starts, ends))
        edges, one = starts.new_zeros((*sizes, size + 1)), torch.ones_like(starts)
        edges.scatter_add_(-1, starts, one).scatter_add_(-1, torch.maximum(starts, ends), -one)
        kept = edges.cumsum(-1).narrow(-1, 0, size).reshape(*sizes, *[1] * len(others), size)
        kept = kept.permute(sorted(range(len(shape)), key=order.__getitem__))
    return (kept * repeated).expand([1 if d in dims else s for d, s in enumerate(shape)])


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
    need_data("Mask.count", structure.device)
    closed = structure.closed_count()
    if closed is not None:
        return closed
    if not structure.shape:
        return int(structure.materialize() if bits is None else bits)
    if bits is not None:
        # Several times faster than to add up bools, which torch widens to eight bytes each.
        return int(bits.count_nonzero())
    return int(row_counts(structure, bits).sum())


def is_prefix(structure: Structure, bits: Tensor | None = None) -> bool:
    """Return whether each row keeps a leading run, which may be empty or the whole row."""
    if structure.known_prefix is not None:
        return structure.known_prefix
    need_data("Mask.is_prefix", structure.device)
    if isinstance(structure, Intervals):
        return bool(structure.starts_at_zero().all())
    if not structure.shape:
        return True
    bits = structure.materialize() if bits is None else bits
    # A leading run never changes from dropped to kept.
    return not bool((~bits[..., :-1] & bits[..., 1:]).any())


# -- the methods of Mask -----------------------------------------------------------------------------------------------


@overload
def count(mask: Mask, dim: None = None, keepdim: bool = False) -> int: ...
@overload
def count(mask: Mask, dim: int | Sequence[int], keepdim: bool = False) -> Tensor: ...
def count(mask: Mask, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> int | Tensor:
    """Return how many are kept: an int in all, or an int64 tensor along ``dim``.

    >>> from maskwise import Mask
    >>> mask = Mask.from_lengths([2, 4])
    >>> mask.count(), mask.count(0), mask.count(1, keepdim=True)
    (6, tensor([2, 2, 1, 1]), tensor([[2],
            [4]]))

    Args:
        dim: the dim or dims to count along; None for all.
        keepdim: whether counted dims stay, with size 1.

    Raises:
        OutOfRangeError: there is no such dim.
        ArgumentError: a dim is named twice.
        DeviceError: the mask is on the meta device, where nothing can be counted.
        StaleMaskError: the tensor that the mask was made of has been changed in place.

    """
    if dim is None:
        return mask._once("count", lambda: count_all(mask._local, mask._seen))
    dims = _dims("Mask.count", mask, dim)
    if not dims:
        return mask.to_bool().to(torch.int64)
    if mask._along is not None and mask.device.type == "cpu":
        along = mask._along
        total = mask._once(("count", *dims), lambda: count_lines(mask._bounds(), along, mask.shape, dims))
    elif dims[-1] == mask.ndim - 1:
        # Kept per row is often known in closed form, so the bool tensor is not needed.
        rows = mask.lengths.unsqueeze(-1)
        total = rows.sum(dims[:-1], keepdim=True) if len(dims) > 1 else rows
    else:
        total = mask.to_bool().sum(dims, keepdim=True)
    # The caller owns what is returned, so it is never the cached tensor itself.
    return total.clone() if keepdim else total.squeeze(dims).clone()


def sum(mask: Mask, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return how many are kept as an int64 tensor, as the sum of a bool tensor does; `Mask.count` returns an int.

    >>> from maskwise import Mask
    >>> mask = Mask.from_lengths([2, 4])
    >>> mask.sum(), mask.sum(-1)
    (tensor(6), tensor([2, 4]))

    Args:
        dim: the dim or dims to add up; None for all.
        keepdim: whether these dims stay, with size 1.

    Raises:
        OutOfRangeError: there is no such dim.
        ArgumentError: a dim is named twice.

    """
    dims = _dims("Mask.sum", mask, dim)
    if dims and len(dims) < mask.ndim:
        return count(mask, dims, keepdim).to(mask.device)
    if _is_on_host(mask):
        total = torch.tensor(mask.count(), dtype=torch.int64, device=mask.device)
    else:
        total = mask.to_bool().sum()
    return total.reshape((1,) * mask.ndim) if keepdim else total


def any(mask: Mask, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return whether something is kept as a bool tensor, in all or along ``dim``.

    >>> from maskwise import Mask
    >>> mask = Mask.from_lengths([2, 0], max_len=4)
    >>> mask.any(), mask.any(-1)
    (tensor(True), tensor([ True, False]))

    Args:
        dim: the dim or dims to look along; None for all.
        keepdim: whether these dims stay, with size 1.

    Raises:
        OutOfRangeError: there is no such dim.
        ArgumentError: a dim is named twice.

    """
    dims = _dims("Mask.any", mask, dim) or list(range(mask.ndim))
    if mask._bits is not None or not _is_on_host(mask):
        return mask.to_bool().any(dims, keepdim=keepdim) if dims else mask.to_bool().clone()
    return sum(mask, dims, keepdim) > 0


def all(mask: Mask, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return whether everything is kept as a bool tensor, in all or along ``dim``.

    >>> from maskwise import Mask
    >>> mask = Mask.from_lengths([2, 4])
    >>> mask.all(), mask.all(-1)
    (tensor(False), tensor([False,  True]))

    Args:
        dim: the dim or dims to look along; None for all.
        keepdim: whether these dims stay, with size 1.

    Raises:
        OutOfRangeError: there is no such dim.
        ArgumentError: a dim is named twice.

    """
    dims = _dims("Mask.all", mask, dim) or list(range(mask.ndim))
    if mask._bits is not None or not _is_on_host(mask):
        return mask.to_bool().all(dims, keepdim=keepdim) if dims else mask.to_bool().clone()
    return sum(mask, dims, keepdim) == prod([mask.shape[d] for d in dims])


def _dims(op: str, mask: Mask, dim: int | Sequence[int] | None) -> list[int]:
    """Dims, not negative, sorted and unique; none of them for None."""
    given = [] if dim is None else [dim] if isinstance(dim, int) else dim
    dims = sorted(normalize_dim(op, d, mask.ndim) for d in given)
    if len(set(dims)) < len(dims):
        hint = f"dim={tuple(sorted(set(dims)))}"
        raise ArgumentError(say(op, "dim", must="name each dim once", got=dim, hint=hint))
    return dims


def _is_on_host(mask: Mask) -> bool:
    """Whether counting takes no host-device sync, and is not to become a part of a graph."""
    return not is_tracing() and mask.facts.on_host


def indices(mask: Mask) -> Tensor:
    """Return the kept positions in order: (n,) for a mask of one dim, else (n, ndim), int64.

    >>> from maskwise import Mask
    >>> Mask.from_lengths([1, 2]).indices()
    tensor([[0, 0],
            [1, 0],
            [1, 1]])

    Raises:
        DeviceError: the mask is on the meta device, which holds no values.

    """

    def compute() -> Tensor:
        structure = mask._structure
        if isinstance(structure, Indices):
            columns = torch.unravel_index(structure.flat, structure.shape)
            found = torch.stack(columns, -1).to(mask.device, non_blocking=True)
        else:
            need_data("Mask.indices", mask._local.device)
            # On meta the positions are those of what lies on the host.
            bits = mask._local.materialize() if mask.device.type == "meta" else mask.to_bool()
            found = bits.nonzero().to(mask.device)
        return found.squeeze(-1) if mask.ndim == 1 else found

    return mask._once("indices", compute)


def equal(mask: Mask, other: Mask | Tensor) -> bool:
    """Return whether two masks have the same shape and keep the same positions; ``==`` compares each position.

    >>> from maskwise import Mask
    >>> Mask.causal(3).equal(Mask.from_lengths([1, 2, 3]))
    True

    Args:
        other: a Mask or a bool tensor.

    Raises:
        DtypeError: it is neither.
        DeviceError: it is on another device.

    """
    right = mask._coerce(other, "equal")
    return mask is right or (mask.shape == right.shape and (mask ^ right).is_empty)
