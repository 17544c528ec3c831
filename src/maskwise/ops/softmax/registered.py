"""Softmax and friends as registered ops: schema, fake, gradient, work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.operation import Operation
from maskwise.ops.register import define, register
from maskwise.ops.softmax import gradients, reference
from maskwise.ops.softmax.turning import turning
from maskwise.plan.capability import FLOATING
from maskwise.plan.cost import Work

__all__ = ["log_softmax", "normalize", "softmax", "softmin", "standardize"]

_ops = torch.ops.maskwise
#: Where the Triton kernels are.
GPU = "maskwise.ops.softmax.gpu"


def like_first(first: Tensor, *rest: Any) -> Tensor:
    """The result without its data: shape, dtype and strides of x, or of the gradient's second argument."""
    return torch.empty_like(first)


def like_second(first: Tensor, second: Tensor, *rest: Any) -> Tensor:
    """A gradient without its data: shape, dtype and strides of what the forward pass remembered."""
    return torch.empty_like(second)


def as_laid_out(function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with its result in the memory layout that the fake promises."""

    def laid_out(*arguments: Any) -> Tensor:
        out, promised = function(*arguments), fake(*arguments)
        return out if out.stride() == promised.stride() else promised.copy_(out)

    return laid_out


#: How many torch calls the plain route makes, of those that autograd follows.
CALLS = {"softmax": 3, "softmin": 3, "log_softmax": 3, "normalize": 8, "standardize": 14}


def work_of(name: str, route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel streams x and mask and writes the result; the idiom writes two copies on the way."""
    x, mask = elements * size, elements
    if route == "plain":
        backward = 4 * x if grad else 0
        return Work(calls=CALLS[name], streamed=4 * x + 2 * mask + 2 * backward, fresh=3 * x + backward)
    backward = x if grad else 0
    return Work(calls=1, streamed=2 * x + 2 * mask + 2 * backward, fresh=x + backward)


def one(
    name: str,
    arguments: str,
    gradient: Callable[..., Tensor],
    kernel: Callable[..., Tensor],
    *,
    of_result: bool,
    constants: tuple[Any, ...] = (),
) -> Operation:
    """Register a function of the family, whose gradient looks at its result or at x.

    Args:
        name: the public name.
        arguments: what its schema has after x, mask and dim.
        gradient: the gradient in plain torch operations, for where it is differentiated itself.
        kernel: the same as a registered op.
        of_result: whether the gradient is a function of the result, rather than of x.
        constants: what the gradient takes after the arguments of the function.
    """

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mask, *ctx.rest = inputs
        ctx.save_for_backward(output if of_result else x, mask)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        known, mask = ctx.saved_tensors
        run = gradient if torch.is_grad_enabled() else kernel
        return run(grad, known, mask, *ctx.rest, *constants), None, *[None] * len(ctx.rest)

    return register(
        name,
        f"(Tensor x, Tensor mask, int[] dim{arguments}) -> Tensor",
        reference=as_laid_out(getattr(reference, name), like_first),
        fake=like_first,
        setup_context=remember,
        backward=backward,
        work=partial(work_of, name),
        cpu=FLOATING,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{name}",
        fuses=True,
        adapt=turning,
    )


def define_gradient(name: str, arguments: str, gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Define the kernel of a backward pass, and return it."""
    op = f"{name}_fused_backward"
    schema = f"(Tensor grad, Tensor known, Tensor mask, int[] dim{arguments}) -> Tensor"
    define(
        op,
        schema,
        reference=as_laid_out(gradient, like_second),
        fake=like_second,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{name}_backward",
    )
    found: Callable[..., Tensor] = getattr(_ops, op).default
    return found


_softmax_backward = define_gradient("softmax", ", bool negate", gradients.softmax)
_log_softmax_backward = define_gradient("log_softmax", "", gradients.log_softmax)
_normalize_backward = define_gradient("normalize", ", float p, float eps", gradients.normalize)
_standardize_backward = define_gradient("standardize", ", float correction, float eps", gradients.standardize)

softmax = one("softmax", "", gradients.softmax, _softmax_backward, of_result=True, constants=(False,))
softmin = one("softmin", "", gradients.softmax, _softmax_backward, of_result=True, constants=(True,))
log_softmax = one("log_softmax", "", gradients.log_softmax, _log_softmax_backward, of_result=True)
normalize = one("normalize", ", float p, float eps", gradients.normalize, _normalize_backward, of_result=False)
standardize = one(
    "standardize", ", float correction, float eps", gradients.standardize, _standardize_backward, of_result=False
)
