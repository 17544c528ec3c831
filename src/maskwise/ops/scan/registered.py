"""The scans as registered ops: schema, fake, gradient, work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.register import define, register
from maskwise.ops.scan import reference
from maskwise.plan.capability import FLOATING, INTEGRAL
from maskwise.plan.cost import Work
from maskwise.plan.planner import Describe

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"]

#: Where the Triton kernels are.
GPU = "maskwise.ops.scan.gpu"
ALL = (*FLOATING, *INTEGRAL, torch.bool)
ONE = "(Tensor x, Tensor mask, int[] dim) -> Tensor"
WITH_PLACES = "(Tensor x, Tensor mask, int[] dim) -> (Tensor, Tensor)"


# -- results without data ----------------------------------------------------------------------------------------------
def new_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty result: in x's order of dims if x has no gaps and no overlaps, as in torch; else contiguous."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return x.new_empty(x.shape, dtype=dtype)
        expected *= size
    return x.new_empty_strided(x.shape, x.stride(), dtype=dtype)


def fake_total(x: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """A running sum or product without its data: integers and bools give int64, as in torch."""
    return new_like(x, x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)


def fake_extreme(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor]:
    """A running extreme and its places without their data."""
    return new_like(x, x.dtype), new_like(x, torch.int64)


# -- gradients ---------------------------------------------------------------------------------------------------------
# Each is written once in plain torch, as the ground truth and for the second derivative, and defined as an op of its
# own, whose kernel runs when no second derivative is asked for.
def reversed_cumsum(grad: Tensor, dim: int) -> Tensor:
    """The running sum from the end."""
    return grad.flip(dim).cumsum(dim).flip(dim)


def cumsum_backward_reference(grad: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """Each kept value is in every later total; exactly zero elsewhere, whatever the gradient holds."""
    return torch.where(mask, reversed_cumsum(grad, dim[0]), 0.0)


def extreme_backward_reference(grad: Tensor, places: Tensor, dim: list[int]) -> Tensor:
    """Each gradient goes to the place its value came from; before anything was kept, nowhere."""
    sent = torch.where(places >= 0, grad, 0.0)
    return torch.zeros_like(sent).scatter_add(dim[0], places.clamp_min(0), sent)


def through(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradient of a reference by torch itself, as a function of (grad, x, mask, out, dim)."""

    def backward(grad: Tensor, x: Tensor, mask: Tensor, out: Tensor, dim: list[int]) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(scan(leaf, mask, dim), leaf, grad)
        return gradient

    return backward


