"""A bool tensor, as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from maskwise.errors import StaleMaskError
from maskwise.mask.structures.affine import Affine
from maskwise.mask.structures.base import Structure
from maskwise.ops.torch_private import is_tracing

__all__ = ["Dense"]


def _version(bits: Tensor) -> int | None:
    """Return the in-place counter of a tensor, or None where there is none to read."""
    # In a compiled graph a version would be an output, inference tensors have none, and pytrees may hold non-tensors.
    if is_tracing() or not isinstance(bits, Tensor) or bits.is_inference():
        return None
    return bits._version


@dataclass(frozen=True, eq=False)
class Dense(Structure):
    """A bool tensor that is aliased, not copied, and watched for in-place changes."""

    kind: ClassVar[str] = "dense"
    leaves: ClassVar[tuple[str, ...]] = ("bits",)
    bits: Tensor
    version: int | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", _version(self.bits))

    def __reduce__(self) -> tuple[type[Dense], tuple[Tensor]]:
        # A copy counts its own in-place changes, so the version is taken anew.
        return Dense, (self.bits,)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bits.shape)

    @property
    @override
    def device(self) -> torch.device:
        return self.bits.device

    def current(self) -> Tensor:
        """Return the bits, or raise StaleMaskError if they were changed after the mask was made."""
        if self.version is not None and not is_tracing() and self.bits._version != self.version:
            raise StaleMaskError(
                "Mask: the bool tensor behind this mask was changed in place after the mask was made, so its cached "
                "count, lengths and structure are stale. Hint: Mask(t.clone()) before changing t."
            )
        return self.bits

    @override
    def predicate(self, *index: Tensor) -> Tensor:
        bits = self.current()
        return bits[tuple(i.to(bits.device) for i in index)] if index else bits

    @override
    def materialize(self) -> Tensor:
        return self.current()

    @override
    def view(self, affine: Affine) -> Structure:
        return Dense(affine.apply(self.current()).expand(affine.shape))

    @override
    def invert(self) -> Structure:
        return Dense(~self.current())

    @override
    def to(self, device: torch.device) -> Structure:
        bits = self.current()
        moved = bits.to(device, non_blocking=bits.is_pinned() if bits.device.type == "cpu" else False)
        return self if moved is bits else Dense(moved)
