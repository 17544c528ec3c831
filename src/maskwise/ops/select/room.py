"""``out=``: results in memory that is there already, which costs a large one less than fresh memory does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say

__all__ = ["check_room"]


def check_room(op: str, out: Any, shape: tuple[int, ...], *sources: Tensor) -> Tensor:
    """``out``, if the result can be written there; ``sources`` are what is read, the one with the dtype first.

    Raises:
        DtypeError: it is no tensor, or of another dtype.
        ShapeError: it has another shape, or gaps.
        DeviceError: it is on another device.
        ArgumentError: it shares memory with what is read, or a gradient is asked for.
    """
    if not isinstance(out, Tensor):
        raise DtypeError(say(op, "out", must="be a tensor", got=type(out).__name__, hint=f"torch.empty({shape})"))
    like = sources[0]
    if out.dtype != like.dtype:
        must = f"have the dtype {like.dtype} of what is written"
        raise DtypeError(say(op, "out", must=must, got=out.dtype, hint=f"torch.empty({shape}, dtype={like.dtype})"))
    if out.device != like.device:
        must = f"be on the device {like.device} of what is written"
        raise DeviceError(say(op, "out", must=must, got=out.device, hint=f"out.to({str(like.device)!r})"))
    if tuple(out.shape) != shape:
        hint = f"buffer[:{shape[0]}]" if tuple(out.shape[1:]) == shape[1:] and out.shape[0] > shape[0] else ""
        must = f"have the shape {shape} of the result"
        raise ShapeError(say(op, "out", must=must, got=tuple(out.shape), hint=hint or f"torch.empty({shape})"))
    if not out.is_contiguous():
        raise ShapeError(say(op, "out", must="be contiguous", got=f"strides {out.stride()}", hint="out.contiguous()"))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (out, *sources)):
        must = "not be given where a gradient is asked for"
        raise ArgumentError(say(op, "out", must=must, got="a tensor", hint="with torch.no_grad():"))
    mine = out.untyped_storage().data_ptr()
    if out.numel() and any(x.numel() and x.untyped_storage().data_ptr() == mine for x in sources):
        must = "not share memory with what is read"
        raise ArgumentError(say(op, "out", must=must, got="a view of it", hint="torch.empty_like(out)"))
    return out
