"""mw.apply: run a row-wise function on kept rows only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, need_dense
from maskwise.ops.backends import why_not_served
from maskwise.ops.flops import on_kept_rows
from maskwise.ops.primitives import fill_dropped, fits_dtype
from maskwise.ops.row_functions import RowFunction, find
from maskwise.ops.select.arguments import line_up
from maskwise.ops.select.packed import Packed, collect, fill_for, index_rows, row_skips, why_torch_indexes
from maskwise.ops.select.rows import mask_of_rows, pack_rows_forward, unpack_rows_forward
from maskwise.ops.select.rowwise_check import convolution_hint, run
from maskwise.ops.torch_private import is_tracing, is_transformed, is_vmapped_or_functional
from maskwise.plan import calibration, dispatch
from maskwise.plan.cost import Rates, Work, microseconds
from maskwise.plan.dispatch import (
    NOT_APPLICABLE,
    Decision,
    Facts,
    Plan,
    Route,
    decide,
    forced,
    is_any_forced,
    is_any_observing,
    is_observed,
)
from maskwise.plan.explain import record

__all__ = ["apply", "apply_"]


def apply(
    fn: Callable[..., Any],
    x: Tensor,  # (*lead, *rest)
    *more: Any,
    mask: MaskLike,
    fill: float | Tensor = 0.0,
    other: Tensor | None = None,
) -> Any:
    """Apply a row-wise function to kept rows only.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[1.0, -1.0], [4.0, 0.0]])
    >>> mw.apply(torch.log2, x, mask=x > 0)
    tensor([[0., 0.],
            [2., 0.]])
    >>> mw.apply(lambda row: row * 10, x, mask=torch.tensor([False, True]), other=x)
    tensor([[ 1., -1.],
            [40.,  0.]])

    Args:
        fn: takes the kept rows (n, *rest) of x and of each tensor in ``more``, and returns a tensor of n rows or a
            tuple of them. It may be a module, and change the feature size or the dtype; it must be row-wise.
        x: (*lead, *rest).
        more: tensors with x's leading dims, of which fn gets the same rows; any other value is passed unchanged.
        mask: a Mask or a bool tensor of x's leading dims, or of as many dims as x, which broadcasts and selects single
            elements, so that rows are of shape (n,); True means keep.
        fill: the number at dropped rows.
        other: the values at dropped rows instead: a tensor that broadcasts to the result, such as x itself for a
            selective update.

    Returns:
        The result in x's layout: (*lead, *rest of fn's result), or a tuple of them. Gradients reach kept rows only.

    Raises:
        ShapeError: the mask does not align with x; a tensor in ``more`` does not have x's leading dims, or has another
            number of dims where fn is an elementwise function of torch; or fn does not return one row per input row.
        DtypeError: the mask is not bool, x is not a tensor, or fn does not return tensors.
        DeviceError: the mask is on another device.
        ArgumentError: fn returns an empty tuple, or is not row-wise; or a tensor is nested or sparse.

    fn gets rows in any number and batch, so its output for a row must not depend on other rows: ``t - t.mean(0)``,
    batch norm in training mode and other functions that mix along dim 0 are rejected. To check this, the first use
    calls fn once more with a few of the rows (a few times, if it is random or half-precision), and restores the RNG
    state. Compiled graphs and transforms cannot inspect values, and skip the check. fn may modify its input rows in
    place: x is not modified.

    Functions of torch that one of ours computes run as that, without gathering a row: ``softmax``, ``softmin``,
    ``normalize``, and ``layer_norm`` without weights, as functions, bound by ``functools.partial``, or as modules.

    Where skipping does not pay (nearly everything is kept, or fn is a cheap elementwise function), fn runs on all rows,
    with each dropped row replaced by a kept one, and the result is the same.
    """
    key = None
    if not more and other is None and fn in ELEMENTWISE and not is_tracing():
        key = _static_key(fn, x, mask)
        direct: Decision | None = dispatch.cache.get(key)
        if direct is not None and not is_any_observing():
            return direct.run(fn, x, mask, fill)
    lead = _lead(fn, x, mask)
    arguments = [x if x.shape == lead.shape else _rows_of(x, lead), *(_rows_of(value, lead) for value in more)]
    if more and fn in ELEMENTWISE:
        _check_ranks(arguments)
    grad = torch.is_grad_enabled() and (x.requires_grad or (bool(more) and _requires_grad(more)))
    if is_tracing():
        return _run_on_all(fn, arguments, lead, fill if other is None else other, grad)
    kept = lead.facts.count
    masked = _masked(fn, x, lead, more, fill if other is None else other)
    decision = _decision(fn, x, lead, kept, grad=grad, op=None if masked is None else masked.op)
    if key is not None and _is_direct(decision, fn, kept):
        run = _where_kept if _is_few(x) else _fill_rest
        dispatch.cache[key] = Decision(run, None, decision.plan, decision.route, decision.facts)
    if is_observed() and (planned := _report(decision, x, lead)):
        return planned
    called = masked if decision.route.name == "fused" else fn
    return decision.run(called, arguments, lead, fill if other is None else other, grad)


def apply_(fn: Callable[..., Any], x: Tensor, *more: Any, mask: MaskLike) -> Tensor:
    """The in-place variant of `apply`: replaces the kept rows of x, and returns x.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> mw.apply_(torch.neg, x, mask=torch.tensor([True, False, True]))
    tensor([-1.,  2., -3.])

    Args:
        fn: as for `apply`; it must preserve the shape and the dtype of the rows.
        x: (*lead, *rest); modified in place.
        more: as for `apply`.
        mask: as for `apply`.

    Returns:
        The same x.

    Raises:
        ShapeError: the mask does not line up with x, or fn does not return rows of x's own shape and dtype.
        DtypeError: the mask is not bool, x is not a tensor, or fn does not return tensors.
        DeviceError: the mask is on another device.
        ArgumentError: fn returns an empty tuple, or is not row-wise; or a tensor is nested or sparse.
    """
    out = apply(fn, x, *more, mask=mask, other=x)
    if isinstance(out, Plan):
        return out  # type: ignore[return-value]
    if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        must = f"return rows of x's own shape and dtype, {tuple(x.shape)} {x.dtype}"
        raise ShapeError(say("apply_", "fn", must=must, got=got, hint="mw.apply, which returns a new tensor"))
    return x.copy_(out)


def _lead(fn: Callable[..., Any], x: Tensor, mask: MaskLike) -> Mask:
    """The mask of x's leading dims; for a convolution whose positions are not x's leading dims, its own function."""
    try:
        return line_up("apply", x, mask)
    except ShapeError as error:
        if not isinstance(fn, _ConvNd):
            raise
        refused = error
    must, got = (
        "be row-wise, or the mask must have x's leading dims",
        f"{type(fn).__name__} with positions behind channels",
    )
    raise ShapeError(say("apply", "fn", must=must, got=got, hint=convolution_hint(fn))) from refused


def _masked(
    fn: Callable[..., Any], x: Tensor, lead: Mask, more: tuple[Any, ...], other: float | Tensor
) -> RowFunction | None:
    """The function of ours that computes fn on kept rows, if there is one; it gives 0 at dropped ones."""
    return None if isinstance(other, Tensor) or other != 0.0 else find(fn, x, x.dim() - lead.ndim, more)


def _requires_grad(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _rows_of(value: Any, lead: Mask) -> Any:
    """An argument with the mask's leading dims: tensors are expanded (not copied), other values are unchanged."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    need_dense("apply", "more", value)
    shape = (*lead.shape, *value.shape[lead.ndim :])
    if value.shape == shape:
        return value
    try:
        return value.expand(shape)
    except RuntimeError:
        must = f"have x's leading dims {tuple(lead.shape)}, or 1 where they broadcast"
        raise ShapeError(
            say("apply", "more", must=must, got=tuple(value.shape), hint="functools.partial(fn, value)")
        ) from None


