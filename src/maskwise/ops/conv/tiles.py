"""Convolutions by tiles: those with something wanted are gathered with their halo, convolved as a batch, scattered.

Three registered ops move data: ``conv_active`` finds the tiles, ``conv_gather`` copies what they read into a
channels-last batch, with zeros where nothing is valid, and ``conv_scatter`` writes the result, every place once. Each
has a C++ kernel, and the last two a Triton kernel. Between them runs torch's own convolution; for tiles of one
position, that is one matrix product. On a GPU tiles are found on the host, from masks that lie there: without a sync.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from maskwise.ops.backends import DEVICE, FLOATING, INTERPRETED, provide
from maskwise.ops.conv.arguments import Geometry, Pair
from maskwise.ops.operation import define
from maskwise.ops.primitives import number

__all__ = [
    "Tiling",
    "active",
    "convolve",
    "convolve_batch",
    "find",
    "gather",
    "gradients",
    "scatter",
    "scatter_into",
    "tiling_of",
    "transposed_batch",
    "weight_gradient",
]


class Tiling(NamedTuple):
    """Tiles of the result, and the window of the input that each reads.

    Tile ``(i, j)`` writes ``size`` positions from ``(i, j) * size`` on, and reads ``window`` positions from
    ``(i, j) * step + first`` on. Of the convolved window it writes what follows ``crop``.
    """

    size: Pair
    step: Pair
    first: Pair
    window: Pair
    crop: Pair

    @property
    def reads(self) -> list[int]:
        """Step, first and window, as the ops take them."""
        return [*self.step, *self.first, *self.window]


def tiling_of(geometry: Geometry, size: Pair, is_transposed: bool) -> Tiling:
    """The tiling of a convolution into tiles of a size; of a transposed one, of so many coarse positions.

    >>> geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1, (32, 32), (32, 32))
    >>> tiling_of(geometry, (8, 8), False)
    Tiling(size=(8, 8), step=(8, 8), first=(-1, -1), window=(10, 10), crop=(0, 0))
    """
    axes = [
        (_transposed_axis if is_transposed else _axis)(n, s, b, span)
        for n, s, b, span in zip(size, geometry.stride, geometry.before, geometry.span, strict=True)
    ]
    return Tiling(*((one, two) for one, two in zip(*axes, strict=True)))


def _axis(size: int, stride: int, before: int, span: int) -> tuple[int, ...]:
    return size, size * stride, -before, (size - 1) * stride + span + 1, 0


def _transposed_axis(size: int, stride: int, before: int, span: int) -> tuple[int, ...]:
    fine = size * stride
    first = -((span - before) // stride)
    # Where the taps leave gaps, the first positions of a tile may be out of the reach of its first window position.
    first -= before < first * stride
    last = (fine - 1 + before) // stride
    return fine, size, first, last - first + 1, before - first * stride


# -- the ops -----------------------------------------------------------------------------------------------------------
def _windows(bits: Tensor, tiles: Tensor, reads: list[int]) -> Tensor:
    """What bits say of the window of each tile: (n, *window)."""
    at = _positions(tiles, reads)
    inside = [(p >= 0) & (p < size) for p, size in zip(at, bits.shape[1:], strict=True)]
    rows, columns = (p.clamp(0, size - 1) for p, size in zip(at, bits.shape[1:], strict=True))
    found = bits[tiles[:, 0, None, None].long(), rows[:, :, None], columns[:, None, :]]
    return found & inside[0][:, :, None] & inside[1][:, None, :]


def _positions(tiles: Tensor, reads: list[int]) -> list[Tensor]:
    """The rows and the columns that each tile reads or writes: (n, height) and (n, width)."""
    return [
        tiles[:, 1 + d, None].long() * reads[d] + reads[2 + d] + torch.arange(reads[4 + d], device=tiles.device)
        for d in (0, 1)
    ]


def _active(
    target: Tensor | None, source: Tensor | None, sizes: list[int], size: list[int], reads: list[int]
) -> tuple[Tensor, int]:
    """Tiles in which something is wanted and, where there are source bits, something is read."""
    batch, height, width = sizes
    grid = [-(-height // size[0]), -(-width // size[1])]
    device = next((bits.device for bits in (target, source) if bits is not None), None)
    every = [torch.arange(n, device=device) for n in (batch, *grid)]
    tiles = torch.cartesian_prod(*every).to(torch.int32)
    own = [*size, 0, 0, *size]
    bits = torch.ones(sizes, dtype=torch.bool, device=device) if target is None else target
    wanted = _windows(bits, tiles, own)
    kept = wanted.flatten(1).any(1)
    if source is not None:
        kept &= _windows(source, tiles, reads).flatten(1).any(1)
    return tiles[kept], int(wanted[kept].sum())


def _gather(
    x: Tensor, bits: Tensor | None, tiles: Tensor, reads: list[int], fill: Tensor | None = None, edge: bool = False
) -> Tensor:
    """The windows of tiles: (n, channels, *window), channels last.

    Where they are not valid, and outside of the map, lies zero or ``fill``; with ``edge``, what is outside repeats the
    nearest position.
    """
    valid = x.new_ones((), dtype=torch.bool).expand(x.shape[0], *x.shape[2:]) if bits is None else bits
    at = _positions(tiles, reads)
    rows, columns = (p.clamp(0, size - 1) for p, size in zip(at, x.shape[2:], strict=True))
    index = (tiles[:, 0, None, None].long(), rows[:, :, None], columns[:, None, :])
    kept = valid[index] if edge else _windows(valid, tiles, reads)
    found = x.permute(0, 2, 3, 1)[index]
    missing = found.new_zeros(()) if fill is None else fill.to(found.dtype)
    return torch.where(kept[..., None], found, missing).contiguous().permute(0, 3, 1, 2)


def _scatter_out(
    batch: Tensor, tiles: Tensor, wanted: Tensor | None, size: list[int], crop: list[int], out: Tensor
) -> None:
    """Write the positions of tiles that are wanted into a result."""
    own = [*size, 0, 0, *size]
    everything = torch.ones((), dtype=torch.bool, device=out.device).expand(out.shape[0], *out.shape[2:])
    bits = everything if wanted is None else wanted
    kept = _windows(bits, tiles, own)
    rows, columns = _positions(tiles, own)
    index = (tiles[:, 0, None, None].long(), rows[:, :, None], columns[:, None, :])
    b, y, x = (each.expand(kept.shape)[kept] for each in index)
    values = batch.permute(0, 2, 3, 1)[:, crop[0] : crop[0] + size[0], crop[1] : crop[1] + size[1]][kept]
    out.permute(0, 2, 3, 1)[b, y, x] = values


def _scatter(
    batch: Tensor,
    tiles: Tensor,
    wanted: Tensor | None,
    other: Tensor,
    sizes: list[int],
    size: list[int],
    crop: list[int],
    channels_last: bool,
) -> Tensor:
    """A result that holds ``other`` wherever no tile writes: (batch, channels, height, width)."""
    out = _empty(batch, sizes, channels_last)
    _scatter_out(batch, tiles, wanted, size, crop, out.copy_(other.expand(out.shape)))
    return out


def _empty(batch: Tensor, sizes: list[int], channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(sizes, dtype=batch.dtype, device=batch.device, memory_format=layout)


def _fake_active(
    target: Tensor | None, source: Tensor | None, sizes: list[int], size: list[int], reads: list[int]
) -> tuple[Tensor, int]:
    count = torch.library.get_ctx().new_dynamic_size()
    return torch.empty((count, 3), dtype=torch.int32), count  # type: ignore[return-value]


def _fake_gather(
    x: Tensor, bits: Tensor | None, tiles: Tensor, reads: list[int], fill: Tensor | None = None, edge: bool = False
) -> Tensor:
    return x.new_empty(tiles.shape[0], *reads[4:], x.shape[1]).permute(0, 3, 1, 2)


define(
    "conv_active",
    "(Tensor? target, Tensor? source, SymInt[] sizes, int[] size, int[] reads) -> (Tensor, int)",
    reference=_active,
    fake=_fake_active,
)
define(
    "conv_gather",
    "(Tensor x, Tensor? bits, Tensor tiles, int[] reads, Tensor? fill=None, bool edge=False) -> Tensor",
    reference=_gather,
    fake=_fake_gather,
    gpu=FLOATING,
    gpu_from="maskwise.ops.conv.gpu:gather",
)
define(
    "conv_scatter",
    "(Tensor batch, Tensor tiles, Tensor? wanted, Tensor other, SymInt[] sizes, int[] size, int[] crop, "
    "bool channels_last) -> Tensor",
    reference=_scatter,
    fake=lambda batch, tiles, wanted, other, sizes, size, crop, last: _empty(batch, sizes, last),
    gpu=FLOATING,
    gpu_from="maskwise.ops.conv.gpu:scatter",
)
define(
    "conv_scatter_out",
    "(Tensor batch, Tensor tiles, Tensor? wanted, int[] size, int[] crop, Tensor(a!) out) -> ()",
    reference=_scatter_out,
    fake=lambda *_: None,
    gpu=FLOATING,
    gpu_from="maskwise.ops.conv.gpu:scatter_out",
)
if not INTERPRETED:
    provide("conv_tiles", "cpu", FLOATING)
provide("conv_tiles", DEVICE, FLOATING)
active, gather = torch.ops.maskwise.conv_active.default, torch.ops.maskwise.conv_gather.default
scatter, scatter_into = torch.ops.maskwise.conv_scatter.default, torch.ops.maskwise.conv_scatter_out.default


# -- convolutions ------------------------------------------------------------------------------------------------------
def find(
    wanted: Tensor | None, valid: Tensor | None, batch: int, geometry: Geometry, tiling: Tiling, is_transposed: bool
) -> tuple[Tensor, int]:
    """The tiles to compute, (n, 3) of batch entry, row and column, and how many positions of them are wanted.

    Where ``valid`` is given, tiles that read nothing valid are left out.
    """
    sizes = [batch, *(geometry.fine if is_transposed else geometry.coarse)]
    found: tuple[Tensor, int] = active(wanted, valid, sizes, list(tiling.size), tiling.reads)
    return found


def convolve(
    x: Tensor,  # (batch, channels, height, width)
    weight: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,  # bool, (batch, height, width)
    wanted: Tensor | None,  # bool, of the result
    other: Tensor,
    geometry: Geometry,
    tiling: Tiling,
    tiles: Tensor,
    is_transposed: bool,
    channels_last: bool,
) -> Tensor:
    """The convolution, or transposed convolution, of the positions that some tiles write; ``other`` elsewhere."""
    outputs = weight.shape[1] * geometry.groups if is_transposed else weight.shape[0]
    batch = gather(x, valid, tiles, tiling.reads)
    crop = tiling.crop
    if tiles.shape[0] == 0:
        batch, crop = batch.new_empty(0, outputs, *tiling.size), (0, 0)
    elif not is_transposed or geometry.stride == (1, 1):
        batch = convolve_batch(batch, _mirrored(weight, geometry) if is_transposed else weight, bias, geometry)
        crop = (0, 0)
    else:
        batch = transposed_batch(batch, weight, bias, geometry, tiling)
    sizes = [x.shape[0], outputs, *(geometry.fine if is_transposed else geometry.coarse)]
    return _placed(batch, tiles, wanted, other, sizes, tiling.size, crop, channels_last)


def _placed(
    batch: Tensor, tiles: Tensor, wanted: Tensor | None, other: Tensor, sizes: list[int], size: Pair, crop: Pair,
    channels_last: bool,
) -> Tensor:  # fmt: skip
    """A map of what tiles gave, and ``other`` elsewhere."""
    # As the kernels read it: double, for one, comes in another order.
    batch = batch.contiguous(memory_format=torch.channels_last)
    if other.dim():
        out = _empty(batch, sizes, channels_last)
        scatter_into(batch, tiles, wanted, list(size), list(crop), out.copy_(other.expand(sizes)))
        return out
    scattered: Tensor = scatter(batch, tiles, wanted, other, sizes, list(size), list(crop), channels_last)
    return scattered


def convolve_batch(batch: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Convolve windows without padding: a matrix product where each gives one position."""
    if tuple(batch.shape[2:]) == geometry.kernel and geometry.groups == 1 and geometry.dilation == (1, 1):
        rows = batch.permute(0, 2, 3, 1).flatten(1)
        flat = weight.permute(0, 2, 3, 1).flatten(1)
        return F.linear(rows, flat, bias)[:, :, None, None]
    return F.conv2d(batch, weight, bias, geometry.stride, 0, geometry.dilation, geometry.groups)


