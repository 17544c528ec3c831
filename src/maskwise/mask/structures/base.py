"""What every structure can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from maskwise.mask.structures.affine import Affine

__all__ = ["Operand", "Skeleton", "Structure", "assemble", "open_grid", "take_apart"]

#: How a mask reaches a kernel: as one run [start, end) for each line along a dim, or as a bool for each position.
Operand: TypeAlias = Literal["intervals", "bits"]


@dataclass(frozen=True, eq=False)
class Structure(ABC):
    """Which positions are kept, as data: an immutable value with a shape, a device and a pure predicate.

    A new kind is a frozen dataclass with these four: ``shape``, ``device``, ``predicate`` and ``kind``. All the rest
    has a default that is right for any kind, and is overridden where the kind knows better.
    """

    kind: ClassVar[str] = "structure"
    # The fields that hold tensors, by name: a pytree may have put anything in their place.
    leaves: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:
        # Fields in some kinds and properties in others, so the base can only promise them.
        @property
        def shape(self) -> tuple[int, ...]:
            """The mask's shape."""

        @property
        def device(self) -> torch.device:
            """The device that the mask is for."""

        @property
        def along(self) -> int | None:
            """The dim, counted from the right, of which each line keeps one run; None where bits must be read."""
    else:
        along = None

    @abstractmethod
    def predicate(self, *index: Tensor) -> Tensor:
        """Return True where kept, for one int64 index tensor a dim; the index tensors broadcast together."""

    def bounds(self) -> tuple[Tensor | None, Tensor | None]:
        """Return where the run of each line `along` a dim starts and ends: int64, broadcastable, of size 1 in that dim.

        None means the line's own edge. Bounds may lie outside of the line. Only where `along` is not None.
        """
        return None, None

    def materialize(self) -> Tensor:
        """Return the bool tensor of this structure's shape, on its device. It may be an expanded view."""
        return self.predicate(*open_grid(self.shape, self.device)).expand(self.shape)

    def view(self, affine: Affine) -> Structure:
        """Return the structure seen through an affine view; nothing is materialised."""
        from maskwise.mask.structures.view import View

        return View(self, affine)

    def invert(self) -> Structure:
        """Return the structure that keeps what this one drops."""
        from maskwise.mask.structures.combination import Not

        return Not(self)

    @property
    def known_count(self) -> int | None:
        """How many are kept, if that takes no work."""
        return None

    @property
    def known_prefix(self) -> bool | None:
        """Whether each row keeps a leading run, if that takes no work."""
        return None

    def row_counts(self) -> Tensor | None:
        """Return how many each row keeps, int64, broadcastable to shape[:-1]; None where the bits must be read."""
        return None

    def closed_count(self) -> int | None:
        """Return how many are kept in all; None where the bits must be read."""
        if self.known_count is not None:
            return self.known_count
        rows = self.row_counts()
        if rows is None:
            return None
        # The rows may be given once for many.
        return int(rows.sum()) * (prod(self.shape[:-1]) // rows.numel() if rows.numel() else 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that this structure is made of."""
        return tuple(take_apart(self)[0])

    @property
    def on_host(self) -> bool:
        """Whether counting reads host memory only, never a device."""
        return self.device.type == "cpu"

    def numel(self) -> int:
        """Return how many positions there are, kept or not."""
        return prod(self.shape)

    def to(self, device: torch.device) -> Structure:
        """Return this structure for another device. What lies on the host stays there until it is needed."""
        tensors, skeleton = take_apart(self)
        moved = [t if t.device.type == "cpu" else t.to(device) for t in tensors]
        return assemble(skeleton.on(device), moved)

    def place(self) -> Structure:
        """Return this structure with every tensor on its device, for kernels that read them there."""
        tensors, skeleton = take_apart(self)
        return assemble(skeleton, [t.to(self.device, non_blocking=True) for t in tensors])


def open_grid(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return one arange a dim, shaped so that together they broadcast to ``shape``.

    >>> [tuple(index.shape) for index in open_grid((2, 3), torch.device("cpu"))]
    [(2, 1), (1, 3)]
    """
    return tuple(
        torch.arange(size, device=device).view((1,) * dim + (size,) + (1,) * (len(shape) - dim - 1))
        for dim, size in enumerate(shape)
    )


@dataclass(frozen=True)
class Skeleton:
    """A structure without its tensors: what is left is static, and can be compared."""

    cls: type[Structure]
    values: tuple[Any, ...]

    def on(self, device: torch.device) -> Skeleton:
        """Return this skeleton with every device in it replaced."""
        return Skeleton(self.cls, tuple(_on(value, device) for value in self.values))


class _Hole:
    """Where a tensor was taken out of a Skeleton."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hole)

    def __hash__(self) -> int:
        return hash(_Hole)

    def __repr__(self) -> str:
        return "*"


_HOLE = _Hole()


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.device):
        return device
    return value.on(device) if isinstance(value, Skeleton) else value


def take_apart(structure: Structure) -> tuple[list[Tensor], Skeleton]:
    """Split a structure into its tensors and the skeleton that `assemble` puts them back into."""
    tensors: list[Tensor] = []
    values: list[Any] = []
    for field in fields(structure):
        if not field.init:
            continue
        value = getattr(structure, field.name)
        if field.name in structure.leaves and value is not None:
            tensors.append(value)
            values.append(_HOLE)
        elif isinstance(value, Structure):
            inner, skeleton = take_apart(value)
            tensors.extend(inner)
            values.append(skeleton)
        else:
            values.append(value)
    return tensors, Skeleton(type(structure), tuple(values))


def assemble(skeleton: Skeleton, tensors: list[Any]) -> Structure:
    """Put tensors back into a skeleton. They may be anything: pytrees are mapped to all sorts of leaves."""
    supply = iter(tensors)

    def fill(bones: Skeleton) -> Structure:
        values = []
        for value in bones.values:
            if isinstance(value, _Hole):
                values.append(next(supply))
            else:
                values.append(fill(value) if isinstance(value, Skeleton) else value)
        return bones.cls(*values)

    return fill(skeleton)
