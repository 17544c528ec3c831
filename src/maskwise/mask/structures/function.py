"""Any function of the indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from maskwise.mask.structures.base import Structure

__all__ = ["Function"]


@dataclass(frozen=True, eq=False)
class Function(Structure):
    """A pure function of one index tensor per dim, called only where its result is needed."""

    kind: ClassVar[str] = "function"
    fn: Callable[..., Tensor]
    shape: tuple[int, ...]
    device: torch.device

    @override
    def predicate(self, *index: Tensor) -> Tensor:
        return self.fn(*index)

    @override
    def to(self, device: torch.device) -> Structure:
        return Function(self.fn, self.shape, device)
