"""What every function is measured against: a loop over slices, in float64, that sees only what is kept."""

from __future__ import annotations

from collections.abc import Callable

import torch

ONE_SLICE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda kept: kept.sum(),
}


def reduce_slices(name, x, mask, dim=None, keepdim=False, empty=None, **kwargs):
    """The reduction ``name`` of ``x``, one slice after the other; ``empty`` where a slice keeps nothing."""
    mask = mask.expand(x.shape)
    dims = list(range(x.dim())) if dim is None else sorted(d % x.dim() for d in ([dim] if isinstance(dim, int) else dim))
    others = [d for d in range(x.dim()) if d not in dims]
    moved = x.double().permute(*others, *dims).reshape(*[x.shape[d] for d in others], -1)
    moved_mask = mask.permute(*others, *dims).reshape(moved.shape)
    rows, bits = moved.reshape(-1, moved.shape[-1]), moved_mask.reshape(-1, moved.shape[-1])
    outs = []
    for row, kept in zip(rows, bits, strict=True):
        values = row[kept]
        outs.append(torch.tensor(empty, dtype=torch.float64) if len(values) == 0 else ONE_SLICE[name](values, **kwargs))
    out = torch.stack(outs).reshape([x.shape[d] for d in others])
    if keepdim:
        for d in dims:
            out = out.unsqueeze(d)
    return out
