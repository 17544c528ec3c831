"""The masked loss in plain torch operations: the ground truth of the tests, and the route that works everywhere.

What is dropped is replaced before the loss sees it, and what the loss makes of the replacement is replaced by 0: so
nothing comes through in either direction, whatever the loss does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.arguments import fits
from maskwise.ops.loss.functional_losses import LossSpec, Prepared, align, check_device, check_mask
from maskwise.ops.primitives import where_kept

__all__ = ["UNDIVIDED", "loss", "mean_of_rows", "reduce", "row_dims", "scales", "sum_of_row_means", "user_loss"]

#: The reductions in which no weight of an element or a class divides.
UNDIVIDED = ("none", "sum", "batchmean")
Shape: TypeAlias = tuple[int, ...]


def loss(prepared: Prepared, operands: tuple[Tensor, ...], bits: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """The loss of what is kept."""
    aligned = align(prepared.fn, prepared.spec, operands, bits, kwargs)
    tensors = aligned.filled()
    out = where_kept(aligned.run(tensors), aligned.keep, 0.0)
    divisors = None if prepared.reduction in UNDIVIDED else aligned.divisors(tensors)
    return reduce(out, aligned.keep, prepared.reduction, divisors)


# -- reductions --------------------------------------------------------------------------------------------------------
def reduce(
    out: Tensor,  # (...), 0 where dropped
    keep: Tensor,  # bool, broadcasts to out
    reduction: str,
    divisors: Tensor | None = None,  # like out: by what each element counts in a mean
) -> Tensor:
    """The unreduced loss, reduced. Where nothing is kept it is 0, and so is its gradient."""
    if reduction == "none":
        return out
    if reduction == "sum":
        return out.sum()
    # Sums of many halves do not fit a half, their means do.
    wide = torch.promote_types(out.dtype, torch.float32)
    if reduction == "batchmean":
        return (out.sum(dtype=wide) / _count_kept_rows(keep, out.shape).clamp(min=1)).to(out.dtype)
    counts = _count(keep, out.shape, divisors, rows=reduction == "sequence")
    if reduction == "sequence":
        return mean_of_rows(out, counts)
    result = out.sum(dtype=wide) / counts.where(counts != 0, 1)
    return result.to(out.dtype) if out.is_floating_point() else result


def mean_of_rows(out: Tensor, counts: Tensor) -> Tensor:
    """The mean of each row of the unreduced loss, (N, ...), and then of the rows that keep something.

    ``counts``, (N,), are by how much each row is divided.
    """
    result = _row_means(out, counts).sum() / (counts != 0).sum().clamp(min=1)
    return result.to(out.dtype) if out.is_floating_point() else result


def _row_means(out: Tensor, counts: Tensor) -> Tensor:
    """The mean of each row, in float32 or better."""
    wide = torch.promote_types(out.dtype, torch.float32)
    sums = out.sum(row_dims(out.shape), dtype=wide) if out.dim() > 1 else out.to(wide)
    return sums / counts.where(counts != 0, 1)


def sum_of_row_means(
    spec: LossSpec | None,
    fn: Callable[..., Any],
    operands: tuple[Tensor, ...],
    bits: Tensor,
    kwargs: Mapping[str, Any],
    out: Tensor,  # (N, ...), 0 where dropped
) -> Tensor:
    """The mean of each row of the unreduced loss, summed over rows; a function of one's own has no ``spec``."""
    keep, divisors = bits, None
    if spec is not None:
        aligned = align(fn, spec, operands, bits, kwargs, warns=False)
        keep = aligned.keep
        divisors = aligned.divisors(aligned.filled()) if "weight" in kwargs else None
    counts = _count(keep, out.shape, divisors, rows=True)
    return _row_means(out, counts).sum()


def scales(keep: Tensor, shape: Sequence[int], reduction: str, divisors: Tensor | None) -> Tensor:
    """By what each element of the loss enters the result: one number, or one for each row, (N,).

    "row means", of which "sequence" is the mean, are summed.
    """
    one = torch.ones((), dtype=torch.float64, device=keep.device)
    if reduction in ("none", "sum"):
        return one
    if reduction == "batchmean":
        return one / _count_kept_rows(keep, shape).clamp(min=1)
    counts = _count(keep, shape, divisors, rows=reduction != "mean")
    each = one / counts.where(counts != 0, 1)
    if reduction == "mean":
        return each
    each = where_kept(each, counts != 0, 0.0)
    return each if reduction == "row means" else each / (counts != 0).sum().clamp(min=1)


