"""mw.fill, mw.where and mw.mul: replace dropped elements. The op is a primitive, `maskwise.ops.primitives.fill`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from maskwise.errors import DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.mask.algebra import broadcast
from maskwise.ops import primitives
from maskwise.ops.arguments import MUST, MaskLike, check, fits, mask_hint, need_dense
from maskwise.ops.operation import as_bits
from maskwise.ops.torch_private import is_tracing

__all__ = ["fill", "mul", "where"]

# isinstance with a tuple takes half as long as with a union.
_NUMBERS = (int, float, complex)


def fill(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    value: float | complex | Tensor,  # a number, or broadcasts to x
) -> Tensor:
    """Replace dropped elements by a value.

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


def mul(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
) -> Tensor:
    """Multiply by the mask: 0 where it drops, also where x is NaN or inf there, which ``x * mask`` would keep.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([1.0, float("nan"), 3.0])
    >>> mw.mul(x, torch.tensor([True, False, True]))
    tensor([1., 0., 3.])

    Args:
        x: any shape, any dtype.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.

    Returns:
        x where it is kept, 0 where it is dropped; of x's shape and dtype. It is ``mw.fill(x, mask, 0.0)``.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool.
        DeviceError: the mask is on another device.
        ArgumentError: x or the mask is sparse.
    """
    out: Tensor = _mul(x, mask, None, 0.0)
    return out


def where(
    mask: MaskLike,  # broadcasts with x and other
    x: Tensor | complex,  # (...), or a number
    other: Tensor | complex,  # (...), or a number
) -> Tensor:
    """Take x where the mask keeps, and other where it drops, as torch.where does with a bool tensor.

    >>> import torch, maskwise as mw
    >>> mask = mw.Mask.from_lengths([1, 3])
    >>> mw.where(mask, torch.ones(2, 3), -1.0)
    tensor([[ 1., -1., -1.],
            [ 1.,  1.,  1.]])

    Args:
        mask: a Mask or a bool tensor; True means keep, that is to take x.
        x: a tensor, or a number.
        other: a tensor, or a number. Both broadcast with the mask, and are promoted to one dtype as by torch.

    Returns:
        A tensor of the shape that all three broadcast to. Each of both has a gradient where it was taken, and exactly 0
        elsewhere.

    Raises:
        ShapeError: the shapes do not broadcast.
        DtypeError: the mask is not bool, or x and other are not numbers and tensors, at least one of them a tensor.
        ArgumentError: a number does not fit the dtype of the other, or a tensor is sparse.
        DeviceError: they are on different devices.
    """
    if not isinstance(mask, (Mask, Tensor)):
        raise DtypeError(say("where", "mask", must=MUST, got=type(mask).__name__, hint=mask_hint(mask)))
    for name, value in (("x", x), ("other", other)):
        need_dense("where", name, value)
        if not isinstance(value, Tensor) and not isinstance(value, _NUMBERS):
            hint = f"torch.as_tensor({name})"
            raise DtypeError(say("where", name, must="be a tensor or a number", got=type(value).__name__, hint=hint))
    if not isinstance(x, Tensor):
        if not isinstance(other, Tensor):
            must, hint = "be a tensor where other is a number", f"torch.full(mask.shape, {x!r})"
            raise DtypeError(say("where", "x", must=must, got=type(x).__name__, hint=hint))
        check("where", other, other.new_ones((), dtype=torch.bool))
        need_dense("where", "mask", mask)
        if mask.dtype is not torch.bool:
            raise DtypeError(say("where", "mask", must=MUST, got=mask.dtype, hint=mask_hint(mask)))
        return where(mask.logical_not(), other, x)
    return _where_tensors(mask, x, other)


def _where_tensors(mask: MaskLike, x: Tensor, other: Tensor | complex) -> Tensor:
    """The same where x is a tensor."""
    if is_tracing():
        # Dynamo cannot trace result_type; in a graph torch's own operation promotes and broadcasts.
        bits = as_bits(mask)
        check("where", bits, bits)
        return torch.where(bits, x, other)
    dtype = torch.result_type(x, other)
    if x.dtype is not dtype:
        x = x.to(dtype)
    shape: tuple[int, ...] | None = tuple(x.shape)
    shapes = [tuple(mask.shape), *([tuple(other.shape)] if isinstance(other, Tensor) else [])]
    if any(each != shape for each in shapes):
        for each in shapes:
            shape = None if shape is None else broadcast(shape, each)
        if shape is None:
            given = " and ".join(str(each) for each in (*shapes[1:], tuple(x.shape)))
            hint = "sizes line up from the right; mask[..., None] adds a dim on the right"
            raise ShapeError(say("where", "mask", must=f"broadcast with {given}", got=shapes[0], hint=hint))
        x = x.expand(shape)
    if isinstance(other, Tensor):
        if other.device != x.device and other.dim() > 0:
            must = f"be on x's device {x.device}"
            raise DeviceError(say("where", "other", must=must, got=other.device, hint="other.to(x.device)"))
        other = other.to(device=x.device, dtype=dtype)
        if other.requires_grad and torch.is_grad_enabled():
            # As in `fill`.
            bits = as_bits(mask)
            check("where", x, bits)
            return torch.where(bits, x, other)
    elif type(other) is not float or not primitives.fits_dtype(other, dtype):
        other = primitives.number_for(x, other, "where", "other")
    out: Tensor = _where(x, mask, None, other)
    return out


#: The same op and the same routes, under the names that errors and plans report.
_mul = replace(primitives.fill, name="mul")
_where = replace(primitives.fill, name="where")


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
