"""mw.loss: signature, checks, and the routes of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, mask_hint, need_dense
from maskwise.ops.backends import INTERVALS_ON
from maskwise.ops.loss import chunked, cross_entropy, element_losses, reference
from maskwise.ops.loss.denominator import Denominator, Scales, divide, wide_dtype
from maskwise.ops.loss.denominator import check as check_denominator
from maskwise.ops.loss.functional_losses import LOSSES, REQUIRED, LossFacts, LossSpec, Prepared, align
from maskwise.ops.operation import as_bits, report
from maskwise.ops.torch_private import has_dispatch_modes, is_tracing, is_transformed
from maskwise.plan import dispatch
from maskwise.plan.dispatch import Decision, Facts, Route, decide, is_observed

__all__ = ["loss"]

REDUCTIONS = ("none", "sum", "mean", "sequence")
#: The one more that torch has, for kl_div.
BATCHMEAN = "batchmean"

# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_is_grad_enabled, _is_autocast_enabled, _cached = torch.is_grad_enabled, torch.is_autocast_enabled, dispatch.cache.get
_is_any_forced, _is_any_observing, _forced = dispatch.is_any_forced, dispatch.is_any_observing, dispatch.forced


def loss(
    fn: Callable[..., Tensor],
    input: Tensor | Sequence[Tensor],  # (N, ...), for cross_entropy (N, C, ...) or (N, ..., C)
    target: Tensor | None,  # (N, ...)
    mask: MaskLike,  # broadcasts to the unreduced loss
    reduction: str = "mean",
    *,
    denominator: Denominator | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute any loss of torch.nn.functional, or your own, over kept elements.

    Dropped elements are replaced before the loss is computed: neither a NaN nor an out-of-range class under the mask
    reaches the loss or a gradient.

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
    >>> part = mw.loss(F.mse_loss, x, torch.ones(2, 2), keep, denominator=8)    # of a batch that keeps 8 elements
    >>> part                                                                    # (0 + 4 + 16) / 8
    tensor(2.5000)

    Args:
        fn: called as ``fn(input, target, reduction="none", **kwargs)``. Each element of what it returns may depend on
            its own elements of input and target only (for cross_entropy and such: on its own row of them).
        input: what ``fn`` takes first; or several tensors, for a loss of several inputs: ``(input1, input2)`` of
            margin_ranking_loss and cosine_embedding_loss, ``(anchor, positive)`` of triplet_margin_loss, whose
            ``negative`` is the target here. For cross_entropy and nll_loss with classes as target, logits may be
            (N, L, C) as models return them; where C and L are equal, they are torch's (N, C, L).
        target: what ``fn`` takes next; None for a loss without one.
        mask: a Mask or a bool tensor that broadcasts to the unreduced loss; True means keep. For cross_entropy with
            input (N, C, L) or (N, L, C) that is (N, L).
        reduction: "none" gives the unreduced loss, with 0 where it is dropped; "sum"; "mean" divides by how many are
            kept, or as torch does by their weights, where classes (or for mse_loss and l1_loss elements) have them;
            "sequence" is the mean of each row, which is an index of dim 0 with all further dims, and then the mean of
            the rows that keep something. kl_div has "batchmean" as well, as in torch: the sum divided by the number of
            rows, here of those that keep something.
        denominator: the divisor of the unnormalized sum, instead of the count of this call; for a call on one of
            several micro-batches or ranks. A window of `mw.accumulate`, which has counted all of them; a number; or a
            0-d tensor, which is not read on the host. The sum is over kept elements for "mean" and "batchmean"
            (weighted, if there are weights), and over the means of rows for "sequence". A window divides "mean" by its
            kept elements, the others by its rows with a kept element. Half precision returns float32.
        **kwargs: go to ``fn``, with torch's meaning. Where ``ignore_index`` is met, the element is dropped too. One
            with a value for each element of the loss, such as ``var`` of gaussian_nll_loss, is under the mask also;
            for your own functions, hand such tensors over in ``input``.

    Returns:
        A tensor of no dims; for "none", of the shape of the unreduced loss. Where nothing is kept, it is 0, with a
        gradient of 0.

    Raises:
        ShapeError: the mask does not broadcast to the unreduced loss, or the target not with the input; the denominator
            has dims.
        DtypeError: the mask is not bool; an input is not a tensor; ``fn`` does not take ``reduction``; the denominator
            is not a number.
        DeviceError: the mask, or another input, is on another device than the first input.
        ArgumentError: a reduction that does not exist, a loss that is not one of elements, another number of tensors
            than the loss takes, a tensor that is nested or sparse, or a denominator that is negative, or that comes
            with a reduction that divides by nothing.
        OutOfRangeError: a kept target is a class that does not exist (on a GPU the loss is NaN instead).
    """
    if isinstance(fn, functools.partial) and not fn.args:
        return loss(fn.func, input, target, mask, reduction, denominator=denominator, **{**fn.keywords, **kwargs})
    if (fn is F.cross_entropy or fn is F.nll_loss) and _is_classes_last(input, target):
        input = input.movedim(-1, 1)  # type: ignore[union-attr]
        # torch's nll_loss of four dims has no gradient of other strides.
        input = input.contiguous() if fn is F.nll_loss and input.dim() == 4 else input
    if denominator is not None:
        return _of_whole_batch(fn, input, target, mask, reduction, denominator, kwargs)
    traced = is_tracing()
    along, kept = None, mask
    if isinstance(mask, Mask):
        along = None if traced else mask._along
        kept = mask.to_bool() if along is None else mask
    operands: tuple[Tensor, ...]
    key = decision = None
    if not traced:
        try:
            rest = () if target is None else (target,)
            operands = (input, *rest) if isinstance(input, Tensor) else (*input, *rest)
            key = _key(fn, operands, kept, along, reduction, kwargs)
            decision = _cached(key)
        except (AttributeError, IndexError, RuntimeError, TypeError):
            # Not tensors, or nested ones without a shape, which the checks report in full; or sizes that are symbols: a
            # graph is made of the call, as by make_fx.
            key, traced = None, has_dispatch_modes()
    if decision is None:
        # What the checks look at is known of intervals without making bits of them.
        stands_in: Any = kept
        if along is not None:
            stands_in = torch.empty((), dtype=torch.bool, device=mask.device).expand(mask.shape)
        operands = _check(fn, input, target, stands_in, reduction, kwargs)
        spec = LOSSES.get(fn)
        if spec is None:
            return _user_loss(fn, operands, as_bits(mask), mask, reduction, kwargs)
        prepared = Prepared(fn, spec, reduction)
        if traced:
            return reference.loss(prepared, operands, as_bits(mask), kwargs)
        decision = _decide(prepared, operands, stands_in, along, kwargs)
        if key is not None:
            dispatch.cache[key] = decision
    if along is not None and not decision.prepared.intervals:
        kept = as_bits(mask)
    if _is_any_observing() and (planned := report(decision, operands[0], kept, mask)):
        return planned  # type: ignore[return-value]
    out: Tensor = decision.run(decision.prepared, operands, kept, kwargs)
    return out