def remember_mask(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradient of a running sum needs."""
    _, mask, ctx.dim = inputs
    ctx.save_for_backward(mask)


def remember_places(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the gradient of a running extreme needs."""
    ctx.dim = inputs[2]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def remember_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradient of a running product or sum of exponentials needs."""
    x, mask, ctx.dim = inputs
    ctx.save_for_backward(x, mask, output)


def cumsum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """The gradient of the running sum."""
    (mask,) = ctx.saved_tensors
    run = cumsum_backward_reference if torch.is_grad_enabled() else torch.ops.maskwise.cumsum_backward
    return run(grad, mask, ctx.dim), None, None


def extreme_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    """The gradient of a running extreme."""
    (places,) = ctx.saved_tensors
    run = extreme_backward_reference if torch.is_grad_enabled() else torch.ops.maskwise.cumextreme_backward
    return run(grad, places, ctx.dim), None, None


def backward_of(name: str, scan: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None, None]]:
    """The gradient of a scan that is not linear in x."""
    kernel = getattr(torch.ops.maskwise, f"{name}_backward")

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, mask, out = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return kernel(grad, x, mask, out, ctx.dim), None, None
        (gradient,) = torch.autograd.grad(scan(x, mask, ctx.dim), x, grad, create_graph=True)
        return gradient, None, None

    return backward


def fake_of_grad(grad: Tensor, *saved: Any) -> Tensor:
    """The gradient of a linear scan without its data."""
    return new_like(grad, grad.dtype)


def fake_of_x(grad: Tensor, x: Tensor, *saved: Any) -> Tensor:
    """The gradient of any other scan without its data."""
    return new_like(x, x.dtype)


define(
    "cumsum_backward",
    "(Tensor grad, Tensor mask, int[] dim) -> Tensor",
    reference=cumsum_backward_reference,
    fake=fake_of_grad,
    gpu=FLOATING,
    gpu_from=f"{GPU}:cumsum_backward",
)
define(
    "cumextreme_backward",
    "(Tensor grad, Tensor places, int[] dim) -> Tensor",
    reference=extreme_backward_reference,
    fake=fake_of_grad,
    gpu=FLOATING,
    gpu_from=f"{GPU}:cumextreme_backward",
)
for _name, _scan in (("cumprod", reference.cumprod), ("logcumsumexp", reference.logcumsumexp)):
    define(
        f"{_name}_backward",
        "(Tensor grad, Tensor x, Tensor mask, Tensor out, int[] dim) -> Tensor",
        reference=through(_scan),
        fake=fake_of_x,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{_name}_backward",
    )


# -- work --------------------------------------------------------------------------------------------------------------
def work_of(*, calls: int, gradient_calls: int, results: int, arithmetic: int) -> Describe:
    """How much a scan is: the plain route also writes and reads a copy of x, and scans without SIMD.

    ``calls`` are those of the plain route, ``gradient_calls`` how many more than the usual few its gradient takes;
    ``results`` are bytes of the results for each byte of x; ``arithmetic`` is what torch's scan computes for each
    element, as the bytes that could be streamed in that time.
    """

    def work(route: str, elements: int, size: int, grad: bool) -> Work:
        read = elements * (size + 1)
        fresh = elements * size * (results + grad)
        if route == "plain":
            streamed = (2 if grad else 1) * (read + elements * arithmetic)
            return Work(calls + gradient_calls * grad, streamed, fresh=2 * fresh)
        return Work(calls=1, streamed=read, fresh=fresh)

    return work


cumsum = register(
    "cumsum",
    ONE,
    reference=reference.cumsum,
    fake=fake_total,
    setup_context=remember_mask,
    backward=cumsum_backward,
    work=work_of(calls=2, gradient_calls=0, results=1, arithmetic=20),
    cpu=ALL,
    gpu=ALL,
    gpu_from=f"{GPU}:cumsum",
)
cumprod = register(
    "cumprod",
    ONE,
    reference=reference.cumprod,
    fake=fake_total,
    setup_context=remember_all,
    backward=backward_of("cumprod", reference.cumprod),
    work=work_of(calls=2, gradient_calls=6, results=1, arithmetic=20),
    cpu=ALL,
    gpu=ALL,
    gpu_from=f"{GPU}:cumprod",
)
cummax = register(
    "cummax",
    WITH_PLACES,
    reference=reference.cummax,
    fake=fake_extreme,
    setup_context=remember_places,
    backward=extreme_backward,
    work=work_of(calls=10, gradient_calls=5, results=3, arithmetic=200),
    cpu=ALL,
    gpu=ALL,
    gpu_from=f"{GPU}:cummax",
)
cummin = register(
    "cummin",
    WITH_PLACES,
    reference=reference.cummin,
    fake=fake_extreme,
    setup_context=remember_places,
    backward=extreme_backward,
    work=work_of(calls=10, gradient_calls=5, results=3, arithmetic=200),
    cpu=ALL,
    gpu=ALL,
    gpu_from=f"{GPU}:cummin",
)
logcumsumexp = register(
    "logcumsumexp",
    ONE,
    reference=reference.logcumsumexp,
    fake=fake_total,
    setup_context=remember_all,
    backward=backward_of("logcumsumexp", reference.logcumsumexp),
    work=work_of(calls=12, gradient_calls=20, results=1, arithmetic=600),
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from=f"{GPU}:logcumsumexp",
)
