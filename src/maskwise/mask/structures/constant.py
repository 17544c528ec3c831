"""All kept, or none."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from maskwise.mask.structures.affine import Affine
from maskwise.mask.structures.base import Structure

__all__ = ["Constant"]


@dataclass(frozen=True, eq=False)
class Constant(Structure):
    """Every position is kept, or none is. No tensor is behind it."""

    kind: ClassVar[str] = "constant"
    shape: tuple[int, ...]
    device: torch.device
    value: bool

    @override
    def predicate(self, *index: Tensor) -> Tensor:
        device = index[0].device if index else self.device
        shape = torch.broadcast_shapes(*[i.shape for i in index])  # type: ignore[no-untyped-call]
        return torch.full((), self.value, dtype=torch.bool, device=device).expand(shape)

    @property
    @override
    def along(self) -> int | None:
        return -1 if self.shape else None

    @override
    def bounds(self) -> tuple[Tensor | None, Tensor | None]:
        kept = self.shape[-1] if self.value else 0
        return None, torch.full((1,) * len(self.shape), kept, device="cpu")

    @override
    def materialize(self) -> Tensor:
        return torch.full((), self.value, dtype=torch.bool, device=self.device).expand(self.shape)

    @override
    def view(self, affine: Affine) -> Structure:
        return Constant(affine.shape, self.device, self.value)

    @override
    def invert(self) -> Structure:
        return Constant(self.shape, self.device, not self.value)

    @property
    @override
    def known_count(self) -> int:
        return prod(self.shape) if self.value else 0

    @property
    @override
    def known_prefix(self) -> bool:
        return True

    @property
    @override
    def on_host(self) -> bool:
        return True

    @override
    def row_counts(self) -> Tensor | None:
        if not self.shape:
            return None
        return torch.full((1,) * (len(self.shape) - 1), self.shape[-1] if self.value else 0, device="cpu")
