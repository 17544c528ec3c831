"""The losses of single elements: those with a kernel, as one registered op, and few elements gathered for torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.ops.arguments import MaskLike
from maskwise.ops.backends import FLOATING
from maskwise.ops.loss.functional_losses import REDUCTION_CODES, Prepared, kernel_route, why_not_on_cpu
from maskwise.ops.loss.reference import mean_of_rows, reduce, row_dims
from maskwise.ops.operation import ALONG, as_bits, as_operand, define, dropped_blocks, kept_mask, register
from maskwise.ops.primitives import count, empty_dense, where_kept
from maskwise.plan.cost import Work
from maskwise.plan.dispatch import NOT_APPLICABLE, Facts, Route

__all__ = ["KERNEL_LOSSES", "ROUTES", "element_loss", "kernel_settings", "unreduced"]


# -- the losses that have a kernel -------------------------------------------------------------------------------------
class KernelLoss(NamedTuple):
    """A loss that has a kernel."""

    fn: Callable[..., Any]
    #: What its keyword arguments must be, where they are given; a function with two kernels has two entries.
    settings: Mapping[str, Any] = {}
    #: The keyword argument that the kernel takes as its parameter, and what it is unless given.
    parameter: tuple[str, float] | None = None
    #: Keyword arguments that make no difference.
    unused: tuple[str, ...] = ()


#: In the order of the codes of loss_kernels.h. The first of a function's entries holds torch's defaults.
KERNEL_LOSSES = (
    KernelLoss(F.mse_loss),
    KernelLoss(F.l1_loss),
    KernelLoss(F.smooth_l1_loss, parameter=("beta", 1.0)),
    KernelLoss(F.huber_loss, parameter=("delta", 1.0)),
    KernelLoss(F.binary_cross_entropy_with_logits),
    KernelLoss(F.kl_div, {"log_target": False}),
    KernelLoss(F.kl_div, {"log_target": True}),
    KernelLoss(F.poisson_nll_loss, {"log_input": True, "full": False}, unused=("eps",)),
    KernelLoss(F.poisson_nll_loss, {"log_input": False, "full": False}, parameter=("eps", 1e-8)),
    KernelLoss(F.soft_margin_loss),
    KernelLoss(F.hinge_embedding_loss, parameter=("margin", 1.0)),
)
_L1 = 1
_BY_FUNCTION: dict[Callable[..., Any], list[int]] = {}
for _code, _loss in enumerate(KERNEL_LOSSES):
    _BY_FUNCTION.setdefault(_loss.fn, []).append(_code)


def kernel_settings(
    fn: Callable[..., Any], operands: tuple[Tensor, ...], kwargs: Mapping[str, Any], reduction: str
) -> tuple[int, float, int] | str:
    """What the kernel takes after its tensors: code, parameter, reduction; or why it does not compute such a loss."""
    found = _code_of(fn, kwargs)
    if found is None:
        return f"no kernel computes {fn.__name__} of such arguments"
    x, target = operands
    if x.shape != target.shape or x.dtype != target.dtype:
        return "input and target differ in shape or dtype"
    if target.requires_grad and torch.is_grad_enabled():
        return "the target requires grad"
    if reduction == "batchmean":
        return "the kernel does not count rows"
    return (*found, REDUCTION_CODES.get(reduction, 0)) if x.numel() else "there are no elements"


def _code_of(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[int, float] | None:
    """The code of a loss with these keyword arguments, and its parameter; None where no kernel serves them."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    codes = _BY_FUNCTION.get(fn, ())
    if not codes or any(isinstance(value, Tensor) for value in given.values()):
        return None
    given = {**KERNEL_LOSSES[codes[0]].settings, **given}
    for code in codes:
        loss = KERNEL_LOSSES[code]
        name, default = loss.parameter or ("", 0.0)
        rest = {key: value for key, value in given.items() if key != name and key not in loss.unused}
        if rest != loss.settings:
            continue
        parameter = float(given.get(name, default))
        if fn is F.smooth_l1_loss and parameter == 0:
            # Without a smooth part it is the absolute difference.
            return _L1, 0.0
        # torch refuses what is not positive.
        return None if fn in (F.smooth_l1_loss, F.huber_loss) and not parameter > 0 else (code, parameter)
    return None


# -- the op ------------------------------------------------------------------------------------------------------------
def unreduced(x: Tensor, target: Tensor, code: int, parameter: float) -> Tensor:
    """The loss of each element, by torch."""
    loss = KERNEL_LOSSES[code]
    given = {**loss.settings, **({loss.parameter[0]: parameter} if loss.parameter else {})}
    out: Tensor = loss.fn(x, target, reduction="none", **given)
    return out


def reference(
    x: Tensor, target: Tensor, mask: Tensor, code: int, parameter: float, reduction: int
) -> tuple[Tensor, Tensor]:
    """The loss, and for a mean how many are kept, in plain torch operations."""
    out = unreduced(where_kept(x, mask, 0.0), where_kept(target, mask, 0.0), code, parameter)
    names = {number: name for name, number in REDUCTION_CODES.items()}
    kept = mask.expand(x.shape).sum() if reduction == REDUCTION_CODES["mean"] else mask.new_zeros(())
    return reduce(where_kept(out, mask, 0.0), mask, names[reduction]), kept.to(torch.float64)


