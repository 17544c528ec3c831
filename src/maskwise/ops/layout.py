"""Where a kernel puts its results: the fakes must promise what the kernels do."""

from __future__ import annotations

from torch import Tensor

__all__ = ["room_like"]


def room_like(x: Tensor) -> Tensor:
    """Room in x's order of dims if x has no gaps and no overlaps, else contiguous.

    >>> import torch
    >>> room_like(torch.empty(3, 2).T).stride(), room_like(torch.empty(3, 1).expand(3, 2)).stride()
    ((1, 2), (2, 1))
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return x.new_empty(x.shape)
        expected *= size
    return x.new_empty_strided(x.shape, x.stride())