def _check_ranks(arguments: list[Any]) -> None:
    """Raise where an elementwise function would broadcast the rows of one argument along the features of another, with
    a result that depends on the route.
    """
    x = arguments[0]
    for value in arguments[1:]:
        if isinstance(value, Tensor) and value.dim() and value.dim() != x.dim():
            must = f"have as many dims as x, {x.dim()}: fn gets rows, and broadcasts from the last dim"
            hint = "value[..., None], with a dim of 1 for each that x has after the mask's"
            raise ShapeError(say("apply", "more", must=must, got=tuple(value.shape), hint=hint))


# -- the routes --------------------------------------------------------------------------------------------------------
#: Elementwise functions. They cost about as much as gathering an element, and cannot leak a dropped value to another.
ELEMENTWISE = frozenset(
    {torch.abs, torch.neg, torch.exp, torch.log, torch.log1p, torch.expm1, torch.sqrt, torch.rsqrt, torch.square}
    | {torch.relu, torch.sigmoid, torch.tanh, torch.sin, torch.cos, torch.add, torch.sub, torch.mul, torch.div}
    | {torch.nn.functional.relu, torch.nn.functional.gelu, torch.nn.functional.silu, torch.reciprocal}
)
#: From this density on, gathering rows costs more than it saves: for a 768-3072-768 network, 2 % of its time.
_NEARLY_ALL = 0.98
#: The same for elementwise functions of a non-contiguous x with a gradient.
_NEARLY_ALL_STRIDED = 0.9
#: Gathering a row takes at least as long as this many elements.
_LEAST_ELEMENTS = 6
_CHEAP, _ALL = "fn is as cheap as gathering rows", "nearly all rows are kept"


