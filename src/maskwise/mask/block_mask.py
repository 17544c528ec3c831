"""FlexAttention's `BlockMask`, both ways. flex_attention is imported on use, for it is heavy."""

# The first argument is the class itself, which the reader of a method never passes.
# ruff: noqa: D417

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask.structures import Function, Structure
from maskwise.mask.structures.affine import subscript

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from maskwise.mask.mask import Mask

__all__ = ["block_mask_of", "from_block_mask", "to_block_mask"]


def from_block_mask(cls: type[Mask], block_mask: BlockMask) -> Mask:
    """Convert a FlexAttention block mask: its blocks and its mask_mod.

    >>> from maskwise import Mask
    >>> Mask.from_block_mask(Mask.causal(256).to_block_mask()).shape
    torch.Size([1, 1, 256, 256])

    Args:
        block_mask: a BlockMask; its mask_mod must broadcast over index tensors, as all index arithmetic does.

    Returns:
        A lazy mask of shape (B, H, Q, K).

    Raises:
        DtypeError: it is not a BlockMask.

    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        hint = "Mask(t) for a bool tensor"
        got = type(block_mask).__name__
        raise DtypeError(say("Mask.from_block_mask", "block_mask", must="be a BlockMask", got=got, hint=hint))
    rows, columns = block_mask.BLOCK_SIZE
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = None
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    mask_mod = block_mask.mask_mod

    def kept(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = (b, h, q // rows, k // columns)
        inside = partial[block] & mask_mod(b, h, q, k)
        return inside if full is None else inside | full[block]

    shape = tuple(int(size) for size in block_mask.shape)
    return cls._wrap(Function(kept, shape, block_mask.kv_indices.device))


def to_block_mask(mask: Mask, block_size: int = 128) -> BlockMask:
    """Return the FlexAttention block mask, full blocks apart from partial ones.

    Unlike `create_block_mask` it evaluates one row of blocks at a time, and never materializes all of Q x K.

    >>> from maskwise import Mask
    >>> block_mask = Mask.causal(512).to_block_mask()
    >>> block_mask.kv_num_blocks.tolist(), block_mask.full_kv_num_blocks.tolist()
    ([[[1, 1, 1, 1]]], [[[0, 1, 2, 3]]])

    Args:
        block_size: the side of a block.

    Returns:
        A BlockMask for a (Q, K), (B, Q, K) or (B, H, Q, K) mask.

    Raises:
        ShapeError: the mask has another number of dims.
        ArgumentError: ``block_size`` is not positive.

    """
    op = "Mask.to_block_mask"
    if not isinstance(block_size, int) or block_size < 1:
        raise ArgumentError(say(op, "block_size", must="be a positive int", got=block_size, hint="block_size=128"))
    if not 2 <= mask.ndim <= 4:
        must = "be (Q, K), (B, Q, K) or (B, H, Q, K)"
        hint = "mask[:, None, None, :].expand(-1, 1, Q, -1) for a (B, K) padding mask"
        raise ShapeError(say(op, "mask", must=must, got=tuple(mask.shape), hint=hint))
    four = mask.unsqueeze(1) if mask.ndim == 3 else mask[None, None] if mask.ndim == 2 else mask
    return block_mask_of(four, block_size)[0]


def block_mask_of(mask: Mask, block_size: int) -> tuple[BlockMask, Tensor, Tensor]:
    """Return the block mask of a (B, H, Q, K) mask, and which of its columns and rows keep anything.

    The latter are bool tensors (B, H, K) and (B, H, Q), from the same single pass over the mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    structure = mask._structure.place()
    batch, heads = structure.shape[:2]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # A mask of one batch or head serves all of them.
        return structure.predicate(b if batch > 1 else b * 0, h if heads > 1 else h * 0, q, k)

    strips = [_strip(structure, start, block_size) for start in range(0, structure.shape[2], block_size)]
    counts = torch.stack([blocks for blocks, _, _ in strips], -2)
    some, all_ = _ordered((counts > 0) & (counts < block_size**2)), _ordered(counts == block_size**2)
    lengths = (structure.shape[2], structure.shape[3])
    blocks = BlockMask.from_kv_blocks(*some, *all_, BLOCK_SIZE=block_size, mask_mod=mask_mod, seq_lengths=lengths)
    columns = torch.stack([found for _, found, _ in strips]).any(0)
    return blocks, columns, torch.cat([found for _, _, found in strips], -1)


def _strip(structure: Structure, start: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a row of blocks: how many positions each keeps, (B, H, K blocks); its columns and rows that keep some."""
    strip = structure.view(subscript(structure.shape, (..., slice(start, start + size), slice(None)))).materialize()
    columns = strip.sum(-2)
    padded = pad(columns, (0, -structure.shape[3] % size))
    return padded.view(*padded.shape[:-1], -1, size).sum(-1), columns > 0, strip.any(-1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, and their columns, first those that it has."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int().contiguous(), columns.int().contiguous()


def _listed(counts: Tensor, columns: Tensor) -> Tensor:
    """Return the blocks that `_ordered` lists, as a bool tensor."""
    first = torch.arange(columns.shape[-1], device=columns.device) < counts[..., None]
    return torch.zeros_like(columns).scatter_add_(-1, columns.long(), first.to(columns.dtype)) > 0
