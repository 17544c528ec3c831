"""Sort, topk, median and quantile in plain torch operations: the ground truth of the tests, and the fallback.

Each is leak-proof, forward and backward, and differentiable by torch itself, transforms included. ``mask`` is a bool
tensor that broadcasts to x, ``dim`` a list of non-negative dims; sort, argsort and topk take one of them.
"""

from __future__ import annotations

from math import inf, nan, prod

import torch
from torch import Tensor

from maskwise.ops.primitives import where_kept
from maskwise.ops.torch_private import is_exporting, is_transformed

__all__ = [
    "INTERPOLATIONS",
    "argsort",
    "median",
    "median_indices",
    "nothing",
    "quantile",
    "quantile_indices",
    "sort",
    "topk",
    "worst",
]

#: The interpolations of a quantile; kernels take the index into this tuple.
INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")


def ranked(x: Tensor, mask: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """Indices along ``dim`` with kept elements first, in order, and whether each is kept."""
    if selects(x) and x.dtype is not torch.int64:
        order = stable_order(sort_keys(x.detach(), mask, descending), dim, descending)
        return order, mask.expand(x.shape).gather(dim, order)
    clean = where_kept(x.detach(), mask, 0)
    order = stable_order(clean, dim, descending)
    kept = mask.expand(x.shape).gather(dim, order)
    # A fill value could tie with a kept one; a second stable sort, by the mask, is correct for every value.
    front = stable_order(kept, dim, True)
    return order.gather(dim, front), kept.gather(dim, front)


def stable_order(x: Tensor, dim: int, descending: bool) -> Tensor:
    """The indices of a stable sort."""
    if is_exporting() and torch.onnx.is_in_onnx_export():
        # The ONNX exporter has no stable sort; it maps the unstable one to TopK, which is stable, but takes no bools.
        return torch.sort(x.int() if x.dtype is torch.bool else x, dim=dim, descending=descending).indices
    return torch.sort(x, dim=dim, descending=descending, stable=True).indices


# -- on a GPU: one radix pass over integers that sort as the values do -------------------------------------------------
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def selects(x: Tensor) -> bool:
    """Whether integers stand for the values: torch sorts and selects those by radix on a GPU."""
    return x.device.type == "cuda" and not is_transformed() and not is_exporting()


def sort_keys(x: Tensor, mask: Tensor, descending: bool) -> Tensor:
    """Integers that sort as x does, NaN above all and both zeros alike; what is dropped comes after everything.

    >>> keys = sort_keys(torch.tensor([1.0, -0.0, 0.0, -2.0]), torch.tensor([True, True, True, False]), False)
    >>> keys.argsort(stable=True).tolist()
    [1, 2, 0, 3]
    """
    if x.dtype.is_floating_point:
        wide = _BITS[x.dtype]
        highest = torch.iinfo(wide).max
        # Adding 0 makes -0 of it 0. The bits of a negative number sort downwards but for the sign.
        bits = (where_kept(x, mask, 0) + 0).view(wide)
        keys = torch.where(bits < 0, bits ^ highest, bits)
        # No NaN has all bits set, in either direction, which is left for what is dropped.
        keys, lowest = torch.where(x.isnan(), highest - 1, keys), torch.iinfo(wide).min
    else:
        # One beyond what 32 bits hold, in either direction.
        keys, lowest, highest = x.to(torch.int64), -(2**31) - 1, 2**31
    return torch.where(mask, keys, lowest if descending else highest)


def select_best(x: Tensor, mask: Tensor, dim: int, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The indices of the k best kept elements along ``dim``, and whether each is kept, by one selection.

    The key has the position in its lower 31 bits, so that equal values come in their order.
    """
    size = x.shape[dim]
    places = torch.arange(size, device=x.device)
    if largest:
        places = size - 1 - places
    shape = [size if d == dim else 1 for d in range(x.dim())]
    keys = sort_keys(x.detach(), mask, largest).to(torch.int64) << 31 | places.view(shape)
    order = torch.topk(keys, k, dim, largest=largest, sorted=True).indices
    return order, mask.expand(x.shape).gather(dim, order)


def median_places(rows: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """The index of each row's median, the lower of two, and whether the row keeps anything; a kept NaN is the median.

    nanmedian selects by radix, each row with its own count.
    """
    some = bits.any(-1, keepdim=True)
    found = torch.nanmedian(where_kept(rows, bits, nan), -1, keepdim=True).indices
    spoiled = bits & rows.isnan()
    return torch.where(spoiled.any(-1, keepdim=True), spoiled.byte().argmax(-1, keepdim=True), found), some


def selects_median(x: Tensor) -> bool:
    """Whether `median_places` serves: its selection has no deterministic form."""
    return selects(x) and x.dtype.is_floating_point and not torch.are_deterministic_algorithms_enabled()


def sort(x: Tensor, mask: Tensor, dim: list[int], descending: bool) -> tuple[Tensor, Tensor]:
    """Kept elements in order; then zeros with index -1."""
    order, kept = ranked(x, mask, dim[0], descending)
    return where_kept(where_kept(x, mask, 0).gather(dim[0], order), kept, 0), torch.where(kept, order, -1)


def argsort(x: Tensor, mask: Tensor, dim: list[int], descending: bool) -> Tensor:
    """The indices of kept elements in the order of their values; then -1."""
    order, kept = ranked(x, mask, dim[0], descending)
    return torch.where(kept, order, -1)


def worst(dtype: torch.dtype, largest: bool) -> float:
    """The identity of topk, its value where fewer than k are kept."""
    if dtype.is_floating_point:
        return -inf if largest else inf
    limits = torch.iinfo(dtype)
    return limits.min if largest else limits.max


def topk(x: Tensor, mask: Tensor, dim: list[int], k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The k best kept elements, the best first; then `worst` with index -1."""
    if selects(x) and x.dim() > 0 and x.element_size() <= 4 and k < x.shape[dim[0]] < 2**31:
        order, kept = select_best(x, mask, dim[0], k, largest)
    else:
        order, kept = ranked(x, mask, dim[0], largest)
        if x.dim() > 0:
            order, kept = order.narrow(dim[0], 0, k), kept.narrow(dim[0], 0, k)
    values = where_kept(where_kept(x, mask, 0).gather(dim[0], order), kept, worst(x.dtype, largest))
    return values, torch.where(kept, order, -1)


def nothing(dtype: torch.dtype) -> float:
    """The result of median and quantile for an empty slice: NaN, or the minimum of an integer dtype."""
    return nan if dtype.is_floating_point else torch.iinfo(dtype).min


def slices(x: Tensor, dim: list[int]) -> Tensor:
    """X with its reduced dims flattened into the last dim."""
    if x.dim() == 0:
        return x.reshape(1)
    # Not `d not in dim`, which before torch 2.13 compares a traced dim by identity.
    others = [d for d in range(x.dim()) if all(d != each for each in dim)]
    return x.permute(*others, *dim).reshape(*[x.shape[d] for d in others], prod([x.shape[d] for d in dim]))


def unreduced(out: Tensor, x: Tensor, dim: list[int], keepdim: bool, lead: int) -> Tensor:
    """``out`` with the reduced dims of size 1 after ``lead`` others, if ``keepdim``."""
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
    """For each quantile: the indices of the values below and above (..., Q), the weight of the upper, and validity."""
    n = kept.sum(-1, keepdim=True)
    last = (n - 1).clamp_min(0)
    # In q's dtype, as in torch, where 0.1 * 10 is 1. Beyond 2^24, float32 cannot represent every rank.
    narrow, wide = (q * last.to(q.dtype)).double(), q.double() * last
    rank = torch.where(n <= 2**24, narrow, wide) if q.dtype is torch.float32 else narrow
    valid = (rank >= 0) & (rank <= last) & (n > 0)
    name = INTERPOLATIONS[interpolation]
    rank = torch.where(valid, rank, 0.0)
    rank = rank.round() if name == "nearest" else rank.ceil() if name == "higher" else rank
    rank = rank.floor() if name == "lower" else rank
    if x.dtype.is_floating_point:
        # A kept NaN makes every quantile NaN, as in torch; it sorts last.
        has_nan = x.gather(-1, order.gather(-1, last)).isnan() & (n > 0)
        rank = torch.where(has_nan & valid, last.double(), rank)
    below, above = rank.floor(), rank.ceil()
    weight = torch.full_like(rank, 0.5) if name == "midpoint" else rank - below
    return order.gather(-1, below.long()), order.gather(-1, above.long()), weight, valid


def quantile(x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int) -> Tensor:
    """The quantiles of kept elements, with the dim of q in front; NaN for an empty slice."""
    rows, bits = slices(x, dim), slices(mask.expand(x.shape), dim)
    clean = where_kept(rows, bits, 0)
    if rows.shape[-1] == 0:
        # An empty sum has the right shape, and is connected to the graph.
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


def quantile_indices(
    x: Tensor, mask: Tensor, dim: list[int], q: Tensor, keepdim: bool, interpolation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The indices into ``x.reshape(-1)`` of the values below and above, -1 for none, and the weight of the upper."""
    rows, bits = slices(x, dim), slices(mask.expand(x.shape), dim)
    if rows.shape[-1] == 0:
        below = above = torch.full((*rows.shape[:-1], q.numel()), -1, device=x.device)
        weight = below.double() + 1
    else:
        order, kept = ranked(rows, bits, -1, False)
        below, above, weight, valid = positions(rows.detach(), kept, order, q.reshape(-1), interpolation)
        flat = slices(torch.arange(x.numel(), device=x.device).reshape(x.shape), dim)
        below, above = (torch.where(valid, flat.gather(-1, index), -1) for index in (below, above))
    shaped = [
        unreduced(out.squeeze(-1) if q.dim() == 0 else out.movedim(-1, 0), x, dim, keepdim, q.dim()).contiguous()
        for out in (below, above, weight)
    ]
    return shaped[0], shaped[1], shaped[2]


def half(x: Tensor) -> Tensor:
    """The q of the median."""
    return torch.scalar_tensor(0.5, dtype=torch.float64, device=x.device)


def median(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The median of kept elements, the lower of two; NaN for an empty slice."""
    rows, bits = slices(x, dim), slices(mask.expand(x.shape), dim)
    if selects_median(x) and rows.shape[-1]:
        places, some = median_places(rows.detach(), bits)
        out = where_kept(where_kept(rows, bits, 0).gather(-1, places), some, nothing(x.dtype)).squeeze(-1)
        return unreduced(out, x, dim, keepdim, 0)
    return quantile(x, mask, dim, half(x), keepdim, INTERPOLATIONS.index("lower"))


def median_indices(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The index into ``x.reshape(-1)`` of each median; -1 for none."""
    rows, bits = slices(x, dim), slices(mask.expand(x.shape), dim)
    if selects_median(x) and rows.shape[-1]:
        places, some = median_places(rows, bits)
        flat = slices(torch.arange(x.numel(), device=x.device).reshape(x.shape), dim)
        out = torch.where(some, flat.gather(-1, places), -1).squeeze(-1)
        return unreduced(out, x, dim, keepdim, 0).contiguous()
    return quantile_indices(x, mask, dim, half(x), keepdim, INTERPOLATIONS.index("lower"))[0]