class Rows(NamedTuple):
    """Facts of the family."""

    #: The number of rows, kept or not.
    total: int
    is_elementwise: bool
    #: The op that computes fn on kept rows where they lie, if there is one.
    op: str | None


def _serves_fused(facts: Facts) -> str | None:
    if facts.detail.op is None or facts.device != "cpu":
        return NOT_APPLICABLE
    return why_not_served(facts.detail.op, facts.device, facts.dtype)


def _pays_fused(facts: Facts) -> str | None:
    return _ALL if facts.kept is not None and facts.kept == facts.detail.total > 0 else None


def _serves_kept(facts: Facts) -> str | None:
    if facts.device != "cpu" and facts.kept is None:
        return "the number of kept rows is not known without a host-device sync"
    return None


def _pays_kept(facts: Facts) -> str | None:
    """Why gathering rows would not pay. The cost of fn is unknown, unless it is elementwise."""
    rows: Rows = facts.detail
    if facts.kept is not None and facts.kept == rows.total > 0:
        return _ALL
    if _is_elementwise(facts):
        # A small x is not worth a count.
        return _CHEAP if facts.kept is None else None
    density = 0.0 if facts.kept is None or not rows.total else facts.kept / rows.total
    if density < _NEARLY_ALL_STRIDED:
        return None
    if rows.is_elementwise:
        # The dense route has two more passes, to replace dropped rows before and after fn.
        return None if facts.contiguous else _CHEAP
    return None if density < _NEARLY_ALL else _ALL


def _is_elementwise(facts: Facts) -> bool:
    """Whether the cost of the call can be predicted: it is memory-bound."""
    return bool(facts.detail.is_elementwise and not facts.grad and facts.device == "cpu")


