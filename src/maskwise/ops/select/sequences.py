"""The sequences of a Packed (the rows of its mask's last dim), and reductions over each, without unpacking.

The registered op ``segments`` reduces floating values by one kernel, whose results do not depend on threads or atomics;
other dtypes are reduced by plain torch operations.
"""

# These are methods of Packed: the first argument is cls or self, and not documented.
# ruff: noqa: D417

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, say
from maskwise.ops.backends import DEVICE, FLOATING, is_kernel_allowed, provide
from maskwise.ops.operation import define, differentiate, eager_function
from maskwise.ops.torch_private import is_tracing, is_transformed

if TYPE_CHECKING:
    from maskwise.ops.select.packed import Packed

__all__ = [
    "amax",
    "amin",
    "cu_seqlens",
    "first",
    "last",
    "lengths",
    "logsumexp",
    "mean",
    "position_ids",
    "sequence_ids",
    "softmax",
    "sum",
]


def lengths(self: Packed) -> Tensor:
    """The number of rows of each sequence: int64, the mask's shape without its last dim."""
    return self.mask.lengths


def cu_seqlens(self: Packed) -> Tensor:
    """The cumulative sequence lengths, from 0: int32, (sequences + 1,)."""
    return self.mask.cu_seqlens


def sequence_ids(self: Packed) -> Tensor:
    """The sequence of each row: int64, (n,); unused rows of a capacity have the last id."""
    flat = self.mask.lengths.reshape(-1)
    ends = flat.cumsum(0)
    rows = torch.arange(self.values.shape[0], device=ends.device)
    return torch.searchsorted(ends, rows, right=True).clamp(max=max(flat.shape[0] - 1, 0))


def position_ids(self: Packed) -> Tensor:
    """The position of each row along the mask's last dim: int64, (n,)."""
    bits = self.mask.to_bool()
    positions = torch.arange(bits.shape[-1], device=bits.device).expand(bits.shape)
    from maskwise.ops.select.packed import collect

    return collect(positions, self.mask, capacity=self.capacity).values


def _reduced(self: Packed, op: str) -> Tensor:
    """A reduction of each sequence, by the kernel or by plain torch operations; or the softmax over each."""
    if self.capacity is not None:
        # Its unused rows would be reduced as well.
        hint = "packed.unpack() and the function of the same name"
        raise ArgumentError(say(f"Packed.{op}", "capacity", must="be None", got=self.capacity, hint=hint))
    run = run_segments if has_kernel(self.values) else reduce_plain
    return run(self.values, self.mask.cu_seqlens, op)


def _shape(self: Packed) -> tuple[int, ...]:
    return (*self.mask.shape[:-1], *self.values.shape[1:])


def sum(self: Packed) -> Tensor:
    """The sum of each sequence: (*lead without the last dim, *rest); 0 for an empty one. Bools are counted.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.sum()
    tensor([3., 3.])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    return _reduced(self, "sum").reshape(_shape(self))


def mean(self: Packed) -> Tensor:
    """The mean of each sequence; NaN for an empty one.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.mean()
    tensor([1.5000, 3.0000])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    return _reduced(self, "mean").reshape(_shape(self))


def amax(self: Packed) -> Tensor:
    """The largest of each sequence; -inf for an empty one, the least integer where values are integers.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.amax()
    tensor([2., 3.])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    return _reduced(self, "amax").reshape(_shape(self))


def amin(self: Packed) -> Tensor:
    """The smallest of each sequence; +inf for an empty one, the greatest integer where values are integers.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.amin()
    tensor([1., 3.])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    return _reduced(self, "amin").reshape(_shape(self))


def logsumexp(self: Packed) -> Tensor:
    """The logarithm of the sum of the exponentials of each sequence; -inf for an empty one.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.logsumexp()
    tensor([2.3133, 3.0000])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    return _reduced(self, "logsumexp").reshape(_shape(self))


def softmax(self: Packed) -> Packed:
    """The softmax over each sequence, as a Packed of the same mask.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.softmax().values
    tensor([0.2689, 0.7311, 1.0000])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    return self._like(_reduced(self, "softmax"))


def _end(self: Packed, offset: Tensor, fill: float) -> Tensor:
    flat = self.mask.lengths.reshape(-1)
    some = (flat > 0).reshape(-1, *[1] * (self.values.dim() - 1))
    if self.values.shape[0] == 0:
        return self.values.new_full(_shape(self), fill)
    rows = self.values.index_select(0, offset.clamp(0, self.values.shape[0] - 1))
    return torch.where(some, rows, torch.as_tensor(fill, dtype=rows.dtype, device=rows.device)).reshape(_shape(self))


def first(self: Packed, fill: float = 0.0) -> Tensor:
    """The first kept row of each sequence; ``fill`` for an empty one.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.first()
    tensor([1., 3.])

    Args:
        fill: the value for an empty sequence.
    """
    return _end(self, self.mask.cu_seqlens[:-1].long(), fill)


def last(self: Packed, fill: float = 0.0) -> Tensor:
    """The last kept row of each sequence; ``fill`` for an empty one.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.last()
    tensor([2., 3.])

    Args:
        fill: the value for an empty sequence.
    """
    return _end(self, self.mask.cu_seqlens[1:].long() - 1, fill)


