"""The constructors of masks. `Mask` has each of these functions as a class method."""

# The first argument is the class itself, which the reader of a method never passes.
# ruff: noqa: D417

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import TypeIs

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask.checks import (
    Device,
    Shape,
    as_ints,
    as_shape,
    check_range,
    check_size,
    device_of,
    need_dense,
    readable,
)
from maskwise.mask.structures import Constant, Dense, Function, Indices, Intervals, Segments
from maskwise.ops.torch_private import is_tracing

if TYPE_CHECKING:
    from maskwise.mask.mask import Mask

__all__ = [
    "causal",
    "from_function",
    "from_indices",
    "from_lengths",
    "from_segments",
    "from_values",
    "full",
    "none",
    "random",
    "window",
]


def from_lengths(
    cls: type[Mask],
    lengths: Tensor | Sequence[Any] | int,  # (...)
    max_len: int | None = None,
    *,
    side: str = "right",
    device: Device = None,
) -> Mask:
    """Keep the first ``length`` positions of each row, or the last where the padding is on the left.

    >>> from maskwise import Mask
    >>> print(Mask.from_lengths([2, 4, 3], max_len=5))
    Mask (3, 5)  intervals  9 of 15 kept (60.0 %)
    0 ██···
    1 ████·
    2 ███··
    █ kept  · dropped

    Args:
        lengths: (...) ints, as a tensor or as lists of any nesting.
        max_len: the size of the new last dim; by default the longest length. Required for a device tensor, because
            the maximum would take a host-device sync.
        side: where the padding is: "right" or "left".
        device: where the mask is used; by default where ``lengths`` is.

    Returns:
        A mask of shape (..., max_len). Host lengths stay on the host, so its facts never touch the device. The values
        of a device tensor are not read either: they are clamped to 0..max_len.

    Raises:
        DtypeError: the lengths are not ints.
        OutOfRangeError: a length is negative or above max_len.
        ArgumentError: ``side`` is unknown, or ``max_len`` is missing or negative.

    """
    op = "Mask.from_lengths"
    if side not in ("right", "left"):
        raise ArgumentError(say(op, "side", must='be "right" or "left"', got=repr(side), hint='side="right"'))
    bounds = as_ints(op, "lengths", lengths)
    where = device_of(device, lengths)
    if max_len is None:
        if not readable(bounds):
            hint = f"{op}(lengths, max_len=tokens.shape[1])"
            raise ArgumentError(
                say(op, "max_len", must="be given when lengths is a device tensor", got=None, hint=hint)
            )
        max_len = max(0, int(bounds.max())) if bounds.numel() else 0
    check_size(op, "max_len", max_len)
    count = None
    if readable(bounds):
        check_range(op, "lengths", bounds, low=0, high=max_len, hints=("lengths.clamp(min=0)", "max_len=max(lengths)"))
        count = int(bounds.sum())
    shape = (*bounds.shape, max_len)
    if side == "left":
        return cls._wrap(Intervals(max_len - bounds, None, shape, where, count))
    return cls._wrap(Intervals(None, bounds, shape, where, count))


