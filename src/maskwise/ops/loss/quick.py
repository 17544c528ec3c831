"""The calls that are made most, planned once for each combination of static facts: a repeated one costs a look-up.

Served are losses of one input and one target of plain tensors on the CPU or a GPU, without tensors among the keyword
arguments but a weight of classes: those that have a kernel and, on the CPU alone, nll_loss, which can ignore what is
dropped, and small ones of single elements, of which what is kept is gathered and left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.ops.loss import cross_entropy, reference
from maskwise.ops.loss.call import check_mask, prepare
from maskwise.ops.loss.kinds import KINDS, Kind
from maskwise.ops.loss.registered import REDUCTIONS, Code, code_of, elements
from maskwise.ops.operation import dropped_rows
from maskwise.ops.torch_private import is_transformed
from maskwise.plan import Plan, planner
from maskwise.plan.dispatch import Refusal, Skips
from maskwise.plan.remembered import Remembered

__all__ = ["Quick", "find"]

_PLAIN = (Tensor, torch.nn.Parameter)
SERVED = ("cpu", "cuda")
#: The keyword arguments that may be given: numbers, of which tensors could never be keys, and a weight.
_SETTINGS = frozenset(
    {"weight", "beta", "delta", "log_target", "ignore_index", "label_smoothing", "log_input", "full", "eps", "margin"}
)
#: Elements of input up to which gathering single elements is worth its calls.
FEW_ELEMENTS = 1 << 11


class Quick(NamedTuple):
    """A call that was checked and planned."""

    plan: Plan
    #: (input, target, mask, weight) -> loss
    run: Callable[[Any, Any, Tensor, Any], Tensor]
    #: What the kernel leaves out for a dropped element, by (input, mask); None for nothing.
    skips: Callable[[Tensor, Tensor], Skips] | None = None


_found: Remembered[Quick | None] = Remembered()


def find(
    fn: Callable[..., Any], x: Any, target: Any, bits: Tensor, reduction: str, kwargs: Mapping[str, Any]
) -> Quick | None:
    """The way of this call if it is one of those that are served here, else None."""
    if type(x) not in _PLAIN or type(target) not in _PLAIN or type(bits) is not Tensor or bits.dtype is not torch.bool:
        return None
    settings, weight = kwargs, None
    if kwargs:
        if not _SETTINGS.issuperset(kwargs):
            return None
        settings = {name: value for name, value in kwargs.items() if name != "weight"}
        weight = kwargs.get("weight")
        if weight is not None and type(weight) not in _PLAIN:
            return None
    if any(each is not None and each.is_nested for each in (x, target, bits, weight)):
        return None
    enabled = torch.is_grad_enabled()
    facts = (
        *(x.shape, target.shape, bits.shape, x.dtype, target.dtype, x.device, bits.device),
        *(enabled and x.requires_grad, enabled and target.requires_grad),
        is_transformed(),
        x.device.type in SERVED and torch.is_autocast_enabled(x.device.type),
        None if weight is None else (weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.layout),
        *(x.layout, target.layout, bits.layout),
    )
    try:
        key = (fn, reduction, tuple(settings.items()), facts, planner.forced())
        return _found[key]
    except KeyError:
        way = _found[key] = plan(Asked(fn, reduction, settings, *facts[7:9]), x, target, bits, weight, *facts[9:11])
        return way
    except TypeError:
        # A function or an argument that cannot be a key.
        return None


@dataclass(frozen=True)
class Asked:
    """What is asked for, apart from the tensors."""

    fn: Callable[..., Any]
    reduction: str
    settings: Mapping[str, Any]
    #: Whether a gradient is asked for: of the input, of the target.
    grad: bool
    of_target: bool

    def by_kernel(self, run: Callable[..., Tensor], skips: Callable[[Tensor, Tensor], Skips]) -> Quick:
        """The call by a kernel."""
        refused = (Refusal("plain", "it would write the loss of everything, and read it again"),)
        plan = Plan("loss", "fused" if self.grad else "bare", "one pass over x and the mask", 0.0, refused)
        return Quick(plan, run, skips)

    @property
    def inner(self) -> int:
        """The reduction that the kernel does; what it cannot do is done afterwards, from the unreduced loss."""
        return REDUCTIONS.get(self.reduction, REDUCTIONS["none"])


def plan(
    asked: Asked, x: Tensor, target: Tensor, bits: Tensor, weight: Tensor | None, transformed: bool, autocast: bool
) -> Quick | None:
    """Check and plan a call."""
    kind = KINDS.get(asked.fn)
    device = x.device.type
    if any(each is not None and each.layout is not torch.strided for each in (x, target, bits, weight)):
        return None
    if kind is not None and len(kind.fills) > 2:
        # A loss of three tensors that is given two.
        return None
    if kind is None or transformed or autocast or device not in SERVED or planner.forced() == "plain":
        return None
    if bits.device != x.device or target.device != x.device or (weight is not None and weight.device != x.device):
        return None
    if kind.lines_up == "elements" and weight is None:
        return plan_elements(asked, x, target, bits)
    if kind.lines_up == "classes":
        return plan_classes(asked, kind, x, target, bits, weight)
    return None


def plan_elements(asked: Asked, x: Tensor, target: Tensor, bits: Tensor) -> Quick | None:
    """A loss of single elements."""
    if x.shape != target.shape:
        return None
    check_mask(bits, tuple(x.shape), x)
    code = code_of(asked.fn, asked.settings) if x.dtype == target.dtype and not asked.of_target else None
    if code is not None and x.numel() and planner.has_kernel("loss", x.dtype, x.device.type):
        return asked.by_kernel(partial(of_elements, asked, code), dropped_rows)
    if x.device.type != "cpu":
        # What is kept cannot be gathered without waiting for the device.
        return None
    if planner.forced() is None and asked.reduction in ("mean", "sum") and x.numel() <= FEW_ELEMENTS:
        return Quick(
            Plan("loss", "kept", "small: gathering what is kept is cheapest", 0.0), partial(of_kept_elements, asked)
        )
    return None


def plan_classes(
    asked: Asked, kind: Kind, x: Tensor, target: Tensor, bits: Tensor, weight: Tensor | None
) -> Quick | None:
    """A loss of rows of classes, with a class for each row as target."""
    shape = (*x.shape[:1], *x.shape[2:])
    if x.dim() < 2 or x.numel() == 0 or target.dtype is not torch.int64 or target.shape != shape:
        return None
    if weight is not None and (
        weight.shape != x.shape[1:2] or weight.dtype != x.dtype or weight.requires_grad or asked.reduction == "sequence"
    ):
        return None
    check_mask(bits, shape, x)
    ignored = asked.settings.get("ignore_index", kind.ignores)
    smoothing = asked.settings.get("label_smoothing", 0.0)
    if asked.fn is F.nll_loss:
        if x.device.type != "cpu":
            # Whether a mean is one of nothing cannot be told without waiting for the device.
            return None
        return Quick(Plan("loss", "plain", "torch ignores what is dropped", 0.0), partial(of_log, asked, kind, ignored))
    served = planner.has_kernel("cross_entropy", x.dtype, x.device.type) and (smoothing == 0.0 or weight is None)
    if asked.fn is F.cross_entropy and served and 0.0 <= smoothing <= 1.0:
        return asked.by_kernel(partial(of_classes, asked, ignored, float(smoothing)), dropped_positions)
    return None


def dropped_positions(x: Tensor, bits: Tensor) -> Skips:
    """The kernel of cross entropy passes over a position that is dropped, if its classes lie side by side."""
    return Skips.READING if x.stride(1) == 1 else Skips.NOTHING


def of_elements(asked: Asked, code: Code, x: Tensor, target: Tensor, bits: Tensor, _: None) -> Tensor:
    """A loss of single elements by its kernel."""
    run = elements.route("fused" if asked.grad else "bare")
    out: Tensor = run(x, target, bits, *code, asked.inner)[0]
    return reference.reduce(out, bits, "sequence") if asked.reduction == "sequence" else out


def of_classes(
    asked: Asked, ignored: int, smoothing: float, x: Tensor, target: Tensor, bits: Tensor, weight: Tensor | None
) -> Tensor:
    """Cross entropy by its kernel."""
    out = cross_entropy.loss(asked.grad, x, target, bits, weight, ignored, smoothing, asked.inner)
    return reference.reduce(out, bits & (target != ignored), "sequence") if asked.reduction == "sequence" else out


def of_log(
    asked: Asked, kind: Kind, ignored: int, x: Tensor, target: Tensor, bits: Tensor, weight: Tensor | None
) -> Tensor:
    """nll_loss, which reads nothing where the target is to be ignored, nor gives it a gradient."""
    classes = torch.where(bits, target, ignored)
    sequence = asked.reduction == "sequence"
    out = F.nll_loss(x, classes, weight, ignore_index=ignored, reduction="none" if sequence else asked.reduction)
    if sequence:
        return reference.reduce(out, bits & (target != ignored), "sequence")
    if asked.reduction == "mean" and out.isnan():
        # A NaN that is kept, or a mean of nothing.
        given = {**asked.settings, **({} if weight is None else {"weight": weight})}
        return reference.loss(prepare(F.nll_loss, kind, (x, target), bits, given), "mean")
    return out


def of_kept_elements(asked: Asked, x: Tensor, target: Tensor, bits: Tensor, _: None) -> Tensor:
    """The loss of the kept elements alone, by torch."""
    x, target = x.masked_select(bits), target.masked_select(bits)
    n = x.shape[0]
    if n == 0:
        # The sum of nothing is a zero that belongs to the graph.
        return x.sum() + target.sum()
    if asked.fn is F.kl_div and asked.reduction == "mean":
        # torch would warn that this mean is one.
        return asked.fn(x, target, reduction="sum", **asked.settings) / n  # type: ignore[no-any-return]
    return asked.fn(x, target, reduction=asked.reduction, **asked.settings)  # type: ignore[no-any-return]
