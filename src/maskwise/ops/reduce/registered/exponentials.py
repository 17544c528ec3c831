"""Logsumexp and the vector norms as registered ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.ops.operation import dropped_rows
from maskwise.ops.reduce import gradients, reference
from maskwise.ops.reduce.registered.shared import GPU, SCHEMA, contiguous, fake, fake_gradient_with_out, remember, works
from maskwise.ops.register import define, register
from maskwise.plan.capability import FLOATING

__all__ = ["logsumexp", "norm"]

define(
    "logsumexp_backward",
    "(Tensor grad, Tensor out, Tensor x, Tensor mask, int[] dim, bool keepdim) -> Tensor",
    reference=contiguous(gradients.logsumexp),
    fake=fake_gradient_with_out,
    gpu=FLOATING,
    gpu_from=f"{GPU}:logsumexp_backward",
)
define(
    "norm_backward",
    "(Tensor grad, Tensor out, Tensor x, Tensor mask, int[] dim, bool keepdim, float ord) -> Tensor",
    reference=contiguous(gradients.norm),
    fake=fake_gradient_with_out,
    gpu=FLOATING,
    gpu_from=f"{GPU}:norm_backward",
)


def logsumexp_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """The softmax times the gradient."""
    x, mask, out = ctx.saved_tensors
    if torch.is_grad_enabled():
        return gradients.again(reference.logsumexp, grad, x, mask, *ctx.rest), None, None, None
    return torch.ops.maskwise.logsumexp_backward(grad, out, x, mask, *ctx.rest), None, None, None


def norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    """Each by its part in the norm."""
    x, mask, out = ctx.saved_tensors
    if torch.is_grad_enabled():
        return gradients.again(reference.norm, grad, x, mask, *ctx.rest), None, None, None, None
    return torch.ops.maskwise.norm_backward(grad, out, x, mask, *ctx.rest), None, None, None, None


logsumexp = register(
    "logsumexp",
    SCHEMA,
    reference=reference.logsumexp,
    fake=fake(),
    setup_context=remember(out=True),
    backward=logsumexp_backward,
    work=works(calls=6, copies=3, gradient_copies=3),
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from=f"{GPU}:logsumexp",
    fuses=True,
    skips=dropped_rows,
)
norm = register(
    "norm",
    "(Tensor x, Tensor mask, int[] dim, bool keepdim, float ord) -> Tensor",
    reference=reference.norm,
    fake=fake(),
    setup_context=remember(out=True),
    backward=norm_backward,
    work=works(calls=3, copies=1, gradient_copies=2),
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from=f"{GPU}:norm",
    fuses=True,
    skips=dropped_rows,
)
