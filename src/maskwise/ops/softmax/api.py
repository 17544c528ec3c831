"""Softmax and friends as users call them: check the arguments, plan, run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.ops.arguments import Dim, MaskLike, to_dtype
from maskwise.ops.operation import Operation
from maskwise.ops.softmax import registered

__all__ = ["log_softmax", "normalize", "softmax", "softmin", "standardize"]


def softmax(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Take the softmax over what the mask keeps; what it drops gets probability 0.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 1.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.softmax(x, mask, dim=1)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the probabilities of what is kept sum to 1.
        dtype: x is cast to it first.

    Returns:
        The probabilities, of x's shape: 0 where dropped, and so a zero row where nothing is kept. The gradient of what
        is dropped is exactly zero.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    return along_one_dim(registered.softmax, x, mask, dim, dtype)


def log_softmax(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Take the logarithm of the softmax over what the mask keeps; what it drops gets -inf.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 1.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.log_softmax(x, mask, dim=1)
    tensor([[-0.6931, -0.6931,    -inf],
            [   -inf,    -inf,    -inf]])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the probabilities of what is kept sum to 1.
        dtype: x is cast to it first.

    Returns:
        The log-probabilities, of x's shape: the logarithm of what ``softmax`` gives, everywhere. So -inf where dropped,
        also where nothing is kept: that is the logarithm of softmax's zero row. The gradient of what is dropped is
        exactly zero, whatever gradient comes in for it.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    return along_one_dim(registered.log_softmax, x, mask, dim, dtype)


def softmin(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Take the softmax of -x over what the mask keeps; what it drops gets probability 0.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([0.0, 0.0, -100.0])
    >>> mw.softmin(x, torch.tensor([True, True, False]), dim=0)
    tensor([0.5000, 0.5000, 0.0000])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the probabilities of what is kept sum to 1.
        dtype: x is cast to it first.

    Returns:
        The probabilities, of x's shape: 0 where dropped, and so a zero row where nothing is kept.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: x or the mask is sparse.
    """
    return along_one_dim(registered.softmin, x, mask, dim, dtype)


def normalize(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    p: float = 2.0,
    dim: Dim = 1,
    eps: float = 1e-12,
) -> Tensor:
    """Divide what the mask keeps by its p-norm; what it drops becomes 0.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[3.0, 4.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.normalize(x, mask)
    tensor([[0.6000, 0.8000, 0.0000],
            [0.0000, 0.0000, 0.0000]])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        p: the exponent of the norm; any float, inf and -inf included.
        dim: the dim or dims of one norm. 1 by default, as in ``torch.nn.functional.normalize``; None for all.
        eps: the least number that is divided by.

    Returns:
        The normalized values, of x's shape: 0 where dropped, and so a zero row where nothing is kept.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or p or eps is not a number.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    check_floating("normalize", x)
    numbers = check_number("normalize", "p", p), check_number("normalize", "eps", eps)
    out: Tensor = registered.normalize(x, mask, dim, *numbers)
    return out


def standardize(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = -1,
    *,
    correction: float = 0,
    eps: float = 1e-5,
) -> Tensor:
    """Subtract the mean of what the mask keeps, and divide by its standard deviation; what it drops becomes 0.

    It is ``(x - mean) / sqrt(var + eps)``, and so with its defaults ``torch.nn.functional.layer_norm`` of what is kept.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 3.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.standardize(x, mask, eps=0)
    tensor([[-1.,  1.,  0.],
            [ 0.,  0.,  0.]])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims of one mean and variance; None for all.
        correction: the variance divides by the number kept less this; 0 as in ``layer_norm``, 1 for Bessel's.
        eps: added to the variance before its square root is taken, so that equal values give 0 and not NaN.

    Returns:
        The standardized values, of x's shape: 0 where dropped, and so a zero row where nothing is kept. NaN for what is
        kept where no more than ``correction`` values are, as ``torch.var`` has it.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or correction or eps is not a number.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, an eps is below 0, or x or the mask is sparse.
    """
    check_floating("standardize", x)
    numbers = check_number("standardize", "correction", correction), check_number("standardize", "eps", eps)
    if eps < 0:
        raise ArgumentError(say("standardize", "eps", must="be at least 0", got=eps, hint="eps=1e-5"))
    out: Tensor = registered.standardize(x, mask, dim, *numbers)
    return out


def along_one_dim(op: Operation, x: Tensor, mask: MaskLike, dim: int, dtype: torch.dtype | None) -> Tensor:
    """Run one of the softmaxes, which take one dim as torch's do."""
    if type(dim) is not int:
        raise DtypeError(say(op.name, "dim", must="be an int", got=type(dim).__name__, hint="dim=-1"))
    if dtype is not None:
        x = to_dtype(op.name, x, dtype)
    check_floating(op.name, x)
    out: Tensor = op(x, mask, dim)
    return out


def check_floating(op: str, x: Any) -> None:
    """Raise unless x is floating, or no tensor at all, of which the next check will say more."""
    if isinstance(x, Tensor) and not x.is_floating_point():
        hint = "x.float()" if "soft" not in op else "dtype=torch.float32"
        raise DtypeError(say(op, "x", must="be floating", got=x.dtype, hint=hint))


def check_number(op: str, argument: str, value: Any) -> float:
    """The value as a float; an error unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DtypeError(say(op, argument, must="be a number", got=type(value).__name__, hint=f"float({argument})"))
    return float(value)