def _is_classes_last(x: object, target: object) -> bool:
    """Whether logits are (N, ..., C) for a target (N, ...) of classes, and cannot be torch's (N, C, ...).

    >>> target = torch.zeros(2, 5)
    >>> _is_classes_last(torch.zeros(2, 5, 9), target), _is_classes_last(torch.zeros(2, 5, 5), target)
    (True, False)
    """
    if not isinstance(x, Tensor) or not isinstance(target, Tensor) or x.is_nested or target.is_nested:
        return False
    shape, classes = x.shape, target.shape
    return len(shape) > 2 and shape[:-1] == classes and shape[2:] != classes[1:]


def _of_whole_batch(
    fn: Callable[..., Tensor],
    input: Tensor | Sequence[Tensor],
    target: Tensor | None,
    mask: MaskLike,
    reduction: str,
    denominator: Denominator,
    kwargs: dict[str, Any],
) -> Tensor:
    """The loss as a part of a mean over several calls: its total, divided by a denominator that is none of its own."""
    if reduction not in ("mean", "sequence", BATCHMEAN):
        must, hint = 'be "mean" or "sequence" with a denominator', 'reduction="mean", which is the sum / denominator'
        raise ArgumentError(say("loss", "reduction", must=must, got=repr(reduction), hint=hint))
    first = input if isinstance(input, Tensor) else input[0] if isinstance(input, Sequence) and input else None
    # A sum of many halves does not fit a half.
    halves = isinstance(first, Tensor) and first.dtype.itemsize < 4
    if not isinstance(denominator, Scales):
        check_denominator("loss", denominator, first.device if isinstance(first, Tensor) else torch.device("cpu"))
    if reduction == "sequence":
        out = loss(fn, input, target, mask, "none", **kwargs)
        if not isinstance(out, Tensor):
            return out
        operands = _check(fn, input, target, as_bits(mask), reduction, kwargs)
        total = reference.sum_of_row_means(LOSSES.get(fn), fn, operands, as_bits(mask), kwargs, out)
        return divide("loss", total, denominator, "sequence")
    out = loss(fn, input, target, mask, "none" if halves else "sum", **kwargs)
    if not isinstance(out, Tensor):
        # A plan.
        return out
    total = out.sum(dtype=wide_dtype(out.dtype)) if halves else out
    return divide("loss", total, denominator, "sequence" if reduction == BATCHMEAN else "token")