def _count(keep: Tensor, shape: Sequence[int], divisors: Tensor | None, rows: bool) -> Tensor:
    """How many are kept, or how much they weigh: in all, or in each row."""
    if divisors is not None:
        held = where_kept(divisors, keep, 0.0)
    elif rows:
        held = keep.expand(shape)
    else:
        return keep.sum() * (prod(shape) // max(keep.numel(), 1))
    if rows:
        return held.sum(row_dims(shape)) if len(shape) > 1 else held.to(torch.promote_types(held.dtype, torch.uint8))
    return held.sum()


def _count_kept_rows(keep: Tensor, shape: Sequence[int]) -> Tensor:
    """How many rows, which are the indices of dim 0, keep something."""
    keep = keep.reshape((1,) * (len(shape) - keep.dim()) + tuple(keep.shape))
    rows = keep.reshape(keep.shape[0], -1).any(1) if keep.dim() else keep.reshape(1)
    # A mask that all rows share is looked at once.
    return rows.sum() * (shape[0] if shape and keep.shape[0] == 1 else 1)


def row_dims(shape: Sequence[int]) -> tuple[int, ...]:
    """The dims within a row: all but the first."""
    return tuple(range(1, len(shape)))


# -- users' own losses -------------------------------------------------------------------------------------------------
# How such a loss lines up is read off the shape of what it returns. Which values it can take is not known, but it takes
# the kept ones: so a dropped value is replaced by a copy of the first that is kept, and by 0.5 (0 for integers) if none
# is.
def user_loss(
    fn: Callable[..., Any], operands: tuple[Tensor, ...], bits: Tensor, kwargs: Mapping[str, Any], reduction: str
) -> Tensor:
    """The loss over kept elements, by an arbitrary function.

    Raises:
        ShapeError: the mask does not broadcast to what ``fn`` returned.
        DeviceError: the mask is on another device.
        DtypeError: ``fn`` returned no tensor, or does not take ``reduction``.
    """
    check_device(bits, operands[0])
    guess = next((shape for shape in _guesses(operands, bits) if fits(bits.shape, shape)), None)
    out = _run(fn, operands if guess is None else _copies_of_kept(operands, bits, guess), kwargs)
    shape = tuple(out.shape)
    check_mask(bits, shape, operands[0])
    if shape != guess:
        out = _run(fn, _copies_of_kept(operands, bits, shape), kwargs)
    return reduce(where_kept(out, bits, 0.0), bits, reduction)


def _run(fn: Callable[..., Any], operands: Sequence[Tensor], kwargs: Mapping[str, Any]) -> Tensor:
    """The unreduced loss."""
    try:
        out = fn(*operands, reduction="none", **kwargs)
    except TypeError as error:
        if "reduction" not in str(error):
            raise
        hint = 'F.cross_entropy instead of nn.CrossEntropyLoss(), or def fn(input, target, reduction="none")'
        must = 'be a function that takes reduction="none"'
        got = getattr(fn, "__name__", type(fn).__name__)
        raise DtypeError(say("loss", "fn", must=must, got=f"{got}: {error}", hint=hint)) from error
    if not isinstance(out, Tensor):
        hint = "lambda *args, **kwargs: fn(*args, **kwargs)[0]"
        raise DtypeError(say("loss", "fn", must="return a tensor", got=type(out).__name__, hint=hint))
    return out


def _guesses(operands: tuple[Tensor, ...], bits: Tensor) -> Iterator[Shape]:
    """The shapes that the unreduced loss may have, the likeliest first."""
    first, last = tuple(operands[0].shape), tuple(operands[-1].shape)
    if last in (first, _without_classes(first)) or last == first[: len(last)]:
        yield last
    yield _without_classes(first)
    yield first[: bits.dim()]


def _without_classes(shape: Shape) -> Shape:
    """A shape without its dim 1.

    >>> _without_classes((8, 10, 3)), _without_classes((8,))
    ((8, 3), (8,))
    """
    return (*shape[:1], *shape[2:])


def _copies_of_kept(operands: tuple[Tensor, ...], bits: Tensor, shape: Shape) -> list[Tensor]:
    """The operands, with copies of what is kept in the place of what is dropped."""
    keep = bits.expand(shape)
    flat = keep.reshape(-1)
    if flat.numel() == 0:
        return list(operands)
    place = flat.to(torch.uint8).argmax().reshape(1)
    first: list[Tensor] = []
    for size in reversed(shape):
        first.insert(0, place % size)
        place = place // size
    indexed = tuple(operands[-1].shape) == shape
    return [_copy_kept(x, keep, shape, first, flat.any(), indexed) for x in operands]


def _copy_kept(x: Tensor, keep: Tensor, shape: Shape, first: list[Tensor], some: Tensor, indexed: bool) -> Tensor:
    """One operand with copies of its first kept value; ``indexed`` where the target has the loss's own shape."""
    own = tuple(x.shape)
    missing = len(own) - len(shape)
    if fits(own, shape):
        # One value that serves several elements is dropped only with all of them.
        shared = [d for d, size in enumerate(shape) if d < -missing or own[d + missing] != size]
        keep = keep.any(shared, keepdim=True) if shared else keep
        keep = keep.reshape(keep.shape[-missing:])
        places = {d: first[d - missing] for d, size in enumerate(own) if size > 1}
    elif _without_classes(own) == shape and (indexed or own[: len(shape)] != shape):
        keep = keep.unsqueeze(1)
        places = {d + (d > 0): place for d, place in enumerate(first)}
    elif own[: len(shape)] == shape:
        keep = keep.reshape(*shape, *[1] * missing)
        places = dict(enumerate(first))
    else:
        # It does not line up with the loss, so no part of it is under the mask.
        return x
    copy = x.detach()
    for dim, place in places.items():
        copy = copy.index_select(dim, place)
    copy = torch.where(some, copy, 0.5 if x.is_floating_point() else False if x.dtype is torch.bool else 0)
    return torch.where(keep, x, copy)
