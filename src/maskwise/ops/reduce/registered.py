"""The reductions as registered ops: schema, fake, gradient, work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.ops.reduce import reference
from maskwise.ops.register import register
from maskwise.plan.capability import FLOATING, INTEGRAL
from maskwise.plan.cost import Work

__all__ = ["sum"]


def reduced_shape(x: Tensor, dim: list[int], keepdim: bool) -> list[Any]:
    """The sizes of the result."""
    return [1 if d in dim else size for d, size in enumerate(x.shape) if keepdim or d not in dim]


def spread(grad: Tensor, shape: torch.Size, dim: list[int], keepdim: bool) -> Tensor:
    """A gradient of the result, expanded (not copied) to x's shape."""
    if not keepdim:
        for d in dim if shape else []:
            grad = grad.unsqueeze(d)
    return grad.expand(shape)


def fake_sum(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    """The sum without its data."""
    dtype = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64
    return x.new_empty(reduced_shape(x, dim, keepdim), dtype=dtype)


def remember_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradient of sum needs: the mask, and how to undo the reduction."""
    x, mask, ctx.dim, ctx.keepdim = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(mask)


def sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """Spread the gradient over what was kept; exactly zero elsewhere, whatever the gradient holds."""
    (mask,) = ctx.saved_tensors
    return torch.where(mask, spread(grad, ctx.shape, ctx.dim, ctx.keepdim), 0.0), None, None, None


def sum_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel streams x and mask once; the idiom also writes and reads a copy of x."""
    read = elements * (size + 1)
    backward = elements * size if grad else 0
    if route == "plain":
        return Work(calls=2, streamed=read + elements * size, fresh=elements * size + backward)
    return Work(calls=1, streamed=read, fresh=backward)


sum = register(
    "sum",
    "(Tensor x, Tensor mask, int[] dim, bool keepdim) -> Tensor",
    reference=reference.sum,
    fake=fake_sum,
    setup_context=remember_sum,
    backward=sum_backward,
    work=sum_work,
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
)
