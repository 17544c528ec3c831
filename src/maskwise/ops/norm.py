"""Normalization of what is kept by its statistics, or by given ones: what the norms of `mw.nn` are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.backends import FLOATING
from maskwise.ops.operation import ALONG, as_bits, define, dropped_rows, kept_mask, register
from maskwise.ops.primitives import accumulate_dtype, count, empty_dense, fill_dropped
from maskwise.ops.reduce.moments import var_step
from maskwise.ops.reduce.sums import mean_step
from maskwise.ops.softmax.normalize import standardize_step
from maskwise.plan.cost import Work
from maskwise.plan.dispatch import Skips, is_dry_run

__all__ = ["affine_norm", "moments"]


def moments(x: Tensor, mask: MaskLike, dims: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """How many elements of each slice along ``dims`` are kept, their mean and their variance, in one pass over x.

    They have size 1 along ``dims``, and no gradient. Half precision gives float32. Where nothing is kept, mean and
    variance are anything.

    >>> moments(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([True, True, False]), [0])
    (tensor([2]), tensor([2.]), tensor([1.]))
    """
    if is_dry_run():
        # The plan is that of the normalization that follows.
        return _moments_fake(x, as_bits(mask), dims)
    found: tuple[Tensor, Tensor, Tensor] = _moments(x.detach(), mask, tuple(dims))
    return found


def affine_norm(
    x: Tensor,
    mask: MaskLike,
    dims: list[int],
    statistics: tuple[Tensor | None, Tensor, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` where the mask keeps, 0 where it drops; of x's dtype.

    >>> x, mask = torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([True, True, False])
    >>> affine_norm(x, mask, [0], moments(x, mask, [0]), None, torch.tensor(5.0), 0.0)
    tensor([4., 6., 0.])

    Args:
        x: floating.
        mask: broadcasts to x.
        dims: those of a slice, which has one mean, variance, weight and bias.
        statistics: the `moments` of x, which have a part in its gradient; or None and a mean and a variance that have
            none. They broadcast to x, with size 1 along ``dims``.
        weight: broadcasts to the mean; None for 1.
        bias: broadcasts to the mean; None for 0.
        eps: added to the variance.
    """
    kept, mean, var = statistics
    wide = accumulate_dtype(x)
    mean, var = mean.to(wide), var.to(wide)
    weight = mean.new_ones(()) if weight is None else weight.to(wide)
    bias = mean.new_zeros(()) if bias is None else bias.to(wide)
    trains = weight.requires_grad or bias.requires_grad
    out: Tensor = _affine_norm(x, mask, tuple(dims), weight, bias, mean, var, kept, eps, trains=trains)
    return out


