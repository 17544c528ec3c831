"""Sum, product, mean, any, all as registered ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.ops.reduce import gradients, reference
from maskwise.ops.reduce.reference import counts, spread, wide
from maskwise.ops.reduce.registered.shared import SCHEMA, fake, remember, works
from maskwise.ops.register import register
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


def sum_backward(ctx: Any, grad: Tensor) -> Gradients:
    """Spread the gradient over what was kept; exactly zero elsewhere, whatever the gradient holds."""
    (mask,) = ctx.saved_tensors
    return kept_only(spread(grad, ctx.shape, ctx.dim, ctx.keepdim), mask), None, None, None


def mean_backward(ctx: Any, grad: Tensor) -> Gradients:
    """As the sum's, an equal part to each that was kept."""
    (mask,) = ctx.saved_tensors
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
    return gradients.prod(grad, out, x, mask, *ctx.rest), None, None, None


sum = register(
    "sum",
    SCHEMA,
    reference=reference.sum,
    fake=fake(summed),
    setup_context=remember_mask,
    backward=sum_backward,
    work=works(calls=2, copies=1),
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
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
)
any = register(
    "any",
    SCHEMA,
    reference=reference.any,
    fake=fake(truth),
    work=works(calls=2, copies=1),
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
)
all = register(
    "all",
    SCHEMA,
    reference=reference.all,
    fake=fake(truth),
    work=works(calls=2, copies=1),
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
)
