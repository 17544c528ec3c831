"""mw.linear_cross_entropy: signature, checks, and the routes of a call."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, check, input_hint, need_dense
from maskwise.ops.loss import kept_rows
from maskwise.ops.loss.denominator import Denominator, divide
from maskwise.ops.loss.kept_rows import Settings, check_classes
from maskwise.ops.loss.reference import scales
from maskwise.ops.operation import as_bits
from maskwise.ops.primitives import where_kept
from maskwise.ops.torch_private import has_dispatch_modes, is_tracing, is_transformed
from maskwise.plan.dispatch import Facts, Plan, Route, Skips, decide, decide_in_graph, is_observed
from maskwise.plan.explain import record

__all__ = ["linear_cross_entropy"]

_OP = "linear_cross_entropy"
REDUCTIONS = ("none", "sum", "mean", "sequence")
#: Logits below which a pass over chunks takes longer than to compute all of them, since it takes more calls.
_FEW_LOGITS = 1 << 15


def linear_cross_entropy(
    hidden: Tensor,  # (..., features)
    weight: Tensor,  # (classes, features)
    target: Tensor,  # (...)
    mask: MaskLike | None,  # broadcasts to target
    bias: Tensor | None = None,  # (classes,)
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,  # (classes,)
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    denominator: Denominator | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), target)`` computed for kept rows only.

    Logits are computed, used and overwritten in chunks of rows, forward and backward in one pass: the full logits are
    never in memory.

    >>> import torch, maskwise as mw
    >>> hidden, weight = torch.zeros(2, 3, 8), torch.ones(4, 8)     # 2 sequences of 3 tokens, 4 classes
    >>> hidden[1, 1:] = float("nan")
    >>> target = torch.tensor([[1, 2, -100], [3, 99999, -1]])
    >>> mask = mw.Mask.from_lengths([3, 1])
    >>> mw.linear_cross_entropy(hidden, weight, target, mask)
    tensor(1.3863)
    >>> mw.linear_cross_entropy(hidden, weight, target, mask, reduction="none")
    tensor([[1.3863, 1.3863, 0.0000],
            [1.3863, 0.0000, 0.0000]])

    Args:
        hidden: what the linear map takes, any leading dims, then the features.
        weight: (classes, features), as torch.nn.Linear has it: the head's, or that of the embedding that it is tied to.
        target: a class for each row of ``hidden``, of its leading dims.
        mask: a Mask or a bool tensor that broadcasts to the target; True means keep. None keeps each row whose target
            is not ``ignore_index``.
        bias: (classes,), or None.
        ignore_index: a target that drops its row, whatever the mask.
        label_smoothing: as in torch's cross_entropy, in [0, 1].
        class_weight: (classes,), torch's ``weight`` of cross_entropy, or None.
        z_loss: adds this times the square of the log of the softmax's denominator to the loss of each row, which keeps
            logits from drifting; by the class's weight, where there are any.
        softcap: a number that logits stay within: ``softcap * tanh(logits / softcap)``, as in Gemma 2; None for none.
        reduction: "none" gives the loss of each row, with 0 where it is dropped; "sum"; "mean" divides by how many rows
            are kept, or as torch does by their class weights; "sequence" is the mean of each index of dim 0, and then
            of those that keep something.
        denominator: by what the sum is divided instead, where the call is one of several micro-batches or ranks: see
            `mw.loss`.

    Returns:
        A tensor of no dims; for "none", of the target's shape. It is float32 for inputs in half precision, of which
        gradients are accumulated in float32 too. Where nothing is kept, it is 0, with a gradient of 0.

    Raises:
        ShapeError: shapes do not fit each other, or the denominator has dims.
        DtypeError: the mask is not bool, the target has no classes, dtypes differ, or an argument is no tensor or no
            number.
        DeviceError: devices differ.
        ArgumentError: a number out of its range, a reduction that does not exist, a denominator with a reduction that
            divides by nothing, class weights that require grad, or a tensor that is nested or sparse.
        OutOfRangeError: a kept target is a class that does not exist (on a GPU the loss is NaN instead).
    """
    numbers = _Numbers(ignore_index, label_smoothing, z_loss, softcap, reduction)
    _check(hidden, weight, target, mask, bias, class_weight)
    _check_numbers(numbers, denominator)
    target = target.long()
    keep = target != ignore_index
    if mask is not None:
        keep = keep & as_bits(mask)
    settings = Settings(float(label_smoothing), float(z_loss), float(softcap or 0.0), _low(hidden))
    call = _Call(hidden, weight, target, keep, bias, class_weight, settings, reduction, denominator)
    facts = _facts(call)
    if facts.traced:
        return decide_in_graph(facts, _ROUTES)(call)  # type: ignore[no-any-return]
    # Not cached: what follows takes longer than a decision.
    decision = decide(facts, _ROUTES)
    if is_observed() and (planned := _report(decision.plan, call)):
        return planned  # type: ignore[return-value]
    return decision.run(call)  # type: ignore[no-any-return]


class _Numbers(NamedTuple):
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str


