"""Cross entropy with a class for each position as target, as a registered op: schema, fake, gradient, work.

The kernel reads a kept position once in each direction, and a dropped one never where its classes lie together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.errors import OutOfRangeError, say
from maskwise.ops.backends import FLOATING
from maskwise.ops.loss.call import harmless
from maskwise.ops.loss.reference import reduce
from maskwise.ops.loss.registered import REDUCTIONS
from maskwise.ops.operation import define, register
from maskwise.plan.cost import Work

__all__ = ["loss"]


def plain(
    x: Tensor,  # (N, C, ...)
    target: Tensor,  # (N, ...), int64
    mask: Tensor,  # broadcasts to target
    weight: Tensor | None,  # (C,), without smoothing
    ignored: int,
    smoothing: float,
    reduction: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss; the log of the sum of exponentials of each position; by what a mean divides, and -1.

    The kernel has the first position with a class that does not exist in the place of the -1; torch raises.
    """
    keep = mask & (target != ignored)
    clean, classes = harmless(x, keep.unsqueeze(1), 0.0), harmless(target, keep, 0)
    out = F.cross_entropy(clean, classes, weight, reduction="none", label_smoothing=smoothing)
    divisors = None if weight is None else weight[classes]
    names = {number: name for name, number in REDUCTIONS.items()}
    with torch.no_grad():
        sums = harmless(torch.logsumexp(clean.double(), 1), keep, 0.0)
        divisor = (keep if divisors is None else harmless(divisors, keep, 0.0)).sum(dtype=torch.float64)
        facts = torch.stack((divisor, divisor.new_full((), -1.0)))
    return reduce(harmless(out, keep, 0.0), keep, names[reduction], divisors), sums, facts


def fake(
    x: Tensor,
    target: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    ignored: int,
    smoothing: float,
    reduction: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results without their data."""
    sums, facts = x.new_empty(target.shape, dtype=torch.float64), x.new_empty(2, dtype=torch.float64)
    return x.new_empty(() if reduction else target.shape), sums, facts


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """What the gradient needs: the operands themselves, and one number for each position."""
    *operands, ctx.ignored, ctx.smoothing, ctx.reduction = inputs
    ctx.mark_non_differentiable(*output[1:])
    # They have no gradient, and to make zeros in the place of none costs a tiny backward pass two calls.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *output[1:])


def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, None, None, None, None, None, None]:
    """The gradient of x."""
    if grad is None:
        return None, None, None, None, None, None, None
    x, target, mask, weight, sums, facts = ctx.saved_tensors
    if torch.is_grad_enabled():
        # The gradient is to be differentiated again, which torch can do with what it knows.
        out = plain(x, target, mask, weight, ctx.ignored, ctx.smoothing, ctx.reduction)[0]
        (of_x,) = torch.autograd.grad(out, x, grad, create_graph=True)
    else:
        op = torch.ops.maskwise.cross_entropy_fused_backward.default
        settings = (ctx.ignored, ctx.smoothing, ctx.reduction)
        of_x = op(grad.contiguous(), x, target, mask, weight, sums, facts, *settings)
    return of_x, None, None, None, None, None, None


def plain_backward(
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
    """The gradient of x, where there is no kernel."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = plain(leaf, target, mask, weight, ignored, smoothing, reduction)[0]
    return like(x).copy_(torch.autograd.grad(out, leaf, grad)[0])


def fake_backward(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """The gradient of x without its data."""
    return like(x)


def like(x: Tensor) -> Tensor:
    """Room for a gradient: with the classes next to each other if x has them so, else contiguous."""
    if x.stride(1) == 1:
        return x.new_empty((*x.shape[:1], *x.shape[2:], x.shape[1])).movedim(-1, 1)
    return x.new_empty(x.shape)


def work(route: str, elements: int, size: int, grad: bool) -> Work:
    """The kernel reads x once, and once more for a gradient; torch writes the logarithms of softmax too."""
    read, back = elements * size, elements * size if grad else 0
    if route == "plain":
        return Work(calls=7, streamed=4 * read, fresh=2 * read + 2 * back)
    return Work(calls=1, streamed=read + back, fresh=back)


define(
    "cross_entropy_fused_backward",
    "(Tensor grad, Tensor x, Tensor target, Tensor mask, Tensor? weight, Tensor sums, Tensor facts,"
    " int ignored, float smoothing, int reduction) -> Tensor",
    reference=plain_backward,
    fake=fake_backward,
    gpu=FLOATING,
    gpu_from="maskwise.ops.loss.gpu:cross_entropy_backward",
)
_op = register(
    "cross_entropy",
    "(Tensor x, Tensor target, Tensor mask, Tensor? weight, int ignored, float smoothing, int reduction)"
    " -> (Tensor, Tensor, Tensor)",
    reference=plain,
    fake=fake,
    setup_context=remember,
    backward=backward,
    work=work,
    cpu=FLOATING,
    gpu=FLOATING,
    gpu_from="maskwise.ops.loss.gpu:cross_entropy",
    fuses=True,
)


def loss(
    grad: bool,
    x: Tensor,
    target: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    ignored: int,
    smoothing: float,
    reduction: int,
) -> Tensor:
    """Cross entropy by its kernel, in eager mode.

    Raises:
        OutOfRangeError: a kept position has a class that does not exist.
    """
    if x.stride(1) != 1 and not x.is_contiguous():
        x = x.contiguous()
    run = _op.route("fused" if grad else "bare")
    out, _, facts = run(x, target, mask, weight, ignored, smoothing, reduction)
    # To look would make a GPU wait: there a class that does not exist makes the loss NaN.
    stray = int(facts.tolist()[1]) if x.device.type == "cpu" else -1
    if stray >= 0:
        must, got = f"name a class in [0, {x.shape[1] - 1}] where it is kept", target.reshape(-1)[stray].item()
        hint = f"mask & (target >= 0) & (target < {x.shape[1]}), or ignore_index={got}"
        raise OutOfRangeError(say("loss", "target", must=must, got=got, hint=hint))
    return out  # type: ignore[no-any-return]
