"""mw.apply: a row-wise function sees only what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, need_dense
from maskwise.ops.primitives import fill_dropped
from maskwise.ops.select.arguments import line_up
from maskwise.ops.select.packed import Packed, collect, fill_for, index_rows, row_skips, why_torch_indexes
from maskwise.ops.select.rows import pack_rows_forward, unpack_rows_forward
from maskwise.ops.select.rowwise_check import run
from maskwise.ops.torch_private import is_tracing, is_transformed, is_vmapped_or_functional
from maskwise.plan import dispatch
from maskwise.plan.cost import Rates, Work, microseconds
from maskwise.plan.dispatch import Decision, Facts, Plan, Route, decide, forced, is_any_forced, is_observed
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
    """Apply a row-wise function to what is kept, and only to that.

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
            tuple of them. It may be a module, and change the feature size or the dtype; each row is treated by itself.
        x: (*lead, *rest).
        more: tensors laid out as x is, of which fn gets the same rows; anything else is handed on as it is.
        mask: a Mask or a bool tensor of x's leading dims, or of as many dims as x, which broadcasts and selects single
            elements, so that rows are of shape (n,); True means keep.
        fill: what stands where nothing was kept: a number.
        other: what stands there instead: a tensor that broadcasts to the result, such as x itself for a selective
            update.

    Returns:
        The result in x's layout: (*lead, *rest of fn's result), or a tuple of them. Gradients reach only what was kept.

    Raises:
        ShapeError: the mask does not line up with x; a tensor in ``more`` is not laid out as x is, or has another
            number of dims where fn is an elementwise function of torch; or fn does not return one row for each it got.
        DtypeError: the mask is not bool, x is not a tensor, or fn returns something else than tensors.
        DeviceError: the mask is on another device.
        ArgumentError: fn returns an empty tuple, or does not treat each row by itself; or a tensor is nested or sparse.

    Rows are computed in any order and number, so what fn makes of one must not depend on others: ``t - t.mean(0)``,
    batch norm in training mode and whatever else mixes along dim 0 is refused. For that, fn is called once more when it
    is first used, with a few of the rows (a few times, if it is random or of half precision); random numbers that
    follow are not disturbed. Compiled graphs and transforms cannot look at values, and do not check. fn may write into
    the rows that it gets: x is not changed.

    Where skipping does not pay (nearly everything is kept, or fn is a cheap elementwise function), fn runs on all rows,
    with a kept row in the place of each dropped one, and the result is the same.
    """
    lead = line_up("apply", x, mask)
    arguments = [x if x.shape == lead.shape else _rows_of(x, lead), *(_rows_of(value, lead) for value in more)]
    if more and fn in ELEMENTWISE:
        _check_ranks(arguments)
    grad = torch.is_grad_enabled() and (x.requires_grad or (bool(more) and _requires_grad(more)))
    if is_tracing():
        return _run_on_all(fn, arguments, lead, fill if other is None else other, grad)
    decision = _decision(fn, x, lead, grad=grad)
    if is_observed() and (planned := _report(decision, x, lead)):
        return planned
    return decision.run(fn, arguments, lead, fill if other is None else other, grad)


def apply_(fn: Callable[..., Any], x: Tensor, *more: Any, mask: MaskLike) -> Tensor:
    """As `apply`, in place: the kept rows of x become fn of them, and x is returned.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> mw.apply_(torch.neg, x, mask=torch.tensor([True, False, True]))
    tensor([-1.,  2., -3.])

    Args:
        fn: as for `apply`; it must keep the shape and the dtype of the rows.
        x: (*lead, *rest); it is written into.
        more: as for `apply`.
        mask: as for `apply`.

    Returns:
        The same x.

    Raises:
        ShapeError: the mask does not line up with x, or fn does not return rows of x's own shape and dtype.
        DtypeError: the mask is not bool, x is not a tensor, or fn returns something else than tensors.
        DeviceError: the mask is on another device.
        ArgumentError: fn returns an empty tuple, or does not treat each row by itself; or a tensor is nested or sparse.
    """
    out = apply(fn, x, *more, mask=mask, other=x)
    if isinstance(out, Plan):
        return out  # type: ignore[return-value]
    if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        must = f"return rows of x's own shape and dtype, {tuple(x.shape)} {x.dtype}"
        raise ShapeError(say("apply_", "fn", must=must, got=got, hint="mw.apply, which makes a new tensor"))
    return x.copy_(out)


def _requires_grad(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _rows_of(value: Any, lead: Mask) -> Any:
    """An argument laid out as the mask is: tensors are expanded (not copied) to its dims, the rest is left alone."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    need_dense("apply", "more", value)
    shape = (*lead.shape, *value.shape[lead.ndim :])
    if value.shape == shape:
        return value
    try:
        return value.expand(shape)
    except RuntimeError:
        must = f"be laid out as x is: leading dims {tuple(lead.shape)}, or 1 where they broadcast"
        raise ShapeError(
            say("apply", "more", must=must, got=tuple(value.shape), hint="functools.partial(fn, value)")
        ) from None


