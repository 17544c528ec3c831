"""Selection in plain torch operations: the ground truth of the tests, and the fallback without a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bits_of", "pack_rows", "pack_rows_out", "pack_static", "unpack_rows", "unpack_rows_out", "unpack_static"]


def bits_of(mask: Tensor) -> Tensor:
    """The mask of an op as a bool tensor: itself, or from the starts and ends of what is kept along its last dim."""
    if mask.dtype is torch.bool:
        return mask
    places = torch.arange(mask.shape[-1], device=mask.device)
    return (places >= mask[0]) & (places < mask[1])


def pack_rows(
    x: Tensor,  # (*mask.shape, *rest)
    mask: Tensor,  # bool, or bounds
) -> Tensor:
    """The kept rows, contiguous: (n, *rest)."""
    return x[bits_of(mask)]


def unpack_rows(
    values: Tensor,  # (n, *rest)
    mask: Tensor,  # bool, or bounds; keeps n
    other: Tensor,  # broadcasts to (*mask.shape, *rest)
) -> Tensor:
    """The rows scattered to kept positions, ``other`` elsewhere: (*mask.shape, *rest)."""
    mask = bits_of(mask)
    base = other.expand(*mask.shape, *values.shape[1:])
    return base.index_put((mask,), values[: mask.sum()] if values.shape[0] else values)


def pack_rows_out(x: Tensor, mask: Tensor, out: Tensor) -> None:
    """The out= variant of pack_rows."""
    out.copy_(pack_rows(x, mask))


def unpack_rows_out(values: Tensor, mask: Tensor, other: Tensor, out: Tensor) -> None:
    """The out= variant of unpack_rows."""
    out.copy_(unpack_rows(values, mask, other))


def pack_static(x: Tensor, mask: Tensor, capacity: int) -> Tensor:
    """As pack_rows, into exactly ``capacity`` rows, padded with zeros: a static shape."""
    rows = mask.reshape(-1)
    indices = torch.nonzero_static(rows, size=capacity, fill_value=-1).squeeze(-1)
    flat = x.reshape(rows.shape[0], *x.shape[mask.dim() :])
    if rows.shape[0] == 0:
        return flat.new_zeros(capacity, *flat.shape[1:])
    picked = flat.index_select(0, indices.clamp(min=0))
    used = (indices >= 0).reshape(-1, *[1] * (flat.dim() - 1))
    return torch.where(used, picked, torch.zeros((), dtype=x.dtype, device=x.device))


def unpack_static(values: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    """As unpack_rows, for any number of rows, without a host-device sync for the number of kept ones."""
    shape = (*mask.shape, *values.shape[1:])
    if values.shape[0] == 0:
        return other.expand(shape).clone()
    indices = (mask.reshape(-1).cumsum(0) - 1).clamp(0, values.shape[0] - 1)
    scattered = values.index_select(0, indices).reshape(shape)
    return torch.where(mask.reshape(*mask.shape, *[1] * (values.dim() - 1)), scattered, other)