# -- the op ------------------------------------------------------------------------------------------------------------
def reduce_plain(
    values: Tensor,  # (n, *rest)
    bounds: Tensor,  # (S + 1,): the start of each segment, and the end of the last
    op: str,
) -> Tensor:
    """A reduction of each segment, (S, *rest), or its softmax, (n, *rest), in plain torch operations."""
    rows = torch.arange(values.shape[0], device=values.device)
    ids = torch.searchsorted(bounds[1:].long(), rows, right=True)
    if op in ("sum", "mean"):
        return _sum_plain(values, bounds, ids, op)
    if op in ("amax", "amin"):
        return _extreme_plain(values, bounds, ids, op)
    # Half precision would round each step, and has a small range.
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    # The shift cancels, so it needs no gradient.
    peak = _extreme_plain(wide.detach(), bounds, ids, "amax")
    # Of an infinite value the exponential is infinite, and its softmax NaN, as torch has both.
    peak = torch.where(peak == -torch.inf if op == "softmax" else ~peak.isfinite(), 0.0, peak)
    exponentials = (wide - peak.index_select(0, ids)).exp()
    total = _sum_plain(exponentials, bounds, ids, "sum")
    if op == "softmax":
        out = exponentials / total.index_select(0, ids)
    else:
        # The logarithm of 0, of an empty segment, would have a NaN gradient.
        out = torch.where(total != 0, torch.where(total != 0, total, 1.0).log() + peak, -torch.inf)
    return out.to(values.dtype) if values.is_floating_point() else out


def _sum_plain(values: Tensor, bounds: Tensor, ids: Tensor, op: str) -> Tensor:
    """The sum or the mean, in a wider dtype: half precision would lose the last terms of a long segment."""
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    wide = wide.long() if values.dtype is torch.bool else wide
    out = wide.new_zeros(bounds.shape[0] - 1, *values.shape[1:]).index_add(0, ids, wide)
    if op == "mean":
        lengths = bounds.diff().reshape(-1, *[1] * (values.dim() - 1))
        # The gradient of an empty segment is zero.
        out = torch.where(lengths > 0, out / lengths.clamp(min=1), torch.nan)
    return out.to(values.dtype) if values.is_floating_point() else out


def _extreme_plain(values: Tensor, bounds: Tensor, ids: Tensor, op: str) -> Tensor:
    if values.is_floating_point():
        identity: float = -torch.inf if op == "amax" else torch.inf
    else:
        limits = torch.iinfo(values.dtype)
        identity = limits.min if op == "amax" else limits.max
    base = values.new_full((bounds.shape[0] - 1, *values.shape[1:]), identity)
    index = ids.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return base.scatter_reduce(0, index, values, reduce=op, include_self=True)


def reduce_plain_backward(grad: Tensor, saved: Tensor, values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """The gradient in plain torch operations."""
    with torch.enable_grad():
        leaf = values.detach().requires_grad_()
        (grad_values,) = torch.autograd.grad(reduce_plain(leaf, bounds, op), leaf, grad)
    return grad_values.contiguous()


def fake(values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """The fake of segments."""
    return values.new_empty(values.shape if op == "softmax" else (bounds.shape[0] - 1, *values.shape[1:]))


def fake_backward(grad: Tensor, saved: Tensor, values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """The fake of segments_backward."""
    return values.new_empty(values.shape)


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save for the gradient."""
    values, bounds, ctx.op = inputs
    ctx.save_for_backward(output, values, bounds)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """The gradient: by its kernel, or by autograd for a double backward."""
    saved, values, bounds = ctx.saved_tensors
    if torch.is_grad_enabled():
        (grad_values,) = torch.autograd.grad(reduce_plain(values, bounds, ctx.op), values, grad, create_graph=True)
        return grad_values, None, None
    return torch.ops.maskwise.segments_backward(grad, saved, values, bounds, ctx.op), None, None


GPU = "maskwise.ops.select.gpu"
SCHEMA = "(Tensor values, Tensor bounds, str op) -> Tensor"
# With and without autograd, whose bookkeeping costs 5 µs even where no gradient is required.
for _suffix in ("", "_forward"):
    define(
        f"segments{_suffix}",
        SCHEMA,
        reference=lambda *operands: reduce_plain(*operands).contiguous(),
        fake=fake,
        gpu=FLOATING,
        gpu_from=f"{GPU}:segments",
    )
define(
    "segments_backward",
    "(Tensor grad, Tensor saved, Tensor values, Tensor bounds, str op) -> Tensor",
    reference=reduce_plain_backward,
    fake=fake_backward,
    gpu=FLOATING,
    gpu_from=f"{GPU}:segment_backward",
)
differentiate("segments", backward, save)
for _device in {"cpu", DEVICE}:
    provide("segments", _device, FLOATING)

_segments, _segments_forward = torch.ops.maskwise.segments.default, torch.ops.maskwise.segments_forward.default
_segments_eager = eager_function("segments", SCHEMA, _segments_forward, save, backward)


def run_segments(values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """The op, by the cheapest of its autograd wrappers."""
    run: Callable[..., Tensor] = _segments
    if not is_tracing():
        run = _segments_eager if values.requires_grad and torch.is_grad_enabled() else _segments_forward
    return run(values, bounds, op)


def has_kernel(values: Tensor) -> bool:
    """Whether a kernel reduces these rows: never under transforms, which support plain operations only."""
    if not is_kernel_allowed("segments", values.device.type, values.dtype):
        return False
    return is_tracing() or not is_transformed()
