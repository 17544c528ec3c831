"""Checks the arguments that every masked function has in common: the mask and the dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError, say
from maskwise.mask import Mask

__all__ = ["Dim", "MaskLike", "check", "dims_of"]

MaskLike: TypeAlias = Mask | torch.Tensor
Dim: TypeAlias = int | Sequence[int] | None


def check(
    op: str,
    x: torch.Tensor,  # (...)
    bits: torch.Tensor,  # bool, broadcasts to x
) -> None:
    """Raise unless ``bits`` is a bool tensor that masks ``x``: it broadcasts to x, and is on x's device."""
    if not isinstance(bits, torch.Tensor):
        hint = "Mask.full(x.shape)" if bits is None else "Mask(torch.as_tensor(mask))"
        raise DtypeError(say(op, "mask", must="be a Mask or a bool tensor", got=type(bits).__name__, hint=hint))
    if not isinstance(x, torch.Tensor):
        raise DtypeError(say(op, "x", must="be a tensor", got=type(x).__name__, hint="torch.as_tensor(x)"))
    if x.layout is not torch.strided or bits.layout is not torch.strided:
        name, tensor = ("x", x) if x.layout is not torch.strided else ("mask", bits)
        raise ArgumentError(say(op, name, must="be a dense tensor", got=tensor.layout, hint=f"{name}.to_dense()"))
    if bits.dtype is not torch.bool:
        hint = "mask.bool(), Mask.from_attention_mask(mask) or Mask.from_additive(mask)"
        raise DtypeError(say(op, "mask", must="be a Mask or a bool tensor", got=bits.dtype, hint=hint))
    if bits.shape != x.shape and not fits(bits.shape, x.shape):
        raise ShapeError(
            say(
                op,
                "mask",
                must=f"broadcast to x's shape {tuple(x.shape)}",
                got=tuple(bits.shape),
                hint=shape_hint(tuple(bits.shape), tuple(x.shape)),
            )
        )
    if bits.device != x.device:
        raise DeviceError(
            say(op, "mask", must=f"be on x's device {x.device}", got=bits.device, hint="mask.to(x.device)")
        )


def fits(mask: Sequence[int], x: Sequence[int]) -> bool:
    """Whether a mask of one shape broadcasts to x of another without x having to grow.

    >>> fits((1, 5), (3, 5)), fits((3, 5), (1, 5)), fits((3,), (3, 5))
    (True, False, False)
    """
    offset = len(x) - len(mask)
    return offset >= 0 and all(size in (1, x[offset + d]) for d, size in enumerate(mask))


def shape_hint(mask: tuple[int, ...], x: tuple[int, ...]) -> str:
    """What to write instead when a mask of one shape meets x of another.

    >>> shape_hint((8, 128), (8, 128, 64)), shape_hint((5, 3), (3, 5)), shape_hint((8, 4), (1, 4))
    ('mask[..., None]', 'mask.T', 'x.expand(8, 4)')
    """
    missing = len(x) - len(mask)
    if missing > 0 and fits((*mask, *[1] * missing), x):
        return f"mask[..., {', '.join(['None'] * missing)}]"
    if len(mask) == 2 and fits(mask[::-1], x):
        return "mask.T"
    if missing == 0 and fits(x, mask):
        return f"x.expand{mask}"
    return "sizes line up from the right, and each is x's size or 1"


def dims_of(op: str, x: torch.Tensor, dim: Dim) -> list[int]:
    """The dims to reduce: not negative, sorted, each once. None, and an empty sequence, stand for all, as in torch."""
    ndim = x.dim()
    if dim is None:
        return list(range(ndim))
    if isinstance(dim, int):
        return [wrap(op, dim, ndim)]
    if not isinstance(dim, Sequence):
        raise DtypeError(say(op, "dim", must="be None, an int or a sequence of ints", got=type(dim).__name__))
    dims = sorted(wrap(op, d, ndim) for d in dim)
    if len(set(dims)) < len(dims):
        raise ArgumentError(say(op, "dim", must="name each dim once", got=tuple(dim), hint=f"dim={tuple(set(dims))}"))
    # x of no dims has one value; torch calls it dim 0 as well as dim -1.
    return dims or list(range(ndim))


def wrap(op: str, dim: int, ndim: int) -> int:
    """One dim, not negative."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise DtypeError(say(op, "dim", must="be None, an int or a sequence of ints", got=type(dim).__name__))
    bound = max(ndim, 1)
    if not -bound <= dim < bound:
        raise OutOfRangeError(say(op, "dim", must=f"be in [-{bound}, {bound - 1}] for x of {ndim} dims", got=dim))
    return dim % bound
