"""Masked softmax, log_softmax and softmin; and the registration that they share with normalize and standardize."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import DtypeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, to_dtype
from maskwise.ops.backends import FLOATING
from maskwise.ops.operation import ALONG, Operation, as_bits, define, kept_mask, register
from maskwise.ops.primitives import copy_transposed
from maskwise.ops.row_functions import row_dim, serve, serve_module
from maskwise.ops.softmax import reference
from maskwise.plan.cost import Work
from maskwise.plan.dispatch import Skips

__all__ = ["log_softmax", "softmax", "softmin"]


def softmax(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Take the softmax over what the mask keeps; what it drops gets probability 0.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 1.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.softmax(x, mask, dim=1)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the probabilities of what is kept sum to 1.
        dtype: x is cast to it first.

    Returns:
        The probabilities, of x's shape: 0 where dropped, so a zero row for an empty slice. The gradient of dropped
        elements is exactly zero.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    return along_one_dim(_softmax, x, mask, dim, dtype)


def log_softmax(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Take the logarithm of the softmax over what the mask keeps; what it drops gets -inf.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, 1.0, float("nan")], [4.0, 5.0, 6.0]])
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> mw.log_softmax(x, mask, dim=1)
    tensor([[-0.6931, -0.6931,    -inf],
            [   -inf,    -inf,    -inf]])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the probabilities of what is kept sum to 1.
        dtype: x is cast to it first.

    Returns:
        The log-probabilities, of x's shape: the logarithm of ``softmax``, so -inf where dropped, and in all of an empty
        slice. The gradient of dropped elements is exactly zero, whatever their incoming gradient.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    return along_one_dim(_log_softmax, x, mask, dim, dtype)


def softmin(
    x: Tensor,  # (...)
    mask: MaskLike,  # broadcasts to x
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Take the softmax of -x over what the mask keeps; what it drops gets probability 0.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([0.0, 0.0, -100.0])
    >>> mw.softmin(x, torch.tensor([True, True, False]), dim=0)
    tensor([0.5000, 0.5000, 0.0000])

    Args:
        x: any shape; floating.
        mask: a Mask or a bool tensor that broadcasts to ``x``; True means keep.
        dim: the dim along which the probabilities of what is kept sum to 1.
        dtype: x is cast to it first.

    Returns:
        The probabilities, of x's shape: 0 where dropped, so a zero row for an empty slice.

    Raises:
        ShapeError: the mask does not broadcast to x.
        DtypeError: the mask is not bool, x is not floating, or dim is not an int.
        DeviceError: the mask is on another device.
        OutOfRangeError: a dim is out of range for x.
        ArgumentError: x or the mask is sparse.
    """
    return along_one_dim(_softmin, x, mask, dim, dtype)


def along_one_dim(op: Operation, x: Tensor, mask: MaskLike, dim: int, dtype: torch.dtype | None) -> Tensor:
    """Check and run a softmax, which takes one dim, as in torch."""
    if type(dim) is not int:
        raise DtypeError(say(op.name, "dim", must="be an int", got=type(dim).__name__, hint="dim=-1"))
    if dtype is not None:
        x = to_dtype(op.name, x, dtype)
    check_floating(op.name, x)
    out: Tensor = op(x, mask, dim)
    return out


# -- what all functions of the family share ----------------------------------------------------------------------------
#: The module of the Triton kernels.
GPU = "maskwise.ops.softmax.gpu"


def check_floating(op: str, x: Any) -> None:
    """Raise unless x is floating. Values that are not tensors are left to the checks that follow."""
    if isinstance(x, Tensor) and not x.is_floating_point():
        hint = "x.float()" if "soft" not in op else "dtype=torch.float32"
        raise DtypeError(say(op, "x", must="be floating", got=x.dtype, hint=hint))


# -- results without data ----------------------------------------------------------------------------------------------
def like_first(first: Tensor, *rest: Any) -> Tensor:
    """The fake of the result: shape, dtype and strides of x."""
    return torch.empty_like(first)


def like_second(first: Tensor, second: Tensor, *rest: Any) -> Tensor:
    """The fake of the gradient: shape, dtype and strides of the saved tensor."""
    return torch.empty_like(second)


