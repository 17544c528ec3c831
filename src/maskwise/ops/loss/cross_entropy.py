"""Cross entropy with a class for each position as target, as a registered op, and nll_loss by torch.

The kernel reads a kept position once in each direction, and a dropped one never if its classes are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.errors import OutOfRangeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.backends import FLOATING
from maskwise.ops.loss import reference as plain
from maskwise.ops.loss.functional_losses import LOSSES, REDUCTION_CODES, Prepared, kernel_route, why_not_on_cpu
from maskwise.ops.loss.reference import mean_of_rows, reduce, row_dims
from maskwise.ops.operation import ALONG, as_bits, as_operand, define, kept_mask, register
from maskwise.ops.primitives import fill_dropped, sum_kept, where_kept
from maskwise.plan.cost import Work
from maskwise.plan.dispatch import Route, Skips

__all__ = ["NLL_ROUTES", "ROUTES", "empty_for_gradient", "kernel_settings"]

#: The keyword arguments that the routes below take.
_TAKEN = {
    F.cross_entropy: frozenset({"weight", "ignore_index", "label_smoothing"}),
    F.nll_loss: frozenset({"weight", "ignore_index"}),
}


def kernel_settings(
    fn: Callable[..., Any], operands: tuple[Tensor, ...], kwargs: Mapping[str, Any], reduction: str
) -> tuple[int, float, int] | str:
    """What the kernel takes after its tensors: the ignored class, smoothing, reduction; or why it cannot compute it.

    The same arguments suit nll_loss, which has no kernel, and ignores what is dropped by itself.
    """
    x, target = operands
    if x.dim() < 2 or not x.numel() or target.dtype is not torch.int64 or target.shape != (*x.shape[:1], *x.shape[2:]):
        return "the target is no class for each position of a batch"
    weight, smoothing = kwargs.get("weight"), kwargs.get("label_smoothing", 0.0)
    ignored = kwargs.get("ignore_index", LOSSES[fn].ignore_index)
    if not _TAKEN[fn].issuperset(kwargs) or type(ignored) is not int or not isinstance(smoothing, (int, float)):
        return f"no kernel computes {fn.__name__} of such arguments"
    if weight is not None:
        if not isinstance(weight, Tensor) or weight.shape != x.shape[1:2] or weight.dtype != x.dtype:
            return "the weight is not one number of the input's dtype for each class"
        if weight.requires_grad or reduction == "sequence" or smoothing != 0.0:
            return "no kernel has gradients of weights, weighted sequences, or smooths weighted classes"
    if not 0.0 <= smoothing <= 1.0:
        return "torch refuses such smoothing"
    return ignored, float(smoothing), REDUCTION_CODES.get(reduction, 0)


# -- the op ------------------------------------------------------------------------------------------------------------
def reference(
    x: Tensor,  # (N, C, ...)
    target: Tensor,  # (N, ...), int64
    mask: Tensor,  # bool, broadcasts to target
    weight: Tensor | None,  # (C,), without smoothing
    ignored: int,
    smoothing: float,
    reduction: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss; the log of the sum of exponentials of each position; by what a mean divides, and -1.

    The kernel has the first position with a class that does not exist in the place of the -1; torch raises.
    """
    keep = mask & (target != ignored)
    clean, classes = where_kept(x, keep.unsqueeze(1), 0.0), where_kept(target, keep, 0)
    out = F.cross_entropy(clean, classes, weight, reduction="none", label_smoothing=smoothing)
    divisors = None if weight is None else weight[classes]
    names = {number: name for name, number in REDUCTION_CODES.items()}
    with torch.no_grad():
        sums = where_kept(torch.logsumexp(clean.double(), 1), keep, 0.0)
        divisor = (keep if divisors is None else where_kept(divisors, keep, 0.0)).sum(dtype=torch.float64)
        facts = torch.stack((divisor, divisor.new_full((), -1.0)))
    return reduce(where_kept(out, keep, 0.0), keep, names[reduction], divisors), sums, facts


def _fake(
    x: Tensor, target: Tensor, mask: Tensor, weight: Tensor | None, ignored: int, smoothing: float, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    sums, facts = x.new_empty(target.shape, dtype=torch.float64), x.new_empty(2, dtype=torch.float64)
    return x.new_empty(() if reduction else target.shape), sums, facts


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """The gradient needs the operands themselves, and one number for each position."""
    *operands, ctx.ignored, ctx.smoothing, ctx.reduction = inputs
    ctx.mark_non_differentiable(*output[1:])
    # They have no gradient, and to make zeros in the place of none costs a tiny backward pass two calls.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *output[1:])


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, None, None, None, None, None, None]:
    """The gradient of x."""
    if grad is None:
        return None, None, None, None, None, None, None
    x, target, mask, weight, sums, facts = ctx.saved_tensors
    if torch.is_grad_enabled():
        # The gradient is to be differentiated again, which torch can do with what it knows.
        bits = as_bits(kept_mask(mask, ctx.along, target.shape))
        out = reference(x, target, bits, weight, ctx.ignored, ctx.smoothing, ctx.reduction)[0]
        (of_x,) = torch.autograd.grad(out, x, grad, create_graph=True)
    else:
        op = torch.ops.maskwise.cross_entropy_fused_backward.default
        settings = (ctx.ignored, ctx.smoothing, ctx.reduction, ctx.along)
        of_x = op(grad.contiguous(), x, target, mask, weight, sums, facts, *settings)
    return of_x, None, None, None, None, None, None


