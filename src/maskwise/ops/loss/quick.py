"""The calls that are made most, planned once for each combination of static facts: a repeated one costs a look-up.

Served are losses of one input and one target of plain tensors on the CPU, without tensors among the keyword arguments:
those of single elements that have a kernel, and small ones, of which what is kept is gathered and left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from maskwise.ops.loss.call import check_mask
from maskwise.ops.loss.kinds import KINDS, Kind
from maskwise.ops.loss.registered import REDUCTIONS, code_of, elements
from maskwise.plan import Plan, planner

__all__ = ["Quick", "find"]

_PLAIN = (Tensor, torch.nn.Parameter)
_KEPT = 4096
#: The keyword arguments that may be given: numbers, of which tensors could never be keys.
_SETTINGS = frozenset(
    {"beta", "delta", "log_target", "ignore_index", "label_smoothing", "log_input", "full", "eps", "margin"}
)
#: Elements of input up to which gathering single elements, and whole rows, is worth its calls.
FEW_ELEMENTS, FEW_ROWS = 1 << 11, 1 << 17


class Quick(NamedTuple):
    """A call that was checked and planned."""

    plan: Plan
    #: (input, target, mask) -> loss
    run: Callable[[Any, Any, Tensor], Tensor]


_found: dict[tuple[Any, ...], Quick | None] = {}
planner.on_forget(_found.clear)


def find(
    fn: Callable[..., Any], x: Any, target: Any, bits: Tensor, reduction: str, kwargs: Mapping[str, Any]
) -> Quick | None:
    """The way of this call if it is one of those that are served here, else None."""
    if type(x) not in _PLAIN or type(target) not in _PLAIN or type(bits) is not Tensor or bits.dtype is not torch.bool:
        return None
    if kwargs and not _SETTINGS.issuperset(kwargs):
        return None
    enabled = torch.is_grad_enabled()
    facts = (
        *(x.shape, target.shape, bits.shape, x.dtype, target.dtype, x.device, bits.device),
        *(enabled and x.requires_grad, enabled and target.requires_grad),
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0,
        torch.is_autocast_enabled("cpu"),
    )
    try:
        key = (fn, reduction, tuple(kwargs.items()), facts)
        return _found[key]
    except KeyError:
        if len(_found) >= _KEPT:
            _found.clear()
        way = _found[key] = plan(fn, x, target, bits, reduction, kwargs, *facts[-4:])
        return way
    except TypeError:
        # A function or an argument that cannot be a key.
        return None


def plan(
    fn: Callable[..., Any],
    x: Tensor,
    target: Tensor,
    bits: Tensor,
    reduction: str,
    kwargs: Mapping[str, Any],
    grad: bool,
    of_target: bool,
    transformed: bool,
    autocast: bool,
) -> Quick | None:
    """Check and plan a call."""
    kind = KINDS.get(fn)
    if kind is None or transformed or autocast or x.device.type != "cpu" or planner.forced() == "plain":
        return None
    if kind.lines_up == "elements":
        return plan_elements(fn, x, target, bits, reduction, kwargs, grad, of_target)
    if kind.lines_up == "classes":
        return plan_classes(fn, kind, x, target, bits, reduction, kwargs)
    return None


def plan_elements(
    fn: Callable[..., Any],
    x: Tensor,
    target: Tensor,
    bits: Tensor,
    reduction: str,
    kwargs: Mapping[str, Any],
    grad: bool,
    of_target: bool,
) -> Quick | None:
    """A loss of single elements."""
    if x.shape != target.shape or bits.device != x.device:
        return None
    check_mask(bits, tuple(x.shape), x)
    code = code_of(fn, kwargs) if reduction in REDUCTIONS and x.dtype == target.dtype and not of_target else None
    if code is not None:
        made = planner.make("loss", tuple(x.shape), x.dtype, "cpu", grad=grad)
        if made.route != "plain":
            op = elements.fused if made.route == "fused" else elements.bare
            return Quick(made, partial(by_kernel, op, *code, REDUCTIONS[reduction]))
    if planner.forced() is None and reduction in ("mean", "sum") and x.numel() <= FEW_ELEMENTS:
        return Quick(GATHERED, partial(of_elements, fn, dict(kwargs), reduction))
    return None


def plan_classes(
    fn: Callable[..., Any],
    kind: Kind,
    x: Tensor,
    target: Tensor,
    bits: Tensor,
    reduction: str,
    kwargs: Mapping[str, Any],
) -> Quick | None:
    """A loss of rows of classes, with a class for each row as target."""
    by_index = not target.is_floating_point() and x.dim() == 2 and tuple(target.shape) == x.shape[:1]
    if not by_index or reduction not in ("mean", "sum") or planner.forced() is not None or x.numel() > FEW_ROWS:
        return None
    if bits.device != x.device:
        return None
    check_mask(bits, tuple(target.shape), x)
    ignored = kwargs.get("ignore_index", kind.ignores)
    return Quick(GATHERED, partial(of_rows, fn, dict(kwargs), reduction, ignored))


GATHERED = Plan("loss", "kept", "small: gathering what is kept is cheapest", 0.0)


def by_kernel(
    op: Callable[..., tuple[Tensor, Tensor]],
    code: int,
    parameter: float,
    reduction: int,
    x: Tensor,
    target: Tensor,
    bits: Tensor,
) -> Tensor:
    """The loss by its kernel."""
    return op(x, target, bits, code, parameter, reduction)[0]


def of_elements(
    fn: Callable[..., Tensor], kwargs: dict[str, Any], reduction: str, x: Tensor, target: Tensor, bits: Tensor
) -> Tensor:
    """The loss of the kept elements alone."""
    x, target = x.masked_select(bits), target.masked_select(bits)
    n = x.shape[0]
    if n == 0:
        # The sum of nothing is a zero that belongs to the graph.
        return x.sum() + target.sum()
    if fn is F.kl_div and reduction == "mean":
        # torch would warn that this mean is one.
        return fn(x, target, reduction="sum", **kwargs) / n
    return fn(x, target, reduction=reduction, **kwargs)


def of_rows(
    fn: Callable[..., Tensor],
    kwargs: dict[str, Any],
    reduction: str,
    ignored: int,
    x: Tensor,
    target: Tensor,
    bits: Tensor,
) -> Tensor:
    """The loss of the kept rows alone."""
    index = (bits & (target != ignored)).nonzero().squeeze(1)
    n = index.shape[0]
    if n < x.shape[0]:
        x, target = x.index_select(0, index), target.index_select(0, index)
    return fn(x, target, reduction=reduction, **kwargs) if n else x.sum()
