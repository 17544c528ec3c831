"""Where the kept weights of a (outputs, inputs) matrix are: an immutable value of a few index tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, ShapeError, say

__all__ = ["BLOCKS", "Block", "SparseLayout", "Transposed"]

Block: TypeAlias = tuple[int, int]

#: The blocks that kernels serve: (outputs, inputs).
BLOCKS: tuple[Block, ...] = ((1, 1), (4, 1), (16, 16))

#: Rows are cut into ranges of about this many columns, whose inputs stay in the first cache. Kernels take one or more
#: of them at a time.
_RANGE = 96


@dataclass(frozen=True)
class Transposed:
    """The layout of the transposed matrix, for the gradient of the input, and where its values are found."""

    starts: Tensor
    columns: Tensor
    #: Which of the values each is, int64; what only fills up an edge block of the original is left out.
    order: Tensor


@dataclass(frozen=True, eq=False)
class SparseLayout:
    """Kept weights in rows of blocks. The values of a block are contiguous, row by row of the block.

    >>> import torch
    >>> layout = SparseLayout.from_mask(torch.tensor([[True, False, True], [False, True, False]]))
    >>> layout.starts.tolist(), layout.columns.tolist(), layout.count
    ([0, 2, 3], [0, 2, 1], 3)
    >>> layout.dense(torch.tensor([1.0, 2.0, 3.0]))
    tensor([[1., 0., 2.],
            [0., 3., 0.]])

    Attributes:
        shape: (outputs, inputs).
        block: (outputs, inputs) of a block, one of `BLOCKS`. Blocks at the far edges may reach out of the matrix; what
            is outside has a value, which is 0 and stays so.
        starts: int32; the first block of each row of blocks, and how many there are. Unstructured rows are cut into
            ranges of columns, and have an entry for each.
        columns: int32; the column of each block, counted in blocks.
    """

    shape: tuple[int, int]
    block: Block
    starts: Tensor
    columns: Tensor

    @classmethod
    def from_mask(cls, bits: Tensor, block: Block = (1, 1)) -> SparseLayout:
        """The layout of a bool mask (outputs, inputs) that keeps whole blocks.

        Raises:
            ShapeError: the mask does not have two dims.
            ArgumentError: no kernel has this block, or the mask keeps a part of one.
        """
        if bits.dim() != 2:
            raise ShapeError(
                say("SparseLayout", "mask", must="have two dims", got=tuple(bits.shape), hint="bits[None]")
            )
        if block not in BLOCKS:
            raise ArgumentError(
                say("SparseLayout", "block", must=f"be one of {BLOCKS}", got=block, hint="block=(1, 1)")
            )
        if block == (1, 1):
            rows, columns = bits.nonzero(as_tuple=True)
        else:
            found = _in_blocks(bits, block).any(-1)
            if not torch.equal(found, _in_blocks(bits, block, pad=True).all(-1)):
                hint = "SparseLayout.from_mask(mask), which takes any mask"
                message = say(
                    "SparseLayout", "mask", must=f"keep whole blocks of {block}", got="a part of one", hint=hint
                )
                raise ArgumentError(message)
            rows, columns = found.nonzero(as_tuple=True)
        return cls.from_coordinates((bits.shape[0], bits.shape[1]), rows, columns, block)

    @classmethod
    def from_coordinates(
        cls,
        shape: tuple[int, int],
        rows: Tensor,  # (n,) int64, in blocks
        columns: Tensor,  # (n,) int64, in blocks
        block: Block = (1, 1),
    ) -> SparseLayout:
        """The layout of blocks at these places, which are sorted by row and then by column."""
        height, width = -(-shape[0] // block[0]), shape[1]
        return cls(shape, block, _starts(rows, columns, height, width if block == (1, 1) else 1), columns.int())

    @property
    def count(self) -> int:
        """How many values there are."""
        return self.columns.numel() * self.block[0] * self.block[1]

    @property
    def device(self) -> torch.device:
        """The device of the indices."""
        return self.columns.device

    @cached_property
    def rows(self) -> Tensor:
        """The row of each block, counted in blocks: int64."""
        height = -(-self.shape[0] // self.block[0])
        ranges = (self.starts.numel() - 1) // max(height, 1)
        ends = self.starts[::ranges] if height else self.starts
        # How many rows have ended before each block. Unlike repeat_interleave, it has a size that no data decide.
        ended = torch.zeros(self.columns.shape[0] + 1, dtype=torch.long, device=self.device)
        ended = ended.index_add(0, ends[1:].long(), torch.ones_like(ends[1:], dtype=torch.long))
        return ended.cumsum(0)[:-1]

    @cached_property
    def coordinates(self) -> tuple[Tensor, Tensor]:
        """The row and the column of each value, int64; those of values outside of the matrix are outside too."""
        height, width = self.block
        if self.block == (1, 1):
            return self.rows, self.columns.long()
        down = torch.arange(height, device=self.device).repeat_interleave(width)
        along = torch.arange(width, device=self.device).repeat(height)
        rows = (self.rows[:, None] * height + down).reshape(-1)
        columns = (self.columns.long()[:, None] * width + along).reshape(-1)
        return rows, columns

    @cached_property
    def is_exact(self) -> bool:
        """Whether no block reaches out of the matrix."""
        return self.shape[0] % self.block[0] == 0 and self.shape[1] % self.block[1] == 0

    @cached_property
    def positions(self) -> Tensor:
        """The place of each value in the flattened matrix, int64; -1 for one outside of it."""
        rows, columns = self.coordinates
        flat = rows * self.shape[1] + columns
        return flat if self.is_exact else torch.where(self._inside, flat, -1)

    @cached_property
    def _inside(self) -> Tensor:
        rows, columns = self.coordinates
        return (rows < self.shape[0]) & (columns < self.shape[1])

    @cached_property
    def transposed(self) -> Transposed:
        """What the gradient of the input needs."""
        if self.block == (16, 16):
            order = torch.argsort(self.columns, stable=True)
            rows, columns = self.columns[order].long(), self.rows[order]
            starts = _starts(rows, columns, -(-self.shape[1] // 16), 1)
            within = torch.arange(256, device=self.device).reshape(16, 16).T.reshape(-1)
            return Transposed(starts, columns.int(), (order[:, None] * 256 + within).reshape(-1))
        rows, columns = self.coordinates
        order = torch.argsort(columns * self.shape[0] + rows)
        if not self.is_exact:
            order = order[self._inside[order]]
        rows, columns = columns[order], rows[order]
        return Transposed(_starts(rows, columns, self.shape[1], self.shape[0]), columns.int(), order)

    def gather(self, matrix: Tensor) -> Tensor:
        """The values of a dense matrix at the kept places: (count,). It can be differentiated."""
        flat = matrix.reshape(-1)
        if self.is_exact:
            return flat.index_select(0, self.positions)
        if not flat.numel():
            return flat.new_zeros(self.count)
        picked = flat.index_select(0, self.positions.clamp(min=0))
        return torch.where(self._inside, picked, torch.zeros((), dtype=flat.dtype, device=flat.device))

    def dense(self, values: Tensor) -> Tensor:
        """The dense matrix of these values, 0 elsewhere: (outputs, inputs). It can be differentiated."""
        outputs, inputs = self.shape
        size, positions = outputs * inputs, self.positions
        if self.is_exact:
            return values.new_zeros(size).index_copy(0, positions, values).reshape(outputs, inputs)
        # What is outside goes to one place more, which is left out: no size depends on data.
        positions = torch.where(positions < 0, size, positions)
        return values.new_zeros(size + 1).index_copy(0, positions, values)[:size].reshape(outputs, inputs)

    def to_bool(self) -> Tensor:
        """The mask: (outputs, inputs), True where kept."""
        return self.dense(torch.ones(self.count, dtype=torch.bool, device=self.device))

    def to(self, device: torch.device) -> SparseLayout:
        """The same layout on another device."""
        if device == self.device:
            return self
        return SparseLayout(self.shape, self.block, self.starts.to(device), self.columns.to(device))


def _in_blocks(bits: Tensor, block: Block, pad: bool = False) -> Tensor:
    """The mask by blocks: (rows of blocks, columns of blocks, values of a block), filled up with ``pad``."""
    height, width = block
    down, along = -bits.shape[0] % height, -bits.shape[1] % width
    full = torch.nn.functional.pad(bits, (0, along, 0, down), value=pad)
    cut = full.reshape(full.shape[0] // height, height, full.shape[1] // width, width)
    return cut.transpose(1, 2).reshape(cut.shape[0], cut.shape[2], height * width)


def _starts(rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
    """Where each row starts, in as many ranges of columns as its width requires: int32."""
    ranges = max(1, round(width / _RANGE))
    size = max(1, -(-width // ranges))
    keys = rows if ranges == 1 else rows * ranges + columns.div(size, rounding_mode="floor")
    counts = torch.bincount(keys, minlength=height * ranges)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
