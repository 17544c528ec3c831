"""Sum, product, mean, any, all as registered ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.ops.gpu.status import DEVICE
from maskwise.ops.operation import dropped_rows
from maskwise.ops.reduce import gradients, reference
from maskwise.ops.reduce.reference import counts, spread, wide
from maskwise.ops.reduce.registered.shared import (
    GPU,
    SCHEMA,
    contiguous,
    fake,
    fake_gradient_with_out,
    remember,
    works,
)
from maskwise.ops.register import define, register
from maskwise.plan.capability import FLOATING, INTEGRAL, can_serve

__all__ = ["all", "any", "mean", "prod", "sum"]

Gradients = tuple[Tensor, None, None, None]


def summed(dtype: torch.dtype) -> torch.dtype:
    """What a sum or a product of the dtype is made of."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def truth(dtype: torch.dtype) -> torch.dtype:
    """What any and all of the dtype are made of."""
    return torch.uint8 if dtype is torch.uint8 else torch.bool


def remember_mask(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """The gradients of sum and mean need the mask, and how to undo the reduction."""
    x, mask, ctx.dim, ctx.keepdim = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(mask)


def kept_only(values: Tensor, mask: Tensor) -> Tensor:
    """The values where they are kept, exactly 0 elsewhere: by the kernel of mw.fill, where there is one."""
    if torch.is_grad_enabled() or not can_serve("fill", values.device.type, values.dtype)[0]:
        return torch.where(mask, values, 0.0)
    out: Tensor = torch.ops.maskwise.fill_fused_forward.default(values, mask, values.new_zeros(()))
    return out


def by_kernel(grad: Tensor) -> bool:
    """Whether a kernel of its own spreads this gradient: on a GPU, unless a second derivative is asked for."""
    served, _ = can_serve("mean", grad.device.type, grad.dtype)
    return served and grad.device.type == DEVICE and not torch.is_grad_enabled()


def plain_sum_backward(grad: Tensor, mask: Tensor, shape: list[int], dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of the sum in plain torch operations."""
    return torch.where(mask, spread(grad, torch.Size(shape), dim, keepdim), 0.0).contiguous()


def plain_mean_backward(grad: Tensor, mask: Tensor, shape: list[int], dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of the mean in plain torch operations."""
    kept = counts(grad.new_empty(()).expand(shape), mask, dim, keepdim)
    share = (grad.to(wide(grad)) / kept).to(grad.dtype)
    return plain_sum_backward(share, mask, shape, dim, keepdim)


def fake_spread(grad: Tensor, mask: Tensor, shape: list[int], dim: list[int], keepdim: bool) -> Tensor:
    """A gradient without its data."""
    return grad.new_empty(shape)


for _name, _plain in (("sum", plain_sum_backward), ("mean", plain_mean_backward)):
    define(
        f"{_name}_backward",
        "(Tensor grad, Tensor mask, SymInt[] shape, int[] dim, bool keepdim) -> Tensor",
        reference=_plain,
        fake=fake_spread,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{_name}_backward",
    )
define(
    "prod_backward",
    "(Tensor grad, Tensor out, Tensor x, Tensor mask, int[] dim, bool keepdim) -> Tensor",
    reference=contiguous(gradients.prod),
    fake=fake_gradient_with_out,
    gpu=FLOATING,
    gpu_from=f"{GPU}:prod_backward",
)


def sum_backward(ctx: Any, grad: Tensor) -> Gradients:
    """Spread the gradient over what was kept; exactly zero elsewhere, whatever the gradient holds."""
    (mask,) = ctx.saved_tensors
    if by_kernel(grad):
        return torch.ops.maskwise.sum_backward(grad, mask, ctx.shape, ctx.dim, ctx.keepdim), None, None, None
    return kept_only(spread(grad, ctx.shape, ctx.dim, ctx.keepdim), mask), None, None, None


def mean_backward(ctx: Any, grad: Tensor) -> Gradients:
    """As the sum's, an equal part to each that was kept."""
    (mask,) = ctx.saved_tensors
    if by_kernel(grad):
        return torch.ops.maskwise.mean_backward(grad, mask, ctx.shape, ctx.dim, ctx.keepdim), None, None, None
    if mask.shape == ctx.shape and can_serve("sum", mask.device.type, torch.bool)[0]:
        # torch counts bools a hundred times slower than it reads them.
        kept = torch.ops.maskwise.sum_fused_forward.default(mask, mask, ctx.dim, ctx.keepdim)
    else:
        kept = counts(grad.new_empty(()).expand(ctx.shape), mask, ctx.dim, ctx.keepdim)
    share = (grad.to(wide(grad)) / kept).to(grad.dtype)
    return kept_only(spread(share, ctx.shape, ctx.dim, ctx.keepdim), mask), None, None, None


def prod_backward(ctx: Any, grad: Tensor) -> Gradients:
    """The product of all others."""
    x, mask, out = ctx.saved_tensors
    if torch.is_grad_enabled():
        return gradients.again(reference.prod, grad, x, mask, *ctx.rest), None, None, None
    run = torch.ops.maskwise.prod_backward if x.device.type == DEVICE else gradients.prod
    return run(grad, out, x, mask, *ctx.rest), None, None, None


sum = register(
    "sum",
    SCHEMA,
    reference=reference.sum,
    fake=fake(summed),
    setup_context=remember_mask,
    backward=sum_backward,
    work=works(calls=2, copies=1),
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu_from=f"{GPU}:sum",
    fuses=True,
    skips=dropped_rows,
)
prod = register(
    "prod",
    SCHEMA,
    reference=reference.prod,
    fake=fake(summed),
    setup_context=remember(out=True),
    backward=prod_backward,
    work=works(calls=2, copies=1, gradient_calls=12),
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from=f"{GPU}:prod",
    fuses=True,
    skips=dropped_rows,
)
mean = register(
    "mean",
    SCHEMA,
    reference=reference.mean,
    fake=fake(),
    setup_context=remember_mask,
    backward=mean_backward,
    work=works(calls=4, copies=1, gradient_calls=6),
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from=f"{GPU}:mean",
    fuses=True,
    skips=dropped_rows,
)
any = register(
    "any",
    SCHEMA,
    reference=reference.any,
    fake=fake(truth),
    work=works(calls=2, copies=1),
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu_from=f"{GPU}:any",
    fuses=True,
    skips=dropped_rows,
)
all = register(
    "all",
    SCHEMA,
    reference=reference.all,
    fake=fake(truth),
    work=works(calls=2, copies=1),
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu_from=f"{GPU}:all",
    fuses=True,
    skips=dropped_rows,
)
