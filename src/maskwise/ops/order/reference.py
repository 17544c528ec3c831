"""Sort, topk, median and quantile in plain torch operations: the ground truth of the tests, and the route where no
kernel serves.

Each is leak-proof, forward and backward, and differentiable by torch itself, transforms included. ``mask`` is a bool
tensor that broadcasts to x, ``dim`` a list of dims that are not negative; sort, argsort and topk take one of them.
"""

from __future__ import annotations

from math import inf, nan, prod

import torch
from torch import Tensor

from maskwise.ops.primitives import where_kept
from maskwise.ops.torch_private import is_exporting

__all__ = ["INTERPOLATIONS", "argsort", "median", "nothing", "quantile", "quantile_places", "sort", "topk", "worst"]

#: The ways to take a quantile between two values; the kernels know them by their place here.
INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")


def ranked(x: Tensor, mask: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """Indices along ``dim`` that put what is kept first, in order, and whether what each points at is kept."""
    clean = where_kept(x.detach(), mask, 0)
    order = stable_order(clean, dim, descending)
    kept = mask.expand(x.shape).gather(dim, order)
    # A value to fill in could equal a kept one; a second sort, by the mask, is right for every value.
    front = stable_order(kept, dim, True)
    return order.gather(dim, front), kept.gather(dim, front)


def stable_order(x: Tensor, dim: int, descending: bool) -> Tensor:
    """The indices that sort x; equal values stay in their order."""
    if is_exporting() and torch.onnx.is_in_onnx_export():
        # The exporter knows no stable sort; what it makes of the other, ONNX's TopK, is one. It takes no bools.
        return torch.sort(x.int() if x.dtype is torch.bool else x, dim=dim, descending=descending).indices
    return torch.sort(x, dim=dim, descending=descending, stable=True).indices


def sort(x: Tensor, mask: Tensor, dim: list[int], descending: bool) -> tuple[Tensor, Tensor]:
    """What is kept, in order; then zeros, with index -1."""
    order, kept = ranked(x, mask, dim[0], descending)
    return where_kept(where_kept(x, mask, 0).gather(dim[0], order), kept, 0), torch.where(kept, order, -1)


def argsort(x: Tensor, mask: Tensor, dim: list[int], descending: bool) -> Tensor:
    """The indices of what is kept, in the order of the values; then -1."""
    order, kept = ranked(x, mask, dim[0], descending)
    return torch.where(kept, order, -1)


def worst(dtype: torch.dtype, largest: bool) -> float:
    """The value that loses against every other: what topk gives where too few are kept."""
    if dtype.is_floating_point:
        return -inf if largest else inf
    limits = torch.iinfo(dtype)
    return limits.min if largest else limits.max


def topk(x: Tensor, mask: Tensor, dim: list[int], k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k best of what is kept, the best first; then the worst value, with index -1."""
    order, kept = ranked(x, mask, dim[0], largest)
    if x.dim() > 0:
        order, kept = order.narrow(dim[0], 0, k), kept.narrow(dim[0], 0, k)
    values = where_kept(where_kept(x, mask, 0).gather(dim[0], order), kept, worst(x.dtype, largest))
    return values, torch.where(kept, order, -1)


def nothing(dtype: torch.dtype) -> float:
    """What median and quantile give where nothing is kept: NaN, for integers the least."""
    return nan if dtype.is_floating_point else torch.iinfo(dtype).min


def slices(x: Tensor, dim: list[int]) -> Tensor:
    """X with its reduced dims as one dim, the last."""
    if x.dim() == 0:
        return x.reshape(1)
    others = [d for d in range(x.dim()) if d not in dim]
    return x.permute(*others, *dim).reshape(*[x.shape[d] for d in others], prod([x.shape[d] for d in dim]))


def unreduced(out: Tensor, x: Tensor, dim: list[int], keepdim: bool, lead: int) -> Tensor:
    """``out`` with the dims that were reduced, of size 1, behind ``lead`` others, if they are to stay."""
    for d in dim if keepdim and x.dim() else []:
        out = out.unsqueeze(d + lead)
    return out


def positions(
    x: Tensor,  # (..., L)
    kept: Tensor,  # (..., L), the kept ones first, in order
    order: Tensor,  # (..., L)
    q: Tensor,  # (Q,)
    interpolation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each quantile lies: indices of the values below and above (..., Q), the weight of the one above, valid."""
    n = kept.sum(-1, keepdim=True)
    last = (n - 1).clamp_min(0)
    # In q's own type, as torch does: 0.1 * 10 is 1 there. Beyond 2^24 float32 does not have every rank.
    narrow, wide = (q * last.to(q.dtype)).double(), q.double() * last
    rank = torch.where(n <= 2**24, narrow, wide) if q.dtype is torch.float32 else narrow
    valid = (rank >= 0) & (rank <= last) & (n > 0)
    name = INTERPOLATIONS[interpolation]
    rank = torch.where(valid, rank, 0.0)
    rank = rank.round() if name == "nearest" else rank.ceil() if name == "higher" else rank
    rank = rank.floor() if name == "lower" else rank
    if x.dtype.is_floating_point:
        # A kept NaN is every quantile, as in torch; it is the last in order.
        poisoned = x.gather(-1, order.gather(-1, last)).isnan() & (n > 0)
        rank = torch.where(poisoned & valid, last.double(), rank)
    below, above = rank.floor(), rank.ceil()
    weight = torch.full_like(rank, 0.5) if name == "midpoint" else rank - below
    return order.gather(-1, below.long()), order.gather(-1, above.long()), weight, valid


def quantile(x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int) -> Tensor:
    """The quantiles of what is kept, the ones of several q in front; NaN where nothing is kept."""
    rows, bits = slices(x, dim), slices(mask.expand(x.shape), dim)
    clean = where_kept(rows, bits, 0)
    if rows.shape[-1] == 0:
        # A sum of nothing has the right shape, and belongs to the graph.
        out = clean.sum(-1, dtype=x.dtype).unsqueeze(-1).expand(*rows.shape[:-1], q.numel())
        out = where_kept(out, torch.zeros_like(out, dtype=torch.bool), nothing(x.dtype))
    else:
        order, kept = ranked(rows, bits, -1, False)
        below, above, weight, valid = positions(rows.detach(), kept, order, q.reshape(-1), interpolation)
        out = clean.gather(-1, below)
        if INTERPOLATIONS[interpolation] in {"linear", "midpoint"}:
            wide = torch.promote_types(x.dtype, torch.float32)
            out = torch.lerp(out.to(wide), clean.gather(-1, above).to(wide), weight.to(wide)).to(x.dtype)
        out = where_kept(out, valid, nothing(x.dtype))
    out = out.squeeze(-1) if q.dim() == 0 else out.movedim(-1, 0)
    return unreduced(out, x, dim, keepdim, q.dim())


def quantile_places(
    x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which elements of ``x.reshape(-1)`` the quantiles lie between, -1 for none, and the weight of the upper."""
    rows, bits = slices(x, dim), slices(mask.expand(x.shape), dim)
    if rows.shape[-1] == 0:
        below = above = torch.full((*rows.shape[:-1], q.numel()), -1, device=x.device)
        weight = below.double() + 1
    else:
        order, kept = ranked(rows, bits, -1, False)
        below, above, weight, valid = positions(rows.detach(), kept, order, q.reshape(-1), interpolation)
        flat = slices(torch.arange(x.numel(), device=x.device).reshape(x.shape), dim)
        below, above = (torch.where(valid, flat.gather(-1, place), -1) for place in (below, above))
    shaped = [
        unreduced(out.squeeze(-1) if q.dim() == 0 else out.movedim(-1, 0), x, dim, keepdim, q.dim()).contiguous()
        for out in (below, above, weight)
    ]
    return shaped[0], shaped[1], shaped[2]


def half(x: Tensor) -> Tensor:
    """The q of the median, which is the lower of the two in the middle where there are two."""
    return torch.scalar_tensor(0.5, dtype=torch.float64, device=x.device)


def median(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The median of what is kept, the lower of two; NaN where nothing is kept."""
    return quantile(x, mask, dim, half(x), keepdim, INTERPOLATIONS.index("lower"))


def median_places(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """Which element of ``x.reshape(-1)`` each median is; -1 for none."""
    return quantile_places(x, mask, dim, half(x), keepdim, INTERPOLATIONS.index("lower"))[0]
