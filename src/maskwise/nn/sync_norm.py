"""Masked batch normalization with the statistics of what is kept on all ranks."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from maskwise.distributed.group import Group, all_reduce, process_group, size
from maskwise.errors import ArgumentError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import check_module, check_tensor, fit_dtype
from maskwise.nn.norm import (
    MaskedBatchNorm1d,
    MaskedBatchNorm2d,
    MaskedBatchNorm3d,
    OverKept,
    by_channel,
    check_batch,
    track_batch,
)
from maskwise.ops.arguments import MaskLike
from maskwise.ops.norm import affine_norm, moments
from maskwise.ops.operation import as_bits, as_operand
from maskwise.ops.primitives import accumulate_dtype, fill_dropped
from maskwise.ops.torch_private import is_tracing, is_transformed

__all__ = [
    "SYNCED",
    "SyncMaskedBatchNorm1d",
    "SyncMaskedBatchNorm2d",
    "SyncMaskedBatchNorm3d",
    "convert_sync_masked",
]

M = TypeVar("M", bound=nn.Module)


class _Synced(OverKept):
    """What these layers have in common: the group, and the forward."""

    group: Group = None

    def __init__(self, *args: Any, group: Group = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = process_group(type(self).__name__, group)

    def forward(self, input: Tensor, mask: MaskLike | None = None) -> Tensor:
        """Normalize (N, C, *places) over what the masks (N, *places) of all ranks keep."""
        if not self.training or size(self.group) == 1:
            return super().forward(input, mask)
        if mask is None:
            # A rank without a mask takes part as one whose mask keeps everything.
            check_tensor(type(self).__name__, input)
            mask = Mask.full((1,) * max(input.dim() - 1, 1), device=input.device)
        return _sync_batch_norm(self, input, check_batch(self, input, mask))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Synced:
        # A group is a handle of this process, which cannot be copied.
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        return copied


class SyncMaskedBatchNorm1d(_Synced, MaskedBatchNorm1d):
    """`MaskedBatchNorm1d` with the statistics of what is kept on all ranks of a process group.

    >>> import torch, maskwise as mw
    >>> norm = mw.nn.SyncMaskedBatchNorm1d(1, eps=0.0)
    >>> x = torch.tensor([[[1.0, 3.0, 99.0]], [[3.0, 1.0, 99.0]]])
    >>> norm(x, mw.Mask.from_lengths([2, 2], max_len=3)).squeeze(1).tolist()  # one rank is a group too
    [[-1.0, 1.0, 0.0], [1.0, -1.0, 0.0]]

    In training, output, running statistics and the gradient of the input are those of one process that has the batches
    of all ranks. Batches may differ in size from rank to rank, and a rank may keep nothing, or have no rows; all ranks
    must call the layer, and its backward pass, equally often. As in torch, the gradients of weight and bias are those
    of the rank's own batch, which DistributedDataParallel and FSDP reduce. In evaluation nothing is communicated.

    A training step communicates 3 C float64 numbers in two all-reduces forward, and 2 C in one backward.

    Args:
        group: the ranks that share statistics, a process group or a device mesh of one dim; by default all.
            The other arguments are those of `MaskedBatchNorm1d`.

    Raises:
        ShapeError: the mask does not line up with the input, or the input has another number of channels.
        DtypeError: the mask is not bool, the input is not a tensor, ``empty`` is not a number, or ``group`` no group.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype, or this process is not in the group.
    """


class SyncMaskedBatchNorm2d(_Synced, MaskedBatchNorm2d):
    """`MaskedBatchNorm2d` with the statistics of what is kept on all ranks of a process group.

    >>> import torch, maskwise as mw
    >>> norm = mw.nn.SyncMaskedBatchNorm2d(1, eps=0.0)
    >>> norm(torch.tensor([[[[1.0, 3.0, 99.0]]]]), torch.tensor([[[True, True, False]]])).flatten().tolist()
    [-1.0, 1.0, 0.0]

    The input of ``forward(input, mask=None)`` is (N, C, H, W), its mask (N, H, W), or of four dims that broadcast to
    the input. Everything else is as in `SyncMaskedBatchNorm1d`.

    Raises:
        ShapeError: the mask does not line up with the input, or the input has other dims or channels.
        DtypeError: the mask is not bool, the input is not a tensor, ``empty`` is not a number, or ``group`` no group.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype, or this process is not in the group.
    """


class SyncMaskedBatchNorm3d(_Synced, MaskedBatchNorm3d):
    """`MaskedBatchNorm3d` with the statistics of what is kept on all ranks of a process group.

    >>> import torch, maskwise as mw
    >>> norm = mw.nn.SyncMaskedBatchNorm3d(1, eps=0.0)
    >>> x = torch.tensor([1.0, 3.0, 99.0]).reshape(1, 1, 3, 1, 1)
    >>> norm(x, torch.tensor([True, True, False]).reshape(1, 3, 1, 1)).flatten().tolist()  # (N, D, H, W)
    [-1.0, 1.0, 0.0]

    The input of ``forward(input, mask=None)`` is (N, C, D, H, W), its mask (N, D, H, W), or of five dims that broadcast
    to the input. Everything else is as in `SyncMaskedBatchNorm1d`.

    Raises:
        ShapeError: the mask does not line up with the input, or the input has other dims or channels.
        DtypeError: the mask is not bool, the input is not a tensor, ``empty`` is not a number, or ``group`` no group.
        DeviceError: the mask is on another device.
        ArgumentError: ``empty`` does not fit the input's dtype, or this process is not in the group.
    """


# -- statistics and gradient -------------------------------------------------------------------------------------------
def _sync_batch_norm(self: _Synced, x: Tensor, mask: MaskLike) -> Tensor:
    dims = [0, *range(2, x.dim())]
    weight, bias = (None if each is None else by_channel(each, x) for each in (self.weight, self.bias))
    weight = x.new_ones((), dtype=accumulate_dtype(x)) if weight is None else weight
    bias = x.new_zeros((), dtype=accumulate_dtype(x)) if bias is None else bias
    if is_tracing() or is_transformed():
        # In operations and collectives that a graph can hold.
        bits = as_bits(mask)
        count = all_reduce(bits.expand(x.shape).sum(dims, keepdim=True), self.group)
        out, mean, var = _reference(x, bits, weight, bias, _Statistics(bits, count, None, dims, self.eps, self.group))
    else:
        count, mean, var = _moments_of_all(x, mask, dims, self.group)
        found = _Statistics(mask, count, (mean, var), dims, self.eps, self.group)
        out = _Normalize.apply(x, weight, bias, found)  # type: ignore[no-untyped-call]
    if self.track_running_stats and self.num_batches_tracked is not None:
        track_batch(self, count, mean.detach(), var.detach())
    if self.empty != 0.0:
        # Of a channel of which no rank keeps anything.
        out = torch.where(count > 0, out, fit_dtype(type(self).__name__, self.empty, out.dtype))
    return out


@torch.no_grad()
def _moments_of_all(x: Tensor, mask: MaskLike, dims: list[int], group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """How many elements of each channel all ranks keep, their mean and their variance."""
    count, mean, var = moments(x, mask, dims)
    # Of nothing kept, mean and variance are anything.
    here = count.double()
    mean, var = (torch.where(count > 0, each, 0.0).double() for each in (mean, var))
    total, summed = all_reduce(torch.stack([here, here * mean]), group)
    divisor = total.clamp_min(1.0)
    overall = summed / divisor
    # Squared distances from the mean of all: no cancellation, as in a difference of sums of squares.
    squares = all_reduce(here * (var + (mean - overall).square()), group)
    wide = accumulate_dtype(x)
    return total.long(), overall.to(wide), (squares / divisor).to(wide)


class _Statistics(NamedTuple):
    """What the gradient needs beside tensors that have one."""

    mask: MaskLike
    total: Tensor
    moments: tuple[Tensor, Tensor] | None
    dims: list[int]
    eps: float
    group: Group


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, found: _Statistics) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.found = found
        assert found.moments is not None
        return affine_norm(x, found.mask, found.dims, (None, *found.moments), weight, bias, found.eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, weight, bias = ctx.saved_tensors
        mask, count, (mean, var), dims, eps, group = ctx.found
        if torch.is_grad_enabled():
            # For a double backward, by operations that torch differentiates.
            inputs = [each if each.requires_grad else each.detach().requires_grad_() for each in (x, weight, bias)]
            out, _, _ = _reference(inputs[0], as_bits(mask), inputs[1], inputs[2], ctx.found)
            found = torch.autograd.grad(out, inputs, gradients[0], create_graph=True, materialize_grads=True)
            return found[0], found[1], found[2], None
        wide = mean.dtype
        # Half precision is rounded once, at the end.
        values, grad, scale = x.to(wide), gradients[0].to(wide), weight.to(wide).expand_as(mean).contiguous()
        operand, along = as_operand(mask, values)
        of_x, of_weight, of_bias = torch.ops.maskwise.affine_norm_backward(
            grad, values, operand, scale, mean.contiguous(), var.contiguous(), None, dims, eps, along
        )
        if ctx.needs_input_grad[0]:
            # Through mean and variance, to which every rank has contributed: an affine map of x as well.
            sums = all_reduce(torch.stack([of_bias, of_weight]).double(), group) / count.clamp_min(1)
            inverse = -scale * (var + eps).rsqrt()
            shift, slope = (inverse * each.to(wide) for each in sums)
            of_x = of_x + affine_norm(values, mask, dims, (None, mean, var), slope, shift, eps)
            of_x = of_x.to(x.dtype)
        return of_x, _summed_to(of_weight, weight), _summed_to(of_bias, bias), None


def _summed_to(grad: Tensor, like: Tensor) -> Tensor:
    return grad.to(like.dtype) if grad.shape == like.shape else grad.sum().to(like.dtype)


def _reference(
    x: Tensor, bits: Tensor, weight: Tensor, bias: Tensor, found: _Statistics
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, mean and variance by operations that torch differentiates."""
    wide, dims, divisor = accumulate_dtype(x), found.dims, found.total.clamp_min(1)
    values = fill_dropped(x, bits).to(wide)
    mean = all_reduce(values.sum(dims, keepdim=True), found.group) / divisor
    centred = torch.where(bits, values - mean, 0.0)
    var = all_reduce(centred.square().sum(dims, keepdim=True), found.group) / divisor
    out = torch.addcmul(bias.to(wide), centred * (var + found.eps).rsqrt(), weight.to(wide))
    return fill_dropped(out, bits).to(x.dtype), mean, var


