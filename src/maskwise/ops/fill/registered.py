"""Filling as a registered op: schema, fake, gradient, work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, say
from maskwise.ops.fill import reference
from maskwise.ops.layout import room_like
from maskwise.ops.numbers import number
from maskwise.ops.operation import Operation
from maskwise.ops.register import register
from maskwise.plan.capability import FLOATING, INTEGRAL
from maskwise.plan.cost import Work
from maskwise.tracing import is_tracing

__all__ = ["fill", "is_held"]


def fake_fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """The result without its data."""
    return room_like(x)


def remember_mask(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradient needs."""
    _, mask, value = inputs
    ctx.shape = value.shape
    ctx.save_for_backward(mask)


def fill_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    """The gradient of what is kept is x's, that of what is dropped is the value's."""
    (mask,) = ctx.saved_tensors
    of_x = of_value = None
    zero = value_for(grad, 0.0)
    if ctx.needs_input_grad[0]:
        # With autograd around it where a second derivative is asked for.
        ops = torch.ops.maskwise
        of_x = (ops.fill_fused if torch.is_grad_enabled() else ops.fill_fused_forward)(grad, mask, zero)
    if ctx.needs_input_grad[2]:
        of_value = torch.where(mask, zero, grad).sum_to_size(ctx.shape)
    return of_x, None, of_value


def fill_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """Both routes read x and the mask once and write once; the kernel writes into huge pages, and with SIMD."""
    read, fresh = elements * (size + 1), elements * size * (1 + grad)
    # torch's own kernel selects element by element, which takes the time of streaming as many bytes again.
    return Work(calls=1, streamed=read if route != "plain" else 2 * read, fresh=fresh)


# -- numbers and dims --------------------------------------------------------------------------------------------------
def value_for(x: Tensor, value: float | complex) -> Tensor:
    """A number as a tensor of x's dtype and no dims; torch knows what fits."""
    # A number stays on the host: to hand it over with the launch is cheaper than a launch to write it.
    device = "cpu" if x.device.type == "cuda" and not is_tracing() else x.device
    # torch would make a number infinite that is too large for a float.
    too_large = isinstance(value, float) and x.is_floating_point() and torch.finfo(x.dtype).max < abs(value) < math.inf
    try:
        if not too_large:
            return number(value, x.dtype, device)
    except RuntimeError:
        pass
    hint = f"a value that {x.dtype} can hold, or x.to({torch.result_type(x, value)})"
    raise ArgumentError(say("fill", "value", must=f"fit x's dtype {x.dtype}", got=value, hint=hint))


def with_tensor(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An op that takes tensors and no dims, as `Operation` calls it: with dims, and perhaps with a number."""

    def call(x: Tensor, mask: Tensor, dims: list[int], value: float | complex | Tensor) -> Tensor:
        return run(x, mask, value if isinstance(value, Tensor) else value_for(x, value))

    return call


def plain(x: Tensor, mask: Tensor, dims: list[int], value: float | complex | Tensor) -> Tensor:
    """The plain route. A number that is sure to fit goes to torch as it is, which saves a tiny call half its time."""
    if type(value) is float and is_held(value, x.dtype):
        return torch.where(mask, x, value)
    return with_tensor(reference.fill)(x, mask, dims, value)


def with_numbers(fill: Operation) -> Operation:
    """Filling with a number or a tensor of values, whichever way."""
    return replace(
        fill,
        plain=plain,
        bare=with_tensor(fill.bare),
        fused=with_tensor(fill.fused),
        taped=with_tensor(fill.taped or fill.fused),
    )


def is_held(value: float, dtype: torch.dtype) -> bool:
    """Whether a dtype is sure to hold a number, in range if not in digits."""
    return dtype in _WIDE and not _LARGEST < abs(value) < math.inf


_WIDE = (torch.float32, torch.float64, torch.bfloat16)
_LARGEST = torch.finfo(torch.bfloat16).max

fill = register(
    "fill",
    "(Tensor x, Tensor mask, Tensor value) -> Tensor",
    reference=reference.fill,
    fake=fake_fill,
    setup_context=remember_mask,
    backward=fill_backward,
    work=fill_work,
    cpu=(*FLOATING, *INTEGRAL, torch.bool, torch.complex64, torch.complex128),
    gpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu_from="maskwise.ops.fill.gpu:fill",
    fuses=True,
    adapt=with_numbers,
)
