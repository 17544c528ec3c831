"""The losses of single elements that have a kernel, as one registered op: schema, fake, gradient, work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.ops.backends import FLOATING
from maskwise.ops.loss.call import harmless
from maskwise.ops.loss.reference import reduce
from maskwise.ops.operation import define, register
from maskwise.ops.primitives import empty_dense
from maskwise.plan.cost import Work

__all__ = ["REDUCTIONS", "Code", "code_of", "elements"]

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}


class Served(NamedTuple):
    """A loss that has a kernel."""

    fn: Callable[..., Any]
    #: What its keyword arguments must be, where they are given; a function with two kernels has two entries.
    settings: Mapping[str, Any] = {}
    #: The keyword argument that the kernel takes as its parameter, and what it is unless given.
    parameter: tuple[str, float] | None = None
    #: Keyword arguments that make no difference.
    idle: tuple[str, ...] = ()


#: In the order of the codes of loss_kernels.h. The first of a function's entries holds torch's defaults.
SERVED = (
    Served(F.mse_loss),
    Served(F.l1_loss),
    Served(F.smooth_l1_loss, parameter=("beta", 1.0)),
    Served(F.huber_loss, parameter=("delta", 1.0)),
    Served(F.binary_cross_entropy_with_logits),
    Served(F.kl_div, {"log_target": False}),
    Served(F.kl_div, {"log_target": True}),
    Served(F.poisson_nll_loss, {"log_input": True, "full": False}, idle=("eps",)),
    Served(F.poisson_nll_loss, {"log_input": False, "full": False}, parameter=("eps", 1e-8)),
    Served(F.soft_margin_loss),
    Served(F.hinge_embedding_loss, parameter=("margin", 1.0)),
)
_L1 = 1
_BY_FUNCTION: dict[Callable[..., Any], list[int]] = {}
for _code, _served in enumerate(SERVED):
    _BY_FUNCTION.setdefault(_served.fn, []).append(_code)


class Code(NamedTuple):
    """A loss as the kernel knows it: its number and its one parameter."""

    code: int
    parameter: float


def code_of(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> Code | None:
    """The code of a loss with these keyword arguments, or None where no kernel serves them."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    codes = _BY_FUNCTION.get(fn, ())
    if not codes or any(isinstance(value, Tensor) for value in given.values()):
        return None
    given = {**SERVED[codes[0]].settings, **given}
    for code in codes:
        served = SERVED[code]
        name, usual = served.parameter or ("", 0.0)
        rest = {key: value for key, value in given.items() if key != name and key not in served.idle}
        if rest == served.settings:
            return checked(fn, Code(code, float(given.get(name, usual))))
    return None


def checked(fn: Callable[..., Any], found: Code) -> Code | None:
    """A code, unless it is one that torch refuses or treats in another way."""
    if fn is F.smooth_l1_loss and found.parameter == 0:
        # Without a smooth part it is the absolute difference.
        return Code(_L1, 0.0)
    if fn in (F.smooth_l1_loss, F.huber_loss):
        return found if found.parameter > 0 else None
    return found


def unreduced(x: Tensor, target: Tensor, code: int, parameter: float) -> Tensor:
    """The loss of each element, by torch."""
    served = SERVED[code]
    given = {**served.settings, **({served.parameter[0]: parameter} if served.parameter else {})}
    out: Tensor = served.fn(x, target, reduction="none", **given)
    return out


def plain(
    x: Tensor, target: Tensor, mask: Tensor, code: int, parameter: float, reduction: int
) -> tuple[Tensor, Tensor]:
    """The loss, and for a mean how many are kept, in plain torch operations."""
    out = unreduced(harmless(x, mask, 0.0), harmless(target, mask, 0.0), code, parameter)
    names = {number: name for name, number in REDUCTIONS.items()}
    kept = mask.expand(x.shape).sum() if reduction == REDUCTIONS["mean"] else mask.new_zeros(())
    return reduce(harmless(out, mask, 0.0), mask, names[reduction]), kept.to(torch.float64)


def fake(x: Tensor, target: Tensor, mask: Tensor, code: int, parameter: float, reduction: int) -> tuple[Tensor, Tensor]:
    """The results without their data."""
    return x.new_empty(()) if reduction else empty_dense(x), x.new_empty((), dtype=torch.float64)


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the gradient needs: the operands themselves, and how many are kept."""
    x, target, mask, ctx.code, ctx.parameter, ctx.reduction = inputs
    ctx.mark_non_differentiable(output[1])
    # The count has no gradient, and to make zeros in the place of none costs a tiny backward pass a call.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, target, mask, output[1])


def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
    """The gradients of x and, by plain operations, of a target that wants one."""
    if grad is None:
        return None, None, None, None, None, None
    x, target, mask, kept = ctx.saved_tensors
    if torch.is_grad_enabled() or ctx.needs_input_grad[1]:
        wanted = [t for t, want in zip((x, target), ctx.needs_input_grad, strict=False) if want]
        with torch.enable_grad():
            out = plain(x, target, mask, ctx.code, ctx.parameter, ctx.reduction)[0]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=torch.is_grad_enabled()))
        of_x, of_target = (next(found) if want else None for want in ctx.needs_input_grad[:2])
        return of_x, of_target, None, None, None, None
    op = torch.ops.maskwise.loss_fused_backward
    return op(grad, x, target, mask, kept, ctx.code, ctx.parameter, ctx.reduction), None, None, None, None, None


def plain_backward(
    grad: Tensor, x: Tensor, target: Tensor, mask: Tensor, kept: Tensor, code: int, parameter: float, reduction: int
) -> Tensor:
    """The gradient of x, where there is no kernel."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out, _ = plain(leaf, target, mask, code, parameter, reduction)
    return empty_dense(x).copy_(torch.autograd.grad(out, leaf, grad)[0])


def fake_backward(
    grad: Tensor, x: Tensor, target: Tensor, mask: Tensor, kept: Tensor, code: int, parameter: float, reduction: int
) -> Tensor:
    """The gradient of x without its data."""
    return empty_dense(x)


def work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel reads x, target and mask once; the idiom writes and reads the loss twice, once with the mask in it."""
    read, back = elements * (2 * size + 1), elements * size if grad else 0
    if route == "plain":
        return Work(calls=5, streamed=read + 4 * elements * size, fresh=2 * elements * size + 2 * back)
    return Work(calls=1, streamed=read, fresh=back)


define(
    "loss_fused_backward",
    "(Tensor grad, Tensor x, Tensor target, Tensor mask, Tensor kept, int code, float parameter, int reduction)"
    " -> Tensor",
    reference=plain_backward,
    fake=fake_backward,
    gpu=FLOATING,
    gpu_from="maskwise.ops.loss.gpu:loss_backward",
)
elements = register(
    "loss",
    "(Tensor x, Tensor target, Tensor mask, int code, float parameter, int reduction) -> (Tensor, Tensor)",
    reference=plain,
    fake=fake,
    setup_context=remember,
    backward=backward,
    work=work,
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from="maskwise.ops.loss.gpu:loss",
    fuses=True,
)