def _by_slice(route: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapts the op, whose tensors come first, to `Operation`; a kernel takes one weight and bias for each slice."""

    def plain(
        x: Tensor,
        mask: Tensor,
        dims: list[int],
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        var: Tensor,
        kept: Tensor | None,
        eps: float,
    ) -> Tensor:
        return run(x, mask, weight, bias, mean, var, kept, dims, eps)

    def kernel(
        x: Tensor,
        mask: Tensor,
        dims: list[int],
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        var: Tensor,
        kept: Tensor | None,
        eps: float,
        along: int = 0,
    ) -> Tensor:
        weight, bias = (each.expand_as(mean).contiguous() for each in (weight, bias))
        return run(x, mask, weight, bias, mean.contiguous(), var.contiguous(), kept, dims, eps, along)

    return plain if route == "plain" else kernel


# -- references --------------------------------------------------------------------------------------------------------
def _moments_reference(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(accumulate_dtype(x))
    sizes = [1 if d in dim else size for d, size in enumerate(x.shape)]
    kept = count(x, mask, dim, True).expand(sizes).contiguous()
    return kept, mean_step(wide, mask, tuple(dim), True), var_step(wide, mask, tuple(dim), True, 0.0)


def _moments_fake(x: Tensor, mask: Tensor, dim: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [1 if d in dim else size for d, size in enumerate(x.shape)]
    wide = accumulate_dtype(x)
    return x.new_empty(sizes, dtype=torch.int64), x.new_empty(sizes, dtype=wide), x.new_empty(sizes, dtype=wide)


def reference(
    x: Tensor,
    mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    kept: Tensor | None,
    dim: list[int],
    eps: float,
) -> Tensor:
    """The same by other functions of the library, which have gradients of their own."""
    if kept is not None:
        normal = standardize_step(x.to(mean.dtype), mask, tuple(dim), 0.0, float(eps))
    else:
        # What is dropped must not reach the backward pass, where 0 * NaN is NaN.
        normal = (fill_dropped(x, mask).to(mean.dtype) - mean) * (var + eps).rsqrt()
    return fill_dropped(torch.addcmul(bias, normal, weight), mask).to(x.dtype)


# -- gradient ----------------------------------------------------------------------------------------------------------
def _gradients(
    grad: Tensor,
    x: Tensor,
    mask: Tensor,
    weight: Tensor,
    mean: Tensor,
    var: Tensor,
    kept: Tensor | None,
    dim: list[int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias in plain torch operations."""
    grad = torch.where(mask, grad, 0.0).to(mean.dtype)
    centred = torch.where(mask, x.to(mean.dtype) - mean, 0.0)
    inverse = (var + eps).rsqrt()
    total, product = (each.sum(dim, keepdim=True) for each in (grad, grad * centred))
    grad_x = grad
    if kept is not None:
        divisor = kept.clamp_min(1)
        grad_x = grad - total / divisor - centred * (inverse.square() * product / divisor)
    grad_x = torch.where(mask, grad_x * (weight * inverse), 0.0)
    return empty_dense(x).copy_(grad_x), product * inverse, total


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.dim, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, mask, weight, bias, mean, var, kept = ctx.saved_tensors
    if not torch.is_grad_enabled():
        statistics = (mean, var, kept, ctx.dim, ctx.eps, ctx.along)
        of_x, of_weight, of_bias = torch.ops.maskwise.affine_norm_backward(grad, x, mask, weight, *statistics)
        return of_x, None, of_weight, of_bias, *[None] * 5
    # For a double backward, by a function that torch differentiates.
    bits = as_bits(kept_mask(mask, ctx.along, x.shape))
    inputs = [each if each.requires_grad else each.detach().requires_grad_() for each in (x, weight, bias)]
    values, scale, shift = inputs
    out = reference(values, bits, scale, shift, mean, var, kept, list(ctx.dim), ctx.eps)
    of_x, of_weight, of_bias = torch.autograd.grad(out, inputs, grad, create_graph=True, materialize_grads=True)
    return of_x, None, of_weight, of_bias, *[None] * 5


# -- registration ------------------------------------------------------------------------------------------------------
def _moments_work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel reads x once; plain torch has a copy for each step."""
    read, copy = elements * (size + 1), elements * size
    if route == "plain":
        return Work(calls=8, streamed=3 * read, fresh=2 * copy)
    return Work(calls=1, streamed=read)


def _work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel reads x once and writes once; its gradient reads both twice. Plain torch has a copy for each step."""
    read, copy = elements * (size + 1), elements * size
    if route == "plain":
        return Work(calls=16 * (1 + grad), streamed=3 * read, fresh=copy * 3 * (1 + grad))
    return Work(calls=1 + grad, streamed=read * (1 + 4 * grad), fresh=copy * (1 + grad))


def _dropped(x: Tensor, mask: MaskLike) -> Skips | int:
    """What both kernels skip: what lies outside of intervals along contiguous memory, and whole rows, by number."""
    if isinstance(mask, Mask):
        is_in_lines = x.is_contiguous() or (x.dim() > 2 and x.movedim(1, -1).is_contiguous())
        # Bounds that differ from element to element of a line are made bytes of.
        is_along = mask._along == -1 or mask._bounds().shape[-1] == 1
        return Skips.READING if is_in_lines and is_along else Skips.NOTHING
    if dropped_rows(x, mask) is Skips.NOTHING or not mask.numel():
        return Skips.NOTHING
    # Layers pass on bits without the count that a `Mask` may know.
    return int((~mask).sum()) * (x.numel() // mask.numel())


_moments = register(
    "moments",
    f"(Tensor x, Tensor mask, int[] dim{ALONG} -> (Tensor, Tensor, Tensor)",
    reference=_moments_reference,
    fake=_moments_fake,
    work=_moments_work,
    cpu=FLOATING,
    skips=_dropped,
)
define(
    "affine_norm_backward",
    "(Tensor grad, Tensor x, Tensor mask, Tensor weight, Tensor mean, Tensor var, Tensor? count, int[] dim, float eps"
    f"{ALONG} -> (Tensor, Tensor, Tensor)",
    reference=_gradients,
    fake=lambda grad, x, mask, weight, mean, *_: (empty_dense(x), torch.empty_like(mean), torch.empty_like(mean)),
)
_affine_norm = register(
    "affine_norm",
    "(Tensor x, Tensor mask, Tensor weight, Tensor bias, Tensor mean, Tensor var, Tensor? count, int[] dim, float eps"
    f"{ALONG} -> Tensor",
    reference=reference,
    fake=lambda x, *_: empty_dense(x),
    setup_context=_save,
    backward=_backward,
    work=_work,
    cpu=FLOATING,
    skips=_dropped,
    adapt=_by_slice,
)
