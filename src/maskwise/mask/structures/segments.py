"""Same-segment attention: a block diagonal over packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from maskwise.mask.structures.base import Structure
from maskwise.mask.structures.intervals import Intervals
from maskwise.ops.torch_private import is_tracing

__all__ = ["Segments"]


@dataclass(frozen=True, eq=False)
class Segments(Structure):
    """Position q attends to k where both have the same segment id, and that id is not the padding id."""

    kind: ClassVar[str] = "segments"
    leaves: ClassVar[tuple[str, ...]] = ("ids",)
    ids: Tensor
    device: torch.device
    padding: int = -1

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return (*self.ids.shape, self.ids.shape[-1])

    @override
    def predicate(self, *index: Tensor) -> Tensor:
        *batch, query, key = index
        ids = self.ids.to(query.device)
        # Brackets would ask the device for the value of an index of no dims.
        at = torch.ops.aten.index.Tensor
        mine = at(ids, [*batch, query])
        kept: Tensor = (mine == at(ids, [*batch, key])) & (mine != self.padding)
        return kept

    @override
    def materialize(self) -> Tensor:
        ids = self.ids.to(self.device, non_blocking=True)
        return (ids[..., :, None] == ids[..., None, :]) & (ids != self.padding)[..., :, None]

    @property
    @override
    def on_host(self) -> bool:
        return self.ids.device.type == "cpu"

    @override
    def row_counts(self) -> Tensor:
        # In sorted order, a position's segment is the run of its id: no device is waited for to find its length.
        ids = self.ids.contiguous()
        order = ids.sort(-1).values
        counts = torch.searchsorted(order, ids, right=True) - torch.searchsorted(order, ids)
        return torch.where(ids == self.padding, 0, counts)

    @property
    @override
    def along(self) -> int | None:
        return None if is_tracing() or self.runs is None else -1

    @override
    def bounds(self) -> tuple[Tensor | None, Tensor | None]:
        assert self.runs is not None
        return self.runs.bounds()

    @cached_property
    def runs(self) -> Intervals | None:
        """The same mask as Intervals where every id is one run; None where not, or on a device."""
        ids = self.ids
        if is_tracing() or type(ids) is not Tensor or ids.device.type != "cpu" or not ids.numel():
            return None
        length = ids.shape[-1]
        position = torch.arange(length).expand_as(ids)
        first = torch.ones_like(ids, dtype=torch.bool)
        first[..., 1:] = ids[..., 1:] != ids[..., :-1]
        starts = torch.where(first, position, 0).cummax(-1).values
        last = torch.ones_like(first)
        last[..., :-1] = first[..., 1:]
        ends = torch.where(last, position + 1, length).flip(-1).cummin(-1).values.flip(-1)
        ends = torch.where(ids == self.padding, starts, ends)
        # An id in two runs has fewer positions in its run than it has in all.
        if not torch.equal(ends - starts, self.row_counts()):
            return None
        return Intervals(starts, ends, self.shape, self.device)
