"""How the mask of a layer lines up with its input: by positions, as users hold it, and not by broadcasting alone.

Each function returns a bool tensor with as many dims as the input, which broadcasts to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.errors import ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, check, fits, need_dense
from maskwise.ops.torch_private import is_tracing

__all__ = ["along_dims", "beside_channels", "keeps_all", "leading"]


def keeps_all(mask: MaskLike) -> bool:
    """Whether everything is known to be kept; never waits for a device to find out, and a graph cannot know."""
    if is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if isinstance(mask, Mask):
        known = mask.facts
        if known.count is not None:
            return known.count == known.numel
        return mask.device.type == "cpu" and mask.is_full
    return isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.device.type == "cpu" and bool(mask.all())


def beside_channels(
    op: str,
    x: Tensor,  # (N, C, *places) or, with channels=0, (C, *places)
    mask: MaskLike,  # (N, *places), or as many dims as x has
    channels: int = 1,
) -> Tensor:
    """A mask of x's shape without its channels, with a dim of size 1 for them; or one of x's dims, as it is."""
    bits = _bits(op, x, mask)
    if bits.dim() == x.dim() - 1:
        bits = bits.unsqueeze(channels)
    shape = tuple(x.shape)
    places = shape[:channels] + shape[channels + 1 :]
    must = f"be input's shape without its channels, {places}, or broadcast to input's shape {shape}"
    return _fitting(op, x, bits, mask, must, _channel_hint(tuple(mask.shape), shape, places, channels))


def leading(
    op: str,
    x: Tensor,  # (*lead, *rest)
    mask: MaskLike,  # (*lead), or as many dims as x has
) -> Tensor:
    """A mask of x's leading dims, as ``x[mask]`` takes it, with dims of size 1 for the rest; or one of all x's dims."""
    bits = _bits(op, x, mask)
    if bits.dim() < x.dim():
        bits = bits.reshape(*bits.shape, *[1] * (x.dim() - bits.dim()))
    must = f"be input's leading dims, or broadcast to all of them, {tuple(x.shape)}"
    hint = "mask.T" if mask.ndim == 2 and fits(tuple(mask.shape)[::-1], x.shape[:2]) else _LEADING
    return _fitting(op, x, bits, mask, must, hint)


def along_dims(
    op: str,
    x: Tensor,
    mask: MaskLike,
    dims: list[int],  # not negative, sorted
) -> Tensor:
    """A mask of the batch (dim 0) and the dims that are pooled, wherever these are; else as `leading`."""
    bits = _bits(op, x, mask)
    if bits.dim() == x.dim() or bits.dim() != 1 + len(dims) or 0 in dims:
        return leading(op, x, mask)
    own = iter(bits.shape)
    sizes = [next(own) if d == 0 or d in dims else 1 for d in range(x.dim())]
    pooled = tuple(x.shape[d] for d in (0, *dims))
    must = f"be the batch and the pooled dims, {pooled}, or broadcast to input's shape {tuple(x.shape)}"
    elsewhere = [d for d in range(1, x.dim()) if len(dims) == 1 and fits(bits.shape, (x.shape[0], x.shape[d]))]
    hint = f"pool along dim={elsewhere[0]}" if elsewhere else f"input is pooled along {tuple(dims)}; dim= says where"
    return _fitting(op, x, bits.reshape(sizes), mask, must, hint)


_LEADING = "a mask of fewer dims lines up from the left, as input[mask] does"


def _bits(op: str, x: Tensor, mask: MaskLike) -> Tensor:
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    need_dense(op, "mask", bits)
    if not isinstance(bits, Tensor) or bits.dtype is not torch.bool or not isinstance(x, Tensor):
        check(op, x, bits, "input")
    return bits


def _fitting(op: str, x: Tensor, bits: Tensor, mask: MaskLike, must: str, hint: str) -> Tensor:
    if bits.dim() != x.dim() or not fits(bits.shape, x.shape):
        raise ShapeError(say(op, "mask", must=must, got=tuple(mask.shape), hint=hint))
    check(op, x, bits, "input")
    return bits


def _channel_hint(mask: tuple[int, ...], x: tuple[int, ...], places: tuple[int, ...], channels: int) -> str:
    """What to write instead.

    >>> _channel_hint((8, 128), (8, 128, 64), (8, 64), 1)
    'input.movedim(-1, 1), since channels are dim 1'
    """
    if len(mask) == len(x) - 1 and fits(mask, x[:-1]):
        return f"input.movedim(-1, {channels}), since channels are dim {channels}"
    if len(mask) == 2 and fits(mask[::-1], places):
        return "mask.T"
    return "one bool for each position, which all its channels share"
