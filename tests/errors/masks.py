"""Mistakes with masks."""

from __future__ import annotations

import numpy as np
import torch

import maskwise as mw
from maskwise import Mask
from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError, StaleMaskError
from tests.errors.row import Row

BITS = torch.ones(2, 3, dtype=torch.bool)
MASK = Mask.from_lengths([1, 3])
META = Mask.full((2, 3), device="meta")
INTS = torch.tensor([0, 2], device="meta")
FLOATS = torch.ones(2, 3)


def stale() -> None:
    bits = torch.ones(3, dtype=torch.bool)
    mask = Mask(bits)
    bits[0] = False
    mask.to_bool()


def unflatten_leaves_of_another_rank() -> None:
    leaves, spec = torch.utils._pytree.tree_flatten(MASK)
    torch.utils._pytree.tree_unflatten([leaf[None] for leaf in leaves], spec)


WITHOUT_DATA = Mask(torch.ones(2, 3, dtype=torch.bool, device="meta"))

ROWS = [
    # -- without data
    Row("Mask.count", lambda: WITHOUT_DATA.count(), DeviceError, "mw.count(mask), whose result is a tensor"),
    Row("Mask.indices", lambda: WITHOUT_DATA.indices(), DeviceError, "before the mask goes to meta"),
    Row("Mask.to_numpy", lambda: WITHOUT_DATA.to_numpy(), DeviceError, "before the mask goes to meta"),
    Row("Mask.to_cu_seqlens", lambda: WITHOUT_DATA.to_cu_seqlens(), DeviceError, "before the mask goes to meta"),
    Row("Mask.to", lambda: WITHOUT_DATA.to("cpu"), DeviceError, "before the mask goes to meta"),
    # -- not dense
    Row("Mask", lambda: Mask(BITS.to_sparse()), ArgumentError, "bits.to_dense()"),
    Row(
        "Mask.from_indices", lambda: Mask.from_indices([[0, 1], [2]], (3, 3)), ShapeError, "size=x.shape[-1] for a list"
    ),
    Row("Mask.from_indices", lambda: Mask.from_indices([[[0]], [[1]]], 3), ShapeError, "Mask.stack("),
    Row("Mask.from_indices", lambda: Mask.from_indices((INTS, INTS), 3), ShapeError, "x.nonzero(as_tuple=True)"),
    Row("Mask.random", lambda: Mask.random("ab", 0.5), DtypeError, "shape=x.shape"),
    Row("Mask.random", lambda: Mask.random(3, "0.5"), DtypeError, "density=0.5"),
    Row("Mask.random", lambda: Mask.random(3, 90), ArgumentError, "density=0.9"),
    Row("Mask.from_values", lambda: Mask.from_values(FLOATS.to_sparse(), 1), ArgumentError, "tokens.to_dense()"),
    Row("Mask.from_additive", lambda: Mask.from_additive(FLOATS.to_sparse()), ArgumentError, "to_dense()"),
    # -- how to make one
    Row("Mask", lambda: Mask([True]), DtypeError, "Mask(torch.tensor(...))"),
    Row("Mask", lambda: Mask(np.ones(2, dtype=bool)), DtypeError, "Mask.from_numpy(array)"),
    Row("Mask", lambda: Mask(FLOATS), DtypeError, "Mask.from_additive(t) for 0 and -inf"),
    Row("Mask", lambda: Mask(torch.ones(2, dtype=torch.int64)), DtypeError, "Mask.from_attention_mask(t) for 0 and 1"),
    Row("Mask.from_lengths", lambda: Mask.from_lengths([2], side="top"), ArgumentError, 'side="right"'),
    Row("Mask.from_lengths", lambda: Mask.from_lengths(INTS), ArgumentError, "max_len=tokens.shape[1]"),
    Row("Mask.from_lengths", lambda: Mask.from_lengths([[1], [2, 3]]), DtypeError, "torch.tensor(...)"),
    Row("Mask.from_lengths", lambda: Mask.from_lengths([1.5]), DtypeError, "lengths.long()"),
    Row("Mask.from_lengths", lambda: Mask.from_lengths(BITS), DtypeError, "Mask(t) takes a bool tensor"),
    Row("Mask.from_lengths", lambda: Mask.from_lengths([9], max_len=5), OutOfRangeError, "max_len=max(lengths)"),
    Row("Mask.from_lengths", lambda: Mask.from_lengths([-1]), OutOfRangeError, "lengths.clamp(min=0)"),
    Row("Mask.from_lengths", lambda: Mask.from_lengths([1], max_len=-1), ArgumentError, "max_len=x.shape[-1]"),
    Row("Mask.from_indices", lambda: Mask.from_indices([1], size="3"), DtypeError, "size=x.shape"),
    Row("Mask.from_indices", lambda: Mask.from_indices([1], size=-3), ArgumentError, "size=x.shape[-1]"),
    Row("Mask.from_indices", lambda: Mask.from_indices([0.5], size=3), DtypeError, "indices.long()"),
    Row("Mask.from_indices", lambda: Mask.from_indices([[0, 1, 2], [0, 1, 2]], (3, 3)), ShapeError, "indices.T"),
    Row("Mask.from_indices", lambda: Mask.from_indices([0, 1], (3, 3)), ShapeError, "size=x.shape"),
    Row("Mask.from_indices", lambda: Mask.from_indices([3], 3), OutOfRangeError, "indices[indices < size]"),
    Row("Mask.from_values", lambda: Mask.from_values([1], [0]), DtypeError, "torch.tensor(tokens)"),
    Row("Mask.from_segments", lambda: Mask.from_segments(1), ShapeError, "ids[None]"),
    Row("Mask.from_segments", lambda: Mask.from_segments([0.5]), DtypeError, "ids.long()"),
    Row("Mask.from_function", lambda: Mask.from_function(BITS, (2, 3)), DtypeError, "Mask(fn)"),
    Row(
        "Mask.from_function", lambda: Mask.from_function(lambda q, k: q - k, (2, 3)), DtypeError, "lambda q, k: k <= q"
    ),
    Row("Mask.from_function", lambda: Mask.from_function(lambda q: q > 0, -1), ArgumentError, "shape=x.shape[-1]"),
    Row("Mask.causal", lambda: Mask.causal(-1), ArgumentError, "q=x.shape[-1]"),
    Row("Mask.window", lambda: Mask.window(4, -1), ArgumentError, "left=x.shape[-1]"),
    Row("Mask.full", lambda: Mask.full("ab"), DtypeError, "shape=x.shape"),
    Row("Mask.full", lambda: Mask.full(-1), ArgumentError, "shape=x.shape[-1]"),
    Row("Mask.none", lambda: Mask.none(None), DtypeError, "shape=x.shape"),
    Row("Mask.none", lambda: Mask.none((2, -1)), ArgumentError, "shape=x.shape[-1]"),
    # -- the other conventions
    Row("Mask.from_key_padding", lambda: Mask.from_key_padding([True]), DtypeError, "torch.tensor(padding)"),
    Row("Mask.from_key_padding", lambda: Mask.from_key_padding(FLOATS), DtypeError, "Mask.from_additive(t)"),
    Row("Mask.from_attention_mask", lambda: Mask.from_attention_mask(FLOATS * 2), ArgumentError, "Mask.from_segments"),
    Row("Mask.from_attention_mask", lambda: Mask.from_attention_mask([1]), DtypeError, "torch.tensor(attention_mask)"),
    Row("Mask.from_additive", lambda: Mask.from_additive(BITS), DtypeError, "Mask(t)"),
    Row("Mask.from_additive", lambda: Mask.from_additive(FLOATS), ArgumentError, "add the bias to the scores"),
    Row("Mask.to_additive", lambda: MASK.to_additive(torch.int64), DtypeError, "mask.to_attention_mask(dtype)"),
    Row("Mask.from_cu_seqlens", lambda: Mask.from_cu_seqlens([[0, 2]]), ShapeError, "cu_seqlens.flatten()"),
    Row("Mask.from_cu_seqlens", lambda: Mask.from_cu_seqlens([0.0, 2.0]), DtypeError, "cu_seqlens.long()"),
    Row("Mask.from_cu_seqlens", lambda: Mask.from_cu_seqlens([1, 2]), ArgumentError, "lengths.cumsum(0), (1, 0))"),
    Row("Mask.from_cu_seqlens", lambda: Mask.from_cu_seqlens(INTS), ArgumentError, "max_len=longest"),
    Row("Mask.from_cu_seqlens", lambda: Mask.from_cu_seqlens([0, 4], 2), OutOfRangeError, "max_len=max(lengths)"),
    Row("Mask.from_numpy", lambda: Mask.from_numpy(np.ones(2)), DtypeError, "array.astype(bool)"),
    Row("Mask.to_masked_array", lambda: MASK.to_masked_array([1.0]), ShapeError, "mask[..., None].to_masked_array"),
    Row("Mask.from_block_mask", lambda: Mask.from_block_mask(BITS), DtypeError, "Mask(t) for a bool tensor"),
    Row("Mask.to_block_mask", lambda: MASK.to_block_mask(block_size=0), ArgumentError, "block_size=128"),
    Row("Mask.to_block_mask", lambda: Mask.full(3).to_block_mask(), ShapeError, "mask[:, None, None, :]"),
    # -- algebra
    Row("Mask.__and__", lambda: MASK & FLOATS, DtypeError, "Mask(other.bool())"),
    Row("Mask.__or__", lambda: MASK | META, DeviceError, "mask.to(other.device)"),
    Row("Mask.__xor__", lambda: MASK ^ Mask.full((4, 3)), ShapeError, "mask[..., None] adds a dim"),
    # -- views
    Row("Mask.unsqueeze", lambda: MASK.unsqueeze(4), OutOfRangeError, "dim=-1"),
    Row("Mask.squeeze", lambda: Mask.full(()).squeeze(1), OutOfRangeError, "mask[None]"),
    Row("Mask.expand", lambda: MASK.expand(3), ShapeError, "mask.expand(-1, -1)"),
    Row("Mask.expand", lambda: MASK.expand(-1, 2, 3), ShapeError, "a size instead of -1"),
    Row("Mask.expand", lambda: MASK.expand(4, 3), ShapeError, "mask[..., None] adds a dim of size 1"),
    Row("Mask.permute", lambda: MASK.permute(0, 0), ArgumentError, "mask.permute(1, 0)"),
    Row("Mask.reshape", lambda: MASK.reshape(7), ShapeError, "mask.reshape(-1)"),
    Row("Mask.flatten", lambda: MASK.flatten(1, 0), ArgumentError, "mask.flatten()"),
    Row("Mask.__getitem__", lambda: MASK[0, 0, 0], OutOfRangeError, "mask[..., None] adds a dim"),
    Row("Mask.__getitem__", lambda: MASK[..., 0, ...], ArgumentError, "mask[..., 0]"),
    Row("Mask.__getitem__", lambda: MASK[::-1], ArgumentError, "Mask(mask.to_bool().flip(0))"),
    Row("Mask.__getitem__", lambda: MASK[5], OutOfRangeError, "-1 for the last one"),
    Row("Mask.cat", lambda: Mask.cat([]), ArgumentError, "Mask.none(shape)"),
    Row("Mask.cat", lambda: Mask.cat([MASK, BITS]), DtypeError, "Mask(t)"),
    Row("Mask.cat", lambda: Mask.cat([MASK, META]), DeviceError, 'mask.to("cpu")'),
    Row("Mask.cat", lambda: Mask.cat([MASK, Mask.full((2, 4))]), ShapeError, "Mask.from_lengths(..., max_len=L)"),
    Row("Mask.stack", lambda: Mask.stack([MASK, Mask.full((2, 4))]), ShapeError, "Mask.from_lengths(..., max_len=L)"),
    Row("Mask.cat", lambda: Mask.cat([MASK, MASK], 4), OutOfRangeError, "dim=-1"),
    Row("Mask.stack", lambda: Mask.stack([]), ArgumentError, "Mask.none(shape)"),
    Row("Mask.stack", lambda: Mask.stack([BITS]), DtypeError, "Mask(t)"),
    Row("Mask.stack", lambda: Mask.stack([MASK, META]), DeviceError, 'mask.to("cpu")'),
    Row("Mask.stack", lambda: Mask.stack([MASK], 4), OutOfRangeError, "dim=-1"),
    Row("Mask.view", lambda: MASK.view(7), ShapeError, "mask.reshape(-1)"),
    Row("Mask.expand_as", lambda: MASK.expand_as(torch.ones(4, 3)), ShapeError, "mask[..., None] adds a dim"),
    Row("Mask.permute", lambda: MASK.permute(0, 4), OutOfRangeError, "dim=-1"),
    Row("Mask.transpose", lambda: MASK.transpose(0, 4), OutOfRangeError, "dim=-1"),
    Row("Mask.movedim", lambda: MASK.movedim(0, 4), OutOfRangeError, "dim=-1"),
    Row("Mask.flatten", lambda: MASK.flatten(4), OutOfRangeError, "dim=-1"),
    Row("Mask.size", lambda: MASK.size(4), OutOfRangeError, "dim=-1"),
    # -- facts, and what Python asks
    Row("Mask.to_bool", stale, StaleMaskError, "Mask(t.clone())"),
    Row("Mask", stale, StaleMaskError, "Mask(t.clone())"),
    Row("Mask.count", lambda: MASK.count(4), OutOfRangeError, "dim=-1"),
    Row("Mask.count", lambda: MASK.count((0, 0)), ArgumentError, "dim=(0,)"),
    *(
        row
        for name in ("sum", "any", "all")
        for row in (
            Row(f"Mask.{name}", lambda name=name: getattr(MASK, name)(4), OutOfRangeError, "dim=-1"),
            Row(f"Mask.{name}", lambda name=name: getattr(MASK, name)((0, 0)), ArgumentError, "dim=(0,)"),
        )
    ),
    Row("Mask.tolist", lambda: Mask(META.to_bool()).tolist(), DeviceError, "call it before the mask goes to meta"),
    Row("Mask.__eq__", lambda: Mask.full((4, 3)) == MASK, ShapeError, "mask[..., None] adds a dim"),
    Row("Mask.__ne__", lambda: MASK != META, DeviceError, "mask.to(other.device)"),
    Row("Mask.equals", lambda: MASK.equals(FLOATS), DtypeError, "Mask(other.bool())"),
    Row("Mask.equals", lambda: MASK.equals(META), DeviceError, "mask.to(other.device)"),
    Row("Mask.equal", lambda: MASK.equal(FLOATS), DtypeError, "Mask(other.bool())"),
    Row("Mask.equal", lambda: MASK.equal(META), DeviceError, "mask.to(other.device)"),
    Row("Mask.lengths", lambda: Mask.full(()).lengths, ShapeError, "mask[None]"),
    Row("Mask.count", lambda: stale(), StaleMaskError, "Mask(t.clone())"),
    Row("Mask.__bool__", lambda: bool(MASK), ArgumentError, "mask.is_full, mask.is_empty"),
    Row("Mask.__len__", lambda: len(MASK), DtypeError, "mask.shape[0], or mask.count()"),
    Row("Mask.__iter__", lambda: iter(Mask.full(())), DtypeError, "bool(mask)"),
    Row("Mask.__setattr__", lambda: setattr(MASK, "shape", (1,)), AttributeError, "mask & other"),
    Row("Mask.__delattr__", lambda: delattr(MASK, "shape"), AttributeError, "del mask"),
    Row("tree_unflatten", unflatten_leaves_of_another_rank, ShapeError, "pass mask.to_bool() to vmap"),
    Row("maskwise", lambda: mw.summ, AttributeError, "maskwise.sum"),
    Row("maskwise", lambda: mw.masked_fill, AttributeError, "maskwise.fill(x, mask, value)"),
]