def _check_ranks(arguments: list[Any]) -> None:
    """Raise where an elementwise function would broadcast the rows of one argument along the features of another: by
    how many dims the routes give, and by how many rows are kept.
    """
    x = arguments[0]
    for value in arguments[1:]:
        if isinstance(value, Tensor) and value.dim() and value.dim() != x.dim():
            must = f"have as many dims as x, {x.dim()}: fn gets rows, and broadcasts from the last dim"
            hint = "value[..., None], with a dim of 1 for each that x has after the mask's"
            raise ShapeError(say("apply", "more", must=must, got=tuple(value.shape), hint=hint))


# -- the routes --------------------------------------------------------------------------------------------------------
#: Functions of single elements. They cost about what moving an element does, and what a dropped place holds reaches
#: no other.
ELEMENTWISE = frozenset(
    {torch.abs, torch.neg, torch.exp, torch.log, torch.log1p, torch.expm1, torch.sqrt, torch.rsqrt, torch.square}
    | {torch.relu, torch.sigmoid, torch.tanh, torch.sin, torch.cos, torch.add, torch.sub, torch.mul, torch.div}
    | {torch.nn.functional.relu, torch.nn.functional.gelu, torch.nn.functional.silu, torch.reciprocal}
)
#: From this density on, gathering rows costs more than it saves: for a 768-3072-768 network, 2 % of its time.
_NEARLY_ALL = 0.98
#: The same for elementwise functions that are differentiated, of an x whose rows lie apart in memory.
_APART = 0.9
#: A row is moved in the time of this many elements at least.
_LEAST = 6
_CHEAP, _ALL = "fn is as cheap as gathering rows is", "nearly all is kept"


class Rows(NamedTuple):
    """What the routes look at beside x."""

    #: How many there are, kept or not.
    total: int
    is_elementwise: bool


def _serves_kept(facts: Facts) -> str | None:
    if facts.device != "cpu" and facts.kept is None:
        return "nobody has counted what is kept, which would take a host-device sync"
    return None


def _pays_kept(facts: Facts) -> str | None:
    """Why gathering rows would not pay. What fn costs nobody can know, unless it is elementwise."""
    rows: Rows = facts.detail
    if facts.kept is not None and facts.kept == rows.total > 0:
        return _ALL
    if _is_elementwise(facts):
        # Few elements are not worth a count.
        return _CHEAP if facts.kept is None else None
    density = 0.0 if facts.kept is None or not rows.total else facts.kept / rows.total
    if density < _APART:
        return None
    if rows.is_elementwise:
        # The dense route has two passes more, to replace dropped rows before fn and after it.
        return None if facts.contiguous else _CHEAP
    return None if density < _NEARLY_ALL else _ALL


def _is_elementwise(facts: Facts) -> bool:
    """Whether the cost of the call is known: reading and writing."""
    return bool(facts.detail.is_elementwise and not facts.grad and facts.device == "cpu")


