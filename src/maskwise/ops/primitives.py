"""Primitives shared by the op families: fill_dropped, masked_sum, count, copy_transposed, replace_empty.

Where it is not a `MaskLike`, ``mask`` is a bool tensor on x's device that broadcasts to x; callers check that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import copysign, inf, prod
from typing import Any

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import Dim, MaskLike, dims_of
from maskwise.ops.backends import DEVICE, FLOATING, INTEGRAL, is_kernel_allowed, why_not_served
from maskwise.ops.operation import (
    ALONG,
    as_bits,
    define,
    dropped_blocks,
    dropped_unless_few,
    has_no_gaps,
    kept_mask,
    register,
)
from maskwise.ops.torch_private import has_dispatch_modes, is_tracing, is_vmapped_or_functional
from maskwise.plan.cost import Work

__all__ = [
    "accumulate_dtype",
    "copy_transposed",
    "count",
    "empty_dense",
    "expand_reduced",
    "expands_by_kernel",
    "fill",
    "fill_dropped",
    "fits_dtype",
    "highest",
    "lowest",
    "masked_sum",
    "may_be_empty",
    "number",
    "number_for",
    "replace_empty",
    "save_mask",
    "sum_gradient",
    "sum_kept",
    "total_dtype",
    "where_kept",
]


# -- dtypes and shapes -------------------------------------------------------------------------------------------------
def accumulate_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which x is accumulated: float32 for half precision, otherwise its own."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def lowest(dtype: torch.dtype) -> float:
    """The identity of the maximum: no value of the dtype is below it."""
    return -inf if dtype.is_floating_point else False if dtype is torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float:
    """The identity of the minimum: no value of the dtype is above it."""
    return inf if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).max


def expand_reduced(out: Tensor, shape: torch.Size, dim: list[int], keepdim: bool) -> Tensor:
    """A reduced tensor, expanded (not copied) to x's shape."""
    if not keepdim:
        for d in dim if shape else []:
            out = out.unsqueeze(d)
    return out.expand(shape)


