"""Variance and standard deviation as registered ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.operation import dropped_rows
from maskwise.ops.reduce import gradients, reference
from maskwise.ops.reduce.registered.shared import GPU, contiguous, fake, fake_gradient, remember, works
from maskwise.ops.register import define, register
from maskwise.plan.capability import FLOATING

__all__ = ["std", "var"]

SCHEMA = "(Tensor x, Tensor mask, int[] dim, bool keepdim, float correction) -> Tensor"

define(
    "var_backward",
    "(Tensor grad, Tensor x, Tensor mask, int[] dim, bool keepdim, float correction, bool root) -> Tensor",
    reference=contiguous(gradients.var),
    fake=fake_gradient,
    gpu=FLOATING,
    gpu_from=f"{GPU}:var_backward",
)


def backward_of(function: Callable[..., Tensor], *, root: bool) -> Callable[..., Any]:
    """Make the gradient of var or, with ``root``, of std."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, mask = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradients.again(function, grad, x, mask, *ctx.rest), None, None, None, None
        return torch.ops.maskwise.var_backward(grad, x, mask, *ctx.rest, root), None, None, None, None

    return backward


var = register(
    "var",
    SCHEMA,
    reference=reference.var,
    fake=fake(),
    setup_context=remember(out=False),
    backward=backward_of(reference.var, root=False),
    work=works(calls=11, copies=4, gradient_copies=4),
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from=f"{GPU}:var",
    fuses=True,
    skips=dropped_rows,
)
std = register(
    "std",
    SCHEMA,
    reference=reference.std,
    fake=fake(),
    setup_context=remember(out=False),
    backward=backward_of(reference.std, root=True),
    work=works(calls=15, copies=4, gradient_copies=4),
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from=f"{GPU}:std",
    fuses=True,
    skips=dropped_rows,
)
