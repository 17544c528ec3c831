"""The extrema and where they are, as registered ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.operation import dropped_rows
from maskwise.ops.reduce import gradients, reference
from maskwise.ops.reduce.registered.shared import GPU, SCHEMA, contiguous, fake, fake_gradient_with_out, remember, works
from maskwise.ops.register import define, register
from maskwise.plan.capability import FLOATING, INTEGRAL

__all__ = ["amax", "amin", "argmax", "argmin"]

define(
    "extremum_backward",
    "(Tensor grad, Tensor out, Tensor x, Tensor mask, int[] dim, bool keepdim, bool greatest) -> Tensor",
    reference=contiguous(gradients.extremum),
    fake=fake_gradient_with_out,
    gpu=FLOATING,
    gpu_from=f"{GPU}:extremum_backward",
)


def backward_of(function: Callable[..., Tensor], *, greatest: bool) -> Callable[..., Any]:
    """Make the gradient of amax or amin."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, mask, out = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradients.again(function, grad, x, mask, *ctx.rest), None, None, None
        return torch.ops.maskwise.extremum_backward(grad, out, x, mask, *ctx.rest, greatest), None, None, None

    return backward


amax = register(
    "amax",
    SCHEMA,
    reference=reference.amax,
    fake=fake(),
    setup_context=remember(out=True),
    backward=backward_of(reference.amax, greatest=True),
    work=works(calls=5, copies=1, gradient_copies=2),
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu_from=f"{GPU}:amax",
    fuses=True,
    skips=dropped_rows,
)
amin = register(
    "amin",
    SCHEMA,
    reference=reference.amin,
    fake=fake(),
    setup_context=remember(out=True),
    backward=backward_of(reference.amin, greatest=False),
    work=works(calls=5, copies=1, gradient_copies=2),
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu_from=f"{GPU}:amin",
    fuses=True,
    skips=dropped_rows,
)
argmax = register(
    "argmax",
    SCHEMA,
    reference=reference.argmax,
    fake=fake(lambda dtype: torch.int64),
    work=works(calls=8, copies=2),
    cpu=(*FLOATING, *INTEGRAL),
    gpu=(*FLOATING, *INTEGRAL),
    gpu_from=f"{GPU}:argmax",
    fuses=True,
    skips=dropped_rows,
)
argmin = register(
    "argmin",
    SCHEMA,
    reference=reference.argmin,
    fake=fake(lambda dtype: torch.int64),
    work=works(calls=8, copies=2),
    cpu=(*FLOATING, *INTEGRAL),
    gpu=(*FLOATING, *INTEGRAL),
    gpu_from=f"{GPU}:argmin",
    fuses=True,
    skips=dropped_rows,
)
