"""Softmax, log_softmax and softmin over what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.arguments import MaskLike, to_dtype
from maskwise.ops.operation import Operation
from maskwise.ops.softmax.slicewise import check_floating, define_backward, slicewise

__all__ = ["log_softmax", "softmax", "softmin"]


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
    return along_one_dim(_softmax, x, mask, dim, dtype)


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
    return along_one_dim(_log_softmax, x, mask, dim, dtype)


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
    return along_one_dim(_softmin, x, mask, dim, dtype)


def along_one_dim(op: Operation, x: Tensor, mask: MaskLike, dim: int, dtype: torch.dtype | None) -> Tensor:
    """Run one of the softmaxes, which take one dim as torch's do."""
    if type(dim) is not int:
        raise DtypeError(say(op.name, "dim", must="be an int", got=type(dim).__name__, hint="dim=-1"))
    if dtype is not None:
        x = to_dtype(op.name, x, dtype)
    check_floating(op.name, x)
    out: Tensor = op(x, mask, dim)
    return out


# -- gradients ---------------------------------------------------------------------------------------------------------
# The gradients in plain torch operations: the ground truth of the backward kernels, and what runs where a gradient is
# itself differentiated. None looks at a gradient of what is dropped: it may be NaN, as it is behind the logarithm of a
# probability that is 0.
def softmax_gradient(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int], negate: bool) -> Tensor:
    """The gradient of softmax, or of softmin if ``negate``, from its result."""
    grad = torch.where(mask, grad, 0.0)
    wide = torch.promote_types(out.dtype, torch.float32)
    dot = (grad.to(wide) * out).sum(dim, keepdim=True)
    slope = out * (grad - dot)
    return torch.where(mask, -slope if negate else slope, 0.0).to(out.dtype)


def log_softmax_gradient(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The gradient of log_softmax from its result."""
    grad = torch.where(mask, grad, 0.0)
    wide = torch.promote_types(out.dtype, torch.float32)
    total = grad.sum(dim, keepdim=True, dtype=wide)
    # A dropped log-probability is -inf, of which the exponential is 0, and so is that one's own gradient.
    return torch.where(mask, grad - torch.exp(out.to(wide)) * total, 0.0).to(out.dtype)


_softmax_backward = define_backward("softmax", ", bool negate", softmax_gradient)
_softmax = slicewise("softmax", "", 3, softmax_gradient, _softmax_backward, of_result=True, constants=(False,))
_softmin = slicewise("softmin", "", 3, softmax_gradient, _softmax_backward, of_result=True, constants=(True,))
_log_softmax = slicewise(
    "log_softmax",
    "",
    3,
    log_softmax_gradient,
    define_backward("log_softmax", "", log_softmax_gradient),
    of_result=True,
)
