"""Checks of what constructors are given. Values are read only where that takes no host-device sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, say
from maskwise.ops.torch_private import is_tracing

__all__ = [
    "Device",
    "Shape",
    "as_ints",
    "as_shape",
    "bool_tensor",
    "check_range",
    "check_size",
    "device_of",
    "need_data",
    "need_dense",
    "readable",
]

Device = torch.device | str | int | None
Shape = int | Sequence[int]


def readable(tensor: Tensor) -> bool:
    """Return whether the values can be looked at: host memory, real numbers, and no graph being traced."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not is_tracing()


def need_dense(op: str, name: str, value: Any) -> None:
    """Raise for a tensor that is nested or sparse; what is no tensor at all is left to the checks that follow."""
    if not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_nested):
        return
    if value.is_nested:
        got, hint = "a nested tensor", f"{name}.to_padded_tensor(0), and Mask.from_lengths of its lengths"
    else:
        got, hint = str(value.layout), f"{name}.to_dense()"
    raise ArgumentError(say(op, name, must="be a dense tensor", got=got, hint=hint))


def need_data(op: str, device: torch.device) -> None:
    """Raise for a mask on the meta device, where there are shapes and no values."""
    if device.type == "meta":
        hint = "call it before the mask goes to meta, or mw.count(mask), whose result is a tensor"
        raise DeviceError(say(op, "mask", must="be on a device that holds values", got="meta", hint=hint))


def device_of(device: Device, source: Any) -> torch.device:
    """Return the device that was requested; else that of the source, if it is a tensor; else torch's default."""
    if device is not None:
        return torch.device(device)
    if isinstance(source, Tensor):
        return source.device
    # Dynamo cannot trace get_default_device, but it can trace a tensor that is made there.
    return torch.empty(0).device if is_tracing() else torch.get_default_device()


def as_ints(op: str, name: str, values: Any) -> Tensor:
    """Return ints as an int64 tensor: device tensors where they are, everything else on the host."""
    if isinstance(values, Tensor):
        need_dense(op, name, values)
        tensor = values
    else:
        try:
            tensor = torch.tensor(values, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            must = "be ints: a tensor, or lists of equal length"
            raise DtypeError(say(op, name, must=must, got=repr(values)[:80], hint="torch.tensor(...)")) from error
        if not tensor.numel():
            tensor = tensor.to(torch.int64)
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        hint = "Mask(t) takes a bool tensor as it is" if tensor.dtype == torch.bool else f"{name}.long()"
        got = f"{tensor.dtype}" if isinstance(values, Tensor) else f"{tensor.dtype} from {repr(values)[:80]}"
        raise DtypeError(say(op, name, must="be ints", got=got, hint=hint))
    # A copy where there is nothing to convert: a mask must not change when the caller's lengths do.
    return tensor.to(torch.int64) if tensor.dtype != torch.int64 or tensor is not values else tensor.clone()


def check_range(op: str, name: str, values: Tensor, *, low: int, high: int, hints: tuple[str, str]) -> None:
    """Raise for the first value out of range, with the hint for values that are too low or too high."""
    if not values.numel() or (int(values.min()) >= low and int(values.max()) <= high):
        return
    bad = (values < low) | (values > high)
    at = tuple(int(i) for i in bad.nonzero()[0])
    value = int(values[at])
    where = f" at position {at[0] if len(at) == 1 else at}" if at else ""
    must = f"hold only values from {low} to {high}"
    raise OutOfRangeError(say(op, name, must=must, got=f"{value}{where}", hint=hints[value > high]))


def check_size(op: str, name: str, value: Any) -> None:
    """Raise unless the value is an int of 0 or more."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool) or value < 0:
        raise ArgumentError(say(op, name, must="be an int of 0 or more", got=repr(value), hint=f"{name}=x.shape[-1]"))


def as_shape(op: str, name: str, shape: Any) -> tuple[int, ...]:
    """Return a size or a shape as a tuple."""
    sizes = (shape,) if isinstance(shape, (int, torch.SymInt)) else shape
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise DtypeError(say(op, name, must="be an int or a tuple of ints", got=repr(shape), hint=f"{name}=x.shape"))
    for size in sizes:
        check_size(op, name, size)
    return tuple(sizes)


def bool_tensor(bits: Any) -> Tensor:
    """Return a bool tensor, or raise with the converter that was probably meant."""
    need_dense("Mask", "bits", bits)
    if isinstance(bits, Tensor) and bits.dtype == torch.bool:
        return bits
    if not isinstance(bits, Tensor):
        hint = "Mask.from_numpy(array)" if type(bits).__module__ == "numpy" else "Mask(torch.tensor(...))"
        raise DtypeError(say("Mask", "bits", must="be a bool tensor", got=type(bits).__name__, hint=hint))
    if bits.is_floating_point():
        hint = "Mask.from_additive(t) for 0 and -inf, Mask.from_attention_mask(t) for 0. and 1., or Mask(t != 0)"
    else:
        hint = (
            "Mask.from_attention_mask(t) for 0 and 1, Mask.from_lengths(t, max_len) for lengths, "
            "Mask.from_indices(t, size) for positions, Mask.from_segments(t) for segment ids"
        )
    raise DtypeError(say("Mask", "bits", must="be a bool tensor", got=bits.dtype, hint=hint))
