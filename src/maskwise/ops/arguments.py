"""Checks of the arguments that all masked functions share: the mask and the dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.mask.checks import need_dense

__all__ = [
    "MUST",
    "Dim",
    "MaskLike",
    "check",
    "dims_of",
    "fits",
    "input_hint",
    "mask_hint",
    "need_dense",
    "need_ordered",
    "number",
    "shape_hint",
    "to_dtype",
    "wrap",
]

MaskLike: TypeAlias = Mask | torch.Tensor
Dim: TypeAlias = int | Sequence[int] | None


def check(
    op: str,
    x: torch.Tensor,  # (...)
    bits: torch.Tensor,  # bool, broadcasts to x
    name: str = "x",
) -> None:
    """Raise unless ``bits`` is a bool tensor that masks ``x``: it broadcasts to x, and is on x's device.

    Messages refer to x by ``name``.
    """
    if not isinstance(bits, torch.Tensor):
        raise DtypeError(say(op, "mask", must=MUST, got=type(bits).__name__, hint=mask_hint(bits, f"{name}.shape")))
    if not isinstance(x, torch.Tensor):
        raise DtypeError(say(op, name, must="be a tensor", got=type(x).__name__, hint=f"torch.as_tensor({name})"))
    need_dense(op, name, x)
    need_dense(op, "mask", bits)
    if bits.dtype is not torch.bool:
        raise DtypeError(say(op, "mask", must=MUST, got=bits.dtype, hint=mask_hint(bits)))
    if bits.shape != x.shape and not fits(bits.shape, x.shape):
        raise ShapeError(
            say(
                op,
                "mask",
                must=f"broadcast to {name}'s shape {tuple(x.shape)}",
                got=tuple(bits.shape),
                hint=shape_hint(tuple(bits.shape), tuple(x.shape)),
            )
        )
    if bits.device != x.device:
        raise DeviceError(
            say(op, "mask", must=f"be on {name}'s device {x.device}", got=bits.device, hint=f"mask.to({name}.device)")
        )


#: The requirement in messages about a mask.
MUST = "be a Mask or a bool tensor"


def mask_hint(mask: object, shape: str = "x.shape") -> str:
    """The hint for a value that is not a mask; ``shape`` is the expression for the shape of a full mask.

    >>> mask_hint(None), mask_hint([True])
    ('Mask.full(x.shape)', 'Mask(torch.as_tensor(mask))')
    """
    if isinstance(mask, torch.Tensor):
        return "Mask.from_attention_mask(mask) for 0 and 1, Mask.from_additive(mask) for 0 and -inf"
    return f"Mask.full({shape})" if mask is None else "Mask(torch.as_tensor(mask))"


def fits(mask: Sequence[int], x: Sequence[int]) -> bool:
    """Whether a mask of one shape broadcasts to x of another without x having to grow.

    >>> fits((1, 5), (3, 5)), fits((3, 5), (1, 5)), fits((3,), (3, 5))
    (True, False, False)
    """
    offset = len(x) - len(mask)
    return offset >= 0 and all(size in (1, x[offset + d]) for d, size in enumerate(mask))


def shape_hint(mask: tuple[int, ...], x: tuple[int, ...]) -> str:
    """The hint for a mask that does not broadcast to x.

    >>> shape_hint((8, 128), (8, 128, 64)), shape_hint((5, 3), (3, 5)), shape_hint((8, 4), (1, 4))
    ('mask[..., None]', 'mask.T', 'x.expand(8, 4)')
    >>> shape_hint((8, 128), (8, 4, 128, 128))
    'mask[:, None, None, :]'
    """
    missing = len(x) - len(mask)
    if missing > 0 and fits((*mask, *[1] * missing), x):
        return f"mask[..., {', '.join(['None'] * missing)}]"
    if missing > 0 and len(mask) == 2 and fits((mask[0], *[1] * missing, mask[1]), x):
        return f"mask[:, {', '.join(['None'] * missing)}, :]"
    if len(mask) == 2 and fits(mask[::-1], x):
        return "mask.T"
    if missing == 0 and fits(x, mask):
        return f"x.expand{mask}"
    return "sizes line up from the right, and each is x's size or 1"


def input_hint(x: torch.Tensor, features: int, name: str = "input", map: str = "layer") -> str:
    """The hint for an input whose last dim is not the number of features of a linear map.

    >>> input_hint(torch.ones(8, 3, 2, 2), 12), input_hint(torch.ones(3, 8), 3), input_hint(torch.ones(2, 3, 8), 3)
    ('input.flatten(1)', 'input.T', 'input.movedim(1, -1)')
    """
    sizes = tuple(x.shape)
    if len(sizes) > 1 and math.prod(sizes[1:]) == features:
        return f"{name}.flatten(1)"
    if features in sizes:
        moved = f"movedim({sizes.index(features)}, -1)" if len(sizes) > 2 else "T"
        return f"{name}.{moved}"
    return f"a {map} of {sizes[-1]} inputs" if sizes else f"{name}[None]"


def dims_of(op: str, x: torch.Tensor, dim: Dim) -> list[int]:
    """The dims to reduce: not negative, sorted, unique. None and an empty sequence mean all, as in torch."""
    ndim = x.dim()
    if dim is None:
        return list(range(ndim))
    if isinstance(dim, int):
        return [wrap(op, dim, ndim)]
    if not isinstance(dim, Sequence):
        must = "be None, an int or a sequence of ints"
        raise DtypeError(say(op, "dim", must=must, got=type(dim).__name__, hint="dim=-1, or dim=(0, 1)"))
    dims = sorted(wrap(op, d, ndim) for d in dim)
    if len(set(dims)) < len(dims):
        raise ArgumentError(say(op, "dim", must="not repeat a dim", got=tuple(dim), hint=f"dim={tuple(set(dims))}"))
    # A 0-d x accepts dim 0 and -1, as in torch.
    return dims or list(range(ndim))


def wrap(op: str, dim: int, ndim: int) -> int:
    """One dim, not negative."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        must = "be None, an int or a sequence of ints"
        raise DtypeError(say(op, "dim", must=must, got=type(dim).__name__, hint="dim=-1, or dim=(0, 1)"))
    bound = max(ndim, 1)
    if not -bound <= dim < bound:
        must = f"be in [-{bound}, {bound - 1}] for x of {ndim} dims"
        raise OutOfRangeError(say(op, "dim", must=must, got=dim, hint="dim=-1 for the last"))
    return dim % bound