class _Call(NamedTuple):
    """A call that was checked."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    #: Of the target's shape.
    keep: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    settings: Settings
    reduction: str
    denominator: Denominator | None

    @property
    def divisors(self) -> Tensor | None:
        """By what each row counts in a mean, if not by 1."""
        if self.class_weight is None or self.reduction in ("none", "sum"):
            return None
        return self.class_weight[where_kept(self.target, self.keep, 0)]


# -- routes ------------------------------------------------------------------------------------------------------------
class _Detail(NamedTuple):
    """What routes read besides the hidden states: `Facts.detail`."""

    classes: int
    #: Why plain torch operations alone can serve the call, or None.
    obstacle: str | None


def _facts(call: _Call) -> Facts:
    hidden, weight, bias = call.hidden, call.weight, call.bias
    given = [x for x in (hidden, weight, call.target, call.keep, bias, call.class_weight) if x is not None]
    obstacle = None
    if not all(type(x) in (Tensor, torch.nn.Parameter) for x in given):
        obstacle = "an operand is a tensor subclass"
    elif not hidden.numel() or not weight.numel():
        obstacle = "there is nothing to multiply"
    traced = is_tracing()
    learned = any(x.requires_grad for x in (hidden, weight, bias) if x is not None)
    return Facts(
        _OP,
        tuple(hidden.shape),
        hidden.dtype,
        hidden.device.type,
        grad=torch.is_grad_enabled() and learned,
        transformed=not traced and is_transformed(),
        # Sizes that are symbols: a graph is made of the call, as by make_fx.
        traced=traced or has_dispatch_modes(),
        detail=_Detail(weight.shape[0], obstacle),
    )


def _run_in_chunks(run: Callable[..., Tensor]) -> Callable[[_Call], Tensor]:
    """The loss of kept rows in chunks."""

    def run_call(call: _Call) -> Tensor:
        scale, target, keep = _scale(call), call.target, call.keep
        if scale is not None and scale.dim():
            scale = scale.repeat_interleave(prod(target.shape[1:]))
        hidden = call.hidden.reshape(-1, call.hidden.shape[-1])
        rest = (scale, call.bias, call.class_weight, call.settings)
        out = run(hidden, call.weight, target.reshape(-1), keep.reshape(-1), *rest)
        return out.reshape(target.shape) if scale is None else _divided(out, call)

    return run_call


def _run_plain(call: _Call) -> Tensor:
    """The loss by all logits, in torch's own operations."""
    hidden, weight, target, keep, bias, class_weight, settings, *_ = call
    if not is_tracing() and not is_transformed() and not has_dispatch_modes():
        check_classes(target, keep, weight.shape[0])
    out = kept_rows.reference(hidden, weight, target, keep, bias, class_weight, settings)
    scale = _scale(call)
    if scale is None:
        return out
    if scale.dim():
        scale = scale.reshape(-1, *[1] * (target.dim() - 1))
    return _divided((out * scale.to(out.dtype)).sum(), call)


def _scale(call: _Call) -> Tensor | None:
    """By what each loss enters the result: one number, or one for each index of dim 0; None where it is unreduced."""
    by = call.reduction
    if by == "none":
        return None
    if call.denominator is not None:
        # What it divides is the sum of losses, or of the means of rows.
        by = "sum" if by == "mean" else "row means"
    return scales(call.keep, call.target.shape, by, call.divisors)


def _divided(total: Tensor, call: _Call) -> Tensor:
    if call.denominator is None:
        return total
    return divide(_OP, total, call.denominator, "sequence" if call.reduction == "sequence" else "token")


def _why_not_in_chunks(facts: Facts) -> str | None:
    obstacle: str | None = facts.detail.obstacle
    return "shapes without data" if obstacle is None and facts.device == "meta" else obstacle


def _pays_in_chunks(facts: Facts) -> str | None:
    logits = prod(facts.shape[:-1]) * facts.detail.classes
    return "too small for pieces" if logits < _FEW_LOGITS else None


def _flops(facts: Facts) -> int:
    """A product for the logits, and one for each gradient."""
    classes: int = facts.detail.classes
    return 2 * classes * (3 if facts.grad else 1)


_ROUTES = (
    Route(
        "pieces",
        _run_in_chunks(kept_rows.run),
        _why_not_in_chunks,
        pays=_pays_in_chunks,
        reason="kept rows only",
        skips=Skips.READING,
        flops=_flops,
        is_kernel=True,
        in_graph=_run_in_chunks(kept_rows.run_in_graph),
    ),
    Route("plain", _run_plain, flops=_flops, transforms=True),
)


def _report(plan: Plan, call: _Call) -> Plan | None:
    """Record a call; what is dropped is counted where that takes no host-device sync."""
    keep = Mask(call.keep.unsqueeze(-1))
    dropped = call.hidden.numel() - keep.count() * call.hidden.shape[-1] if call.keep.is_cpu else None
    return record(plan, call.hidden, keep, skipped=dropped)