def from_indices(
    cls: type[Mask],
    indices: Tensor | Sequence[Any],  # (n,) or (n, ndim), a list of each row, or a tuple of a tensor a dim
    size: Shape,
    *,
    device: Device = None,
) -> Mask:
    """Keep the listed positions; ``~`` drops them.

    >>> from maskwise import Mask
    >>> Mask.from_indices([2, 5, -1], size=8).to_bool().int().tolist()
    [0, 0, 1, 0, 0, 1, 0, 1]
    >>> Mask.from_indices([[0, 0], [1, 2]], size=(2, 3)).to_bool().int().tolist()
    [[1, 0, 0], [0, 0, 1]]
    >>> Mask.from_indices([[0, 2], [1]], size=3).to_bool().int().tolist()
    [[1, 0, 1], [0, 1, 0]]

    Args:
        indices: (n,) ints where ``size`` has one dim, else (n, ndim). Negative ones count from the end, as in Python;
            any order, duplicates and none at all are fine. With an int as ``size``, also a list of lists or of tensors,
            of any lengths: the kept positions of each row. With a shape, also a tuple of one tensor for each dim, as
            ``nonzero(as_tuple=True)`` returns it.
        size: the mask's size, or its shape; for a list of rows the size of a row.
        device: where the mask is used; by default where ``indices`` is.

    Returns:
        A mask of shape ``size``; for a list of rows (rows, size). The values of a device tensor are not read, so they
        are not checked.

    Raises:
        DtypeError: the indices are not ints, or the size is neither an int nor a sequence.
        ShapeError: the indices do not have one column a dim, or rows come with a shape instead of an int.
        OutOfRangeError: an index is outside of its dim.
        ArgumentError: a size is negative.

    """
    op = "Mask.from_indices"
    shape = as_shape(op, "size", size)
    if _is_rows(indices):
        indices, shape = _points_of_rows(op, indices, size)
    elif isinstance(indices, tuple) and indices and all(hasattr(each, "dtype") for each in indices):
        indices = _points_of_columns(op, indices, shape)
    where = device_of(device, indices)
    points = as_ints(op, "indices", indices)
    if not points.numel() and points.ndim < 2:
        points = points.reshape(0, len(shape))
    elif points.ndim == 1 and len(shape) == 1:
        points = points[:, None]
    if points.ndim != 2 or points.shape[1] != len(shape):
        must = f"be (n, {len(shape)}) for a mask of {len(shape)} dims" if len(shape) != 1 else "be (n,) for one dim"
        hint = "indices.T" if points.ndim == 2 and points.shape[0] == len(shape) else "size=x.shape"
        raise ShapeError(say(op, "indices", must=must, got=tuple(points.shape), hint=hint))
    on_host = readable(points)
    flat = torch.zeros(points.shape[0], dtype=torch.int64, device=points.device)
    for dim, length in enumerate(shape):
        column = points[:, dim]
        if on_host:
            hints = (f"size={length} has positions 0 to {length - 1}", "indices[indices < size]")
            check_range(op, "indices", column, low=-length, high=length - 1, hints=hints)
        flat = flat * length + torch.where(column < 0, column + length, column)
    if on_host:
        return cls._wrap(Indices(torch.unique(flat), shape, where))
    # How many differ is not known without reading them, so duplicates are left to fall on the same bit.
    bits = torch.zeros(prod(shape), dtype=torch.bool, device=where).index_fill_(0, flat.to(where), True)
    return cls._wrap(Dense(bits.view(shape)))


def _is_rows(indices: Any) -> TypeIs[list[Any]]:
    """Whether each entry may be the indices of a row: lists, or tensors of one dim."""
    if not isinstance(indices, list) or not indices:
        return False
    return all(isinstance(each, (list, tuple)) or (isinstance(each, Tensor) and each.ndim == 1) for each in indices)


def _points_of_rows(op: str, rows: list[Any], size: Shape) -> tuple[Any, tuple[int, ...]]:
    """The points (n, 2) of rows, and the shape of their mask; with a shape as size they are points already."""
    if not isinstance(size, (int, torch.SymInt)):
        if len({len(row) for row in rows}) > 1 or any(isinstance(row, Tensor) for row in rows):
            must, hint = "be points of equal length where size is a shape", "size=x.shape[-1] for a list of each row"
            raise ShapeError(say(op, "indices", must=must, got=f"{len(rows)} lists", hint=hint))
        return rows, tuple(size)
    columns = [as_ints(op, "indices", row) for row in rows]
    for column in columns:
        if column.ndim != 1:
            must, hint = "be one list of ints for each row", "Mask.stack([Mask.from_indices(each, size), ...])"
            raise ShapeError(say(op, "indices", must=must, got=f"a row of {column.ndim} dims", hint=hint))
    lengths = torch.tensor([len(column) for column in columns])
    row = torch.repeat_interleave(torch.arange(len(columns)), lengths).to(columns[0].device)
    return torch.stack([row, torch.cat(columns)], -1), (len(rows), size)


def _points_of_columns(op: str, columns: tuple[Any, ...], shape: tuple[int, ...]) -> Tensor:
    """The points (n, ndim) of one tensor for each dim."""
    found = [
        as_ints(op, "indices", column if isinstance(column, Tensor) else torch.as_tensor(column)) for column in columns
    ]
    sizes = [tuple(column.shape) for column in found]
    if len(found) != len(shape) or len(sizes[0]) != 1 or len(set(sizes)) > 1:
        must = f"be {len(shape)} tensors of one dim and one length, one for each dim of the mask"
        raise ShapeError(say(op, "indices", must=must, got=sizes, hint="x.nonzero(as_tuple=True) with size=x.shape"))
    return torch.stack(found, -1)