def _mirrored(weight: Tensor, geometry: Geometry) -> Tensor:
    """The weight of the convolution that a transposed one without stride is."""
    grouped = weight.reshape(geometry.groups, -1, *weight.shape[1:]).transpose(1, 2)
    return grouped.flatten(0, 1).flip(-2, -1)


def transposed_batch(batch: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, tiling: Tiling) -> Tensor:
    """Convolve windows by a transposed convolution; what its tiles write follows the crop of the tiling."""
    # Where the taps leave gaps, the last positions of a tile may be out of reach.
    extra = [
        max(0, crop + size - ((n - 1) * s + span + 1))
        for crop, size, n, s, span in zip(
            tiling.crop, tiling.size, batch.shape[2:], geometry.stride, geometry.span, strict=True
        )
    ]
    return F.conv_transpose2d(batch, weight, bias, geometry.stride, 0, extra, geometry.groups, geometry.dilation)


def weight_gradient(
    fine: Tensor,  # (batch, channels, *fine)
    coarse: Tensor,  # (batch, channels, *coarse)
    fine_bits: Tensor | None,  # bool, (batch, *fine)
    coarse_bits: Tensor | None,  # bool, (batch, *coarse)
    geometry: Geometry,
    size: Pair,
    tiles: Tensor,  # of the coarse positions
) -> tuple[Tensor, Tensor]:
    """The gradient of the weight, from tiles of coarse positions; and the sum of what is kept of these."""
    tiling = tiling_of(geometry, size, False)
    shape = (coarse.shape[1], fine.shape[1] // geometry.groups, *geometry.kernel)
    if tiles.shape[0] == 0:
        return coarse.new_zeros(shape), coarse.new_zeros(shape[0])
    windows = gather(fine, fine_bits, tiles, tiling.reads)
    grads = gather(coarse, coarse_bits, tiles, [*size, 0, 0, *size])
    return _of_windows(windows, grads, shape, geometry), grads.sum((0, 2, 3))


def _of_windows(windows: Tensor, grads: Tensor, shape: tuple[int, ...], geometry: Geometry) -> Tensor:
    """The gradient of a weight, from windows of fine positions and the gradients of the coarse ones that read them."""
    if tuple(grads.shape[2:]) == (1, 1) and geometry.groups == 1 and geometry.dilation == (1, 1):
        flat = grads.flatten(1).T @ windows.permute(0, 2, 3, 1).flatten(1)
        return flat.reshape(shape[0], *geometry.kernel, -1).permute(0, 3, 1, 2)
    found: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
        windows, shape, grads, geometry.stride, 0, geometry.dilation, geometry.groups
    )
    return found