def _key(
    fn: Callable[..., Tensor],
    operands: tuple[Tensor, ...],
    mask: Any,
    along: int | None,
    reduction: str,
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    """What a decision is made of. Of an object among the keyword arguments, its type: the cache must not own it."""
    device = operands[0].device.type
    key: list[Any] = [
        "loss", fn, reduction, along, _is_grad_enabled(), is_transformed(), _is_any_forced() and _forced(),
        device in _KERNELS and _is_autocast_enabled(device),
    ]  # fmt: skip
    if along is not None:
        key += (mask.shape, mask.device)
    for x in operands if along is not None else (*operands, mask):
        key += (type(x), x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            x = value
            key += (name, type(x), x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad)
        else:
            key += (name, value if type(value) in _NUMBERS else type(value))
    return tuple(key)


_NUMBERS = frozenset({int, float, bool, type(None)})
#: The devices on which losses have kernels.
_KERNELS = ("cpu", "cuda")
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


# -- the routes --------------------------------------------------------------------------------------------------------
def _pays_plain(facts: Facts) -> str | None:
    """Why plain torch operations would not pay: the loss has a kernel, which is preferred whatever is predicted."""
    kernels = (route for route in _ROUTES[facts.detail.fn] if route.name in ("bare", "fused"))
    if any(route.refuses(facts) is None for route in kernels):
        return "it would write the loss of everything, and read it again"
    return None


_plain_work = element_losses.element_loss.routes[-1].work
_ANY_LOSS = (
    *chunked.ROUTES,
    Route("plain", reference.loss, work=_plain_work, pays=_pays_plain, transforms=True),
)
_USER_LOSS = (
    Route("plain", reference.user_loss, work=_plain_work, reason="nothing is known of this loss", transforms=True),
)


def _own_routes(fn: Callable[..., Any], spec: LossSpec) -> tuple[Route, ...]:
    if spec.alignment == "classes":
        return cross_entropy.NLL_ROUTES if fn is F.nll_loss else cross_entropy.ROUTES
    return element_losses.ROUTES if spec.alignment == "elements" else ()


#: In order of preference.
_ROUTES = {fn: (*_own_routes(fn, spec), *_ANY_LOSS) for fn, spec in LOSSES.items()}
_KERNEL_SETTINGS = {"elements": element_losses.kernel_settings, "classes": cross_entropy.kernel_settings}


def _decide(
    prepared: Prepared, operands: tuple[Tensor, ...], bits: Tensor, along: int | None, kwargs: dict[str, Any]
) -> Decision:
    """Collect the facts of a call of one of torch's losses, and decide it; ``bits`` are not read."""
    fn, spec, reduction, *_ = prepared
    x, transformed = operands[0], is_transformed()
    # What is ignored is dropped by values, which no route depends on.
    settings = {**kwargs, "ignore_index": None} if spec.divides_by == "classes" else kwargs
    aligned = align(fn, spec, operands, bits, settings, warns=False)
    given = [value for value in kwargs.values() if isinstance(value, Tensor)]
    obstacle = _why_plain((*operands, bits, *given))
    settings_of = _KERNEL_SETTINGS.get(spec.alignment)
    kernel = "it has no kernel" if settings_of is None else settings_of(fn, operands, kwargs, reduction)
    is_cut = obstacle is None and not transformed and x.device.type == "cpu"
    chunks = chunked.chunk(aligned, reduction) if is_cut else None
    detail = LossFacts(
        fn,
        obstacle,
        kernel if isinstance(kernel, str) else None,
        gathers=not given
        and len(operands) == len(spec.fills) == 2
        and operands[1].shape == x.shape
        and reduction in ("mean", "sum"),
        chunks=None if chunks is None else "rows" if chunks.rows else "cells",
        largest=max(each.numel() for each in aligned.tensors),
    )
    # A mask that is broadcast along the dim of its intervals has one byte for all of it.
    is_along = along is not None and x.device.type in INTERVALS_ON and bits.shape[along] == aligned.shape[along]
    facts = _facts(x, transformed=transformed, mask="intervals" if is_along else "bits", detail=detail)
    decision = decide(facts, _ROUTES[fn])
    decision.prepared = prepared._replace(
        kernel=() if isinstance(kernel, str) else kernel, intervals=is_along and decision.route.intervals
    )
    return decision


def _facts(x: Tensor, **more: Any) -> Facts:
    grad = x.requires_grad and _is_grad_enabled()
    return Facts("loss", tuple(x.shape), x.dtype, x.device.type, grad=grad, **more)


def _why_plain(tensors: Sequence[Tensor]) -> str | None:
    """Why plain torch operations alone can serve a call of these tensors, whatever the route, or None."""
    device = tensors[0].device
    if device.type in _KERNELS and _is_autocast_enabled(device.type):
        return "autocast decides on dtypes inside of the loss"
    if not all(type(x) in _PLAIN_TYPES for x in tensors):
        return "an operand is a tensor subclass"
    return None if all(x.device == device for x in tensors) else "tensors are on several devices"


def _user_loss(
    fn: Callable[..., Tensor],
    operands: tuple[Tensor, ...],
    bits: Tensor,
    mask: MaskLike,
    reduction: str,
    kwargs: dict[str, Any],
) -> Tensor:
    """A loss of which nothing is known. There is nothing to choose, so it is decided only where that is reported."""
    if is_observed() and (planned := report(decide(_facts(operands[0]), _USER_LOSS), operands[0], bits, mask)):
        return planned  # type: ignore[return-value]
    return reference.user_loss(fn, operands, bits, kwargs, reduction)


# -- checks ------------------------------------------------------------------------------------------------------------
def _check(
    fn: Callable[..., Tensor], input: Any, target: Any, bits: Any, reduction: str, kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """The operands in the order in which the loss takes them, or raise."""
    operands = _tensors_of(input, target, reduction)
    _check_arguments(fn, bits, reduction, kwargs)
    for name, value in (*(("input", each) for each in operands), ("mask", bits), *kwargs.items()):
        need_dense("loss", name, value)
    _check_devices(operands)
    if fn in LOSSES:
        _check_number(fn, operands, kwargs)
    return operands


def _tensors_of(input: Tensor | Sequence[Tensor], target: Tensor | None, reduction: object) -> tuple[Tensor, ...]:
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


def _check_devices(operands: tuple[Tensor, ...]) -> None:
    """Raise where operands are on several devices; a single number may be on the CPU, as in torch."""
    wanted = operands[0].device
    for other in operands[1:]:
        if other.device != wanted and other.dim():
            must, hint = f"be on the first input's device {wanted}", "target.to(input.device)"
            raise DeviceError(say("loss", "target", must=must, got=other.device, hint=hint))


def _check_number(fn: Callable[..., Tensor], operands: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
    """Raise unless one of torch's losses gets each tensor that it takes, and no more."""
    takes = REQUIRED[fn]
    given, missing = len(operands), [name for name in takes[len(operands) :] if name not in kwargs]
    if given <= len(takes) and not missing:
        return
    name, inputs = fn.__name__, ", ".join(takes[:-1])
    first = f"({inputs})" if len(takes) > 2 else inputs
    must = f"make {len(takes)} tensors with `target`, since {name} takes {', '.join(takes)}"
    raise ArgumentError(
        say("loss", "input", must=must, got=f"{given} in all", hint=f"mw.loss(F.{name}, {first}, {takes[-1]}, mask)")
    )


def _check_arguments(fn: Callable[..., Tensor], bits: Tensor, reduction: str, kwargs: dict[str, Any]) -> None:
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
