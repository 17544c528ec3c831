"""What the reductions' arguments have in common: the empty value and the dtypes that a function takes."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import Dim, MaskLike, dims_of

__all__ = ["need_floating", "replace_empty"]


def replace_empty(op: str, out: Tensor, x: Tensor, mask: MaskLike, dim: Dim, keepdim: bool, empty: float) -> Tensor:
    """``out`` with ``empty`` where a slice kept nothing. The gradient of such a slice is zero."""
    if not isinstance(empty, (int, float, complex, Tensor)):
        raise DtypeError(say(op, "empty", must="be a number or None", got=type(empty).__name__, hint="empty=0.0"))
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    dims = dims_of(op, x, dim)
    bits = bits.reshape((1,) * (x.dim() - bits.dim()) + bits.shape)
    # A dim along which the mask broadcasts is looked at once; unless it has no elements, when nothing is kept.
    kept = bits.any(dims, keepdim=keepdim) if dims else bits
    if any(x.shape[d] == 0 for d in dims):
        kept = torch.zeros_like(kept)
    return torch.where(kept, out, empty)


def need_floating(op: str, x: Tensor, hint: str, *, or_complex: bool = False) -> None:
    """Raise unless x is a floating tensor. What is not a tensor at all is left to the checks that follow."""
    if isinstance(x, Tensor) and not (x.dtype.is_floating_point or (or_complex and x.dtype.is_complex)):
        kinds = "floating or complex" if or_complex else "floating"
        raise DtypeError(say(op, "x", must=f"be {kinds}", got=x.dtype, hint=hint))
