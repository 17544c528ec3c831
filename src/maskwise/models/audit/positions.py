"""Kept positions of any tensor inside of a model: which of its elements must not depend on what is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Positions", "difference", "tolerance_of"]

#: The difference, as a share of the largest value, up to which two results count as equal. Calls of one shape add in
#: one order; this is for kernels that choose by address.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
#: With more padding, products have other sizes, and add in another order, layer by layer.
ACROSS_SHAPES = 100.0
#: More than this share of the largest value is no rounding in any dtype.
LARGEST_TOLERANCE = 0.1
#: The most layers, times two where they run in both directions, of a recurrence.
LAYERS = 16
#: The layers that change the number of positions: their kernel sizes, strides, paddings and dilations are known.
STRIDED = (
    nn.Conv1d, nn.Conv2d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
)  # fmt: skip


class Positions:
    """Which positions are compared, for each number of positions that tensors of the model have.

    >>> positions = Positions(torch.tensor([[True, True, False], [True, True, True]]))
    >>> [rows.tolist() for rows in positions.rows(torch.arange(6).view(2, 3))]
    [[0, 1, 3, 4, 5]]
    """

    def __init__(self, keep: Tensor) -> None:
        self.batch = keep.shape[0]
        self.by_length: dict[int, Tensor] = {keep.shape[1]: keep}

    def rows(self, x: Tensor) -> list[Tensor]:
        """The elements of a tensor to compare, in each reading of its dims; none where they say nothing.

        Which dim has the positions is read from sizes, and sizes may agree by chance.
        """
        return self.readings(x.detach())

    def readings(self, x: Tensor) -> list[Tensor]:
        """The same, with gradients."""
        if not x.dim():
            return [x.clone()]
        found: list[Tensor] = []
        for length, keep in self.by_length.items():
            found += self._aligned(x, length, keep.to(x.device))
        found = found or self._of_other_lengths(x)
        if not found and self.batch in (x.shape[0], self._rows_of_state(x)):
            some = next(iter(self.by_length.values())).any(1).to(x.device)
            found.append(x[some] if x.shape[0] == self.batch else x[:, some])
        return found

    def _rows_of_state(self, x: Tensor) -> int | None:
        """The rows of the last state of a recurrence: (layers, B, features)."""
        return x.shape[1] if x.dim() == 3 and x.shape[0] <= LAYERS and x.shape[0] not in self.by_length else None

    def _of_other_lengths(self, x: Tensor) -> list[Tensor]:
        """What every guess keeps of positions that were cut, strided, or joined by others such as a class token."""
        if x.dim() < 3 or x.shape[0] != self.batch:
            return []
        for keep in self.by_length.values():
            kept = torch.ones(self.batch, *[1] * (x.dim() - 1), dtype=torch.bool)
            for dim in range(1, x.dim()):
                for guess in _guesses(keep, x.shape[dim]):
                    kept = kept & guess.cpu().view(
                        self.batch, *(x.shape[d] if d == dim else 1 for d in range(1, x.dim()))
                    )
            # In rows without padding, nothing can show.
            if bool(kept.flatten(1).any(1)[~keep.all(1).cpu()].any()):
                return [x[kept.expand(x.shape).to(x.device)]]
        return []

    def _aligned(self, x: Tensor, length: int, keep: Tensor) -> list[Tensor]:
        shape, batch, kept = x.shape, self.batch, int(keep.sum())
        found: list[Tensor] = []
        if x.dim() >= 2 and shape[0] == batch:
            dims = [dim for dim in range(1, x.dim()) if shape[dim] == length]
            if dims[-2:] == [x.dim() - 2, x.dim() - 1]:
                # Scores: pairs of which both are kept.
                pairs = keep[:, :, None] & keep[:, None, :]
                pairs = pairs.view(batch, *[1] * (x.dim() - 3), length, length)
                found.append(x[pairs.expand(x.shape)])
            found += [x.movedim(dim, 1)[keep] for dim in dims[:3]]
        if x.dim() >= 2 and shape[:2] == (length, batch):
            found.append(x.transpose(0, 1)[keep])
        if shape[0] == batch * length and length > 1:
            # Flattened, with the rows or with the positions first.
            found.append(x[keep.flatten()])
            found.append(x[keep.t().flatten()])
        heads = shape[0] // batch
        if x.dim() == 3 and heads > 1 and shape[0] == heads * batch and length in shape[1:]:
            # Heads among the rows.
            found += self._aligned(x.view(batch, heads, *shape[1:]), length, keep)
        if x.dim() >= 2 and shape[0] == 1 and batch > 1 and shape[1] == length:
            found.append(x.expand(batch, *shape[1:])[keep])
        if shape == (length,):
            found.append(x.expand(batch, length)[keep])
        if kept > 1 and (shape[0] == kept or shape[:2] == (1, kept)):
            # Packed: nothing else is there.
            found.append(x.clone())
        return found

    def through(self, module: nn.Module, x: Any, out: Any) -> None:
        """Note the positions that a layer with strides leaves: those whose window is kept."""
        if not isinstance(module, STRIDED) or not isinstance(x, Tensor) or not isinstance(out, Tensor):
            return
        if x.dim() != out.dim() or x.dim() < 3:
            return
        places = 1 if isinstance(module, nn.Conv1d | nn.MaxPool1d | nn.AvgPool1d) else 2
        for place in range(places):
            dim = x.dim() - places + place
            keep = self.by_length.get(x.shape[dim])
            if keep is None or out.shape[dim] in self.by_length:
                continue
            size, stride, padding, dilation = (
                _entry(getattr(module, name, default), place)
                for name, default in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
            )
            # As for each sequence alone, whose last windows reach into the zeros of the layer.
            dropped = ~_widened(keep, padding) if padding else ~keep
            dropped = F.max_pool1d(dropped.float()[:, None], size, stride, 0, dilation, ceil_mode=True)
            if dropped.shape[2] >= out.shape[dim]:
                self.by_length[out.shape[dim]] = dropped[:, 0, : out.shape[dim]] == 0


def _widened(keep: Tensor, padding: int) -> Tensor:
    """The padding of a layer around kept positions, for rows of one run of them; around the row for others."""
    padded = F.pad(keep, (padding, padding))
    wider = F.max_pool1d(padded.float()[:, None], 2 * padding + 1, 1, padding)[:, 0] > 0
    runs = F.pad(keep, (1, 0)).int().diff(dim=1).clamp(min=0).sum(1, keepdim=True)
    return torch.where(runs <= 1, wider, F.pad(keep, (padding, padding), value=True))


def _guesses(keep: Tensor, size: int) -> Iterator[Tensor]:
    """Which of another number of positions may be kept: some more or fewer at an end, or every so many."""
    length = keep.shape[1]
    more = size - length
    if more > 0:
        yield F.pad(keep, (more, 0), value=True)
        yield F.pad(keep, (0, more), value=True)
    elif 0 < size < length:
        for start in {0, -more, -more // 2}:
            yield keep[:, start : start + size]
        for stride in {length // size, -(-length // size), (length - 1) // max(size - 1, 1)}:
            if stride > 1 and size in (length // stride, -(-length // stride)):
                yield keep[:, ::stride][:, :size]
                windows = F.pad(keep, (0, size * stride - length)) if size * stride > length else keep
                yield windows[:, : size * stride].view(len(keep), size, stride).all(2)


def _entry(value: Any, place: int) -> int:
    if isinstance(value, str):
        return 0
    return int(value[place]) if isinstance(value, tuple | list) else int(value)


def tolerance_of(dtype: torch.dtype, across_shapes: bool) -> float:
    """The share of the largest value up to which a difference is rounding."""
    return min(TOLERANCES.get(dtype, 0.0) * (ACROSS_SHAPES if across_shapes else 1.0), LARGEST_TOLERANCE)


def difference(before: list[Tensor], after: list[Tensor], *, across_shapes: bool = False, noise: float = 0.0) -> float:
    """How much two results differ, as a share of the largest value; 0 within rounding. The mildest reading counts."""
    found = [
        _difference(old, new, across_shapes, noise)
        for old, new in zip(before, after, strict=False)
        if old.shape == new.shape
    ]
    if not found:
        # Shapes may follow what is dropped, as those of attention scores do.
        return 0.0
    return min(found)


def _difference(old: Tensor, new: Tensor, across_shapes: bool, noise: float) -> float:
    if not old.numel() or torch.equal(old, new):
        return 0.0
    if not old.is_floating_point():
        return float((old != new).float().mean())
    same = (old == new) | (old.isnan() & new.isnan())
    gap = torch.where(same, 0.0, (new.double() - old.double()).abs())
    if not bool(gap.isfinite().all()):
        return float("inf")
    finite = old[old.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    share = float(gap.max()) / (scale if scale > 0 else 1.0)
    return share if share > tolerance_of(old.dtype, across_shapes) + 4 * noise else 0.0