def as_laid_out(function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with its result in the strides of the fake."""

    def laid_out(*arguments: Any) -> Tensor:
        out, promised = function(*arguments), fake(*arguments)
        return out if out.stride() == promised.stride() else promised.copy_(out)

    return laid_out


#: The differentiable torch calls of the plain route.
CALLS = {"softmax": 3, "softmin": 3, "log_softmax": 3, "normalize": 8, "standardize": 14}


# -- few long slices ---------------------------------------------------------------------------------------------------
# For slices along a strided dim, kernels process one slice per vector lane. With fewer slices than a few vectors have
# lanes, a transposed copy costs less than two such passes over x.
#: The number of slices below which to transpose, the number below which torch's copy is faster, and the least length.
_FEW, _TOO_FEW, _LONG = 16, 8, 4096


def transposed_first(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel, with x transposed first where it has few long strided slices."""

    def run(x: Tensor, mask: Tensor, dims: list[int], *rest: Any) -> Tensor:
        return kernel(x if x.is_contiguous() else transposed(x, dims), mask, dims, *rest)

    return run


def transposed(x: Tensor, dims: list[int]) -> Tensor:
    """x, or a contiguous copy where it has few long slices along a strided last dim.

    >>> few, many = torch.zeros(5000, 3).T, torch.zeros(5000, 300).T
    >>> transposed(few, [1]).is_contiguous(), transposed(many, [1]) is many
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
    """Register a function of the family, whose gradient is a function of its result or of x.

    Args:
        name: the public name.
        settings: the schema after x, mask and dim.
        calls: the differentiable torch calls of the plain route.
        gradient: the gradient in plain torch operations, for a double backward.
        kernel: the same as a registered op.
        of_result: whether the gradient is a function of the result, rather than of x.
        constants: the arguments of the gradient after those of the function.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mask, *ctx.rest = inputs
        ctx.save_for_backward(output if of_result else x, mask)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, mask = ctx.saved_tensors
        if torch.is_grad_enabled():
            bits = as_bits(kept_mask(mask, ctx.along, saved.shape))
            grad_x = gradient(grad, saved, bits, *ctx.rest, *constants)
        else:
            grad_x = kernel(grad, saved, mask, *ctx.rest, *constants, ctx.along)
        return grad_x, None, *[None] * len(ctx.rest)

    def work(route: str, elements: int, size: int, grad: bool) -> Work:
        # The kernel streams x and mask and writes the result; the plain route writes two temporaries as well.
        x, mask = elements * size, elements
        if route == "plain":
            backward = 4 * x if grad else 0
            return Work(calls=calls, streamed=4 * x + 2 * mask + 2 * backward, fresh=3 * x + backward)
        backward = x if grad else 0
        return Work(calls=1, streamed=2 * x + 2 * mask + 2 * backward, fresh=x + backward)

    return register(
        name,
        f"(Tensor x, Tensor mask, int[] dim{settings}{ALONG} -> Tensor",
        reference=as_laid_out(getattr(reference, name), like_first),
        fake=like_first,
        setup_context=save,
        backward=backward,
        work=work,
        cpu=FLOATING,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{name}",
        fuses=True,
        # Strided slices may be transposed first.
        skips=lambda x, mask: Skips.READING if isinstance(mask, Mask) and x.is_contiguous() else Skips.NOTHING,
        adapt=lambda route, run: transposed_first(run) if route == "bare" else run,
    )


def define_backward(name: str, settings: str, gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Define the op of a backward pass, and return it; x is what the forward pass has saved."""
    op = f"{name}_fused_backward"
    define(
        op,
        f"(Tensor grad, Tensor x, Tensor mask, int[] dim{settings}{ALONG} -> Tensor",
        reference=as_laid_out(gradient, like_second),
        fake=like_second,
        gpu=FLOATING,
        gpu_from=f"{GPU}:{name}_backward",
    )
    kernel: Callable[..., Tensor] = getattr(torch.ops.maskwise, op).default
    return kernel


# -- gradients ---------------------------------------------------------------------------------------------------------
# The gradients in plain torch operations: the reference of the backward kernels, and the route of a double backward.
# None reads the gradient of a dropped element: it may be NaN, as after the logarithm of a probability of 0.
def softmax_gradient(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int], negate: bool) -> Tensor:
    """The gradient of softmax, or of softmin if ``negate``, from its result."""
    grad = torch.where(mask, grad, 0.0)
    wide = torch.promote_types(out.dtype, torch.float32)
    dot = (grad.to(wide) * out).sum(dim, keepdim=True)
    grad_x = out * (grad - dot)
    return torch.where(mask, -grad_x if negate else grad_x, 0.0).to(out.dtype)


def log_softmax_gradient(grad: Tensor, out: Tensor, mask: Tensor, dim: list[int]) -> Tensor:
    """The gradient of log_softmax from its result."""
    grad = torch.where(mask, grad, 0.0)
    wide = torch.promote_types(out.dtype, torch.float32)
    total = grad.sum(dim, keepdim=True, dtype=wide)
    # A dropped log-probability is -inf, whose exponential is 0, and so is its gradient.
    return torch.where(mask, grad - torch.exp(out.to(wide)) * total, 0.0).to(out.dtype)


_softmax_backward = define_backward("softmax", ", bool negate", softmax_gradient)
_softmax = slicewise("softmax", "", 3, softmax_gradient, _softmax_backward, of_result=True, constants=(False,))
_softmin = slicewise("softmin", "", 3, softmax_gradient, _softmax_backward, of_result=True, constants=(True,))
_log_softmax = slicewise(
    "log_softmax",
    "",
    3,
    log_softmax_gradient,
    define_backward("log_softmax", "", log_softmax_gradient),
    of_result=True,
)


# -- rows of `mw.apply` ------------------------------------------------------------------------------------------------
def _bind(op: Operation) -> Callable[..., Callable[[Tensor, MaskLike], Tensor] | None]:
    step = replace(op, is_step=True)

    def bind(x: Tensor, row_dims: int, dim: int) -> Callable[[Tensor, MaskLike], Tensor] | None:
        along = row_dim(dim, row_dims)
        return None if along is None else lambda x, mask: step(x, mask, along)

    return bind


# The logarithm of a dropped probability is -inf, where `apply` gives 0: log_softmax is gathered.
serve("softmax", _bind(_softmax), torch.softmax, torch.nn.functional.softmax)
serve("softmin", _bind(_softmin), torch.nn.functional.softmin)
serve_module(torch.nn.Softmax, torch.softmax, lambda module: (module.dim,))
serve_module(torch.nn.Softmin, torch.nn.functional.softmin, lambda module: (module.dim,))