def _kept_work(facts: Facts) -> Work:
    # Gather and scatter read the mask twice; all of the result is written.
    elements, size, count, kept = prod(facts.shape), facts.dtype.itemsize, facts.detail.total, facts.kept or 0
    return Work(
        calls=3,
        streamed=4 * count + size * elements + 4 * (size * elements * kept // max(count, 1)),
        gathered=4 * size * kept * max(elements // max(count, 1), _LEAST_ELEMENTS),
    )


def _plain_work(facts: Facts) -> Work:
    # fn and the fill after it each read and write everything, and compute for as long again.
    return Work(calls=2, streamed=(6 * facts.dtype.itemsize + 1) * prod(facts.shape))


def _cost(facts: Facts, work: Work, rates: Rates) -> float:
    """Predicted for elementwise functions only; for others the order of the routes decides."""
    return microseconds(work, rates.plain_call, rates) if _is_elementwise(facts) else 0.0


def _is_worth_counting(facts: Facts) -> bool:
    """Whether kept rows that are not counted yet should be: where a quarter of them would pay for the count, too."""
    if facts.transformed or facts.device != "cpu" or forced() or why_torch_indexes(facts) is not None:
        return False
    if not _is_elementwise(facts):
        return _serves_fused(facts) is not None
    rates = calibration.rates_for(facts.device)
    quarter = facts._replace(kept=facts.detail.total // 4)
    count = microseconds(Work(calls=2, streamed=facts.detail.total), rates.plain_call, rates)
    return _cost(quarter, _kept_work(quarter), rates) + count < _cost(facts, _plain_work(facts), rates)


def _decision(
    fn: Callable[..., Any], x: Tensor, lead: Mask, kept: int | None, *, grad: bool, op: str | None = None
) -> Decision:
    """The decision for one call, cached; counts kept rows where that needs no sync and may pay."""
    is_elementwise = fn in ELEMENTWISE
    # torch.func only: under forward-mode AD, fn itself propagates the tangents.
    transformed = is_vmapped_or_functional()
    key = ("apply", x.shape, x.dtype, x.device, x.is_contiguous(), lead.shape, lead.operand, kept, grad, transformed,
           is_elementwise, op, is_any_forced() and forced())  # fmt: skip
    decision: Decision | None = dispatch.cache.get(key)
    if decision is None:
        facts = Facts(
            "apply",
            tuple(x.shape),
            x.dtype,
            x.device.type,
            grad=grad,
            transformed=transformed,
            mask=lead.operand,
            kept=kept,
            contiguous=x.is_contiguous(),
            detail=Rows(lead.numel(), is_elementwise, op),
        )
        decision = dispatch.cache[key] = decide(facts, _ROUTES, kept is None and _is_worth_counting(facts))
    is_worth_counting: bool = decision.prepared
    return _decision(fn, x, lead, lead.count(), grad=grad, op=op) if is_worth_counting else decision


# -- elementwise functions of all of x --------------------------------------------------------------------------------
def _static_key(fn: Callable[..., Any], x: Tensor, mask: MaskLike) -> tuple[Any, ...]:
    """The facts of a call of an elementwise function that cost nothing to collect."""
    try:
        # fmt: off
        return (
            "apply", fn, x.shape, mask.shape, x.dtype, mask.dtype, x.device, mask.device, x.layout, type(x), type(mask),
            mask.facts.count if isinstance(mask, Mask) else mask.layout,
            x.requires_grad and torch.is_grad_enabled(), is_transformed(), is_any_forced() and forced(),
        )
        # fmt: on
    except (AttributeError, RuntimeError):
        # Not tensors, or nested ones without a shape, which the checks report.
        return ("apply", fn)


def _is_direct(decision: Decision, fn: Callable[..., Any], kept: int | None) -> bool:
    """Whether fn runs on x as it is, and the key with what was known to be kept says so."""
    facts = decision.facts
    if facts is None or decision.route.name != "plain" or facts.kept != kept or kept == facts.detail.total:
        return False
    return _cannot_leak(fn, facts.grad)


def _where_kept(fn: Callable[..., Any], x: Tensor, mask: MaskLike, fill: float | Tensor) -> Tensor:
    """For a small x, where a kernel costs more than torch's own call."""
    out, bits = fn(x), mask.to_bool() if isinstance(mask, Mask) else mask
    if type(fill) is not float or not fits_dtype(fill, out.dtype):
        return _placed(out, bits, fill)
    return torch.where(_as_rows(bits, out), out, fill)


def _fill_rest(fn: Callable[..., Any], x: Tensor, mask: MaskLike, fill: float | Tensor) -> Tensor:
    return _placed(fn(x), mask.to_bool() if isinstance(mask, Mask) else mask, fill)


def _report(decision: Decision, x: Tensor, lead: Mask) -> Plan | None:
    """Record a call, with what it skips for a dropped row; the FLOPs of fn are unknown."""
    plan = decision.plan
    return record(plan if plan.route == "plain" else replace(plan, skips=row_skips(x, lead)), x, lead)


def _run_masked(masked: RowFunction, arguments: list[Any], lead: Mask, other: float | Tensor, grad: bool) -> Tensor:
    """By the function of ours that computes fn on kept rows where they lie, and gives 0 elsewhere."""
    x: Tensor = arguments[0]
    key = (..., *[None] * (x.dim() - lead.ndim))
    if lead.operand == "bits":
        return masked.run(x, lead.to_bool()[key])
    return masked.run(x, lead._once(("rows", len(key)), lambda: lead[key]))


def _run_on_kept(fn: Callable[..., Any], arguments: list[Any], lead: Mask, other: float | Tensor, grad: bool) -> Any:
    x = arguments[0]
    if not grad and len(arguments) == 1 and x.is_cpu and not is_transformed():
        mask = mask_of_rows(lead)
        packed = [pack_rows_forward(x, mask)]
        n = packed[0].shape[0]
        with on_kept_rows(n, lead.numel()):
            outs = _called(fn, packed)
        # Released before the result is allocated.
        packed.clear()
        return _each(outs, lambda out: _unpacked(_checked(out, n), mask, lead, other))
    if grad and len(arguments) == 1 and not isinstance(other, Tensor) and _is_few(x):
        bits = lead.to_bool()
        few = index_rows(x, bits)
        with on_kept_rows(few.shape[0], lead.numel()):
            outs = _called(fn, [few])
        return _each(outs, lambda out: _scatter_few(_checked(out, few.shape[0]), bits, other))
    capacity = None if lead.device.type == "cpu" else lead.facts.count
    rows = [collect(a, lead, capacity=capacity).values if isinstance(a, Tensor) and a.dim() else a for a in arguments]
    count = rows[0].shape[0]
    with on_kept_rows(count, lead.numel()):
        outs = _called(fn, rows)
    return _each(outs, lambda out: Packed(_checked(out, count), lead, capacity).unpack(other))


def _unpacked(values: Tensor, mask: Tensor, lead: Mask, other: float | Tensor) -> Tensor:
    """Scatter rows back. Where fn has trainable weights, autograd records it."""
    if values.requires_grad or isinstance(other, Tensor):
        return Packed(values, lead).unpack(other)
    out: Tensor = unpack_rows_forward(values.contiguous(), mask, fill_for(values, other))
    return out


def _scatter_few(values: Tensor, bits: Tensor, fill: float) -> Tensor:
    """Scatter few rows back, by torch's own indexing."""
    out = values.new_full((*bits.shape, *values.shape[1:]), fill)
    return out.masked_scatter_(bits, values) if values.dim() == 1 else out.index_put_((bits,), values)


def _run_on_all(fn: Callable[..., Any], arguments: list[Any], lead: Mask, other: float | Tensor, grad: bool) -> Any:
    bits = lead.to_bool()
    count = bits.numel()
    # With a full mask, nothing is replaced, before or after fn.
    full = not is_tracing() and lead.facts.count == count
    if _cannot_leak(fn, grad) and not full:
        # Its results for dropped elements are overwritten, and it accepts any shape.
        return _placed(fn(*arguments), bits, other)
    rows = [a.reshape(count, *a.shape[lead.ndim :]) if isinstance(a, Tensor) and a.dim() else a for a in arguments]
    if not full:
        flat = bits.reshape(-1)
        rows = [_replace_dropped(row, flat, fn) if isinstance(row, Tensor) and row.dim() else row for row in rows]

    def place(out: Tensor) -> Tensor:
        out = _checked(out, count).reshape(*lead.shape, *out.shape[1:])
        return out if full else _placed(out, bits, other)

    return _each(_called(fn, rows, is_view=full), place)


def _called(fn: Callable[..., Any], rows: list[Any], *, is_view: bool = False) -> Any:
    """``fn(*rows)``, after the check that fn is row-wise; rows that are a view of x are protected from writes."""
    return fn(*rows) if fn in ELEMENTWISE else run(fn, rows, is_view=is_view)


def _placed(
    out: Tensor,  # (*lead, *rest)
    bits: Tensor,  # bool, (*lead)
    other: float | Tensor,
) -> Tensor:
    """The result with ``other`` at dropped rows."""
    kept = _as_rows(bits, out)
    if type(other) is float and other == 0.0 and out.is_floating_point():
        return fill_dropped(out, kept)
    return torch.where(kept, out, torch.as_tensor(other, device=out.device).to(out.dtype))


def _as_rows(bits: Tensor, out: Tensor) -> Tensor:
    """The mask with as many dims as the result."""
    return bits if bits.dim() == out.dim() else bits.reshape(*bits.shape, *[1] * (out.dim() - bits.dim()))


def _cannot_leak(fn: Callable[..., Any], grad: bool) -> bool:
    """Whether dropped values cannot reach kept results, so that they need not be replaced first.

    With a gradient they can: a gradient of 0 times a dropped NaN is NaN. In graphs and transforms, a gradient may
    follow.
    """
    return fn in ELEMENTWISE and not grad and not is_tracing() and not is_transformed()


def _replace_dropped(
    rows: Tensor,  # (count, *rest)
    kept: Tensor,  # (count,) bool
    fn: Callable[..., Any],
) -> Tensor:
    """The rows with each dropped one replaced by a kept one, which is a valid input of fn.

    Ones where nothing is kept: their logarithm, inverse and root are finite.
    """
    if rows.shape[0] == 0:
        return rows
    if fn in ELEMENTWISE:
        return torch.where(kept.reshape(-1, *[1] * (rows.dim() - 1)), rows, torch.ones((), dtype=rows.dtype).to(rows))
    first = rows.detach().index_select(0, kept.to(torch.uint8).argmax().unsqueeze(0))
    stand_in = torch.where(kept.any(), first, torch.ones_like(first))
    return torch.where(kept.reshape(-1, *[1] * (rows.dim() - 1)), rows, stand_in)


def _checked(out: Any, count: int) -> Tensor:
    if not isinstance(out, Tensor):
        raise DtypeError(
            say(
                "apply",
                "fn",
                must="return a tensor or a tuple of tensors",
                got=type(out).__name__,
                hint="lambda rows: tuple(fn(rows))",
            )
        )
    if out.dim() == 0 or out.shape[0] != count:
        hint = "fn must be row-wise, and must not reduce dim 0"
        raise ShapeError(
            say("apply", "fn", must=f"return {count} rows, as many as it got", got=tuple(out.shape), hint=hint)
        )
    return out


def _each(outs: Any, place: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(outs, tuple):
        if not outs:
            raise ArgumentError(
                say("apply", "fn", must="return at least one tensor", got="()", hint="lambda rows: rows")
            )
        return tuple(place(out) for out in outs)
    return place(outs)


def _is_few(x: Tensor) -> bool:
    """Whether torch's own indexing is faster than our kernel for x."""
    return not forced() and why_torch_indexes(Facts("apply", tuple(x.shape), x.dtype, x.device.type)) is not None


_ROUTES = (
    Route(
        "fused",
        _run_masked,
        _serves_fused,
        pays=_pays_fused,
        reason=lambda facts: f"mw.{facts.detail.op} computes fn on kept rows where they lie",
        is_kernel=True,
    ),
    Route(
        "kept",
        _run_on_kept,
        _serves_kept,
        _kept_work,
        pays=_pays_kept,
        cost=_cost,
        reason=lambda facts: "" if _is_elementwise(facts) else "fn runs on kept rows only",
        is_kernel=True,
    ),
    Route("plain", _run_on_all, work=_plain_work, cost=_cost, transforms=True),
)
