"""How a mask lines up with x on a selection: as indexing does, not as broadcasting does."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from maskwise.errors import DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, fits, mask_hint, need_dense

__all__ = ["as_mask", "is_layout", "line_up"]


def as_mask(op: str, mask: Any) -> Mask:
    """The mask as a Mask."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        return Mask(mask)
    got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    raise DtypeError(say(op, "mask", must=MUST, got=got, hint=mask_hint(mask)))


def line_up(
    op: str,
    x: Tensor,  # (*lead, *rest)
    mask: MaskLike,
) -> Mask:
    """The mask over x's leading dims. One with as many dims as x may broadcast, and then selects single elements."""
    if not isinstance(x, Tensor):
        raise DtypeError(say(op, "x", must="be a tensor", got=type(x).__name__, hint="torch.as_tensor(x)"))
    need_dense(op, "x", x)
    need_dense(op, "mask", mask)
    lead = mask if isinstance(mask, Mask) else as_mask(op, mask)
    device, wanted = lead.device, x.device
    if device != wanted:
        if device.index is not None or device.type != wanted.type:
            raise DeviceError(say(op, "mask", must=f"be on x's device {wanted}", got=device, hint="mask.to(x.device)"))
        # A mask for "cuda" is for any CUDA device.
        lead = lead.to(wanted)
    if lead.shape == x.shape:
        return lead
    shape, sizes = tuple(lead.shape), tuple(x.shape)
    if shape == sizes[: len(shape)]:
        return lead
    if len(shape) == len(sizes) and fits(shape, sizes):
        return lead.expand(sizes)
    raise ShapeError(
        say(
            op,
            "mask",
            must=f"be x's leading dims, or broadcast to all of them, {sizes}",
            got=shape,
            hint=_hint(shape, sizes),
        )
    )


def _hint(mask: tuple[int, ...], x: tuple[int, ...]) -> str:
    if len(mask) < len(x) and fits(mask, x):
        return f"mask[{'None, ' * (len(x) - len(mask))}...] selects single elements"
    if len(mask) == 2 and mask[::-1] == x[:2]:
        return "mask.T"
    return "a selection lines up from the left, as x[mask] does"


def is_layout(value: Any, mask: Mask) -> TypeGuard[Tensor]:
    """Whether value is a tensor laid out as the mask is: its leading dims are the mask's."""
    return isinstance(value, Tensor) and value.shape[: mask.ndim] == mask.shape