# -- checks ------------------------------------------------------------------------------------------------------------
def _low(hidden: Tensor) -> torch.dtype | None:
    """The dtype of products under autocast, or None."""
    device = hidden.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    # As torch's own linear: float64 stays as it is.
    return None if hidden.dtype is torch.float64 else torch.get_autocast_dtype(device)


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    mask: MaskLike | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> None:
    """Raise unless shapes, dtypes and devices fit each other."""
    tensors = {"hidden": hidden, "weight": weight, "target": target, "bias": bias, "class_weight": class_weight}
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and not (value is None and name in ("bias", "class_weight")):
            hint = f"torch.as_tensor({name})"
            raise DtypeError(say(_OP, name, must="be a tensor", got=type(value).__name__, hint=hint))
        need_dense(_OP, name, value)
    if not hidden.is_floating_point():
        raise DtypeError(say(_OP, "hidden", must="be floating", got=hidden.dtype, hint="hidden.float()"))
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        hint = "mw.loss(F.cross_entropy, logits, target, mask) for probabilities"
        raise DtypeError(say(_OP, "target", must="be a class for each row", got=target.dtype, hint=hint))
    if weight.dim() != 2:
        must, hint = "have two dims, (classes, features)", "weight[None]" if weight.dim() == 1 else "weight.flatten(1)"
        raise ShapeError(say(_OP, "weight", must=must, got=tuple(weight.shape), hint=hint))
    classes, features = weight.shape
    if not hidden.dim() or hidden.shape[-1] != features:
        is_transposed = hidden.dim() and hidden.shape[-1] == classes
        hint = "weight.T" if is_transposed else input_hint(hidden, features, "hidden", "weight")
        must = f"end in the weight's {features} features"
        raise ShapeError(say(_OP, "hidden", must=must, got=tuple(hidden.shape), hint=hint))
    if target.shape != hidden.shape[:-1]:
        rows = tuple(hidden.shape[:-1])
        hint = "hidden[:, :-1] and target[:, 1:] predict the next token; target.reshape(hidden.shape[:-1])"
        raise ShapeError(
            say(_OP, "target", must=f"have the shape of hidden's rows {rows}", got=tuple(target.shape), hint=hint)
        )
    for name, value in (("bias", bias), ("class_weight", class_weight)):
        if value is not None and tuple(value.shape) != (classes,):
            must = f"have one value for each of the weight's {classes} classes"
            hint = f"{name}.flatten()" if value.numel() == classes else f"torch.zeros({classes})"
            raise ShapeError(say(_OP, name, must=must, got=tuple(value.shape), hint=hint))
    if class_weight is not None and class_weight.requires_grad:
        must, hint = "not require grad, as in torch", "class_weight.detach()"
        raise ArgumentError(say(_OP, "class_weight", must=must, got="requires_grad=True", hint=hint))
    autocast = _low(hidden) is not None
    for name, value in tensors.items():
        if value is None:
            continue
        if value.device != hidden.device:
            hint = f"{name}.to(hidden.device)"
            raise DeviceError(
                say(_OP, name, must=f"be on hidden's device {hidden.device}", got=value.device, hint=hint)
            )
        if value.dtype != hidden.dtype and name in ("weight", "bias") and not autocast:
            hint = f"{name}.to(hidden.dtype), or torch.autocast"
            raise DtypeError(say(_OP, name, must=f"have hidden's dtype {hidden.dtype}", got=value.dtype, hint=hint))
    if mask is not None:
        check(_OP, target, as_bits(mask), "target")


def _check_numbers(numbers: _Numbers, denominator: Any) -> None:
    """Raise where a number is out of its range, or the reduction does not exist."""
    ignore_index, smoothing, z_loss, softcap, reduction = numbers
    for name, value in (("label_smoothing", smoothing), ("z_loss", z_loss), ("softcap", softcap)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number and not (name == "softcap" and value is None):
            raise DtypeError(say(_OP, name, must="be a number", got=type(value).__name__, hint=f"{name}=0.1"))
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        got = type(ignore_index).__name__
        raise DtypeError(say(_OP, "ignore_index", must="be an int", got=got, hint="ignore_index=-100"))
    if not 0.0 <= smoothing <= 1.0:
        raise ArgumentError(say(_OP, "label_smoothing", must="be in [0, 1]", got=smoothing, hint="label_smoothing=0.1"))
    if not (isfinite(z_loss) and z_loss >= 0.0):
        raise ArgumentError(say(_OP, "z_loss", must="be finite and not negative", got=z_loss, hint="z_loss=1e-4"))
    if softcap is not None and not (isfinite(softcap) and softcap > 0.0):
        raise ArgumentError(say(_OP, "softcap", must="be finite and positive", got=softcap, hint="softcap=None"))
    if reduction not in REDUCTIONS:
        must = f"be one of {', '.join(map(repr, REDUCTIONS))}"
        raise ArgumentError(say(_OP, "reduction", must=must, got=repr(reduction), hint='reduction="mean"'))
    if denominator is not None and reduction not in ("mean", "sequence"):
        must, hint = 'be "mean" or "sequence" with a denominator', 'reduction="mean", which is the sum / denominator'
        raise ArgumentError(say(_OP, "reduction", must=must, got=repr(reduction), hint=hint))