# -- conversion --------------------------------------------------------------------------------------------------------
#: What becomes of each masked batch norm; those that are synchronized already get another group.
SYNCED: dict[type[nn.Module], type[_Synced]] = {
    MaskedBatchNorm1d: SyncMaskedBatchNorm1d,
    MaskedBatchNorm2d: SyncMaskedBatchNorm2d,
    MaskedBatchNorm3d: SyncMaskedBatchNorm3d,
}
SYNCED |= {kind: kind for kind in SYNCED.values()}


def convert_sync_masked(model: M, group: Group = None) -> M:
    """Convert every masked batch norm of a model to one that computes its statistics over all ranks.

    >>> import torch, maskwise as mw
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), mw.nn.MaskedBatchNorm1d(4))
    >>> type(mw.nn.convert_sync_masked(model)[1]).__name__
    'SyncMaskedBatchNorm1d'

    Parameters and buffers stay the same objects, so that an optimizer goes on as before. Call it before
    DistributedDataParallel or ``fully_shard``. ``torch.nn.BatchNorm`` layers stay what they are:
    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`` converts them, and the masked ones inside of a model too.

    Args:
        model: any module; it may itself be a masked batch norm.
        group: the ranks that share statistics, a process group or a device mesh of one dim; by default all.

    Returns:
        The model, changed in place; for a masked batch norm, the new layer.

    Raises:
        DtypeError: ``model`` is not a module, or ``group`` no group.
        ArgumentError: this process is not in the group, or a layer is of a subclass, which may compute something else.
    """
    check_module("convert_sync_masked", model)
    group = process_group("convert_sync_masked", group)
    new = {
        module: _synced("convert_sync_masked", module, group)
        for module in model.modules()
        if isinstance(module, OverKept)
    }
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, OverKept):
                parent._modules[name] = new[child]
    # A layer is converted to one of a subclass of its own.
    return new[model] if isinstance(model, OverKept) else model  # type: ignore[return-value]


