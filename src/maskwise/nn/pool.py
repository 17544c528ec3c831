"""Pooling of what is kept: the mean, the largest, or a learned average."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from maskwise.errors import ArgumentError, ShapeError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import along_dims, check_empty, check_tensor, keeps_all, with_empty
from maskwise.ops.arguments import MaskLike, dims_of
from maskwise.ops.fill import fill
from maskwise.ops.primitives import may_be_empty
from maskwise.ops.reduce import amax, mean
from maskwise.ops.softmax import softmax
from maskwise.ops.torch_private import has_dispatch_modes, is_tracing, is_vmapped_or_functional
from maskwise.plan.dispatch import is_dry_run

__all__ = ["MaskedAttentionPool", "MaskedMaxPool", "MaskedMeanPool"]


class _Pool(nn.Module):
    """What the mean and the largest have in common."""

    #: The reduction of what is kept, and torch's own of everything.
    _masked: Callable[..., Tensor]
    _whole: Callable[..., Tensor]

    def __init__(self, dim: int | tuple[int, ...] = 1, keepdim: bool = False, *, empty: float = 0.0) -> None:
        super().__init__()
        self.dim = dim
        self.keepdim = keepdim
        self.empty = check_empty(type(self).__name__, empty)

    def extra_repr(self) -> str:
        """The arguments, for ``print(model)``."""
        return f"dim={self.dim}, keepdim={self.keepdim}, empty={self.empty}"

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Pool (B, L, D) to (B, D) over what a mask (B, L) keeps."""
        if _can_cache(mask, input) and self.empty == 0.0 and isinstance(self.dim, (int, tuple)):
            # All that can be known before x is read, in one look: in a model the mask is the same call after call.
            key = ("pool", self.dim, input.shape, input.device)
            prepared: _Prepared = mask._once(key, lambda: self._prepare(input, mask))
        else:
            prepared = self._prepare(input, mask)
        if prepared.kept is None:
            return self._whole(input, prepared.dims, keepdim=self.keepdim)
        out = self._masked(input, prepared.kept, prepared.dims, keepdim=self.keepdim)
        if not prepared.has_empty or is_dry_run():
            return out
        op, dims = type(self).__name__, list(prepared.dims)
        return with_empty(op, out, input, prepared.kept, dims, self.keepdim, self.empty)

    def _prepare(self, input: Tensor, mask: MaskLike | None) -> _Prepared:
        op = type(self).__name__
        check_tensor(op, input)
        dims = dims_of(op, input, self.dim)
        kept = None if mask is None else along_dims(op, input, mask, dims)
        if any(input.shape[d] == 0 for d in dims):
            # Without a single position nothing is kept, mask or not: torch has no largest of that, and a mean of NaN.
            nothing = input.new_zeros([1] * input.dim(), dtype=torch.bool)
            return _Prepared(tuple(dims), nothing if kept is None else kept)
        if mask is None or keeps_all(mask):
            return _Prepared(tuple(dims), None)
        has_empty = not _can_cache(kept, input) or may_be_empty(input, kept, dims)
        return _Prepared(tuple(dims), kept, has_empty or self.empty != 0.0)


class _Prepared(NamedTuple):
    """What a pool knows of a call before it reads x."""

    dims: tuple[int, ...]
    #: The mask, if there is something that it drops.
    kept: MaskLike | None
    #: Whether a slice may keep nothing.
    has_empty: bool = True


def _can_cache(mask: MaskLike | None, input: Tensor) -> TypeGuard[Mask]:
    """Whether a mask of intervals holds what is known of a call; not where tensors have no values to be read."""
    is_eager = not is_tracing() and not is_vmapped_or_functional() and not has_dispatch_modes()
    return is_eager and isinstance(input, Tensor) and type(mask) is Mask and mask._along is not None


class MaskedMeanPool(_Pool):
    """The mean of kept positions, such as a sentence's embedding from those of its tokens.

    >>> import torch, maskwise as mw
    >>> tokens = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]])  # (B, L, D)
    >>> mw.nn.MaskedMeanPool()(tokens, torch.tensor([[True, True, False]]))
    tensor([[2., 3.]])

    The input of ``forward(input, mask=None)`` is (B, L, D) with a mask of (B, L), True meaning keep: a Mask or a bool
    tensor. With another ``dim`` the mask is still the batch and what is pooled: (B, L) for ``dim=-1`` of (B, C, L),
    (B, H, W) for ``dim=(2, 3)`` of (B, C, H, W). Any other number of dims lines up from the left, as ``input[mask]``
    does, and as many as the input's broadcast to it. Without a mask, and with one that keeps everything, the result is
    torch's ``input.mean(dim)`` to the last bit.

    Args:
        dim: the dim or dims to pool.
        keepdim: whether they stay, with size 1.
        empty: the output of a batch entry without a kept position. The default is 0, not NaN as for `mw.mean`: the next
            layer multiplies it, and a NaN would reach the gradients of all its weights. Its own gradient is 0.

    Raises:
        ShapeError: the mask does not line up with the input.
        DtypeError: the mask is not bool, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype.
    """

    _masked = staticmethod(mean)
    _whole = staticmethod(torch.mean)


