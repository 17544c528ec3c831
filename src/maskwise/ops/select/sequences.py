"""The sequences of a Packed (the rows of its mask's last dim), and reductions over each, without unpacking.

On the CPU they are plain torch operations; on a GPU the registered op ``segments``, one deterministic kernel, where
torch's own would use atomics.
"""

# These are methods of Packed: the first argument is cls or self, and not documented.
# ruff: noqa: D417

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, say
from maskwise.ops import backends
from maskwise.ops.backends import DEVICE, FLOATING
from maskwise.ops.operation import define, differentiate
from maskwise.ops.torch_private import is_tracing, is_vmapped_or_functional

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


def _usable(self: Packed, name: str) -> Tensor:
    """The values, if there is no capacity, whose unused rows would be reduced as well."""
    if self.capacity is not None:
        hint = "packed.unpack() and the function of the same name"
        raise ArgumentError(say(f"Packed.{name}", "capacity", must="be None", got=self.capacity, hint=hint))
    return self.values


def _expand(self: Packed, ids: Tensor, of_sequence: Tensor) -> Tensor:
    return of_sequence.reshape(-1, *self.values.shape[1:]).index_select(0, ids)


def _shape(self: Packed) -> tuple[int, ...]:
    return (*self.mask.shape[:-1], *self.values.shape[1:])


def _by_kernel(self: Packed, op: str) -> Tensor:
    out: Tensor = reduce_segments(self.values, self.mask.cu_seqlens, op)
    return out.reshape(_shape(self))


def sum(self: Packed) -> Tensor:
    """The sum of each sequence: (*lead without the last dim, *rest); 0 for an empty one. Bools are counted.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.sum()
    tensor([3., 3.])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    if has_kernel(_usable(self, "sum")):
        return _by_kernel(self, "sum")
    total = _wide_sum(self, "sum")
    return total if self.values.dtype is torch.bool else total.to(self.values.dtype)


def _wide_sum(self: Packed, name: str) -> Tensor:
    """The sums in a wider dtype: half precision would lose the last terms of a long sequence."""
    values = _usable(self, name)
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    if values.dtype is torch.bool:
        values = values.long()
    base = values.new_zeros(self.mask.lengths.numel(), *values.shape[1:])
    return base.index_add(0, sequence_ids(self), values).reshape(_shape(self))


def mean(self: Packed) -> Tensor:
    """The mean of each sequence; NaN for an empty one.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.mean()
    tensor([1.5000, 3.0000])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    if has_kernel(_usable(self, "mean")):
        return _by_kernel(self, "mean")
    kept = self.mask.lengths.to(self.values.device).reshape(*self.mask.shape[:-1], *[1] * (self.values.dim() - 1))
    # The gradient of an empty sequence is zero.
    out = torch.where(kept > 0, _wide_sum(self, "mean") / kept.clamp(min=1), torch.nan)
    return out.to(self.values.dtype) if self.values.is_floating_point() else out


def _extreme(self: Packed, name: str) -> Tensor:
    values = _usable(self, name)
    if has_kernel(values):
        return _by_kernel(self, name)
    if values.is_floating_point():
        identity: float = -torch.inf if name == "amax" else torch.inf
    else:
        limits = torch.iinfo(values.dtype)
        identity = limits.min if name == "amax" else limits.max
    base = torch.full(
        (self.mask.lengths.numel(), *values.shape[1:]), identity, dtype=values.dtype, device=values.device
    )
    ids = sequence_ids(self).reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return base.scatter_reduce(0, ids, values, reduce=name, include_self=True).reshape(_shape(self))


def amax(self: Packed) -> Tensor:
    """The largest of each sequence; -inf for an empty one, the least integer where values are integers.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.amax()
    tensor([2., 3.])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    return _extreme(self, "amax")


def amin(self: Packed) -> Tensor:
    """The smallest of each sequence; +inf for an empty one, the greatest integer where values are integers.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.amin()
    tensor([1., 3.])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    return _extreme(self, "amin")


