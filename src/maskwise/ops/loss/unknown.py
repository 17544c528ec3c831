"""A loss that nothing is known of, such as one that a user wrote.

How it lines up is read off the shape of what it returns. Which values do it no harm cannot be known, but the kept ones
do not: so a dropped value is replaced by a copy of the first that is kept, and by 0.5 (0 for integers) if none is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.arguments import fits
from maskwise.ops.loss.call import check_device, check_mask, harmless
from maskwise.ops.loss.reference import reduce

__all__ = ["loss"]

Shape = tuple[int, ...]


def loss(
    fn: Callable[..., Any], operands: tuple[Tensor, ...], bits: Tensor, kwargs: Mapping[str, Any], reduction: str
) -> Tensor:
    """The loss of what is kept.

    Raises:
        ShapeError: the mask does not broadcast to what ``fn`` returned.
        DeviceError: the mask is on another device.
        DtypeError: ``fn`` returned no tensor, or does not take ``reduction``.
    """
    check_device(bits, operands[0])
    guess = next((shape for shape in guesses(operands, bits) if fits(bits.shape, shape)), None)
    out = run(fn, operands if guess is None else kept_only(operands, bits, guess), kwargs)
    shape = tuple(out.shape)
    check_mask(bits, shape, operands[0])
    if shape != guess:
        out = run(fn, kept_only(operands, bits, shape), kwargs)
    return reduce(harmless(out, bits, 0.0), bits, reduction)


def run(fn: Callable[..., Any], operands: Sequence[Tensor], kwargs: Mapping[str, Any]) -> Tensor:
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
        raise DtypeError(
            say(
                "loss",
                "fn",
                must="return a tensor",
                got=type(out).__name__,
                hint="lambda *args, **kwargs: fn(*args, **kwargs)[0]",
            )
        )
    return out


def guesses(operands: tuple[Tensor, ...], bits: Tensor) -> Iterator[Shape]:
    """The shapes that the unreduced loss may have, the likeliest first."""
    first, last = tuple(operands[0].shape), tuple(operands[-1].shape)
    if last in (first, without_classes(first)) or last == first[: len(last)]:
        yield last
    yield without_classes(first)
    yield first[: bits.dim()]


def without_classes(shape: Shape) -> Shape:
    """A shape without its dim 1.

    >>> without_classes((8, 10, 3)), without_classes((8,))
    ((8, 3), (8,))
    """
    return (*shape[:1], *shape[2:])


def kept_only(operands: tuple[Tensor, ...], bits: Tensor, shape: Shape) -> list[Tensor]:
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
    return [lined_up(x, keep, shape, first, flat.any(), indexed) for x in operands]


def lined_up(x: Tensor, keep: Tensor, shape: Shape, first: list[Tensor], some: Tensor, indexed: bool) -> Tensor:
    """One operand with copies of its first kept value; ``indexed`` where the target has the loss's own shape."""
    own = tuple(x.shape)
    missing = len(own) - len(shape)
    if fits(own, shape):
        # One value that serves several elements is dropped only with all of them.
        shared = [d for d, size in enumerate(shape) if d < -missing or own[d + missing] != size]
        keep = keep.any(shared, keepdim=True) if shared else keep
        keep = keep.reshape(keep.shape[-missing:])
        places = {d: first[d - missing] for d, size in enumerate(own) if size > 1}
    elif without_classes(own) == shape and (indexed or own[: len(shape)] != shape):
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
    stand_in = torch.where(some, copy, 0.5 if x.is_floating_point() else False if x.dtype is torch.bool else 0)
    return torch.where(keep, x, stand_in)
