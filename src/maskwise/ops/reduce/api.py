"""The reductions that users call: check the arguments, plan, run."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.arguments import Dim, MaskLike, dims_of
from maskwise.ops.reduce import registered

__all__ = ["sum"]


def sum(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    empty: float | None = None,
) -> Tensor:
    """Sum what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.sum(x, mask, dim=1)
    tensor([3., 0.])
    >>> mw.sum(x, mask, dim=1, empty=-1.0)
    tensor([ 3., -1.])

    Args:
        x: any shape; floating, integer, bool or complex.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        dtype: x is cast to it first. Integers and bools sum to int64 otherwise, as in torch.
        empty: what a slice with nothing kept gives, instead of 0.

    Returns:
        The sums: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
    """
    if dtype is not None:
        x = x.to(dtype)
    out: Tensor = registered.sum(x, mask, dim, keepdim)
    return out if empty is None else replace_empty("sum", out, x, mask, dim, keepdim, empty)


def replace_empty(op: str, out: Tensor, x: Tensor, mask: MaskLike, dim: Dim, keepdim: bool, empty: float) -> Tensor:
    """``out`` with ``empty`` where a slice kept nothing. The gradient of such a slice is zero."""
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    dims = dims_of(op, x, dim)
    kept = bits.expand(x.shape)
    return torch.where(kept.any(dims, keepdim=keepdim) if dims else kept, out, empty)