def to_dtype(op: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """X in another dtype. Values that are not tensors are left to the checks that follow."""
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(say(op, "dtype", must="be a torch.dtype", got=repr(dtype), hint="dtype=torch.float32"))
    return x.to(dtype) if isinstance(x, torch.Tensor) else x


#: Integer dtypes without maxima, indexing and sorting in torch.
UNORDERED = (torch.uint16, torch.uint32, torch.uint64)


def need_ordered(op: str, x: torch.Tensor, *, or_bool: bool = True, or_unsigned: bool = False) -> None:
    """Raise unless the values of x can be ordered. Values that are not tensors are left to the checks that follow."""
    if not isinstance(x, torch.Tensor):
        return
    if x.dtype.is_complex:
        raise DtypeError(say(op, "x", must="be floating or integer", got=x.dtype, hint="x.abs() or x.real"))
    if x.dtype is torch.bool and not or_bool:
        raise DtypeError(say(op, "x", must="be floating or integer", got=x.dtype, hint="x.to(torch.uint8)"))
    if x.dtype in UNORDERED and not or_unsigned:
        hint = "x.long()" if x.dtype.itemsize < 8 else "x.long(), for values below 2**63"
        raise DtypeError(say(op, "x", must="have a dtype that torch can sort", got=x.dtype, hint=hint))


def number(op: str, argument: str, value: float) -> float:
    """The value, if it is a number."""
    if not isinstance(value, (int, float, complex)) or isinstance(value, bool):
        raise DtypeError(say(op, argument, must="be a number", got=type(value).__name__, hint=f"{argument}=0.0"))
    return value
