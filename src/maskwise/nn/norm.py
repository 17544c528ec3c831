"""Batch, instance, group and layer normalization over what a mask keeps, running statistics included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from maskwise.errors import ShapeError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import (
    GivesEmpty,
    beside_channels,
    check_dims,
    check_tensor,
    in_groups,
    keeps_all,
    leading,
    packs,
)
from maskwise.ops.arguments import MaskLike
from maskwise.ops.fill import fill
from maskwise.ops.norm import affine_norm, moments
from maskwise.ops.reduce import mean as masked_mean
from maskwise.ops.select.packed import collect
from maskwise.ops.softmax import standardize
from maskwise.plan.dispatch import is_dry_run

__all__ = [
    "MaskedBatchNorm1d",
    "MaskedBatchNorm2d",
    "MaskedBatchNorm3d",
    "MaskedGroupNorm",
    "MaskedInstanceNorm1d",
    "MaskedLayerNorm",
    "OverKept",
    "by_channel",
    "check_batch",
    "track_batch",
]


# -- batch -------------------------------------------------------------------------------------------------------------
class OverKept(GivesEmpty, _BatchNorm):
    """What these layers have in common: the forward. Torch's layers differ only in the inputs that they refuse."""

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Normalize (N, C, *places) over what a mask (N, *places) keeps."""
        if mask is not None:
            kept = check_batch(self, input, mask)
            # Of an input without elements nothing is kept, of which torch would make running statistics of NaN.
            if not keeps_all(mask) or not input.numel():
                return self._with_empty(_batch_norm(self, input, kept), input, kept, [0, *range(2, input.dim())])
        return super().forward(input)


class MaskedBatchNorm1d(OverKept, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` over what a mask keeps: same arguments, same state_dict, one more input.

    >>> import torch, maskwise as mw
    >>> norm = mw.nn.MaskedBatchNorm1d(1, eps=0.0, momentum=1.0)
    >>> x = torch.tensor([[[1.0, 3.0, 99.0]], [[3.0, 1.0, 99.0]]])
    >>> norm(x, mw.Mask.from_lengths([2, 2], max_len=3)).squeeze(1).tolist()
    [[-1.0, 1.0, 0.0], [1.0, -1.0, 0.0]]
    >>> norm.running_mean, norm.running_var
    (tensor([2.]), tensor([1.3333]))

    The input of ``forward(input, mask=None)`` is (N, C) with a mask of (N,), or (N, C, L) with a mask of (N, L), True
    meaning keep: a Mask or a bool tensor. Sizes of 1 broadcast. A mask with as many dims as the input broadcasts to it,
    and may then differ by channel. The output is 0 where the mask drops. Without a mask, and with one that is known to
    keep everything, this is torch's layer to the last bit. That takes no host-device sync, and no graph is bound to it.

    A channel without a kept element leaves its running statistics unchanged, and a batch without a kept element is not
    counted. A single kept value has no variance: it updates the running mean only.

    Args:
        empty: the output of a channel without a kept element, at all positions; 0 by default. Its gradient is 0.
            The other arguments are torch's.

    Raises:
        ShapeError: the mask does not line up with the input, or the input has another number of channels.
        DtypeError: the mask is not bool, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype.
    """