def empty_dense(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor with x's strides if x is non-overlapping and dense, else contiguous: as kernels allocate.

    >>> empty_dense(torch.empty(3, 2).T).stride(), empty_dense(torch.empty(3, 1).expand(3, 2)).stride()
    ((1, 2), (2, 1))
    """
    if not has_no_gaps(x):
        return x.new_empty(x.shape, dtype=dtype)
    return x.new_empty_strided(x.shape, x.stride(), dtype=dtype)


def number(value: float | complex, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A 0-d tensor of a number. It must not be modified: it may be cached.

    >>> number(1, torch.float32, "cpu")
    tensor(1.)

    Raises:
        RuntimeError: the dtype cannot represent it.
    """
    # A tensor made under a dispatch mode, such as FakeTensorMode, or in inference mode must not be used outside of it.
    if type(value) is not float or is_tracing() or has_dispatch_modes() or torch.is_inference_mode_enabled():
        return torch.full((), value, dtype=dtype, device=device)
    return _cached_number(value, copysign(1.0, value), dtype, device)


@lru_cache(maxsize=64)
def _cached_number(value: float, sign: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    # The sign is a part of the key, because 0.0 and -0.0 are equal.
    return torch.full((), value, dtype=dtype, device=device)


# -- a value for what is dropped ---------------------------------------------------------------------------------------
def where_kept(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """X with ``value`` where it is dropped, in plain torch. Unlike a product with the mask, it lets no NaN through.

    >>> where_kept(torch.tensor([1, 2]), torch.tensor([True, False]), 0.0)
    tensor([1, 0])
    """
    # A Python scalar of x's category: any other would make torch promote, and so copy, x.
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return torch.where(mask, x, float(value))
    if x.dtype is torch.bool:
        # ONNX Runtime has no Where for bools, and torch.jit none for a bool tensor and a Python bool.
        return x | ~mask if value else x & mask
    return torch.where(mask, x, int(value))


def fill_dropped(x: Tensor, mask: MaskLike, value: float = 0.0) -> Tensor:
    """X with ``value`` where it is dropped, as a step of another function: no log records it.

    By the kernel of `mw.fill` where that is predicted to pay, with its gradient where one is required.

    >>> fill_dropped(torch.tensor([1.0, torch.nan]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    out: Tensor = _fill_step(x, mask, None, value)
    return out


def fits_dtype(value: float, dtype: torch.dtype) -> bool:
    """Whether a number is certainly in the range of a dtype."""
    return dtype in _WIDE and not _LARGEST < abs(value) < math.inf


_WIDE = (torch.float32, torch.float64, torch.bfloat16)
_LARGEST = torch.finfo(torch.bfloat16).max


def number_for(x: Tensor, value: float | complex, op: str = "fill", argument: str = "value") -> Tensor:
    """A number as a 0-d tensor of x's dtype; torch checks that it fits."""
    # It stays on the host: a kernel argument is cheaper than a launch to write it.
    device = "cpu" if x.device.type == "cuda" and not is_tracing() else x.device
    # torch would turn a number that is too large for the dtype into inf.
    too_large = isinstance(value, float) and x.is_floating_point() and torch.finfo(x.dtype).max < abs(value) < math.inf
    try:
        if not too_large:
            return number(value, x.dtype, device)
    except RuntimeError:
        pass
    hint = f"a value in the range of {x.dtype}, or x.to({torch.result_type(x, value)})"
    raise ArgumentError(say(op, argument, must=f"fit x's dtype {x.dtype}", got=value, hint=hint))


def _fill_run(route: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapts the op, which takes tensors and no dims, to `Operation`, which passes dims, and perhaps a number."""

    def call(x: Tensor, mask: Tensor, dims: list[int], value: float | complex | Tensor, along: int = 0) -> Tensor:
        return run(x, mask, value if isinstance(value, Tensor) else number_for(x, value), along)

    def plain(x: Tensor, mask: Tensor, dims: list[int], value: float | complex | Tensor) -> Tensor:
        # A number that certainly fits goes to torch as a scalar, which halves the time of a tiny call.
        if type(value) is float and fits_dtype(value, x.dtype):
            return torch.where(mask, x, value)
        return run(x, mask, value if isinstance(value, Tensor) else number_for(x, value))

    return plain if route == "plain" else call


def _fill_fake(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return empty_dense(x)


def _fill_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, value = inputs
    ctx.shape = value.shape
    ctx.save_for_backward(mask)


def _fill_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    """The gradient of kept elements goes to x, that of dropped ones to the value."""
    (mask,) = ctx.saved_tensors
    of_x = of_value = None
    zero = number_for(grad, 0.0)
    if ctx.needs_input_grad[0]:
        # With autograd for a double backward.
        ops = torch.ops.maskwise
        run = ops.fill_fused if torch.is_grad_enabled() else ops.fill_fused_forward
        of_x = run(grad, mask, zero, ctx.along)
    if ctx.needs_input_grad[2]:
        bits = as_bits(kept_mask(mask, ctx.along, grad.shape))
        of_value = torch.where(bits, zero, grad).sum_to_size(ctx.shape)
    return of_x, None, of_value


def _fill_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """Both routes read x and the mask once and write once; the kernel writes into huge pages, and with SIMD."""
    read, fresh = elements * (size + 1), elements * size * (1 + grad)
    # torch's kernel is not vectorized, which takes as long as streaming as many bytes again.
    return Work(calls=1, streamed=read if route != "plain" else 2 * read, fresh=fresh)


#: x where it is kept, a number or a tensor of values where it is dropped: `mw.fill` without its checks of the value.
fill = register(
    "fill",
    f"(Tensor x, Tensor mask, Tensor value{ALONG} -> Tensor",
    reference=lambda x, mask, value: torch.where(mask, x, value),
    fake=_fill_fake,
    setup_context=_fill_setup,
    backward=_fill_backward,
    work=_fill_work,
    cpu=(*FLOATING, *INTEGRAL, torch.bool, torch.complex64, torch.complex128),
    gpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu_from="maskwise.ops.fill.gpu:fill",
    fuses=True,
    skips=dropped_blocks,
    adapt=_fill_run,
)
_fill_step = replace(fill, is_step=True)


# -- sums --------------------------------------------------------------------------------------------------------------
def sum_kept(x: Tensor, mask: MaskLike, dim: Dim = None) -> Tensor:
    """The sum of what is kept, of everything or along dims, as a step of another function: no log records it.

    By the kernel of `mw.sum` where that is predicted to pay, with its gradient where one is required.

    >>> sum_kept(torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([True, False, True]))
    tensor(3.)
    """
    out: Tensor = _sum_step(x, mask, dim, False)
    return out


def total_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a sum or a product."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _sum_fake(x: Tensor, mask: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    sizes = [1 if d in dim else size for d, size in enumerate(x.shape) if keepdim or d not in dim]
    return x.new_empty(sizes, dtype=total_dtype(x.dtype))


def save_mask(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """The gradients of sum and mean need the mask, and how to undo the reduction."""
    x, mask, ctx.dim, ctx.keepdim = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(mask)


def sum_gradient(grad: Tensor, mask: Tensor, shape: list[int], dim: list[int], keepdim: bool) -> Tensor:
    """The gradient of the sum in plain torch operations."""
    return torch.where(mask, expand_reduced(grad, torch.Size(shape), dim, keepdim), 0.0).contiguous()


def expands_by_kernel(grad: Tensor) -> bool:
    """Whether a kernel expands the gradient of a sum or a mean: on a GPU, unless a second derivative is required."""
    served = why_not_served("mean", grad.device.type, grad.dtype) is None
    return served and grad.device.type == DEVICE and not torch.is_grad_enabled()


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """Expand the gradient over what was kept; exactly zero elsewhere, whatever the gradient holds."""
    (mask,) = ctx.saved_tensors
    if expands_by_kernel(grad):
        settings = (ctx.shape, ctx.dim, ctx.keepdim, ctx.along)
        return torch.ops.maskwise.sum_backward(grad, mask, *settings), None, None, None
    expanded = expand_reduced(grad, ctx.shape, ctx.dim, ctx.keepdim)
    return fill_dropped(expanded, kept_mask(mask, ctx.along, ctx.shape)), None, None, None


def _sum_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel streams x and the mask once; the idiom writes a copy of x, and reads it."""
    read, copy = elements * (size + 1), elements * size
    if route == "plain":
        return Work(calls=2, streamed=read + copy, fresh=copy * (1 + grad))
    return Work(calls=1, streamed=read, fresh=copy * grad)


define(
    "sum_backward",
    f"(Tensor grad, Tensor mask, SymInt[] shape, int[] dim, bool keepdim{ALONG} -> Tensor",
    reference=sum_gradient,
    fake=lambda grad, mask, shape, dim, keepdim: grad.new_empty(shape),
    gpu=FLOATING,
    gpu_from="maskwise.ops.reduce.gpu:sum_backward",
)
#: The sum of what is kept along dims: `mw.sum` without its options.
masked_sum = register(
    "sum",
    f"(Tensor x, Tensor mask, int[] dim, bool keepdim{ALONG} -> Tensor",
    # torch reads an empty list of dims as "all", which for x of no dims is what is meant.
    reference=lambda x, mask, dim, keepdim: where_kept(x, mask, 0.0).sum(dim, keepdim=keepdim),
    fake=_sum_fake,
    setup_context=save_mask,
    backward=_sum_backward,
    work=_sum_work,
    cpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu=(*FLOATING, *INTEGRAL, torch.bool),
    gpu_from="maskwise.ops.reduce.gpu:sum",
    fuses=True,
    skips=dropped_unless_few,
)
_sum_step = replace(masked_sum, is_step=True)


# -- counts and copies -------------------------------------------------------------------------------------------------
def count(x: Tensor, mask: MaskLike, dim: list[int], keepdim: bool) -> Tensor:
    """The number of kept elements of x: int64, broadcastable to the result. A broadcast mask is not expanded."""
    if isinstance(mask, Mask):
        return _count_intervals(x, mask, dim, keepdim)
    if mask.shape == x.shape:
        return mask.sum(dim, keepdim=keepdim)
    mask = mask.reshape((1,) * (x.dim() - mask.dim()) + mask.shape)
    # A list, because torch.compile cannot pass a generator to a C function.
    repeated = prod([x.shape[d] for d in dim if x.dim() and mask.shape[d] == 1])
    kept = mask.sum(dim, keepdim=keepdim)
    return kept if repeated == 1 else kept * repeated


def _count_intervals(x: Tensor, mask: Mask, dim: list[int], keepdim: bool) -> Tensor:
    """The number of kept elements of x by what the mask knows of its lines; no bool tensor of its shape is made."""
    mask = mask[(None,) * (x.dim() - mask.ndim)]
    inside = [d for d in dim if mask.shape[d] == x.shape[d]]
    repeated = prod([x.shape[d] for d in dim if d not in inside])
    kept = mask.count(inside, keepdim=True) if inside else mask.to_bool()
    kept = kept if repeated == 1 else kept * repeated
    return kept if keepdim else kept.squeeze(dim)


def copy_transposed(x: Tensor) -> Tensor:
    """A contiguous copy of a transposed x: on the CPU tile by tile, on all threads.

    >>> copy_transposed(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T).is_contiguous()
    True
    """
    if not is_kernel_allowed("fill", x.device.type, x.dtype):
        return x.contiguous()
    out: Tensor = torch.ops.maskwise.copy_transposed.default(x)
    return out


define(
    "copy_transposed",
    "(Tensor x) -> Tensor",
    reference=lambda x: x.clone(memory_format=torch.contiguous_format),
    fake=lambda x: x.new_empty(x.shape),
)


# -- empty slices ------------------------------------------------------------------------------------------------------
def may_be_empty(x: Tensor, mask: Mask, dims: list[int]) -> bool:
    """Whether a slice of x keeps nothing, or may: bounds on a device, and those of a transform, are not read."""
    if not x.numel() or mask.device.type != "cpu" or is_vmapped_or_functional() or has_dispatch_modes():
        return True
    # A mask is the same for all layers that it passes through.
    return mask._once(f"empty along {dims} of {x.dim()}", lambda: bool((count(x, mask, dims, True) == 0).any()))


def replace_empty(
    op: str, x: Tensor, mask: MaskLike, dim: Dim, keepdim: bool, empty: float, dtype: torch.dtype | None = None
) -> Callable[[Tensor], Tensor]:
    """A function that replaces the results of empty slices of a reduction by ``empty``. Its gradient there is zero."""
    if not isinstance(empty, (int, float, complex, Tensor)):
        raise DtypeError(say(op, "empty", must="be a number or None", got=type(empty).__name__, hint="empty=0.0"))

    def replaced(out: Tensor) -> Tensor:
        dims = dims_of(op, x, dim)
        if isinstance(mask, Mask) and mask.operand == "intervals" and not is_tracing():
            if type(empty) is float and out.is_floating_point() and not may_be_empty(x, mask, dims):
                return out if dtype is None else out.to(dtype)
            return torch.where(count(x, mask, dims, keepdim) > 0, out if dtype is None else out.to(dtype), empty)
        bits = as_bits(mask)
        bits = bits.reshape((1,) * (x.dim() - bits.dim()) + bits.shape)
        # A dim along which the mask broadcasts is read once; unless x has size 0 there, when nothing is kept.
        kept = bits.any(dims, keepdim=keepdim) if dims else bits
        if any(x.shape[d] == 0 for d in dims):
            kept = torch.zeros_like(kept)
        return torch.where(kept, out if dtype is None else out.to(dtype), empty)

    return replaced
