"""What the registered reductions have in common: fakes, what a gradient remembers, work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maskwise.plan.cost import Work
from maskwise.plan.planner import Describe

__all__ = ["GPU", "SCHEMA", "contiguous", "fake", "fake_gradient", "fake_gradient_with_out", "remember", "works"]

SCHEMA = "(Tensor x, Tensor mask, int[] dim, bool keepdim) -> Tensor"
#: Where the Triton kernels are.
GPU = "maskwise.ops.reduce.gpu"


def fake(
    result: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,  # of x -> of the result
) -> Callable[..., Tensor]:
    """Make the fake of a reduction: its result without data."""

    def reduced(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, *rest: Any) -> Tensor:
        sizes = [1 if d in dim else size for d, size in enumerate(x.shape) if keepdim or d not in dim]
        return x.new_empty(sizes, dtype=result(x.dtype))

    return reduced


def fake_gradient(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The fake of a backward kernel that gets (grad, x, ...): like x, contiguous."""
    return x.new_empty(x.shape)


def fake_gradient_with_out(grad: Tensor, out: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The fake of a backward kernel that gets (grad, out, x, ...): like x, contiguous."""
    return x.new_empty(x.shape)


def contiguous(gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the reference of a backward kernel from a gradient formula: kernels write contiguous results."""
    return lambda *args: gradient(*args).contiguous()


def remember(*, out: bool) -> Callable[..., None]:
    """Make the setup_context of a reduction: x, mask, the result if ``out``, and every plain argument."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mask, *ctx.rest = inputs
        ctx.save_for_backward(x, mask, output) if out else ctx.save_for_backward(x, mask)

    return setup_context


def works(*, calls: int, copies: float, gradient_copies: float = 0.0, gradient_calls: int = 0) -> Describe:
    """How much work each route is: the kernel streams x and mask once, the idiom writes and reads copies of x.

    Args:
        calls: the torch calls of the plain route.
        copies: how many temporaries of x's size the plain route makes.
        gradient_copies: how many more its gradient makes than the kernel's, which writes the gradient and nothing else.
        gradient_calls: the torch calls of the kernel's gradient, where that has no kernel of its own.
    """

    def work(route: str, elements: int, size: int, grad: bool) -> Work:
        read, copy = elements * (size + 1), elements * size
        backward = copy if grad else 0
        if route == "plain":
            fresh = copy * copies + backward * (1 + gradient_copies)
            return Work(calls=calls, streamed=int(read + copy * copies), fresh=int(fresh))
        return Work(calls=1 + grad * gradient_calls, streamed=read, fresh=backward)

    return work
