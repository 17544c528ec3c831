"""The denominator of a loss: the mean over a whole batch, of which a call computes one part.

A mean of means over micro-batches and ranks is not the mean over tokens. So a call hands over its un-normalised sum,
the ``total``, and the denominator is counted over the whole batch beforehand: by a window of `mw.accumulate`, or by the
caller, as a number or as a tensor.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say

__all__ = ["Denominator", "Kind", "Scales", "divide", "wide_dtype"]

#: What a total is summed over: kept elements; rows, each with its own mean; or a number that it is divided by.
Kind: TypeAlias = Literal["token", "sequence"] | float


@runtime_checkable
class Scales(Protocol):
    """What divides a total by the count of a whole batch, as a window of `mw.accumulate` does."""

    def scale(self, total: Tensor, kind: Kind = "token") -> Tensor:
        """The total (0-d, un-normalised) as the part of the batch's mean that it is."""


Denominator: TypeAlias = Scales | Tensor | float


def divide(op: str, total: Tensor, denominator: Denominator, kind: Kind = "token") -> Tensor:
    """The part of a batch's mean that a total is. 0 where the denominator is 0, since nothing is kept then.

    >>> divide("loss", torch.tensor(6.0), 4), divide("loss", torch.tensor(0.0), torch.tensor(0))
    (tensor(1.5000), tensor(0.))

    Args:
        op: the function, for messages.
        total: 0-d, the un-normalised sum: for "token" of the loss over kept elements, for "sequence" of the means of
            rows. Half precision is divided, and returned, in float32: a sum of many does not fit a half.
        denominator: a window, which gets the total and its kind; a number; or a 0-d tensor, without a host-device sync.
        kind: what the total is a sum of, for a window.

    Raises:
        DtypeError: the denominator is none of these.
        ShapeError: the denominator is a tensor with dims.
        ArgumentError: the denominator is negative or not finite, as far as that can be seen on the host.
        DeviceError: the denominator is on another device than the total, and not on the CPU.
    """
    if isinstance(denominator, Scales):
        return denominator.scale(total, kind)
    check(op, denominator, total.device)
    total = total.to(wide_dtype(total.dtype))
    if isinstance(denominator, Tensor):
        # float64 holds every count, and rounds once.
        by = denominator.where(denominator != 0, 1).to(total.dtype)
        return total / by
    return total / denominator if denominator else total


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which totals are summed and divided: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def check(op: str, denominator: Any, device: torch.device) -> None:
    """Raise unless the denominator is a number, or a tensor of one that can be used on this device."""
    must = "be a window of mw.accumulate, a number or a 0-d tensor"
    name, hint = "denominator", "denominator=mask.sum()"
    if isinstance(denominator, Tensor):
        if denominator.dtype is torch.bool or denominator.dtype.is_complex:
            raise DtypeError(say(op, name, must=must, got=denominator.dtype, hint=hint))
        if denominator.dim():
            raise ShapeError(say(op, name, must=must, got=tuple(denominator.shape), hint="denominator.sum()"))
        if denominator.device != device and denominator.device.type != "cpu":
            must, hint = f"be on the loss's device {device}", "denominator.to(input.device)"
            raise DeviceError(say(op, name, must=must, got=denominator.device, hint=hint))
    elif isinstance(denominator, bool) or not isinstance(denominator, (int, float)):
        raise DtypeError(say(op, name, must=must, got=type(denominator).__name__, hint=hint))
    elif not 0 <= denominator < math.inf:
        raise ArgumentError(say(op, name, must="be finite and not negative", got=denominator, hint=hint))
