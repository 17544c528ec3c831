"""A list of kept positions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from maskwise.mask.structures.base import Structure

__all__ = ["Indices"]


@dataclass(frozen=True, eq=False)
class Indices(Structure):
    """The kept positions as flat int64 indices, sorted and unique. They are stored on the CPU for every device."""

    kind: ClassVar[str] = "indices"
    leaves: ClassVar[tuple[str, ...]] = ("flat",)
    flat: Tensor
    shape: tuple[int, ...]
    device: torch.device

    @override
    def predicate(self, *index: Tensor) -> Tensor:
        where = index[0].device if index else self.device
        position = torch.zeros((), dtype=torch.int64, device=where)
        for size, i in zip(self.shape, index, strict=True):
            position = position * size + i
        flat = self.flat.to(where)
        if not flat.numel():
            return torch.zeros_like(position, dtype=torch.bool)
        nearest = torch.searchsorted(flat, position).clamp(max=flat.numel() - 1)
        return flat[nearest] == position

    @override
    def materialize(self) -> Tensor:
        bits = torch.zeros(prod(self.shape), dtype=torch.bool, device=self.device)
        return bits.index_fill_(0, self.flat.to(self.device, non_blocking=True), True).view(self.shape)

    @property
    @override
    def known_count(self) -> int:
        return self.flat.numel()

    @property
    @override
    def on_host(self) -> bool:
        return self.flat.device.type == "cpu"

    @override
    def row_counts(self) -> Tensor | None:
        if not self.shape or not self.shape[-1]:
            return None
        rows = prod(self.shape[:-1])
        row = torch.div(self.flat, self.shape[-1], rounding_mode="floor")
        # Not bincount, whose size depends on the values, which a compiled graph cannot know.
        counts = torch.zeros(rows, dtype=torch.int64, device=row.device)
        return counts.index_add_(0, row, torch.ones_like(row)).view(self.shape[:-1])