def _fake(
    x: Tensor, target: Tensor, mask: Tensor, code: int, parameter: float, reduction: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(()) if reduction else empty_dense(x), x.new_empty((), dtype=torch.float64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """The gradient needs the operands themselves, and how many are kept."""
    x, target, mask, ctx.code, ctx.parameter, ctx.reduction = inputs
    ctx.mark_non_differentiable(output[1])
    # The count has no gradient, and to make zeros in the place of none costs a tiny backward pass a call.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, target, mask, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
    """The gradients of x and, by plain operations, of a target that requires one."""
    if grad is None:
        return None, None, None, None, None, None
    x, target, mask, kept = ctx.saved_tensors
    if torch.is_grad_enabled() or ctx.needs_input_grad[1]:
        required = [t for t, needed in zip((x, target), ctx.needs_input_grad, strict=False) if needed]
        with torch.enable_grad():
            bits = as_bits(kept_mask(mask, ctx.along, x.shape))
            out = reference(x, target, bits, ctx.code, ctx.parameter, ctx.reduction)[0]
        found = iter(torch.autograd.grad(out, required, grad, create_graph=torch.is_grad_enabled()))
        of_x, of_target = (next(found) if needed else None for needed in ctx.needs_input_grad[:2])
        return of_x, of_target, None, None, None, None
    op = torch.ops.maskwise.loss_fused_backward
    of_x = op(grad, x, target, mask, kept, ctx.code, ctx.parameter, ctx.reduction, ctx.along)
    return of_x, None, None, None, None, None


def _backward_reference(
    grad: Tensor, x: Tensor, target: Tensor, mask: Tensor, kept: Tensor, code: int, parameter: float, reduction: int
) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out, _ = reference(leaf, target, mask, code, parameter, reduction)
    return empty_dense(x).copy_(torch.autograd.grad(out, leaf, grad)[0])


def _work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel reads x, target and mask once; the idiom writes and reads the loss twice, once with the mask in it."""
    read, back = elements * (2 * size + 1), elements * size if grad else 0
    if route == "plain":
        return Work(calls=5, streamed=read + 4 * elements * size, fresh=2 * elements * size + 2 * back)
    return Work(calls=1, streamed=read, fresh=back)


define(
    "loss_fused_backward",
    "(Tensor grad, Tensor x, Tensor target, Tensor mask, Tensor kept, int code, float parameter, int reduction"
    f"{ALONG} -> Tensor",
    reference=_backward_reference,
    fake=lambda grad, x, *rest: empty_dense(x),
    gpu=FLOATING,
    gpu_from="maskwise.ops.loss.gpu:loss_backward",
)
element_loss = register(
    "loss",
    f"(Tensor x, Tensor target, Tensor mask, int code, float parameter, int reduction{ALONG} -> (Tensor, Tensor)",
    reference=reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    work=_work,
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from="maskwise.ops.loss.gpu:loss",
    fuses=True,
)


# -- the routes --------------------------------------------------------------------------------------------------------
#: Elements up to which gathering single ones is worth its calls.
_FEW_ELEMENTS = 1 << 11


def _by_kernel(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """The loss by its kernel; what the kernel cannot reduce is reduced from the unreduced loss."""

    def run(prepared: Prepared, operands: tuple[Tensor, ...], mask: MaskLike, kwargs: Mapping[str, Any]) -> Tensor:
        x, target = operands
        kept, along = as_operand(mask, target)
        out = op(x, target, kept, *prepared.kernel, along)[0]
        if prepared.reduction != "sequence":
            return out
        if along == 0 or out.dim() == 1:
            return reduce(out, as_bits(mask), "sequence")
        return mean_of_rows(out, count(out, mask, list(row_dims(out.shape)), False).expand(out.shape[:1]))

    return run


def _serves_kept(facts: Facts) -> str | None:
    return why_not_on_cpu(facts) if facts.detail.gathers else NOT_APPLICABLE


def _pays_kept(facts: Facts) -> str | None:
    return None if prod(facts.shape) <= _FEW_ELEMENTS else "gathering single elements pays for few of them only"


def _run_on_kept(prepared: Prepared, operands: tuple[Tensor, ...], bits: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """The loss of the kept elements alone, by torch."""
    fn, reduction = prepared.fn, prepared.reduction
    x, target = operands[0].masked_select(bits), operands[1].masked_select(bits)
    n = x.shape[0]
    if n == 0:
        # The sum of nothing is a zero that belongs to the graph.
        return x.sum() + target.sum()
    if fn is F.kl_div and reduction == "mean":
        # torch would warn that this mean is one.
        return fn(x, target, reduction="sum", **kwargs) / n  # type: ignore[no-any-return]
    return fn(x, target, reduction=reduction, **kwargs)  # type: ignore[no-any-return]


_bare, _fused, _ = element_loss.routes
ROUTES = (
    kernel_route(_bare, run=_by_kernel(_bare.run), skips=dropped_blocks),
    kernel_route(_fused, run=_by_kernel(_fused.run), skips=dropped_blocks),
    Route("kept", _run_on_kept, _serves_kept, pays=_pays_kept, reason="small: gathering what is kept is cheapest"),
)