def _kept_work(facts: Facts) -> Work:
    # Both moves read the mask twice; all of the result is written.
    elements, size, count, kept = prod(facts.shape), facts.dtype.itemsize, facts.detail.total, facts.kept or 0
    return Work(
        calls=3,
        streamed=4 * count + size * elements + 4 * (size * elements * kept // max(count, 1)),
        gathered=4 * size * kept * max(elements // max(count, 1), _LEAST),
    )


def _plain_work(facts: Facts) -> Work:
    # fn reads and writes everything, which takes as long again as it computes, and the filling after it does too.
    return Work(calls=2, streamed=(6 * facts.dtype.itemsize + 1) * prod(facts.shape))


def _cost(facts: Facts, work: Work, rates: Rates) -> float:
    """Predicted for elementwise functions alone; of others the order decides."""
    return microseconds(work, rates.plain_call, rates) if _is_elementwise(facts) else 0.0


def _decision(fn: Callable[..., Any], x: Tensor, lead: Mask, *, grad: bool) -> Decision:
    """The route of one call, from the cache or decided now; counts what is kept where that is on the host and pays."""
    is_elementwise = fn in ELEMENTWISE
    # torch.func alone: with forward-mode AD, fn itself carries the tangents.
    transformed = is_vmapped_or_functional()
    required = is_any_forced() and forced()
    kept = lead.facts.count
    few = why_torch_indexes(Facts("apply", tuple(x.shape), x.dtype, x.device.type)) is not None
    if kept is None and not required and not transformed and not few and lead.device.type == "cpu":
        kept = lead.count()
    key = ("apply", x.shape, x.dtype, x.device, x.is_contiguous(), lead.shape, lead.operand, kept, grad, transformed,
           is_elementwise, required)  # fmt: skip
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
            detail=Rows(lead.numel(), is_elementwise),
        )
        decision = dispatch.cache[key] = decide(facts, _ROUTES)
    return decision


def _report(decision: Decision, x: Tensor, lead: Mask) -> Plan | None:
    """Record a call, with what is left out for a dropped row; the FLOPs of fn nobody can know."""
    plan = decision.plan
    return record(plan if plan.route == "plain" else replace(plan, skips=row_skips(x, lead)), x, lead)


def _run_on_kept(fn: Callable[..., Any], arguments: list[Any], lead: Mask, other: float | Tensor, grad: bool) -> Any:
    x = arguments[0]
    if not grad and len(arguments) == 1 and x.is_cpu and not is_transformed():
        bits = lead.to_bool()
        kept = pack_rows_forward(x, bits)
        return _each(_called(fn, [kept]), lambda out: _unpacked(_checked(out, kept.shape[0]), bits, lead, other))
    if grad and len(arguments) == 1 and not isinstance(other, Tensor) and _is_few(x):
        bits = lead.to_bool()
        few = index_rows(x, bits)
        return _each(_called(fn, [few]), lambda out: _scatter_few(_checked(out, few.shape[0]), bits, other))
    capacity = None if lead.device.type == "cpu" else lead.facts.count
    rows = [collect(a, lead, capacity=capacity).values if isinstance(a, Tensor) and a.dim() else a for a in arguments]
    count = rows[0].shape[0]
    return _each(_called(fn, rows), lambda out: Packed(_checked(out, count), lead, capacity).unpack(other))


def _unpacked(values: Tensor, bits: Tensor, lead: Mask, other: float | Tensor) -> Tensor:
    """Rows back in their places. fn may have weights that learn, in which case autograd records them."""
    if values.requires_grad or isinstance(other, Tensor):
        return Packed(values, lead).unpack(other)
    out: Tensor = unpack_rows_forward(values.contiguous(), bits, fill_for(values, other))
    return out


def _scatter_few(values: Tensor, bits: Tensor, fill: float) -> Tensor:
    """Few rows back in their places, by torch's own indexing."""
    out = values.new_full((*bits.shape, *values.shape[1:]), fill)
    return out.masked_scatter_(bits, values) if values.dim() == 1 else out.index_put_((bits,), values)


def _run_on_all(fn: Callable[..., Any], arguments: list[Any], lead: Mask, other: float | Tensor, grad: bool) -> Any:
    bits = lead.to_bool()
    count = bits.numel()
    # Where nothing is dropped, nothing needs a stand-in, and nothing is put back.
    full = not is_tracing() and lead.facts.count == count
    apart = _keeps_apart(fn, grad)
    if apart and not full:
        # What it makes of dropped elements is written over; and of which shape they are, it does not mind.
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
    """What fn makes of the rows, if it treats each by itself; where they are a view of x, x is not written to."""
    return fn(*rows) if fn in ELEMENTWISE else run(fn, rows, is_view=is_view)


def _placed(
    out: Tensor,  # (*lead, *rest)
    bits: Tensor,  # bool, (*lead)
    other: float | Tensor,
) -> Tensor:
    """The result with what stands where nothing was kept."""
    kept = bits if bits.dim() == out.dim() else bits.reshape(*bits.shape, *[1] * (out.dim() - bits.dim()))
    if type(other) is float and other == 0.0 and out.is_floating_point():
        return fill_dropped(out, kept)
    return torch.where(kept, out, torch.as_tensor(other, device=out.device).to(out.dtype))


def _keeps_apart(fn: Callable[..., Any], grad: bool) -> bool:
    """Whether what a dropped place holds reaches no other, so that nothing harmless need stand there.

    In a gradient it would: a gradient of 0 times a dropped NaN is NaN. Graphs and transforms do not say whether there
    will be one.
    """
    return fn in ELEMENTWISE and not grad and not is_tracing() and not is_transformed()


def _replace_dropped(
    rows: Tensor,  # (count, *rest)
    kept: Tensor,  # (count,) bool
    fn: Callable[..., Any],
) -> Tensor:
    """The rows with a kept one in the place of each dropped one: what fn can take there, it can take everywhere.

    Ones where nothing is kept at all: they have a logarithm, an inverse and a root.
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
        hint = "fn must treat each row by itself, and reduce no dim 0"
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
    """Whether torch's own indexing moves the rows of x faster than our kernel does."""
    return not forced() and why_torch_indexes(Facts("apply", tuple(x.shape), x.dtype, x.device.type)) is not None


_ROUTES = (
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