def _backward_reference(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    facts: Tensor,
    ignored: int,
    smoothing: float,
    reduction: int,
) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = reference(leaf, target, mask, weight, ignored, smoothing, reduction)[0]
    return empty_for_gradient(x).copy_(torch.autograd.grad(out, leaf, grad)[0])


def empty_for_gradient(x: Tensor) -> Tensor:
    """Uninitialised memory for x's gradient: with the classes next to each other if x has them so, else contiguous."""
    if x.stride(1) == 1:
        return x.new_empty((*x.shape[:1], *x.shape[2:], x.shape[1])).movedim(-1, 1)
    return x.new_empty(x.shape)


def _work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel reads x once, and once more for a gradient; torch writes the logarithms of softmax too."""
    read, back = elements * size, elements * size if grad else 0
    if route == "plain":
        return Work(calls=7, streamed=4 * read, fresh=2 * read + 2 * back)
    return Work(calls=1, streamed=read + back, fresh=back)


define(
    "cross_entropy_fused_backward",
    "(Tensor grad, Tensor x, Tensor target, Tensor mask, Tensor? weight, Tensor sums, Tensor facts,"
    f" int ignored, float smoothing, int reduction{ALONG} -> Tensor",
    reference=_backward_reference,
    fake=lambda grad, x, *rest: empty_for_gradient(x),
    gpu=FLOATING,
    gpu_from="maskwise.ops.loss.gpu:cross_entropy_backward",
)
_op = register(
    "cross_entropy",
    f"(Tensor x, Tensor target, Tensor mask, Tensor? weight, int ignored, float smoothing, int reduction{ALONG}"
    " -> (Tensor, Tensor, Tensor)",
    reference=reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    work=_work,
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from="maskwise.ops.loss.gpu:cross_entropy",
    fuses=True,
)


# -- the routes --------------------------------------------------------------------------------------------------------
def _by_kernel(op: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Cross entropy by its kernel, which raises where a kept position has a class that does not exist."""

    def run(prepared: Prepared, operands: tuple[Tensor, ...], mask: MaskLike, kwargs: Mapping[str, Any]) -> Tensor:
        x, target = operands
        kept, along = as_operand(mask, target)
        if x.stride(1) != 1 and not x.is_contiguous():
            x = x.contiguous()
        out, _, facts = op(x, target, kept, kwargs.get("weight"), *prepared.kernel, along)
        # To look would take a host-device sync: on a GPU a class that does not exist makes the loss NaN.
        stray = int(facts.tolist()[1]) if x.device.type == "cpu" else -1
        if stray >= 0:
            must, got = f"name a class in [0, {x.shape[1] - 1}] where it is kept", target.reshape(-1)[stray].item()
            hint = f"mask & (target >= 0) & (target < {x.shape[1]}), or ignore_index={got}"
            raise OutOfRangeError(say("loss", "target", must=must, got=got, hint=hint))
        return _mean_of_rows(out, target != prepared.kernel[0], mask) if prepared.reduction == "sequence" else out

    return run


def _mean_of_rows(out: Tensor, valid: Tensor, mask: MaskLike) -> Tensor:
    """The mean of rows of the unreduced loss, of which the mask and ``valid`` keep elements."""
    if out.dim() == 1:
        return mean_of_rows(out, fill_dropped(valid, mask, False).to(torch.uint8))
    return mean_of_rows(out, sum_kept(valid, mask, row_dims(out.shape)))


def _skips(x: Tensor, mask: MaskLike) -> Skips:
    """The kernel of cross entropy skips a dropped position, if its classes are contiguous."""
    return Skips.READING if x.stride(1) == 1 else Skips.NOTHING


def _nll(prepared: Prepared, operands: tuple[Tensor, ...], mask: MaskLike, kwargs: Mapping[str, Any]) -> Tensor:
    """nll_loss, which reads nothing where the target is to be ignored, nor gives it a gradient."""
    (x, target), reduction, ignored = operands, prepared.reduction, prepared.kernel[0]
    # torch's own is the fastest for bits, of which there are few beside the classes.
    classes = fill_dropped(target, mask, ignored) if isinstance(mask, Mask) else where_kept(target, mask, ignored)
    sequence = reduction == "sequence"
    out = F.nll_loss(
        x, classes, kwargs.get("weight"), ignore_index=ignored, reduction="none" if sequence else reduction
    )
    if sequence:
        return _mean_of_rows(out, target != ignored, mask)
    if reduction == "mean" and out.isnan():
        # A NaN that is kept, or a mean of nothing.
        return plain.loss(prepared, operands, as_bits(mask), kwargs)
    return out


_bare, _fused, _ = _op.routes
ROUTES = (
    kernel_route(_bare, run=_by_kernel(_bare.run), skips=_skips),
    kernel_route(_fused, run=_by_kernel(_fused.run), skips=_skips),
)
NLL_ROUTES = (
    Route(
        "filled",
        _nll,
        lambda facts: facts.detail.no_kernel or why_not_on_cpu(facts),
        reason="torch ignores what is dropped",
        intervals=True,
    ),
)