def _shifted(self: Packed, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The values minus the maximum of their sequence, and the maximum: the shift cancels, so it needs no gradient."""
    peak = _extreme(self, "amax").detach()
    peak = torch.where(peak.isfinite(), peak, 0.0)
    return self.values - _expand(self, ids, peak), peak


def logsumexp(self: Packed) -> Tensor:
    """The logarithm of the sum of the exponentials of each sequence; -inf for an empty one.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.logsumexp()
    tensor([2.3133, 3.0000])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    if has_kernel(_usable(self, "logsumexp")):
        return _by_kernel(self, "logsumexp")
    ids = sequence_ids(self)
    shifted, peak = _shifted(self, ids)
    total = self._like(shifted.exp()).sum()
    # The logarithm of 0, of an empty sequence, would have a NaN gradient.
    return torch.where(total > 0, torch.where(total > 0, total, 1.0).log() + peak, -torch.inf)


def softmax(self: Packed) -> Packed:
    """The softmax over each sequence, as a Packed of the same mask.

    >>> import torch, maskwise as mw
    >>> packed = mw.pack(torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), mw.Mask.from_lengths([2, 1], max_len=3))
    >>> packed.softmax().values
    tensor([0.2689, 0.7311, 1.0000])

    Raises:
        ArgumentError: the rows have a capacity, and so rows that belong to no sequence.
    """
    if has_kernel(_usable(self, "softmax")):
        return self._like(reduce_segments(self.values, self.mask.cu_seqlens, "softmax"))
    ids = sequence_ids(self)
    exponentials = _shifted(self, ids)[0].exp()
    return self._like(exponentials / _expand(self, ids, self._like(exponentials).sum()))


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


# -- the op for GPUs ---------------------------------------------------------------------------------------------------
def reduce_plain(
    values: Tensor,  # (n, *rest)
    bounds: Tensor,  # (S + 1,): the start of each segment, and the end of the last
    op: str,
) -> Tensor:
    """A reduction of each segment, (S, *rest), or its softmax, (n, *rest), in plain torch operations."""
    many = bounds.shape[0] - 1
    rows = torch.arange(values.shape[0], device=values.device)
    ids = torch.searchsorted(bounds[1:].long(), rows, right=True)
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    base = wide.new_zeros(many, *values.shape[1:])
    lengths = bounds.diff().reshape(-1, *[1] * (values.dim() - 1))
    if op in ("sum", "mean"):
        total = base.index_add(0, ids, wide)
        out = total if op == "sum" else torch.where(lengths > 0, total / lengths.clamp(min=1), torch.nan)
        return out.to(values.dtype)
    index = ids.reshape(-1, *[1] * (values.dim() - 1)).expand_as(wide)
    name = "amin" if op == "amin" else "amax"
    peak = torch.full_like(base, torch.inf if name == "amin" else -torch.inf)
    peak = peak.scatter_reduce(0, index, wide, reduce=name)
    if op in ("amax", "amin"):
        return peak.to(values.dtype)
    peak = torch.where(peak.isfinite(), peak, 0.0).detach()
    exponentials = (wide - peak.index_select(0, ids)).exp()
    total = base.index_add(0, ids, exponentials)
    if op == "softmax":
        return (exponentials / total.index_select(0, ids)).to(values.dtype)
    return torch.where(total > 0, torch.where(total > 0, total, 1.0).log() + peak, -torch.inf).to(values.dtype)


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
define(
    "segments",
    "(Tensor values, Tensor bounds, str op) -> Tensor",
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
backends.provide("segments", DEVICE, FLOATING)

reduce_segments = torch.ops.maskwise.segments.default


def has_kernel(values: Tensor) -> bool:
    """Whether a kernel reduces these rows: never under torch.func transforms, which support plain operations only."""
    if backends.why_not_served("segments", values.device.type, values.dtype) is not None:
        return False
    return is_tracing() or not is_vmapped_or_functional()