def from_values(cls: type[Mask], tokens: Tensor, values: Tensor | Sequence[Any] | float) -> Mask:
    """Keep the positions where ``tokens`` is one of ``values``; ``~`` drops them.

    >>> import torch
    >>> from maskwise import Mask
    >>> Mask.from_values(torch.tensor([[101, 7, 0], [5, 0, 0]]), [0, 101]).to_bool().int().tolist()
    [[1, 0, 1], [0, 1, 1]]

    Args:
        tokens: (...) any tensor.
        values: one value, a list of them, or a tensor.

    Returns:
        A mask of the shape of ``tokens``, on its device.

    Raises:
        DtypeError: ``tokens`` is not a tensor.
        ArgumentError: ``tokens`` or ``values`` are nested or sparse.

    """
    if not isinstance(tokens, Tensor):
        hint = "torch.tensor(tokens)"
        raise DtypeError(say("Mask.from_values", "tokens", must="be a tensor", got=type(tokens).__name__, hint=hint))
    need_dense("Mask.from_values", "tokens", tokens)
    need_dense("Mask.from_values", "values", values)
    wanted = values if isinstance(values, Tensor) else torch.tensor(values, device=tokens.device)
    if not wanted.numel():
        return cls._wrap(Constant(tuple(tokens.shape), tokens.device, False))
    return cls._wrap(Dense(torch.isin(tokens, wanted.to(tokens.device))))


def from_segments(
    cls: type[Mask],
    ids: Tensor | Sequence[Any],  # (..., L)
    *,
    padding: int = -1,
    device: Device = None,
) -> Mask:
    """Let each position attend to its own segment: a block diagonal, for sequences packed into one row.

    >>> from maskwise import Mask
    >>> print(Mask.from_segments([0, 0, 1, 1, 1, -1]))
    Mask (6, 6)  segments  13 of 36 kept (36.1 %)
    0 ██····
    1 ██····
    2 ··███·
    3 ··███·
    4 ··███·
    5 ······
    █ kept  · dropped

    Args:
        ids: (..., L) ints, the segment of each position.
        padding: the id of padding, which attends to nothing and is attended to by nothing.
        device: where the mask is used; by default where ``ids`` is.

    Returns:
        A mask of shape (..., L, L) that holds the ids only, never L x L of anything.

    Raises:
        DtypeError: the ids are not ints.
        ShapeError: the ids have no dim.

    """
    op = "Mask.from_segments"
    segments = as_ints(op, "ids", ids)
    if not segments.ndim:
        raise ShapeError(say(op, "ids", must="have at least one dim", got=(), hint="ids[None]"))
    return cls._wrap(Segments(segments, device_of(device, ids), padding))


def from_function(cls: type[Mask], fn: Callable[..., Tensor], shape: Shape, device: Device = None) -> Mask:
    """Keep the positions where a function of the indices is True. It is called only when it has to be.

    >>> from maskwise import Mask
    >>> checkers = Mask.from_function(lambda row, column: (row + column) % 2 == 0, (2, 4))
    >>> checkers.to_bool().int().tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1]]

    Args:
        fn: gets one int64 index tensor a dim, which broadcast together, and returns a bool tensor that broadcasts with
            them. It must be pure, for it is called whenever and wherever the answer is needed.
        shape: the mask's shape.
        device: where the index tensors are.

    Returns:
        A mask of shape ``shape``.

    Raises:
        DtypeError: ``fn`` does not return a bool tensor, or is not a function; or the shape is neither an int nor a
            sequence.
        ArgumentError: a size is negative.

    """
    op = "Mask.from_function"
    if not callable(fn):
        raise DtypeError(say(op, "fn", must="be a function of the indices", got=type(fn).__name__, hint="Mask(fn)"))
    sizes = as_shape(op, "shape", shape)
    where = device_of(device, None)
    if prod(sizes):
        first = [torch.zeros((1,) * len(sizes), dtype=torch.int64, device=where) for _ in sizes]
        answer = fn(*first)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
            got = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
            hint = "lambda q, k: k <= q, with & for and, | for or, ~ for not"
            raise DtypeError(say(op, "fn", must="return a bool tensor", got=got, hint=hint))
    return cls._wrap(Function(fn, sizes, where))


def causal(cls: type[Mask], q: int, k: int | None = None, *, offset: int = 0, device: Device = None) -> Mask:
    """Let each query attend to the keys up to its own position, aligned at the top left as SDPA's ``is_causal``.

    >>> from maskwise import Mask
    >>> print(Mask.causal(3, 5, offset=1))
    Mask (3, 5)  intervals  9 of 15 kept (60.0 %)
    0 ██···
    1 ███··
    2 ████·
    █ kept  · dropped

    Args:
        q: how many queries there are.
        k: how many keys there are; by default as many as queries.
        offset: how many keys came before the first query, as with a cache: key <= query + offset is kept.
        device: where the mask is used.

    Returns:
        A mask of shape (q, k) that holds q ints.

    Raises:
        ArgumentError: a size is negative.
    """
    op = "Mask.causal"
    keys = q if k is None else k
    check_size(op, "q", q)
    check_size(op, "k", keys)
    where = device_of(device, None)
    ends = torch.arange(q, device=_home(where)) + (offset + 1)
    return cls._wrap(Intervals(None, ends, (q, keys), where, _triangle(q, keys, offset)))


