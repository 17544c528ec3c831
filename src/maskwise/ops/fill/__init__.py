"""mw.fill: replaces dropped elements. The op itself is a primitive, `maskwise.ops.primitives.fill`."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.errors import DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops import primitives
from maskwise.ops.arguments import MaskLike, check, fits

__all__ = ["fill"]

# isinstance with a tuple takes half as long as with a union.
_NUMBERS = (int, float, complex)


def fill(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    value: float | complex | Tensor,  # a number, or broadcasts to x
) -> Tensor:
    """Replace what the mask drops by a value.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([1.0, float("nan"), 3.0])
    >>> mw.fill(x, torch.tensor([True, False, True]), 0.0)
    tensor([1., 0., 3.])

    Args:
        x: any shape, any dtype.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        value: a number, or a tensor that broadcasts to ``x``. It is cast to x's dtype, as by torch's masked_fill. A
            tensor that requires grad gets the gradient of the dropped elements.

    Returns:
        x where it is kept, ``value`` where it is dropped; of x's shape and dtype.

    Raises:
        ShapeError: the mask, or a tensor of values, does not broadcast to x.
        DtypeError: the mask is not bool, or the value is not a number or a tensor that can be cast to x's dtype.
        ArgumentError: the value does not fit x's dtype.
        DeviceError: the mask, or a tensor of values, is on another device.
    """
    if isinstance(value, Tensor):
        bits = mask.to_bool() if isinstance(mask, Mask) else mask
        check("fill", x, bits)
        value = _values_for(x, value)
        if value.requires_grad and torch.is_grad_enabled():
            # The kernels differentiate x only; a value that requires grad is rare, so torch's own operation runs.
            return torch.where(bits, x, value)
    elif not isinstance(value, _NUMBERS):
        raise DtypeError(say("fill", "value", must="be a number or a tensor", got=type(value).__name__, hint="0.0"))
    out: Tensor = primitives.fill(x, mask, None, value)
    return out


def _values_for(x: Tensor, value: Tensor) -> Tensor:
    """A tensor of values in x's dtype."""
    if not fits(value.shape, x.shape):
        must = f"broadcast to x's shape {tuple(x.shape)}"
        hint = "sizes line up from the right, and each is x's size or 1"
        raise ShapeError(say("fill", "value", must=must, got=tuple(value.shape), hint=hint))
    if value.device != x.device and value.dim() > 0:
        must = f"be on x's device {x.device}"
        raise DeviceError(say("fill", "value", must=must, got=value.device, hint="value.to(x.device)"))
    # A 0-d value is cast as by torch's masked_fill; a larger one must not lose precision.
    castable = torch.can_cast(value.dtype, x.dtype)
    if not castable and (value.dim() > 0 or value.dtype.is_complex):
        must = f"have a dtype that casts to x's dtype {x.dtype}"
        raise DtypeError(say("fill", "value", must=must, got=value.dtype, hint=f"value.to({x.dtype})"))
    return value.to(device=x.device, dtype=x.dtype)
