"""Instance normalization whose statistics are those of kept positions only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

__all__ = ["MaskedInstanceNorm1d"]


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
    keep everything, this is torch's layer to the last bit; a device is not asked, and a compiled graph cannot ask.

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
        _track(self, values.detach(), bits)
    return scaled(self, standardize(values, bits, -1, eps=self.eps), bits).to(x.dtype)


@torch.no_grad()
def _track(self: Any, x: Tensor, bits: Tensor) -> None:
    """Move the running statistics towards the mean of those of the instances that have any."""
    kept = count(x, bits, [2], True).expand(*x.shape[:2], 1).squeeze(-1)
    for running, now, known in (
        (self.running_mean, mean(x, bits, -1), kept > 0),
        (self.running_var, var(x, bits, -1), kept > 1),
    ):
        average = mean(now, known, 0)
        moved = (1.0 - self.momentum) * running + self.momentum * average
        running.copy_(torch.where(known.any(0), moved, running))
