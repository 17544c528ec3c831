"""Bool tensors whose true elements are bytes other than 1, as they come from images of 0 and 255."""

from __future__ import annotations

import torch
from torch import Tensor

#: Every kind of byte: the largest, without the lowest bit, the sign alone, 1 itself, and others.
BYTES = torch.tensor([255, 2, 128, 1, 64, 3, 129], dtype=torch.uint8)


def odd(bits: Tensor) -> Tensor:
    """The same mask, with the same strides, of other bytes."""
    places = torch.arange(bits.numel()).reshape(bits.shape) % len(BYTES)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(bits.shape, bits.stride(), strict=True))
    raw = torch.zeros(extent, dtype=torch.uint8).as_strided(bits.shape, bits.stride())
    raw.copy_(torch.where(bits, BYTES[places], 0))
    found = raw.view(torch.bool)
    assert torch.equal(found, bits)
    assert bits.numel() < len(BYTES) or not bits.any() or int(raw.max()) > 1
    return found
