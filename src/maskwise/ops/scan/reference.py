"""The scans in plain torch operations: the ground truth of the tests, and the fallback without a kernel.

Each is leak-proof, forward and backward, and differentiable by torch itself, transforms included. ``mask`` is a bool
tensor that broadcasts to x, ``dim`` a list with the one dim to scan, not negative.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from maskwise.ops.primitives import highest, lowest, where_kept

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]

#: Distance below the smallest kept value at which a term no longer changes a sum of exponentials, by dtype: the
#: exponential of it is 0 in the arithmetic that torch uses for the dtype.
_GAP = {torch.float64: 2000.0}


def cumsum(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The running sum of kept elements; 0 before the first."""
    return where_kept(x, mask, 0).cumsum(dim[0])


def cumprod(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The running product of kept elements; 1 before the first."""
    return where_kept(x, mask, 1).cumprod(dim[0])


def cummax(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor]:
    """The running maximum of kept elements and its index; the lowest value and -1 before the first."""
    return _extreme(torch.cummax, lowest(x.dtype), x, mask, dim[0])


def cummin(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor]:
    """The running minimum of kept elements and its index; the highest value and -1 before the first."""
    return _extreme(torch.cummin, highest(x.dtype), x, mask, dim[0])


def _extreme(
    scan: Callable[..., tuple[Tensor, Tensor]], identity: float, x: Tensor, mask: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    found, indices = scan(where_kept(x.detach(), mask, identity), dim)
    # While the running value is the identity, every kept value so far equals it, and the latest of them is its index,
    # as for any tie in torch. torch's own index may be of a dropped element, whose fill value ties with them.
    steps = torch.arange(x.shape[dim] if x.dim() else 1, device=x.device)
    steps = steps.reshape([-1 if d == dim else 1 for d in range(x.dim())])
    latest = torch.where(mask, steps, -1).expand(x.shape).cummax(dim).values
    indices = torch.where(found == identity, latest, indices)
    # Gathered from x, so that the gradient goes to exactly that element.
    values = x.gather(dim, indices.clamp_min(0))
    return where_kept(values, indices >= 0, identity), indices


def logcumsumexp(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The running logsumexp of kept elements; -inf before the first."""
    if x.numel() == 0:
        return torch.where(mask, x, 0.0)
    # Terms that add nothing (dropped, or -inf) become a finite value so far below the smallest term that adding it
    # changes no bit. With -inf instead, torch's gradients have intermediate NaN, which leaks into a double backward.
    terms = mask & (x != -torch.inf)
    floor = torch.where(terms, x.detach(), 0.0).nan_to_num(nan=0.0).amin(dim[0], keepdim=True)
    floor = (2 * floor - _GAP.get(x.dtype, 200.0)).clamp_min(torch.finfo(x.dtype).min)
    out = torch.where(terms, x, floor).logcumsumexp(dim[0])
    started = terms.expand(x.shape).cumsum(dim[0]) > 0
    return torch.where(started, out, -torch.inf)