class MaskedMaxPool(_Pool):
    """The largest of kept positions, feature by feature.

    >>> import torch, maskwise as mw
    >>> tokens = torch.tensor([[[1.0, 4.0], [3.0, 2.0], [9.0, 9.0]]])  # (B, L, D)
    >>> mw.nn.MaskedMaxPool()(tokens, torch.tensor([[True, True, False]]))
    tensor([[3., 4.]])

    Shapes are those of `MaskedMeanPool`. Without a mask, and with one that keeps everything, the result is torch's
    ``input.amax(dim)`` to the last bit.

    Args:
        dim: the dim or dims to pool.
        keepdim: whether they stay, with size 1.
        empty: what a batch entry of which nothing is kept gives: 0, and not -inf as for `mw.amax`. Its gradient is 0.

    Raises:
        ShapeError: the mask does not line up with the input.
        DtypeError: the mask is not bool, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype.
    """

    _masked = staticmethod(amax)
    _whole = staticmethod(torch.amax)


class MaskedAttentionPool(nn.Module):
    """An average of kept positions whose weights are learned: the softmax of a score of each.

    >>> import torch, maskwise as mw
    >>> pool = mw.nn.MaskedAttentionPool(4, num_heads=2)
    >>> pool(torch.randn(8, 10, 4), mw.Mask.from_lengths([3] * 8, max_len=10)).shape
    torch.Size([8, 4])

    The input of ``forward(input, mask=None)`` is (B, L, D), or (*, L, D), with a mask of (B, L), or (*, L), True
    meaning keep: a Mask or a bool tensor. The result is (B, D), or (*, D).

    Args:
        embed_dim: D.
        num_heads: how many weightings there are; each averages its own share of the features.
        hidden_dim: the score is a linear function of a position by default. With a hidden size it is
            ``linear(tanh(linear(position)))``.
        empty: what an entry of which nothing is kept gives; its gradient is 0.
        device: where the parameters are.
        dtype: of the parameters.

    Raises:
        ArgumentError: ``embed_dim`` is not a multiple of ``num_heads``, or ``empty`` does not fit the input's dtype.
        ShapeError: the mask does not line up with the input, or the input has another number of features.
        DtypeError: the mask is not bool, or ``empty`` is not a number.
        DeviceError: the mask is on another device.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        hidden_dim: int | None = None,
        empty: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            must, hint = f"divide embed_dim {embed_dim}", "num_heads=1"
            raise ArgumentError(say("MaskedAttentionPool", "num_heads", must=must, got=num_heads, hint=hint))
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.empty = check_empty(type(self).__name__, empty)
        self.score: nn.Module
        if hidden_dim is None:
            # No bias: it would add the same to every score, which a softmax does not see.
            self.score = nn.Linear(embed_dim, num_heads, bias=False, device=device, dtype=dtype)
        else:
            self.score = nn.Sequential(
                nn.Linear(embed_dim, hidden_dim, device=device, dtype=dtype),
                nn.Tanh(),
                nn.Linear(hidden_dim, num_heads, bias=False, device=device, dtype=dtype),
            )

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Pool (*, L, D) to (*, D) over what a mask (*, L) keeps."""
        op = type(self).__name__
        check_tensor(op, input)
        if input.dim() < 2 or input.shape[-1] != self.embed_dim:
            must = f"be (*, L, {self.embed_dim})"
            raise ShapeError(say(op, "input", must=must, got=tuple(input.shape), hint=f"{op}({input.shape[-1]})"))
        bits = None if mask is None else along_dims(op, input, mask, [input.dim() - 2])
        if bits is not None and bits.shape[-1] != 1:
            must, hint = f"keep whole positions, {tuple(input.shape[:-1])}", "mask.to_bool().any(-1)"
            raise ShapeError(say(op, "mask", must=must, got=tuple(bits.shape), hint=hint))
        if bits is None:
            bits = input.new_ones([1] * input.dim(), dtype=torch.bool)
        if input.shape[-2] and (mask is None or keeps_all(mask)):
            return self._average(input, torch.softmax(self.score(input), -2))
        # What is dropped must not reach the products, where 0 * NaN is NaN.
        kept = fill(input, bits, 0.0)
        out = self._average(kept, softmax(self.score(kept), bits, -2))
        # A row of zeros has an average of 0 by itself.
        return out if self.empty == 0.0 else with_empty(op, out, input, bits, [input.dim() - 2], False, self.empty)

    def _average(
        self,
        x: Tensor,  # (*, L, D)
        weights: Tensor,  # (*, L, heads)
    ) -> Tensor:
        split = x.reshape(*x.shape[:-1], self.num_heads, self.embed_dim // self.num_heads)
        by_head = split.transpose(-2, -3)  # (*, heads, L, D / heads)
        return torch.matmul(weights.mT.unsqueeze(-2), by_head).squeeze(-2).flatten(-2)

    def extra_repr(self) -> str:
        """The arguments, for ``print(model)``."""
        return f"{self.embed_dim}, num_heads={self.num_heads}, empty={self.empty}"
