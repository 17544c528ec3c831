"""Masked any and all, and the count of a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, Dim, MaskLike, mask_hint, need_dense
from maskwise.ops.backends import DEVICE, FLOATING, INTEGRAL, provide, served
from maskwise.ops.operation import Operation, kernel_routes
from maskwise.ops.primitives import replace_empty, where_kept
from maskwise.ops.reduce.reduction import reduction, works
from maskwise.ops.reduce.sums import _sum
from maskwise.plan.cost import Work
from maskwise.plan.dispatch import Plan, Refusal, is_observed
from maskwise.plan.explain import record

__all__ = ["all", "any", "count"]


def any(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    empty: bool | None = None,
) -> Tensor:
    """Whether any element that the mask keeps is true.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.any(x, mask, dim=1)
    tensor([ True, False])

    Args:
        x: any shape and dtype; what is not 0 is true.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether to retain reduced dims with size 1.
        empty: the result of a slice with nothing kept, instead of False.

    Returns:
        bool (of uint8: uint8, as in torch): x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    then = None if empty is None else replace_empty("any", x, mask, dim, keepdim, empty)
    out: Tensor = _any(x, mask, dim, keepdim, then=then)
    return out


def all(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: Dim = None,
    *,
    keepdim: bool = False,
    empty: bool | None = None,
) -> Tensor:
    """Whether all elements that the mask keeps are true.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.all(x, mask, dim=1)
    tensor([True, True])

    Args:
        x: any shape and dtype; what is not 0 is true.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim or dims to reduce; None for all.
        keepdim: whether to retain reduced dims with size 1.
        empty: the result of a slice with nothing kept, instead of True.

    Returns:
        bool (of uint8: uint8, as in torch): x's shape without the reduced dims.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: a dim is repeated, or x or the mask is sparse.
    """
    then = None if empty is None else replace_empty("all", x, mask, dim, keepdim, empty)
    out: Tensor = _all(x, mask, dim, keepdim, then=then)
    return out


def count(
    mask: MaskLike,  # (...)
    dim: Dim = None,
    keepdim: bool = False,
) -> Tensor:
    """Count the kept elements.

    >>> import torch, maskwise as mw
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.count(mask), mw.count(mask, dim=1)
    (tensor(2), tensor([2, 0]))
    >>> mw.count(mw.Mask.from_lengths([2, 0], max_len=1_000_000_000), dim=1)
    tensor([2, 0])

    Args:
        mask: a Mask or a bool tensor; True means keep. A Mask uses its structure and its cached counts.
        dim: the dim or dims to count along; None for all.
        keepdim: whether to retain counted dims with size 1.

    Returns:
        int64: the mask's shape without the counted dims.

    Raises:
        DtypeError: the mask is not bool.
        OutOfRangeError: a dim is out of range for the mask.
        ArgumentError: a dim is repeated.
    """
    if isinstance(mask, Mask):
        if is_observed():
            # The log needs a shape; a lazy mask may be too large to materialize.
            positions = torch.zeros((), dtype=torch.bool, device=mask.device).expand(mask.shape)
            if planned := record(_COUNTS_ITSELF, positions, mask):
                return planned  # type: ignore[return-value]
        return mask.sum(dim, keepdim)
    if type(mask) is not Tensor or mask.dtype is not torch.bool:
        need_dense("count", "mask", mask)
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise DtypeError(say("count", "mask", must=MUST, got=got, hint=mask_hint(mask)))
    everything = _EVERYTHING if type(mask) is Tensor and mask.is_cpu else mask.new_ones(())
    out: Tensor = _count(mask, everything, dim, keepdim)
    return out


def any_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Whether something that is kept is true; False where nothing is kept."""
    return where_kept(x, mask, 0.0).any(dim, keepdim=keepdim)


def all_reference(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Whether everything that is kept is true; True where nothing is kept."""
    return where_kept(x, mask, 1.0).all(dim, keepdim=keepdim)


def truth_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of any and all."""
    return torch.uint8 if dtype is torch.uint8 else torch.bool


_any = reduction(
    "any",
    any_reference,
    result=truth_dtype,
    dtypes=(*FLOATING, *INTEGRAL, torch.bool),
    work=works(calls=2, copies=1),
)
_all = reduction(
    "all",
    all_reference,
    result=truth_dtype,
    dtypes=(*FLOATING, *INTEGRAL, torch.bool),
    work=works(calls=2, copies=1),
)


def _count_by_torch(mask: Tensor, everything: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return mask.sum(dims, keepdim)


def _count_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel reads every byte once; torch casts to int64 first, which takes as long as reading five times."""
    return Work(calls=1, streamed=elements if route != "plain" else 5 * elements)


_COUNTS_ITSELF = Plan(
    "count", "plain", "a Mask counts its structure", 0.0, (Refusal("bare", "the structure has the count"),)
)
_EVERYTHING = torch.ones((), dtype=torch.bool)
for _device in ("cpu", DEVICE):
    provide("count", _device, served("sum", _device) & {torch.bool})
# The count is the sum of the mask with everything kept.
_count = Operation(
    "count", kernel_routes("count", _count_by_torch, _sum.route("bare"), _sum.route("fused"), _count_work)
)