class MaskedBatchNorm2d(OverKept, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` over what a mask keeps: same arguments, same state_dict, one more input.

    >>> import torch, maskwise as mw
    >>> norm = mw.nn.MaskedBatchNorm2d(3).eval()
    >>> mask = torch.tensor([[[True, False]]])  # (N, H, W)
    >>> norm(torch.zeros(1, 3, 1, 2).fill_(torch.nan).masked_fill(mask, 2.0), mask).isnan().any()
    tensor(False)

    The input of ``forward(input, mask=None)`` is (N, C, H, W), its mask (N, H, W), or of four dims that broadcast to
    the input. Everything else is as in `MaskedBatchNorm1d`.

    Raises:
        ShapeError: the mask does not line up with the input, or the input has other dims or channels.
        DtypeError: the mask is not bool, the input is not a tensor, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype.
    """


class MaskedBatchNorm3d(OverKept, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` over what a mask keeps: same arguments, same state_dict, one more input.

    >>> import torch, maskwise as mw
    >>> norm = mw.nn.MaskedBatchNorm3d(1, eps=0.0)
    >>> x = torch.tensor([1.0, 3.0, 99.0]).reshape(1, 1, 3, 1, 1)
    >>> norm(x, torch.tensor([True, True, False]).reshape(1, 3, 1, 1)).flatten().tolist()  # (N, D, H, W)
    [-1.0, 1.0, 0.0]

    The input of ``forward(input, mask=None)`` is (N, C, D, H, W), its mask (N, D, H, W), or of five dims that broadcast
    to the input. Everything else is as in `MaskedBatchNorm1d`.

    Raises:
        ShapeError: the mask does not line up with the input, or the input has other dims or channels.
        DtypeError: the mask is not bool, the input is not a tensor, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype.
    """


def check_batch(self: _BatchNorm, x: Tensor, mask: MaskLike) -> MaskLike:
    """The mask as it broadcasts to x, if both fit the layer."""
    op = type(self).__name__
    shapes = {nn.BatchNorm2d: "(N, C, H, W)", nn.BatchNorm3d: "(N, C, D, H, W)"}
    images = [shape for kind, shape in shapes.items() if isinstance(self, kind)]
    check_dims(op, x, *(images or ("(N, C)", "(N, C, L)")))
    _check_channels(op, x, self.num_features, f"{op}({x.shape[1]})")
    return beside_channels(op, x, mask)


def _check_channels(op: str, x: Tensor, channels: int, fitting: str) -> None:
    if x.shape[1] != channels:
        must = f"have {channels} channels in dim 1, as the layer has"
        hint = "input.movedim(-1, 1)" if x.shape[-1] == channels else fitting
        raise ShapeError(say(op, "input", must=must, got=tuple(x.shape), hint=hint))


def _batch_norm(self: _BatchNorm, x: Tensor, mask: MaskLike) -> Tensor:
    dims = [0, *range(2, x.dim())]
    if not self.training and (given := _running(self, x)):
        return _normalized(self, x, mask, dims, given)
    found = moments(x, mask, dims)
    if self.training and self.track_running_stats and self.num_batches_tracked is not None and not is_dry_run():
        track_batch(self, *found)
    return _normalized(self, x, mask, dims, found)


@torch.no_grad()
def track_batch(self: Any, count: Tensor, mean: Tensor, var: Tensor) -> None:
    """Move the running statistics towards those of this batch, where there are any."""
    count, mean, var = (each.reshape(-1) for each in (count, mean, var))
    self.num_batches_tracked.add_((count > 0).any())
    # The cumulative average stays a tensor: neither a graph break nor a host-device sync.
    factor = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.to(mean.dtype)
    for running, now, is_defined in (
        (self.running_mean, mean, count > 0),
        (self.running_var, unbiased(var, count), count > 1),
    ):
        running.copy_(torch.where(is_defined, (1.0 - factor) * running + factor * now, running))


# -- instance ----------------------------------------------------------------------------------------------------------
class MaskedInstanceNorm1d(GivesEmpty, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` over what a mask keeps: same arguments, same state_dict, one more input.

    >>> import torch, maskwise as mw
    >>> norm = mw.nn.MaskedInstanceNorm1d(1, eps=0.0)
    >>> x = torch.tensor([[[1.0, 3.0, 99.0]], [[2.0, 4.0, 6.0]]])
    >>> norm(x, mw.Mask.from_lengths([2, 3])).squeeze(1)
    tensor([[-1.0000,  1.0000,  0.0000],
            [-1.2247,  0.0000,  1.2247]])

    The input of ``forward(input, mask=None)`` is (N, C, L) with a mask of (N, L), or (C, L) with a mask of (L,), True
    meaning keep: a Mask or a bool tensor. Sizes of 1 broadcast. A mask with as many dims as the input broadcasts to it,
    and may then differ by channel. The output is 0 where the mask drops. Without a mask, and with one that is known to
    keep everything, this is torch's layer to the last bit. That takes no host-device sync, and no graph is bound to it.

    With ``track_running_stats``, the running mean averages over the instances that keep something, and the running
    variance over those that keep two values or more. As in torch, ``momentum=None`` leaves both as they are.

    Args:
        empty: what a channel of an instance gives in all its places if nothing of it is kept: 0, or this number. Its
            gradient is 0. The other arguments are torch's.

    Raises:
        ShapeError: the mask does not line up with the input, or the input has another number of channels.
        DtypeError: the mask is not bool, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype.
    """

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Normalize each channel of (N, C, L) or (C, L) over what a mask (N, L) or (L,) keeps."""
        op = type(self).__name__
        if mask is None:
            return super().forward(input)
        check_dims(op, input, "(C, L)", "(N, C, L)")
        kept = beside_channels(op, input, mask, channels=input.dim() - 2)
        if keeps_all(mask) and input.numel():
            return super().forward(input)
        if input.shape[-2] != self.num_features:
            must = f"have {self.num_features} channels in dim -2, as the layer has"
            raise ShapeError(say(op, "input", must=must, got=tuple(input.shape), hint=f"{op}({input.shape[-2]})"))
        if input.dim() == 2:
            out = _instance_norm(self, input[None], kept[None])
            out = out if is_dry_run() else out.squeeze(0)
        else:
            out = _instance_norm(self, input, kept)
        return self._with_empty(out, input, kept, [input.dim() - 1])


def _instance_norm(self: nn.InstanceNorm1d, x: Tensor, mask: MaskLike) -> Tensor:
    if not self.training and (given := _running(self, x)):
        return _normalized(self, x, mask, [0, 2], given)
    found = moments(x, mask, [2])
    if self.training and self.running_mean is not None and self.momentum and not is_dry_run():
        _track_instances(self, *found)
    return _normalized(self, x, mask, [2], found)


@torch.no_grad()
def _track_instances(self: Any, count: Tensor, mean: Tensor, var: Tensor) -> None:
    """Move the running statistics towards the mean of those of the instances that have any."""
    count, mean, var = (each.squeeze(-1) for each in (count, mean, var))
    for running, now, is_defined in (
        (self.running_mean, mean, count > 0),
        (self.running_var, unbiased(var, count), count > 1),
    ):
        average = masked_mean(now, is_defined, 0)
        moved = (1.0 - self.momentum) * running + self.momentum * average
        running.copy_(torch.where(is_defined.any(0), moved, running))


# -- group -------------------------------------------------------------------------------------------------------------
class MaskedGroupNorm(GivesEmpty, nn.GroupNorm):
    """``torch.nn.GroupNorm`` over what a mask keeps: same arguments, same state_dict, one more input.

    >>> import torch, maskwise as mw
    >>> norm = mw.nn.MaskedGroupNorm(1, 2, eps=0.0)
    >>> x = torch.tensor([[[1.0, 3.0, 99.0], [3.0, 1.0, 99.0]]])
    >>> norm(x, mw.Mask.from_lengths([2], max_len=3)).tolist()
    [[[-1.0, 1.0, 0.0], [1.0, -1.0, 0.0]]]

    The input of ``forward(input, mask=None)`` is (N, C, *places) with a mask of (N, *places), True meaning keep: a Mask
    or a bool tensor. Sizes of 1 broadcast. A mask with as many dims as the input broadcasts to it, and may then differ
    by channel. Mean and variance are those of the kept values of a sample's group of channels. The output is 0 where
    the mask drops. Without a mask, and with one that is known to keep everything, this is torch's layer to the last
    bit. That takes no host-device sync, and no graph is bound to it.

    Args:
        empty: what a group of a sample gives in all its places if nothing of it is kept: 0, or this number. Its
            gradient is 0. The other arguments are torch's.

    Raises:
        ShapeError: the mask does not line up with the input, or the input has another number of channels.
        DtypeError: the mask is not bool, the input is not a tensor, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype.
    """

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Normalize each group of channels of (N, C, *places) over what a mask (N, *places) keeps."""
        if mask is None:
            return super().forward(input)
        op = type(self).__name__
        check_tensor(op, input)
        if input.dim() < 2:
            check_dims(op, input, "(N, C, *places)")
        _check_channels(op, input, self.num_channels, f"{op}({self.num_groups}, {input.shape[1]})")
        kept = beside_channels(op, input, mask)
        if keeps_all(mask) and input.numel():
            return super().forward(input)
        return _group_norm(self, input, kept)


def _group_norm(self: MaskedGroupNorm, x: Tensor, mask: MaskLike) -> Tensor:
    sizes = (self.num_groups, self.num_channels // self.num_groups)
    slices, kept = x.reshape(x.shape[0], *sizes, *x.shape[2:]), in_groups(mask, sizes)  # (N, G, C / G, *places)
    dims = list(range(2, slices.dim()))
    # Half precision is rounded once, at the end.
    values = slices if self.weight is None else wide(slices)
    out = affine_norm(values, kept, dims, moments(values, kept, dims), None, None, self.eps)
    if is_dry_run():
        return out
    if self.weight is not None:
        # A weight is that of a channel, not of what was normalized together. A mean of 0 and a variance of 1 are given.
        ones = by_channel(torch.ones_like(self.weight), x)
        statistics = (None, torch.zeros_like(ones), ones)
        out = _normalized(self, out.flatten(1, 2), mask, [0, *range(2, x.dim())], statistics, eps=0.0)
        out = out.to(x.dtype).reshape(slices.shape)
    return self._with_empty(out, slices, kept, dims).reshape(x.shape)


# -- layer -------------------------------------------------------------------------------------------------------------
class MaskedLayerNorm(GivesEmpty, nn.LayerNorm):
    """``torch.nn.LayerNorm`` of what a mask keeps: same arguments, same state_dict, one more input.

    >>> import torch, maskwise as mw
    >>> norm = mw.nn.MaskedLayerNorm(2, eps=0.0)
    >>> x = torch.tensor([[[1.0, 3.0], [float("nan"), 7.0]]])
    >>> norm(x, torch.tensor([[True, False]])).tolist()
    [[[-1.0, 1.0], [0.0, 0.0]]]

    The input of ``forward(input, mask=None)`` is (*, *normalized_shape), such as (B, L, D). Its mask, a Mask or a bool
    tensor with True meaning keep, has leading dims of the input, as ``input[mask]`` takes it: (B, L) keeps positions,
    each of which is normalized as torch does, to the last bit. A mask with as many dims as the input broadcasts to it,
    and then features that it drops are left out of the mean and the variance. The output is 0 where the mask drops, so
    a position of which nothing is kept is 0; it has no part in the gradients of weight and bias.

    Args:
        empty: what a position of which nothing is kept gives: 0, or this number. Its gradient is 0. The other arguments
            are torch's.

    Raises:
        ShapeError: the mask does not line up with the input, or the input does not end in ``normalized_shape``.
        DtypeError: the mask is not bool, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype.
    """

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Normalize (*, *normalized_shape), where a mask of leading dims, or of all dims, keeps."""
        if mask is None:
            return super().forward(input)
        op = type(self).__name__
        check_tensor(op, input)
        inner = len(self.normalized_shape)
        if tuple(input.shape[input.dim() - inner :]) != self.normalized_shape:
            must = f"end in normalized_shape {self.normalized_shape}"
            raise ShapeError(say(op, "input", must=must, got=tuple(input.shape), hint=f"{op}({input.shape[-1]})"))
        kept = leading(op, input, mask)
        if keeps_all(mask):
            return super().forward(input)
        dims = list(range(input.dim() - inner, input.dim()))
        if not all(kept.shape[d] == 1 for d in dims):
            out = standardize(wide(input), kept, dims, eps=self.eps)
            if self.weight is not None:
                out = out * self.weight
            if self.bias is not None:
                out = fill(out + self.bias, kept, 0.0)
            out = out.to(input.dtype)
        elif packs(input):
            rows = _rows_of(mask, kept, input.shape[:-inner])
            out = collect(input, rows).map(super().forward).unpack()
        else:
            # What is dropped must not reach the backward pass, where 0 * NaN is NaN.
            values = fill(input, kept, 0.0) if torch.is_grad_enabled() else input
            out = fill(super().forward(values), kept, 0.0)
        return self._with_empty(out, input, kept, dims)


def _rows_of(mask: MaskLike, kept: MaskLike, lead: torch.Size) -> Mask:
    """The mask of positions: the given one, with what it has cached, where it is that already."""
    rows = mask if isinstance(mask, Mask) else Mask(mask)
    if rows.ndim == len(lead):
        return rows if rows.shape == lead else rows.expand(lead)
    return Mask(kept)[(..., *[0] * (kept.dim() - len(lead)))].expand(lead)


# -- what they share ---------------------------------------------------------------------------------------------------
def wide(x: Tensor) -> Tensor:
    """Half precision as float32: torch's layers compute in it as well, and round once at the end."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unbiased(var: Tensor, count: Tensor) -> Tensor:
    """The variance of a sample, from the mean of squared distances of so many values."""
    return var * (count / (count - 1))


def _running(self: Any, x: Tensor) -> tuple[None, Tensor, Tensor] | None:
    """The running statistics of a layer that has them, as they broadcast to x (N, C, *places)."""
    if self.running_mean is None or self.running_var is None:
        return None
    return None, by_channel(self.running_mean, x), by_channel(self.running_var, x)


def by_channel(values: Tensor, x: Tensor) -> Tensor:
    """One value for each channel of x (N, C, *places), as it broadcasts to x."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def _normalized(
    self: Any,  # a layer with a weight and a bias, either of which may be None
    x: Tensor,  # (N, C, *places)
    mask: MaskLike,
    dims: list[int],
    statistics: tuple[Tensor | None, Tensor, Tensor],
    eps: float | None = None,
) -> Tensor:
    weight, bias = (None if each is None else by_channel(each, x) for each in (self.weight, self.bias))
    return affine_norm(x, mask, dims, statistics, weight, bias, self.eps if eps is None else eps)
