"""Batch normalization whose statistics, the running ones too, are those of kept positions only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from maskwise.errors import ShapeError, say
from maskwise.nn.empty import GivesEmpty
from maskwise.nn.layer_input import check_dims
from maskwise.nn.positions import beside_channels, keeps_all
from maskwise.nn.scaling import scaled, wide
from maskwise.ops.arguments import MaskLike
from maskwise.ops.fill import fill
from maskwise.ops.primitives import count
from maskwise.ops.reduce import mean, var
from maskwise.ops.softmax import standardize

__all__ = ["MaskedBatchNorm1d", "MaskedBatchNorm2d"]


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
    keep everything, this is torch's layer to the last bit; a device is not asked, and a compiled graph cannot ask.

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
        _track(self, values.detach(), bits, dims)
    return scaled(self, standardize(values, bits, dims, eps=self.eps), bits).to(x.dtype)


@torch.no_grad()
def _track(self: Any, x: Tensor, bits: Tensor, dims: list[int]) -> None:
    """Move the running statistics towards those of this batch, where there are any."""
    kept = count(x, bits, dims, True).reshape(-1)
    self.num_batches_tracked.add_((kept > 0).any())
    # The cumulative average stays a tensor: a graph, or a device, must not be asked for the number.
    factor = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.to(x.dtype)
    for running, now, known in (
        (self.running_mean, mean(x, bits, dims), kept > 0),
        (self.running_var, var(x, bits, dims), kept > 1),
    ):
        running.copy_(torch.where(known, (1.0 - factor) * running + factor * now, running))
