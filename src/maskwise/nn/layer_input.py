"""What a layer is called with: checked before anything is computed, since a wrong size may fit a part of the weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from maskwise.errors import DeviceError, DtypeError, ShapeError, say
from maskwise.ops.arguments import input_hint, need_dense

__all__ = ["check_channels", "check_dims", "check_features", "check_tensor"]


def check_tensor(op: str, input: object) -> None:
    """Raise unless the input is a tensor."""
    if not isinstance(input, Tensor):
        hint = "torch.as_tensor(input)"
        raise DtypeError(say(op, "input", must="be a tensor", got=type(input).__name__, hint=hint))
    need_dense(op, "input", input)


def check_features(
    op: str,
    input: Tensor,  # (..., features)
    features: int,
    weight: Tensor,
) -> None:
    """Raise unless the input ends in the layer's features, in the dtype of its weight and on its device."""
    check_tensor(op, input)
    if not input.dim() or input.shape[-1] != features:
        must, hint = f"end in {features} features", input_hint(input, features)
        raise ShapeError(say(op, "input", must=must, got=tuple(input.shape), hint=hint))
    if input.dtype is not weight.dtype or input.device != weight.device:
        _check_kind(op, input, weight)


def check_channels(
    op: str,
    input: Tensor,  # (N, channels, H, W) or (channels, H, W)
    channels: int,
    weight: Tensor,
) -> None:
    """The same for images: as many channels as the layer has, before height and width."""
    check_tensor(op, input)
    if input.dim() not in (3, 4) or input.shape[-3] != channels:
        sizes = tuple(input.shape)
        must = f"be (N, {channels}, H, W) or ({channels}, H, W)"
        hint = (
            f"a layer of {sizes[-3]} channels" if len(sizes) in (3, 4) else f"input.unflatten(-1, ({channels}, H, W))"
        )
        if len(sizes) in (3, 4) and sizes[-1] == channels:
            hint = "input.movedim(-1, -3)"
        elif len(sizes) == 2 and channels == 1:
            hint = "input[None]"
        raise ShapeError(say(op, "input", must=must, got=sizes, hint=hint))
    if input.dtype is not weight.dtype or input.device != weight.device:
        _check_kind(op, input, weight)


def check_dims(op: str, input: Tensor, *shapes: str) -> None:
    """Raise unless the input has as many dims as one of these shapes, such as ``"(N, C, L)"``."""
    check_tensor(op, input)
    dims = [shape.count(",") + 1 for shape in shapes]
    if input.dim() not in dims:
        hint = "input[None]" if input.dim() + 1 == dims[-1] else f"input.flatten({dims[-1] - 1})"
        hint = hint if input.dim() + 1 >= dims[-1] else f"input.unflatten(-1, {shapes[-1]})"
        raise ShapeError(say(op, "input", must=f"be {' or '.join(shapes)}", got=tuple(input.shape), hint=hint))


def _check_kind(op: str, input: Tensor, weight: Tensor) -> None:
    if input.device != weight.device:
        must, hint = f"be on the layer's device {weight.device}", f"input.to({str(weight.device)!r})"
        raise DeviceError(say(op, "input", must=must, got=input.device, hint=hint))
    kind = input.device.type
    # Autocast casts both.
    if not is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        must, hint = f"have the layer's dtype {weight.dtype}", f"input.to({weight.dtype}), or layer.to({input.dtype})"
        raise DtypeError(say(op, "input", must=must, got=input.dtype, hint=hint))