def window(cls: type[Mask], q: int, left: int, right: int = 0, *, k: int | None = None, device: Device = None) -> Mask:
    """Let each query attend to ``left`` keys before its position, itself, and ``right`` keys after it.

    >>> from maskwise import Mask
    >>> print(Mask.window(4, left=1))
    Mask (4, 4)  intervals  7 of 16 kept (43.8 %)
    0 █···
    1 ██··
    2 ·██·
    3 ··██
    █ kept  · dropped

    Args:
        q: how many queries there are.
        left: how many keys before its own position a query attends to.
        right: how many keys after its own position a query attends to; 0 is causal.
        k: how many keys there are; by default as many as queries.
        device: where the mask is used.

    Returns:
        A mask of shape (q, k) that holds 2 q ints.

    Raises:
        ArgumentError: a size is negative.

    """
    op = "Mask.window"
    keys = q if k is None else k
    for name, value in (("q", q), ("left", left), ("right", right), ("k", keys)):
        check_size(op, name, value)
    where = device_of(device, None)
    position = torch.arange(q, device=_home(where))
    count = _band(q, keys, left, right)
    return cls._wrap(Intervals(position - left, position + (right + 1), (q, keys), where, count))


def full(cls: type[Mask], shape: Shape, device: Device = None) -> Mask:
    """Keep everything, in no memory.

    >>> from maskwise import Mask
    >>> Mask.full((1000, 1000, 1000)).count()
    1000000000

    Args:
        shape: the mask's shape.
        device: where the mask is used.

    Raises:
        DtypeError: the shape is neither an int nor a sequence.
        ArgumentError: a size is negative.
    """
    return cls._wrap(Constant(as_shape("Mask.full", "shape", shape), device_of(device, None), True))


def none(cls: type[Mask], shape: Shape, device: Device = None) -> Mask:
    """Keep nothing, in no memory.

    >>> from maskwise import Mask
    >>> Mask.none((2, 3)).to_bool().any().item()
    False

    Args:
        shape: the mask's shape.
        device: where the mask is used.

    Raises:
        DtypeError: the shape is neither an int nor a sequence.
        ArgumentError: a size is negative.
    """
    return cls._wrap(Constant(as_shape("Mask.none", "shape", shape), device_of(device, None), False))


def random(
    cls: type[Mask],
    shape: Shape,
    density: float,
    *,
    generator: torch.Generator | None = None,
    device: Device = None,
) -> Mask:
    """Keep each position with a probability of ``density``, independently of the others.

    >>> import torch
    >>> from maskwise import Mask
    >>> mask = Mask.random((1000, 1000), 0.25, generator=torch.Generator().manual_seed(0))
    >>> round(mask.density, 2)
    0.25

    Args:
        shape: the mask's shape.
        density: the probability with which a position is kept, from 0 to 1.
        generator: the generator to draw from; by default torch's own.
        device: where the mask is used; by default where the generator is.

    Raises:
        DtypeError: the shape is neither an int nor a sequence, or the density is not a number.
        ArgumentError: a size is negative, or the density is not between 0 and 1.
    """
    op = "Mask.random"
    sizes = as_shape(op, "shape", shape)
    if not isinstance(density, (int, float)) or isinstance(density, bool):
        raise DtypeError(say(op, "density", must="be a number", got=type(density).__name__, hint="density=0.5"))
    if not 0.0 <= density <= 1.0:
        hint = f"density={density / 100:g}" if 1.0 < density <= 100.0 else "density=0.5"
        raise ArgumentError(say(op, "density", must="be between 0 and 1", got=density, hint=hint))
    where = generator.device if device is None and generator is not None else device_of(device, None)
    return cls._wrap(Dense(torch.rand(sizes, generator=generator, device=where) < density))


def _home(device: torch.device) -> torch.device:
    """Return where the bounds of a mask made from plain ints live: the host, unless a graph is being traced."""
    # In a graph the bounds are computed by the compiled code, which should not copy from the host each time.
    return device if is_tracing() else torch.device("cpu")


def _triangle(q: int, k: int, offset: int) -> int | None:
    """Return how many (query, key) pairs have key <= query + offset, in closed form."""
    if is_tracing():
        return None
    # Queries see none, then one more each, then all k.
    first = min(max(-offset, 0), q)
    saturated = min(max(k - offset - 1, first), q)
    low, high = first + offset + 1, saturated + offset
    rising = (low + high) * (saturated - first) // 2
    return rising + (q - saturated) * k


def _band(q: int, k: int, left: int, right: int) -> int | None:
    """Return how many pairs lie within a window: one triangle less another."""
    outer, inner = _triangle(q, k, right), _triangle(q, k, -left - 1)
    return None if outer is None or inner is None else outer - inner