def _synced(op: str, module: OverKept, group: Group) -> _Synced:
    kind = SYNCED.get(type(module))
    if kind is None:
        known = ", ".join(each.__name__ for each in SYNCED if not issubclass(each, _Synced))
        hint = f"a {type(module).__name__} that is a SyncMaskedBatchNorm, or convert_sync_masked of other parts"
        raise ArgumentError(
            say(op, "model", must=f"have batch norms of {known}", got=f"a {type(module).__name__}", hint=hint)
        )
    made = kind.__new__(kind)
    # Its own dicts of the same parameters, buffers and hooks.
    vars(made).update({name: copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()})
    made.group = group
    return made


def _keep_mask(parent: nn.Module, name: str, module: nn.Module | None) -> nn.Module | None:
    """Where ``nn.SyncBatchNorm.convert_sync_batchnorm`` replaces a masked batch norm, put a synchronized masked one."""
    if type(module) is not nn.SyncBatchNorm:
        return None
    before = parent._modules.get(name)
    if not isinstance(before, OverKept):
        return None
    # A conversion takes parameters and buffers along; what somebody else puts there has its own.
    same = all(getattr(before, each) is getattr(module, each) for each in ("weight", "bias", "running_mean"))
    return _synced("convert_sync_batchnorm", before, module.process_group) if same else None


# It takes every subclass of torch's batch norms for one of torch's, and has no other way to say otherwise.
register_module_module_registration_hook(_keep_mask)  # type: ignore[arg-type]
