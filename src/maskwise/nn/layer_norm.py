"""Layer normalization of kept rows, or over kept features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maskwise.errors import ShapeError, say
from maskwise.nn.empty import GivesEmpty
from maskwise.nn.layer_input import check_tensor
from maskwise.nn.positions import keeps_all, leading
from maskwise.nn.scaling import wide
from maskwise.ops.arguments import MaskLike
from maskwise.ops.fill import fill
from maskwise.ops.softmax import standardize

__all__ = ["MaskedLayerNorm"]


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
