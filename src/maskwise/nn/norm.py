"""Batch, instance and layer normalization over what a mask keeps; running statistics are those of kept positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from maskwise.errors import ShapeError, say
from maskwise.nn.arguments import GivesEmpty, beside_channels, check_dims, check_tensor, keeps_all, leading
from maskwise.ops.arguments import MaskLike
from maskwise.ops.fill import fill
from maskwise.ops.primitives import count
from maskwise.ops.reduce import mean, var
from maskwise.ops.softmax import standardize

__all__ = ["MaskedBatchNorm1d", "MaskedBatchNorm2d", "MaskedInstanceNorm1d", "MaskedLayerNorm"]


# -- batch -------------------------------------------------------------------------------------------------------------
class _OverKept(GivesEmpty, _BatchNorm):
    """What both layers have in common: the forward. Torch's layers differ only in the inputs that they refuse."""

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Normalize (N, C, *places) over what a mask (N, *places) keeps."""
        if mask is not None:
            bits = _checked(self, input, mask)
            # Of an input without elements nothing is kept, of which torch would make running statistics of NaN.
            if not keeps_all(mask) or not input.numel():
                return self._with_empty(_batch_norm(self, input, bits), input, bits, [0, *range(2, input.dim())])
        return super().forward(input)


class MaskedBatchNorm1d(_OverKept, nn.BatchNorm1d):
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

    A channel of which nothing is kept leaves its running statistics as they were, and a batch of which nothing is kept
    is not counted. One kept value has no variance: it moves the running mean only.

    Args:
        empty: what a channel of which nothing is kept gives in all its places: 0, or this number. Its gradient is 0.
            The other arguments are torch's.

    Raises:
        ShapeError: the mask does not line up with the input, or the input has another number of channels.
        DtypeError: the mask is not bool, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype.
    """


class MaskedBatchNorm2d(_OverKept, nn.BatchNorm2d):
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


def _checked(self: _BatchNorm, x: Tensor, mask: MaskLike) -> Tensor:
    """The mask as bools that broadcast to x, if both fit the layer."""
    op = type(self).__name__
    check_dims(op, x, *(("(N, C, H, W)",) if isinstance(self, nn.BatchNorm2d) else ("(N, C)", "(N, C, L)")))
    if x.shape[1] != self.num_features:
        must = f"have {self.num_features} channels in dim 1, as the layer has"
        hint = "input.movedim(-1, 1)" if x.shape[-1] == self.num_features else f"{op}({x.shape[1]})"
        raise ShapeError(say(op, "input", must=must, got=tuple(x.shape), hint=hint))
    return beside_channels(op, x, mask)


def _batch_norm(self: _BatchNorm, x: Tensor, bits: Tensor) -> Tensor:
    if not self.training and self.running_mean is not None and self.running_var is not None:
        # Each value by itself. What is dropped must not reach the backward pass, where 0 * NaN is NaN.
        kept = fill(x, bits, 0.0) if torch.is_grad_enabled() else x
        out = F.batch_norm(kept, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return fill(out, bits, 0.0)
    dims = [0, *range(2, x.dim())]
    values = wide(x)
    if self.training and self.track_running_stats and self.num_batches_tracked is not None:
        _track_batch(self, values.detach(), bits, dims)
    return scaled(self, standardize(values, bits, dims, eps=self.eps), bits).to(x.dtype)


@torch.no_grad()
def _track_batch(self: Any, x: Tensor, bits: Tensor, dims: list[int]) -> None:
    """Move the running statistics towards those of this batch, where there are any."""
    kept = count(x, bits, dims, True).reshape(-1)
    self.num_batches_tracked.add_((kept > 0).any())
    # The cumulative average stays a tensor: neither a graph break nor a host-device sync.
    factor = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.to(x.dtype)
    for running, now, is_defined in (
        (self.running_mean, mean(x, bits, dims), kept > 0),
        (self.running_var, var(x, bits, dims), kept > 1),
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
        bits = beside_channels(op, input, mask, channels=input.dim() - 2)
        if keeps_all(mask) and input.numel():
            return super().forward(input)
        if input.shape[-2] != self.num_features:
            must = f"have {self.num_features} channels in dim -2, as the layer has"
            raise ShapeError(say(op, "input", must=must, got=tuple(input.shape), hint=f"{op}({input.shape[-2]})"))
        if input.dim() == 2:
            out = _instance_norm(self, input[None], bits[None]).squeeze(0)
        else:
            out = _instance_norm(self, input, bits)
        return self._with_empty(out, input, bits, [input.dim() - 1])


def _instance_norm(self: nn.InstanceNorm1d, x: Tensor, bits: Tensor) -> Tensor:
    if not self.training and self.running_mean is not None and self.running_var is not None:
        # Each value by itself. What is dropped must not reach the backward pass, where 0 * NaN is NaN.
        kept = fill(x, bits, 0.0) if torch.is_grad_enabled() else x
        out = F.instance_norm(kept, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return fill(out, bits, 0.0)
    values = wide(x)
    if self.training and self.running_mean is not None and self.momentum:
        _track_instances(self, values.detach(), bits)
    return scaled(self, standardize(values, bits, -1, eps=self.eps), bits).to(x.dtype)


@torch.no_grad()
def _track_instances(self: Any, x: Tensor, bits: Tensor) -> None:
    """Move the running statistics towards the mean of those of the instances that have any."""
    kept = count(x, bits, [2], True).expand(*x.shape[:2], 1).squeeze(-1)
    for running, now, is_defined in (
        (self.running_mean, mean(x, bits, -1), kept > 0),
        (self.running_var, var(x, bits, -1), kept > 1),
    ):
        average = mean(now, is_defined, 0)
        moved = (1.0 - self.momentum) * running + self.momentum * average
        running.copy_(torch.where(is_defined.any(0), moved, running))


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
        bits = leading(op, input, mask)
        if keeps_all(mask):
            return super().forward(input)
        dims = list(range(input.dim() - inner, input.dim()))
        if all(bits.shape[d] == 1 for d in dims):
            # What is dropped must not reach the backward pass, where 0 * NaN is NaN.
            kept = fill(input, bits, 0.0) if torch.is_grad_enabled() else input
            out = fill(super().forward(kept), bits, 0.0)
        else:
            out = standardize(wide(input), bits, dims, eps=self.eps)
            if self.weight is not None:
                out = out * self.weight
            if self.bias is not None:
                out = fill(out + self.bias, bits, 0.0)
            out = out.to(input.dtype)
        return self._with_empty(out, input, bits, dims)


# -- what they share ---------------------------------------------------------------------------------------------------
def wide(x: Tensor) -> Tensor:
    """Half precision as float32: torch's layers compute in it as well, and round once at the end."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scaled(
    self: Any,  # a layer with a weight and a bias, either of which may be None
    normalized: Tensor,  # (N, C, *places), 0 where dropped
    bits: Tensor,
) -> Tensor:
    """The layer's weight and bias, one of each for a channel, and 0 again where dropped."""
    if self.weight is None:
        return normalized
    shape = (-1, *[1] * (normalized.dim() - 2))
    weight = self.weight.to(normalized.dtype).reshape(shape)
    if self.bias is None:
        return fill(normalized * weight, bits, 0.0)
    return fill(torch.addcmul(self.bias.to(normalized.dtype).reshape(shape), normalized, weight), bits, 0.0)
