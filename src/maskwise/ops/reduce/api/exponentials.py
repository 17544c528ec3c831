"""Logsumexp and the vector norms of what is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.arguments import Dim, MaskLike, to_dtype
from maskwise.ops.reduce import registered
from maskwise.ops.reduce.api.shared import need_floating, replace_empty

__all__ = ["logsumexp", "norm"]


def logsumexp(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    empty: float | None = None,
) -> Tensor:
    """Logarithm of the sum of the exponentials of what the mask keeps.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.logsumexp(x, mask, dim=1)
    tensor([2.3133,   -inf])

    Args:
        x: any shape; floating, or integer, which is cast to the default dtype as in torch.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        empty: what a slice with nothing kept gives, instead of -inf.

    Returns:
        The logarithms: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, or x is complex.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    if isinstance(x, Tensor) and not x.dtype.is_floating_point and not x.dtype.is_complex:
        x = x.to(torch.get_default_dtype())
    need_floating("logsumexp", x, "mw.logsumexp(x.abs(), mask)")
    out: Tensor = registered.logsumexp(x, mask, dim, keepdim)
    return out if empty is None else replace_empty("logsumexp", out, x, mask, dim, keepdim, empty)


def norm(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    ord: float = 2,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    empty: float | None = None,
) -> Tensor:
    """Vector norm of what the mask keeps, as torch.linalg.vector_norm.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.norm(x, mask, dim=1)
    tensor([2.2361, 0.0000])
    >>> mw.norm(x, mask, float("inf"), dim=1)
    tensor([2., 0.])

    Args:
        x: any shape; floating or complex.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        ord: any number: 2 for the root of the squares, 1 for the sum of magnitudes, inf and -inf for the extreme
            magnitudes, 0 for how many are not 0.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether reduced dims stay, with size 1.
        dtype: x is cast to it first.
        empty: what a slice with nothing kept gives, instead of 0.

    Returns:
        The norms: x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating or complex, or ord is not a number.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim that x does not have.
        ArgumentError: a dim is named twice, or x or the mask is sparse.
    """
    if dtype is not None:
        x = to_dtype("norm", x, dtype)
    need_floating("norm", x, "mw.norm(x, mask, dtype=torch.float32)", or_complex=True)
    if not isinstance(ord, (int, float)) or isinstance(ord, bool):
        hint = "a vector norm has no 'fro' or 'nuc'; ord=2 is the root of the squares"
        raise DtypeError(say("norm", "ord", must="be a number", got=repr(ord), hint=hint))
    out: Tensor = registered.norm(x, mask, dim, keepdim, float(ord))
    return out if empty is None else replace_empty("norm", out, x, mask, dim, keepdim, empty)
