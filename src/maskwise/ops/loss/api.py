"""The masked loss that users call: check the arguments, plan, run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, mask_hint, need_dense
from maskwise.ops.loss import reference, unknown
from maskwise.ops.loss.call import prepare
from maskwise.ops.loss.kinds import KINDS, TAKES
from maskwise.ops.loss.quick import find
from maskwise.ops.loss.routes import choose
from maskwise.ops.torch_private import is_tracing
from maskwise.plan import Plan
from maskwise.plan.dispatch import Skips, is_observed
from maskwise.plan.explain import record
from maskwise.plan.planner import with_cost

__all__ = ["loss"]

REDUCTIONS = ("none", "sum", "mean", "sequence")
BATCHMEAN = "batchmean"
"""The one more that torch has, for kl_div."""


def loss(
    fn: Callable[..., Tensor],
    input: Tensor | Sequence[Tensor],  # (N, ...), for cross_entropy (N, C, ...)
    target: Tensor | None,  # (N, ...)
    mask: MaskLike,  # broadcasts to the unreduced loss
    reduction: str = "mean",
    **kwargs: Any,
) -> Tensor:
    """Any loss of torch.nn.functional, or your own, over what the mask keeps.

    What is dropped is made harmless before the loss sees it: under the mask, neither NaN nor a class that does not
    exist does any harm to the loss or to a gradient.

    >>> import torch, torch.nn.functional as F, maskwise as mw
    >>> logits = torch.zeros(2, 4, 3)                       # 2 sequences, 4 classes, 3 tokens
    >>> target = torch.tensor([[1, 2, 99999], [3, -1, -1]])
    >>> mask = mw.Mask.from_lengths([2, 1], max_len=3)
    >>> mw.loss(F.cross_entropy, logits, target, mask)
    tensor(1.3863)
    >>> x = torch.tensor([[1.0, 3.0], [5.0, float("nan")]])
    >>> keep = torch.tensor([[True, True], [True, False]])
    >>> mw.loss(F.mse_loss, x, torch.ones(2, 2), keep, reduction="none")
    tensor([[ 0.,  4.],
            [16.,  0.]])
    >>> mw.loss(F.mse_loss, x, torch.ones(2, 2), keep, reduction="sequence")    # (4 / 2 + 16 / 1) / 2
    tensor(9.)
    >>> better, worse = torch.tensor([1.0, 5.0]), torch.tensor([3.0, float("nan")])
    >>> mw.loss(F.margin_ranking_loss, (better, worse), torch.ones(2), torch.tensor([True, False]))
    tensor(2.)

    Args:
        fn: called as ``fn(input, target, reduction="none", **kwargs)``. Each element of what it returns may depend on
            its own elements of input and target only (for cross_entropy and such: on its own row of them).
        input: what ``fn`` takes first; or several tensors, for a loss of several inputs: ``(input1, input2)`` of
            margin_ranking_loss and cosine_embedding_loss, ``(anchor, positive)`` of triplet_margin_loss, whose
            ``negative`` is the target here.
        target: what ``fn`` takes next; None for a loss without one.
        mask: a Mask or a bool tensor that broadcasts to the unreduced loss; True means keep. For cross_entropy with
            input (N, C, L) that is (N, L).
        reduction: "none" gives the unreduced loss, with 0 where it is dropped; "sum"; "mean" divides by how many are
            kept, or as torch does by their weights, where classes (or for mse_loss and l1_loss elements) have them;
            "sequence" is the mean of each row, which is an index of dim 0 with all further dims, and then the mean of
            the rows that keep something. kl_div has "batchmean" as well, as in torch: the sum divided by the number of
            rows, here of those that keep something.
        **kwargs: go to ``fn``, with torch's meaning. Where ``ignore_index`` is met, the element is dropped too. One
            with a value for each element of the loss, such as ``var`` of gaussian_nll_loss, is made harmless also; for
            your own functions, hand such tensors over in ``input``.

    Returns:
        A tensor of no dims; for "none", of the shape of the unreduced loss. Where nothing is kept, it is 0, with a
        gradient of 0.

    Raises:
        ShapeError: the mask does not broadcast to the unreduced loss, or the target not with the input.
        DtypeError: the mask is not bool; an input is not a tensor; ``fn`` does not take ``reduction``.
        DeviceError: the mask, or another input, is on another device than the first input.
        ArgumentError: a reduction that does not exist, a loss that is not one of elements, another number of tensors
            than the loss takes, or a tensor that is nested or sparse.
        OutOfRangeError: a kept target is a class that does not exist (on a GPU the loss is NaN instead).
    """
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    compiling = is_tracing()
    if not compiling and type(reduction) is str and reduction in REDUCTIONS:
        quick = find(fn, input, target, bits, reduction, kwargs)
        if quick is not None:
            if is_observed():
                x, skips = cast(Tensor, input), quick.skips
                plan = quick.plan if skips is None else replace(quick.plan, skips=skips(x, bits))
                if planned := told(plan, x, mask):
                    return planned  # type: ignore[return-value]
            return quick.run(input, target, bits, kwargs.get("weight"))
    if isinstance(fn, functools.partial) and not fn.args:
        return loss(fn.func, input, target, mask, reduction, **{**fn.keywords, **kwargs})
    operands = tensors_of(input, target, reduction)
    check(fn, bits, reduction, kwargs)
    for name, value in (*(("input", each) for each in operands), ("mask", bits), *kwargs.items()):
        need_dense("loss", name, value)
    check_devices(operands)
    kind = KINDS.get(fn)
    if kind is not None:
        check_number(fn, operands, kwargs)
    if kind is None:
        plan = Plan("loss", "plain", "nothing is known of this loss", 0.0)
        if is_observed() and (planned := told(plan, operands[0], mask)):
            return planned  # type: ignore[return-value]
        return unknown.loss(fn, operands, bits, kwargs, reduction)
    call = prepare(fn, kind, operands, bits, kwargs)
    if compiling:
        return reference.loss(call, reduction)
    plan, run = choose(call, reduction)
    if is_observed() and (planned := told(plan, operands[0], mask)):
        return planned  # type: ignore[return-value]
    return run()


def told(plan: Plan, x: Tensor, mask: MaskLike) -> Plan | None:
    """Tell whoever listens of one call, with what it costs."""
    # A GPU's kernels load what is dropped, too.
    plan = plan if x.is_cpu else replace(plan, skips=Skips.NOTHING)
    return record(with_cost(plan, x, grad=x.requires_grad and torch.is_grad_enabled()), x, mask)


def tensors_of(input: Tensor | Sequence[Tensor], target: Tensor | None, reduction: object) -> tuple[Tensor, ...]:
    """The operands in the order in which the loss takes them, or raise."""
    if isinstance(reduction, (Tensor, Mask)):
        must, hint = "hold every input of a loss of several", "mw.loss(fn, (input1, input2), target, mask)"
        raise ArgumentError(say("loss", "input", must=must, got="a tensor too many behind it", hint=hint))
    inputs = (input,) if isinstance(input, Tensor) else input
    if not isinstance(inputs, Sequence) or not inputs or not all(isinstance(x, Tensor) for x in inputs):
        must, hint = "be a tensor, or several", "torch.as_tensor(input)"
        raise DtypeError(say("loss", "input", must=must, got=type(input).__name__, hint=hint))
    if target is None:
        return tuple(inputs)
    if not isinstance(target, Tensor):
        hint = "torch.as_tensor(target)"
        raise DtypeError(say("loss", "target", must="be a tensor or None", got=type(target).__name__, hint=hint))
    return (*inputs, target)


def check_devices(operands: tuple[Tensor, ...]) -> None:
    """Raise where operands are on several devices; a single number may be on the CPU, as in torch."""
    wanted = operands[0].device
    for other in operands[1:]:
        if other.device != wanted and other.dim():
            must, hint = f"be on the first input's device {wanted}", "target.to(input.device)"
            raise DeviceError(say("loss", "target", must=must, got=other.device, hint=hint))


def check_number(fn: Callable[..., Tensor], operands: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
    """Raise unless one of torch's losses gets each tensor that it takes, and no more."""
    takes = TAKES[fn]
    given, missing = len(operands), [name for name in takes[len(operands) :] if name not in kwargs]
    if given <= len(takes) and not missing:
        return
    name, inputs = fn.__name__, ", ".join(takes[:-1])
    first = f"({inputs})" if len(takes) > 2 else inputs
    must = f"make {len(takes)} tensors with `target`, since {name} takes {', '.join(takes)}"
    raise ArgumentError(
        say("loss", "input", must=must, got=f"{given} in all", hint=f"mw.loss(F.{name}, {first}, {takes[-1]}, mask)")
    )