def gradients(
    x: Tensor,  # (batch, channels, height, width)
    weight: Tensor,
    grad: Tensor,  # of the result, which has the positions of x
    bits: Tensor,  # bool, (batch, height, width), of x and of the result
    geometry: Geometry,
    size: Pair,
    tiles: Tensor,
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias of a convolution that wants what is valid, by the tiles that it had.

    They share what is gathered of the gradient: with its halo, it gives that of x, and without, that of the weight.
    """
    tiling, back = tiling_of(geometry, size, False), tiling_of(geometry, size, True)
    if tiles.shape[0] == 0:
        return torch.zeros_like(x), torch.zeros_like(weight), grad.new_zeros(grad.shape[1])
    windows = gather(grad, bits, tiles, back.reads)
    top, left = (-first for first in back.first)
    own = windows[:, :, top : top + size[0], left : left + size[1]].contiguous(memory_format=torch.channels_last)
    batch = convolve_batch(windows, _mirrored(weight, geometry), None, geometry)
    zero = number(0.0, grad.dtype, grad.device)
    dx = _placed(batch, tiles, bits, zero, list(x.shape), size, (0, 0), channels_last)
    del windows, batch
    dw = _of_windows(gather(x, bits, tiles, tiling.reads), own, tuple(weight.shape), geometry)
    return dx, dw, own.sum((0, 2, 3))
