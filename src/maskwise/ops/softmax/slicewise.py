"""What softmax and normalize share: functions that map slices to slices, their checks and their registration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.backends import FLOATING
from maskwise.ops.operation import Operation, define, register
from maskwise.ops.primitives import copy_transposed
from maskwise.ops.softmax import reference
from maskwise.plan.cost import Work

__all__ = ["check_floating", "define_backward", "slicewise"]

#: Where the Triton kernels are.
GPU = "maskwise.ops.softmax.gpu"


def check_floating(op: str, x: Any) -> None:
    """Raise unless x is floating, or no tensor at all, of which the next check will say more."""
    if isinstance(x, Tensor) and not x.is_floating_point():
        hint = "x.float()" if "soft" not in op else "dtype=torch.float32"
        raise DtypeError(say(op, "x", must="be floating", got=x.dtype, hint=hint))


# -- results without data ----------------------------------------------------------------------------------------------
def like_first(first: Tensor, *rest: Any) -> Tensor:
    """The result without its data: shape, dtype and strides of x, or of the gradient's second argument."""
    return torch.empty_like(first)


def like_second(first: Tensor, second: Tensor, *rest: Any) -> Tensor:
    """A gradient without its data: shape, dtype and strides of what the forward pass saved."""
    return torch.empty_like(second)


def as_laid_out(function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with its result in the memory layout that the fake promises."""

    def laid_out(*arguments: Any) -> Tensor:
        out, promised = function(*arguments), fake(*arguments)
        return out if out.stride() == promised.stride() else promised.copy_(out)

    return laid_out


#: How many torch calls the plain route makes, of those that autograd follows.
CALLS = {"softmax": 3, "softmin": 3, "log_softmax": 3, "normalize": 8, "standardize": 14}


# -- few long slices ---------------------------------------------------------------------------------------------------
# Kernels walk slices side by side with a slice in each lane of a vector. With fewer slices than fill a few vectors,
# each step is a short one, and a transposed copy costs less than walking x like that twice.
#: Slices side by side that are few, and too few for our own copy to pay; elements that make a slice long.
_FEW, _TOO_FEW, _LONG = 16, 8, 4096


def transposed_first(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel, which gets few long slices in rows."""

    def run(x: Tensor, mask: Tensor, dims: list[int], *rest: Any) -> Tensor:
        return kernel(x if x.is_contiguous() else in_rows(x, dims), mask, dims, *rest)

    return run


def in_rows(x: Tensor, dims: list[int]) -> Tensor:
    """X as it is, or contiguous where it has few long slices along the last dim, which lie side by side.

    >>> few, many = torch.zeros(5000, 3).T, torch.zeros(5000, 300).T
    >>> in_rows(few, [1]).is_contiguous(), in_rows(many, [1]) is many
    (True, True)
    """
    last = x.dim() - 1
    if dims != [last] or not x.is_cpu or x.shape[last] < _LONG or x.stride(last) == 1:
        return x
    side = next((d for d in range(last) if x.stride(d) == 1 and x.shape[d] > 1), None)
    if side is None or x.shape[side] > _FEW:
        return x
    return x.contiguous() if x.shape[side] < _TOO_FEW else copy_transposed(x)


# -- registration ------------------------------------------------------------------------------------------------------
def slicewise(
    name: str,
    settings: str,
    calls: int,
    gradient: Callable[..., Tensor],
    kernel: Callable[..., Tensor],
    *,
    of_result: bool,
    constants: tuple[Any, ...] = (),
) -> Operation:
    """Register a function of the family, whose gradient is one of its result or of x.

    Args:
        name: the public name.
        settings: what its schema has after x, mask and dim.
        calls: how many torch calls the plain route makes, of those that autograd follows.
        gradient: the gradient in plain torch operations, for where it is differentiated itself.
        kernel: the same as a registered op.
        of_result: whether the gradient is a function of the result, rather than of x.
        constants: what the gradient takes after the arguments of the function.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mask, *ctx.rest = inputs
        ctx.save_for_backward(output if of_result else x, mask)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, mask = ctx.saved_tensors
        run = gradient if torch.is_grad_enabled() else kernel
        return run(grad, saved, mask, *ctx.rest, *constants), None, *[None] * len(ctx.rest)

    def work(route: str, elements: int, size: int, grad: bool) -> Work:
        # The kernel streams x and mask and writes the result; the idiom writes two copies on the way.
        x, mask = elements * size, elements
        if route == "plain":
            backward = 4 * x if grad else 0
            return Work(calls=calls, streamed=4 * x + 2 * mask + 2 * backward, fresh=3 * x + backward)
        backward = x if grad else 0
        return Work(calls=1, streamed=2 * x + 2 * mask + 2 * backward, fresh=x + backward)

    return register(
        name,
        f"(Tensor x, Tensor mask, int[] dim{settings}) -> Tensor",
        reference=as_laid_out(getattr(reference, name), like_first),
        fake=like_first,
        setup_context=save,
        backward=backward,
        work=work,
        cpu=FLOATING,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{name}",
        fuses=True,
        adapt=lambda route, run: transposed_first(run) if route == "bare" else run,
    )


def define_backward(name: str, settings: str, gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Define the kernel of a backward pass, and return it."""
    op = f"{name}_fused_backward"
    define(
        op,
        f"(Tensor grad, Tensor saved, Tensor mask, int[] dim{settings}) -> Tensor",
        reference=as_laid_out(gradient, like_second),
        fake=like_second,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{name}_backward",
    )
    kernel: Callable[..., Tensor] = getattr(torch.ops.maskwise, op).default
    return kernel