def check(fn: Callable[..., Tensor], bits: Tensor, reduction: str, kwargs: dict[str, Any]) -> None:
    """Raise where an argument cannot be meant."""
    if not isinstance(bits, Tensor):
        hint = mask_hint(bits, "target.shape")
        raise DtypeError(say("loss", "mask", must=MUST, got=type(bits).__name__, hint=hint))
    if bits.dtype is not torch.bool:
        raise DtypeError(say("loss", "mask", must=MUST, got=bits.dtype, hint=mask_hint(bits)))
    if reduction not in REDUCTIONS and not (reduction == BATCHMEAN and fn is F.kl_div):
        must, hint = f"be one of {', '.join(map(repr, REDUCTIONS))}", 'reduction="mean"'
        raise ArgumentError(say("loss", "reduction", must=must, got=repr(reduction), hint=hint))
    for legacy in ("size_average", "reduce"):
        if kwargs.get(legacy) is not None:
            hint = 'reduction="mean", "sum", "sequence" or "none"'
            raise ArgumentError(say("loss", legacy, must="not be given", got=kwargs[legacy], hint=hint))
    if not callable(fn):
        raise DtypeError(say("loss", "fn", must="be a function", got=type(fn).__name__, hint="F.mse_loss"))
    if fn is F.ctc_loss:
        hint = "F.ctc_loss(log_probs[:, keep], targets[keep], input_lengths[keep], target_lengths[keep])"
        must = "give a loss for each element of its input"
        raise ArgumentError(say("loss", "fn", must=must, got="ctc_loss", hint=hint))
    if isinstance(fn, torch.nn.Module) and hasattr(fn, "reduction"):
        hint = "F.cross_entropy instead of nn.CrossEntropyLoss(), with its options as keyword arguments"
        must = 'be a function that takes reduction="none"'
        raise DtypeError(say("loss", "fn", must=must, got=type(fn).__name__, hint=hint))
