"""Which weights of a sparse layer live: choosing them, and carrying values and optimizer state to another choice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from maskwise.distributed.group import is_sharded, whole, write_whole
from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, mask_hint
from maskwise.ops.linear import Block, SparseLayout

__all__ = [
    "carry",
    "fingerprint",
    "indices_of",
    "layout_from",
    "layout_problem",
    "mask_bits",
    "moved",
    "random_layout",
    "seal",
]


def mask_bits(op: str, mask: MaskLike, shape: tuple[int, int]) -> Tensor:
    """The bool tensor of a mask of exactly this shape."""
    if not isinstance(mask, Mask) and not (isinstance(mask, Tensor) and mask.dtype is torch.bool):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DtypeError(say(op, "mask", must=MUST, got=got, hint=f"{mask_hint(mask, 'weight.shape')}, or weight != 0"))
    if tuple(mask.shape) != shape:
        hint = "mask.T" if tuple(mask.shape) == shape[::-1] else "a mask of (out_features, in_features)"
        raise ShapeError(say(op, "mask", must=f"have the weight's shape {shape}", got=tuple(mask.shape), hint=hint))
    return mask.to_bool() if isinstance(mask, Mask) else mask


def random_layout(op: str, shape: tuple[int, int], density: float, block: Block, device: torch.device) -> SparseLayout:
    """A layout that keeps this share of all blocks, at random."""
    if not 0.0 <= density <= 1.0:
        raise ArgumentError(say(op, "density", must="be between 0 and 1", got=density, hint="density=0.1"))
    height, width = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    kept = round(density * height * width)
    places = torch.randperm(height * width, device=device)[:kept].sort().values
    return SparseLayout.from_coordinates(shape, places // max(width, 1), places % max(width, 1), block)


def layout_from(row_starts: Tensor, columns: Tensor, shape: tuple[int, int], block: Block) -> SparseLayout:
    """The layout of the two tensors of indices that are in a state_dict."""
    height = row_starts.numel() - 1
    rows = torch.repeat_interleave(torch.arange(height, device=columns.device), row_starts.diff().long())
    return SparseLayout.from_coordinates(shape, rows, columns.long(), block)


def indices_of(layout: SparseLayout) -> dict[str, Tensor]:
    """The tensors of indices that a layer holds, by the names of its buffers."""
    ranges = max(1, (layout.starts.numel() - 1) // max(1, -(-layout.shape[0] // layout.block[0])))
    back = layout.transposed
    return {
        "row_starts": layout.starts[::ranges].clone(),
        "columns": layout.columns,
        "_starts": layout.starts,
        "_t_starts": back.starts,
        "_t_columns": back.columns,
        "_t_order": back.order,
    }


def layout_problem(row_starts: Tensor, columns: Tensor, shape: tuple[int, int], block: Block) -> str | None:
    """Why these indices cannot be those of a layer of this shape, or None: a kernel would read wherever they point."""
    height, width = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    if row_starts.dim() != 1 or row_starts.numel() != height + 1 or columns.dim() != 1:
        return f"row_starts must have {height + 1} entries and columns one dim"
    if any(each.is_floating_point() or each.is_complex() for each in (row_starts, columns)):
        return f"row_starts and columns must be integers, got {row_starts.dtype} and {columns.dtype}, as a mixture has"
    starts, places = row_starts.long().cpu(), columns.long().cpu()
    if int(starts[0]) != 0 or int(starts[-1]) != places.numel() or bool((starts.diff() < 0).any()):
        return "row_starts must go up from 0 to the number of columns"
    if places.numel() and not (int(places.min()) >= 0 and int(places.max()) < width):
        return f"columns must be in [0, {width})"
    keys = torch.repeat_interleave(torch.arange(height), starts.diff()) * width + places
    if bool((keys.diff() <= 0).any()):
        return "columns must go up within each row"
    return None


def fingerprint(indices: Mapping[str, Tensor | None]) -> tuple[int, ...] | None:
    """One number for each tensor of indices, which another order or another entry changes; None without data.

    >>> one, two = torch.tensor([0, 3, 4]), torch.tensor([0, 4, 3])
    >>> fingerprint({"columns": one}) == fingerprint({"columns": one.clone()}), fingerprint({"columns": two}) is None
    (True, False)
    >>> fingerprint({"columns": one}) == fingerprint({"columns": two})
    False
    """
    found = []
    for name, tensor in indices.items():
        if tensor is None or name == "_seal":
            continue
        if tensor.is_meta or type(tensor) is not Tensor:
            return None
        found.append(int(_mixed(tensor).sum()))
    return tuple(found)


def seal(values: Tensor) -> Tensor | None:
    """A checksum of the values' bits, (2,) int64, that a mix with other values does not have; None without data.

    >>> one, two = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])
    >>> torch.equal(seal(one), seal(one.clone())), torch.equal(seal(one), seal(two))
    (True, False)
    """
    plain = values.detach()
    if plain.is_meta or type(plain) is not Tensor or plain.is_complex():
        return None
    # Sums of integers, by rows and by columns of a square: two passes, exact in any order, and aware of positions.
    bits = plain.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
    side = max(1, math.isqrt(bits.numel()))
    square = bits[: bits.numel() // side * side].view(-1, side)
    sums = (square.sum(1), torch.cat([square.sum(0), bits[square.numel() :].long()]))
    return torch.stack([_mixed(each).sum() for each in sums])


def _mixed(numbers: Tensor) -> Tensor:
    """A hash of each number and its position. Products of int64 wrap around: by multiplication and shift."""
    mixed = (numbers.long() + 1) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * (2 * torch.arange(numbers.numel(), device=numbers.device) + 1)
    return (mixed ^ (mixed >> 31)) * 0x14D049BB133111EB


def moved(old: SparseLayout, new: SparseLayout) -> tuple[Tensor, Tensor]:
    """For each value of the new layout, where it was in the old one, and whether it was there at all."""
    width = max(-(-old.shape[1] // old.block[1]), 1)
    size = old.block[0] * old.block[1]
    before, after = (layout.rows * width + layout.columns.long() for layout in (old, new))
    if not before.numel():
        empty = torch.zeros(new.count, dtype=torch.int64, device=new.device)
        return empty, empty.bool()
    at = torch.searchsorted(before, after).clamp(max=before.numel() - 1)
    lived = before[at] == after
    within = torch.arange(size, device=new.device)
    return (at[:, None] * size + within).reshape(-1), lived.repeat_interleave(size)


def carry(
    values: nn.Parameter,
    old: SparseLayout,
    new: SparseLayout,
    optimizer: torch.optim.Optimizer | None,
    op: str,
    kept: SparseLayout | None = None,
) -> None:
    """Give a parameter the values of a new layout, 0 where new, and its gradient and optimizer state likewise.

    What a layout ``kept`` in between does not have is new as well. As many values as before stay in the same memory:
    that of DistributedDataParallel's buckets, or of a rank's shard.
    """
    is_same_size = new.count == old.count
    if is_sharded(values) and not is_same_size:
        must = f"have {old.count} values while they are sharded over ranks"
        hint = "as many at other places, by mw.nn.RigL, mw.nn.SET or set_mask; another number before fully_shard"
        raise ArgumentError(say(op, "layer", must=must, got=new.count, hint=hint))
    if optimizer is not None and not any(p is values for group in optimizer.param_groups for p in group["params"]):
        hint = f"torch.optim.{type(optimizer).__name__}(layer.parameters())"
        raise ArgumentError(say(op, "optimizer", must="train this layer's values", got="one that does not", hint=hint))
    at, lived = moved(old, new)
    if kept is not None:
        lived = lived & moved(kept, new)[1]
    if optimizer is None:
        _leave_state_behind(values)

    def taken(tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor.new_zeros(new.count)
        return torch.where(lived, tensor.detach()[at], torch.zeros((), dtype=tensor.dtype, device=tensor.device))

    before, gradient = values.shape, values.grad
    if is_same_size:
        for each in (values, gradient):
            if each is not None:
                write_whole(each, taken(whole(each.detach())))
    else:
        values.grad = None
        values.data = taken(values.data)
        if gradient is not None:
            values.grad = taken(gradient)
    if isinstance(optimizer, torch.optim.LBFGS):
        # Its history is of all parameters in one vector, whose length has changed: it starts afresh.
        optimizer.state.clear()
        optimizer._numel_cache = None
    elif optimizer is not None and values in optimizer.state:
        state = optimizer.state[values]
        for name, entry in state.items():
            if isinstance(entry, Tensor) and entry.shape == before and entry.dim():
                if is_same_size:
                    write_whole(entry, taken(whole(entry)))
                else:
                    state[name] = taken(entry)


def _leave_state_behind(values: nn.Parameter) -> None:
    """Note that values moved without their optimizer's state: an optimizer that has some must not use it."""
    if not _HOOKED:
        # For all optimizers, since a parameter does not know which ones train it; from the first such move on.
        _HOOKED.append(register_optimizer_step_pre_hook(_refuse_old_state))
    values._maskwise_optimizers = WeakSet()  # type: ignore[attr-defined]


_HOOKED: list[Any] = []


def _refuse_old_state(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        for values in group["params"]:
            started: WeakSet[Any] | None = getattr(values, "_maskwise_optimizers", None)
            if started is None or optimizer in started:
                continue
            state = optimizer.state.get(values, {})
            if any(isinstance(entry, Tensor) and entry.dim() for entry in state.values()):
                must = "be given to set_mask, drop and regrow, so that its state moves with the values"
                hint = "layer.set_mask(mask, optimizer=optimizer); now, optimizer.state.pop(layer.values)"
                raise ArgumentError(
                    say("SparseLinear", "optimizer", must=must, got="state of other weights", hint=hint)
                )
            started.add(optimizer)
