"""Argument checks of selection: a mask aligns with x as in indexing, from the left; and ``out``."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, fits, mask_hint, need_dense

__all__ = ["as_mask", "check_out", "is_layout", "line_up"]


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
    """The mask over x's leading dims. A mask with as many dims as x may broadcast, and selects single elements."""
    if not isinstance(x, Tensor):
        raise DtypeError(say(op, "x", must="be a tensor", got=type(x).__name__, hint="torch.as_tensor(x)"))
    need_dense(op, "x", x)
    need_dense(op, "mask", mask)
    lead = mask if isinstance(mask, Mask) else as_mask(op, mask)
    device, wanted = lead.device, x.device
    if device != wanted:
        if device.index is not None or device.type != wanted.type:
            raise DeviceError(say(op, "mask", must=f"be on x's device {wanted}", got=device, hint="mask.to(x.device)"))
        # A mask on "cuda" matches any CUDA device.
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
    return "a selection aligns from the left, as x[mask] does"


def is_layout(value: Any, mask: Mask) -> TypeGuard[Tensor]:
    """Whether value is a tensor whose leading dims are the mask's."""
    return isinstance(value, Tensor) and value.shape[: mask.ndim] == mask.shape


def check_out(op: str, out: Any, shape: tuple[int, ...], *sources: Tensor) -> Tensor:
    """``out``, if the result can be written there; ``sources`` are the inputs, the first of which has the dtype.

    Raises:
        DtypeError: it is not a tensor, or of another dtype.
        ShapeError: it has another shape, or is not contiguous.
        DeviceError: it is on another device.
        ArgumentError: it shares memory with an input, or a gradient is required.
    """
    if not isinstance(out, Tensor):
        raise DtypeError(say(op, "out", must="be a tensor", got=type(out).__name__, hint=f"torch.empty({shape})"))
    like = sources[0]
    if out.dtype != like.dtype:
        must = f"have the dtype {like.dtype} of the result"
        raise DtypeError(say(op, "out", must=must, got=out.dtype, hint=f"torch.empty({shape}, dtype={like.dtype})"))
    if out.device != like.device:
        must = f"be on the device {like.device} of the result"
        raise DeviceError(say(op, "out", must=must, got=out.device, hint=f"out.to({str(like.device)!r})"))
    if tuple(out.shape) != shape:
        hint = f"buffer[:{shape[0]}]" if tuple(out.shape[1:]) == shape[1:] and out.shape[0] > shape[0] else ""
        must = f"have the shape {shape} of the result"
        raise ShapeError(say(op, "out", must=must, got=tuple(out.shape), hint=hint or f"torch.empty({shape})"))
    if not out.is_contiguous():
        raise ShapeError(say(op, "out", must="be contiguous", got=f"strides {out.stride()}", hint="out.contiguous()"))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (out, *sources)):
        must = "not be given where a gradient is required"
        raise ArgumentError(say(op, "out", must=must, got="a tensor", hint="with torch.no_grad():"))
    # Tensors without data, such as those of the meta device, share none.
    mine = out.untyped_storage().data_ptr()
    if mine and out.numel() and any(x.numel() and x.untyped_storage().data_ptr() == mine for x in sources):
        must = "not share memory with an input"
        raise ArgumentError(say(op, "out", must=must, got="a view of one", hint="torch.empty_like(out)"))
    return out
