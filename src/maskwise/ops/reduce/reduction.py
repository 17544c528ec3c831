"""What the reductions share: how they are registered, their references, fakes, gradients and work.

A reference, ``<name>_reference`` beside its function, is the reduction in plain torch operations: the ground truth of
the tests, and the route where no kernel serves. Each is leak-proof, forward and backward, and differentiable by torch
itself, transforms included. Its ``mask`` is a bool tensor that broadcasts to x, its ``dim`` a list of dims that are not
negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.ops.backends import FLOATING
from maskwise.ops.operation import ALONG, Describe, Operation, as_bits, define, dropped_unless_few, kept_mask, register
from maskwise.ops.torch_private import is_tracing, is_transformed
from maskwise.plan.cost import Work

__all__ = [
    "GPU", "backward_of", "define_backward", "full", "may_hold", "need_floating", "nothing_to_reduce", "reduction",
    "save", "works",
]  # fmt: skip

#: Where the Triton kernels are.
GPU = "maskwise.ops.reduce.gpu"


# -- arguments ---------------------------------------------------------------------------------------------------------
def need_floating(op: str, x: Tensor, hint: str, *, or_complex: bool = False) -> None:
    """Raise unless x is floating. Values that are not tensors are left to the checks that follow."""
    if isinstance(x, Tensor) and not (x.dtype.is_floating_point or (or_complex and x.dtype.is_complex)):
        kinds = "floating or complex" if or_complex else "floating"
        raise DtypeError(say(op, "x", must=f"be {kinds}", got=x.dtype, hint=hint))


# -- references --------------------------------------------------------------------------------------------------------
def nothing_to_reduce(x: Tensor, dim: list[int]) -> bool:
    """Whether the reduced slices have no elements, which torch refuses for functions without an identity."""
    return prod([x.shape[d] for d in dim if x.dim()]) == 0


def full(x: Tensor, dim: list[int], keepdim: bool, value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A result that is ``value`` everywhere."""
    sizes = [1 if d in dim else size for d, size in enumerate(x.shape) if keepdim or d not in dim]
    return x.new_full(sizes, value, dtype=dtype)


def may_hold(x: Tensor, out: Tensor, value: float) -> bool:
    """Whether a gradient is required and ``out`` may hold ``value``; the data are read only where it costs nothing."""
    if not x.dtype.is_floating_point:
        return False
    required = x.requires_grad and torch.is_grad_enabled()
    if is_tracing():
        return required
    if is_transformed():
        return True
    return required and (x.device.type != "cpu" or bool((out == value).any()))


# -- registration ------------------------------------------------------------------------------------------------------
def reduction(
    name: str,
    reference: Callable[..., Tensor],
    *,
    settings: str = "",
    result: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    dtypes: Iterable[torch.dtype] = FLOATING,
    work: Describe,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Operation:
    """Register a reduction: ``(Tensor x, Tensor mask, int[] dim, bool keepdim<settings>, int along=0) -> Tensor``.

    Args:
        name: the public name; its Triton kernel is the function of that name in gpu.py.
        reference: the same in plain torch.
        settings: the schema after ``keepdim``, such as ``", float correction"``.
        result: the dtype of the result, from that of x.
        dtypes: those that the kernels support.
        work: see `works`.
        backward: the gradient, as for ``torch.library.register_autograd``.
        setup_context: what it saves; by default x, the mask, the result, and every argument that is not a tensor.
    """

    def fake(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool, *rest: Any) -> Tensor:
        sizes = [1 if d in dim else size for d, size in enumerate(x.shape) if keepdim or d not in dim]
        return x.new_empty(sizes, dtype=result(x.dtype))

    return register(
        name,
        f"(Tensor x, Tensor mask, int[] dim, bool keepdim{settings}{ALONG} -> Tensor",
        reference=reference,
        fake=fake,
        setup_context=(setup_context or save()) if backward else None,
        backward=backward,
        work=work,
        cpu=dtypes,
        gpu=dtypes,
        gpu_from=f"{GPU}:{name}",
        fuses=True,
        skips=dropped_unless_few,
    )


def save(*, out: bool = True) -> Callable[..., None]:
    """The setup_context of a reduction: saves x, mask, the result if ``out``, and the arguments that are no tensors."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mask, *ctx.rest = inputs
        ctx.save_for_backward(x, mask, output) if out else ctx.save_for_backward(x, mask)

    return setup_context


def define_backward(
    name: str, formula: Callable[..., Tensor], *, out: bool = True, settings: str = ""
) -> Callable[..., Tensor]:
    """Define the op of a gradient, ``<name>_backward``, and return it; ``formula`` is its reference.

    It takes (grad, out, x, mask, dim, keepdim<settings>, along), or without the result where ``out`` is False.
    """

    def contiguous(*arguments: Any) -> Tensor:
        return formula(*arguments).contiguous()

    def fake(grad: Tensor, *rest: Any) -> Tensor:
        x: Tensor = rest[1] if out else rest[0]
        return x.new_empty(x.shape)

    tensors = "Tensor grad, Tensor out, Tensor x, Tensor mask" if out else "Tensor grad, Tensor x, Tensor mask"
    define(
        f"{name}_backward",
        f"({tensors}, int[] dim, bool keepdim{settings}{ALONG} -> Tensor",
        reference=contiguous,
        fake=fake,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{name}_backward",
    )
    op: Callable[..., Tensor] = getattr(torch.ops.maskwise, f"{name}_backward").default
    return op


def backward_of(
    reference: Callable[..., Tensor], kernel: Callable[..., Tensor], *constants: Any, out: bool = True
) -> Callable[..., Any]:
    """The gradient of a reduction: by its op, or by differentiating the reference for a double backward.

    ``constants`` are the arguments of the op after those of the reduction.
    """

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mask, *result = ctx.saved_tensors
        if torch.is_grad_enabled():
            bits = as_bits(kept_mask(mask, ctx.along, x.shape))
            grad_x = differentiate_reference(reference, grad, x, bits, *ctx.rest)
        else:
            grad_x = kernel(grad, *result, x, mask, *ctx.rest, *constants, ctx.along)
        return grad_x, None, *[None] * len(ctx.rest)

    return backward


def differentiate_reference(reference: Callable[..., Tensor], grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The gradient as a differentiable function of ``x`` and ``grad``: torch differentiates the reference."""
    with torch.enable_grad():
        out = reference(x, *rest)
        (grad_x,) = torch.autograd.grad(out, x, grad, create_graph=True, materialize_grads=True)
    return grad_x


def works(*, calls: int, copies: float, gradient_copies: float = 0.0, gradient_calls: int = 0) -> Describe:
    """The work of each route: the kernel streams x and mask once, the plain route also writes and reads temporaries.

    Args:
        calls: the torch calls of the plain route.
        copies: the temporaries of x's size of the plain route.
        gradient_copies: the further temporaries of its gradient; the kernel's gradient has none.
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
