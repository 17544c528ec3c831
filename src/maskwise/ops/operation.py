"""An operation: one name, the routes by which its calls run, and its registration with ``torch.library``.

A call is checked and dispatched once for each combination of static facts (shapes, dtypes, devices, dim, whether a
gradient is required); a repeated call costs one look-up in the dispatcher's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from maskwise.mask import Mask
from maskwise.mask.structures import Operand
from maskwise.ops.arguments import Dim, MaskLike, check, dims_of
from maskwise.ops.backends import (
    DEVICE,
    FLOATING,
    INTERPRETED,
    INTERVALS_ON,
    KEY,
    provide,
    why_no_triton,
    why_not_served,
)
from maskwise.ops.flops import register_formula
from maskwise.ops.torch_private import (
    has_dispatch_modes,
    is_tracing,
    is_transformed,
    trace_launches,
    untransformed_apply,
)
from maskwise.plan import dispatch
from maskwise.plan.cost import Work
from maskwise.plan.dispatch import NOT_APPLICABLE, Decision, Facts, Plan, Route, Skips, decide
from maskwise.plan.explain import kept_elements, record

__all__ = [
    "ALONG", "Describe", "Operation", "as_bits", "as_operand", "define", "differentiate", "dropped_blocks",
    "dropped_rows", "dropped_unless_few", "eager_function", "has_no_gaps", "kept_mask", "register", "report",
    "takes_intervals",
]  # fmt: skip

#: How an operation describes its work: (route, elements, bytes per element, gradient) -> Work.
Describe = Callable[[str, int, int, bool], Work]

# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_is_grad_enabled, _cached = torch.is_grad_enabled, dispatch.cache.get
_is_any_forced, _is_any_observing, _forced = dispatch.is_any_forced, dispatch.is_any_observing, dispatch.forced


@dataclass(frozen=True)
class Operation:
    """A masked operation; each of its routes takes (x, bits, dims, *rest)."""

    name: str
    #: In order of preference; the last is the plain one.
    routes: tuple[Route, ...]
    #: Whether it is a step of another function, so that no log records it.
    is_step: bool = False

    def __call__(
        self,
        x: torch.Tensor,
        mask: MaskLike,
        dim: Dim,
        *rest: Any,
        then: Callable[[Any], Any] | None = None,
        trains: bool = False,
    ) -> Any:
        """Check and decide the call, or find its decision in the cache, and run it.

        Args:
            x: any shape.
            mask: broadcasts to x.
            dim: as passed by the user.
            rest: further arguments of the routes.
            then: post-processing of the result. Code after the call would get a `Plan` in a dry run.
            trains: whether one of the further arguments requires grad.
        """
        # In a graph the choice must be a constant: dtype and device are, the cache is not.
        if is_tracing():
            return self._in_graph(x, as_bits(mask), dim, rest, then)
        along = mask._along if isinstance(mask, Mask) else None
        bits: Any = as_bits(mask) if along is None else mask
        try:
            # fmt: off
            key = (
                self.name, dim, x.shape, bits.shape, x.dtype, bits.dtype, x.device, bits.device, x.layout,
                bits.layout if along is None else along, (x.requires_grad or trains) and _is_grad_enabled(),
                is_transformed(), _is_any_forced() and _forced(),
            )
            # fmt: on
            decision = _cached(key)
        except (AttributeError, TypeError, RuntimeError):
            # Not tensors, or nested ones without a shape, which the checks report; or a list of dims: not hashable.
            if isinstance(dim, list):
                return self(x, mask, tuple(dim), *rest, then=then, trains=trains)
            bits = as_bits(mask)
            check(self.name, x, bits)
            dims_of(self.name, x, dim)
            if not has_dispatch_modes():
                raise
            # Symbolic sizes: the call is traced, as by make_fx.
            return self._in_graph(x, bits, dim, rest, then)
        if decision is None:
            decision = self._decide(x, mask, along, dim, key)
        if _is_any_observing() and not self.is_step and (planned := self._report(decision, x, mask)):
            return planned
        dims, takes_intervals = decision.prepared
        if takes_intervals:
            out = decision.run(x, bits._bounds(x.device), dims, *rest, along)
        else:
            out = decision.run(x, bits if along is None else bits.to_bool(), dims, *rest)
        return out if then is None else then(out)

    def _in_graph(
        self, x: torch.Tensor, bits: torch.Tensor, dim: Dim, rest: tuple[Any, ...], then: Callable[[Any], Any] | None
    ) -> Any:
        """Trace the call into a graph."""
        check(self.name, x, bits)
        facts = Facts(self.name, (), x.dtype, x.device.type, traced=True)
        out = dispatch.decide_in_graph(facts, self.routes)(x, bits, dims_of(self.name, x, dim), *rest)
        return out if then is None else then(out)

    def route(self, name: str) -> Callable[..., Any]:
        """The ``run`` of one route."""
        return next(route.run for route in self.routes if route.name == name)

    def _decide(self, x: torch.Tensor, mask: MaskLike, along: int | None, dim: Dim, key: tuple[Any, ...]) -> Decision:
        """Check and dispatch a call that is not in the cache."""
        # What the checks look at is known of intervals without making bits of them.
        if isinstance(mask, Mask):
            check(self.name, x, torch.empty((), dtype=torch.bool, device=mask.device).expand(mask.shape))
        else:
            check(self.name, x, mask)
        dims = dims_of(self.name, x, dim)
        *_, grad, transformed, _ = key
        # A mask that is broadcast along the dim of its intervals has one byte for all of it.
        is_along = along is not None and x.device.type in INTERVALS_ON and mask.shape[along] == x.shape[along]
        kind: Operand = "intervals" if is_along else "bits"
        facts = Facts(self.name, tuple(x.shape), x.dtype, x.device.type, grad=grad, transformed=transformed, mask=kind)
        decision = decide(facts, self.routes)
        decision.prepared = dims, is_along and decision.route.intervals
        dispatch.cache[key] = decision
        return decision

    def _report(self, decision: Decision, x: torch.Tensor, mask: MaskLike) -> Plan | None:
        """Record the call with what its route skips."""
        _, takes_intervals = decision.prepared
        return report(decision, x, mask if takes_intervals else as_bits(mask), mask)


def report(decision: Decision, x: torch.Tensor, operand: MaskLike, mask: MaskLike) -> Plan | None:
    """Record a call with what its route skips, which depends on strides and on the mask as the route gets it.

    Args:
        decision: that of the call.
        x: the input.
        operand: the mask as the route takes it: a `Mask` of intervals, or bits.
        mask: the mask as it was passed.
    """
    skips = decision.route.skips
    skipped: int | None = None
    plan = decision.plan_of(kept_elements(x, mask) if isinstance(operand, Mask) else None)
    # GPU kernels load dropped elements, too.
    if x.is_cpu and callable(skips):
        found = skips(x, operand)
        skipped = None if isinstance(found, Skips) else found
        plan = replace(plan, skips=found if isinstance(found, Skips) else Skips.READING)
    elif x.is_cpu and isinstance(operand, Mask) and decision.route.is_kernel:
        plan = replace(plan, skips=Skips.READING)
    return record(plan, x, mask, skipped=skipped)


def as_bits(mask: MaskLike) -> torch.Tensor:
    """The mask as a bool tensor. Values that are not masks are left to the checks that follow."""
    return mask.to_bool() if isinstance(mask, Mask) else mask


def of_kept(work: Work, facts: Facts, elements: int) -> Work:
    """The work of a kernel on what is kept: it reads and computes intervals only, and writes its results in full.

    >>> facts = Facts("sum", (10, 10), torch.float32, "cpu", mask="intervals", kept=20)
    >>> of_kept(Work(calls=1, streamed=500, fresh=400, flops=100), facts, 100)
    Work(calls=1, streamed=100, fresh=400, gathered=0, flops=20, attention_flops=0)
    """
    if facts.mask != "intervals" or facts.kept is None or elements == 0:
        return work
    share = facts.kept / elements
    return work._replace(streamed=round(work.streamed * share), flops=round(work.flops * share))


def kernel_routes(
    name: str,
    plain: Callable[..., Any],
    bare: Callable[..., Any],
    fused: Callable[..., Any],
    work: Describe,
    *,
    eager: Callable[..., Any] | None = None,
    fuses: bool = False,
    skips: Callable[[torch.Tensor, MaskLike], Skips | int] | None = None,
    intervals: bool = False,
) -> tuple[Route, ...]:
    """The routes of an operation that has a kernel.

    Args:
        name: the operation.
        plain: plain torch operations.
        bare: the kernel without autograd.
        fused: the kernel with autograd, as a registered op.
        work: the work of each route.
        eager: the kernel with autograd in eager mode, where that is cheaper than the registered op.
        fuses: whether compiled graphs on a GPU use plain torch operations instead, which Inductor fuses.
        skips: what the CPU kernel skips for a dropped element of a mask of bits; None for nothing.
        intervals: whether the kernels take masks as intervals.
    """

    def serves_bare(facts: Facts) -> str | None:
        if facts.grad or facts.traced:
            return NOT_APPLICABLE
        return why_not_served(name, facts.device, facts.dtype)

    def serves_fused(facts: Facts) -> str | None:
        if not facts.grad and not facts.traced:
            return NOT_APPLICABLE
        if facts.traced and fuses and facts.device == "cuda":
            return "Inductor fuses plain torch operations with their neighbours"
        return why_not_served(name, facts.device, facts.dtype)

    def describe(route: str) -> Callable[[Facts], Work]:
        def of(facts: Facts) -> Work:
            elements = 1
            for size in facts.shape:
                elements *= size
            done = work(route, elements, facts.dtype.itemsize, facts.grad)
            # One FLOP per element and call; a kernel counts as one call.
            steps = done.calls if route == "plain" else 1
            done = done if done.flops else done._replace(flops=elements * steps)
            if route == "plain":
                return done
            # On a GPU every gradient is one kernel.
            return of_kept(done, facts, elements) if facts.device == "cpu" else done._replace(calls=1)

        return of

    declared, flops = (Skips.NOTHING, None) if skips is None else (skips, 1)
    return (
        Route(
            "bare", bare, serves_bare, describe("bare"), call="bare", skips=declared, flops=flops, is_kernel=True,
            intervals=intervals,
        ),
        Route(
            "fused", eager or fused, serves_fused, describe("fused"), call="fused", skips=declared, flops=flops,
            is_kernel=True, in_graph=fused, intervals=intervals,
        ),
        Route("plain", plain, work=describe("plain"), transforms=True),
    )  # fmt: skip


def has_no_gaps(x: torch.Tensor) -> bool:
    """Whether x fills its memory without gaps or overlaps, in any order of its dims.

    >>> has_no_gaps(torch.empty(3, 2).T), has_no_gaps(torch.empty(3, 1).expand(3, 2)), has_no_gaps(torch.ones(6)[::2])
    (True, False, False)
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


#: Up to this many elements, and below this row length, kernels gather elements first, dropped ones too.
_FEW_ELEMENTS, _SHORT_ROW = 1024, 4


def dropped_rows(x: torch.Tensor, mask: MaskLike) -> Skips:
    """What kernels skip that read nothing outside of intervals, nor a row of x if one mask element drops all of it.

    A row is contiguous memory. Where the mask has an element for each element of a row, the kernel loads or prefetches
    x along with the mask, before it knows what is kept.
    """
    if isinstance(mask, Mask):
        # With gaps or overlaps, x may be copied or transposed first.
        return Skips.READING if has_no_gaps(x) else Skips.NOTHING
    bits = mask
    is_in_rows = x.is_contiguous() and bits.is_contiguous() and x.dim() > 0 and x.numel() > _FEW_ELEMENTS
    if is_in_rows and x.shape[-1] >= _SHORT_ROW and (bits.dim() == 0 or bits.shape[-1] == 1):
        return Skips.READING
    return Skips.NOTHING


#: Mask bytes that kernels look at together before they read x (csrc/loops.h).
_BLOCK = 64


def dropped_blocks(x: torch.Tensor, mask: MaskLike) -> Skips | int:
    """The same for kernels that also pass over blocks of a row: how many elements of blocks with nothing kept.

    >>> dropped_blocks(torch.ones(8, 256), torch.arange(256) < 70)
    1024
    """
    rows = dropped_rows(x, mask)
    if isinstance(mask, Mask) or rows is Skips.READING:
        return rows
    bits = mask
    is_in_rows = x.is_contiguous() and x.numel() > _FEW_ELEMENTS and bits.dim() > 0 and bits.numel() > 0
    if not is_in_rows or bits.stride(-1) != 1 or bits.shape[-1] != x.shape[-1] or x.shape[-1] % _BLOCK:
        return Skips.NOTHING
    some = bits.unflatten(-1, (-1, _BLOCK)).any(-1)
    return int((~some).sum()) * _BLOCK * (x.numel() // bits.numel())


#: The fewest elements of x for one of a mask, and the part of it that is kept, for kernels to prefetch dropped rows too
#: (`drops_few`, csrc/reduce_loops.cpp).
_ROW, _MOST = 16, 0.75


def dropped_unless_few(x: torch.Tensor, mask: MaskLike) -> Skips | int:
    """The same for reductions: where few rows are dropped, those are prefetched, and count as read.

    >>> [dropped_unless_few(torch.ones(100, 64), torch.arange(100)[:, None] < n).name for n in (74, 75)]
    ['READING', 'COMPUTING']
    """
    found = dropped_blocks(x, mask)
    if isinstance(mask, Mask) or found is not Skips.READING or mask.numel() * _ROW > x.numel():
        return found
    return Skips.COMPUTING if int(mask.sum()) >= _MOST * mask.numel() else found


# -- registration with torch.library -----------------------------------------------------------------------------------
_library = torch.library.Library("maskwise", "FRAGMENT")


def register(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    work: Describe,
    cpu: Iterable[torch.dtype] = (),
    gpu: Iterable[torch.dtype] = (),
    gpu_from: str | None = None,
    fuses: bool = False,
    skips: Callable[[torch.Tensor, MaskLike], Skips | int] | None = None,
    adapt: Callable[[str, Callable[..., Any]], Callable[..., Any]] = lambda route, run: run,
) -> Operation:
    """Register ``maskwise::<name>_fused`` and ``maskwise::<name>_fused_forward``, and return the operation.

    Two ops with one schema, with and without autograd, since autograd's bookkeeping costs 5 µs even when no gradient is
    required. Both fall back to the plain-torch reference on devices without a kernel, and have a fake for tracing.

    Args:
        name: the public name, such as ``"sum"``.
        schema: arguments and results, such as ``"(Tensor x, Tensor mask, int[] dim, bool keepdim) -> Tensor"``; one
            that ends with `ALONG` takes masks as intervals.
        reference: the same function in plain torch operations: leak-proof, differentiable, the ground truth.
        fake: the fake kernel: results without data, for tracing.
        backward: the gradient, as for ``torch.library.register_autograd``; None where there is none.
        setup_context: saves for the gradient, as for ``torch.library.register_autograd``.
        work: the work of each route, for the dispatcher.
        cpu: the dtypes of the C++ kernel.
        gpu: the dtypes of the Triton kernel.
        gpu_from: its path, such as ``"maskwise.ops.reduce.gpu:sum"``.
        fuses: whether compiled graphs on a GPU use plain torch operations instead, which Inductor fuses.
        skips: what the CPU kernel skips for a dropped element; None for nothing.
        adapt: ``(route, run) -> run``: wraps the registered op of a route.
    """
    for op in (f"{name}_fused", f"{name}_fused_forward"):
        define(op, schema, reference=reference, fake=fake, gpu=gpu, gpu_from=gpu_from)
    intervals = takes_intervals(schema)
    if intervals and backward is not None:
        backward, setup_context = _with_along(schema, backward, setup_context)
    if backward is not None:
        differentiate(f"{name}_fused", backward, setup_context)
    if not INTERPRETED:
        provide(name, "cpu", cpu)
    provide(name, DEVICE, gpu)
    bare = getattr(torch.ops.maskwise, f"{name}_fused_forward").default
    fused = getattr(torch.ops.maskwise, f"{name}_fused").default
    eager = fused if backward is None else eager_function(name, schema, bare, setup_context, backward)
    routes = kernel_routes(
        name,
        adapt("plain", reference),
        adapt("bare", bare),
        adapt("fused", fused),
        work,
        eager=adapt("fused", eager),
        fuses=fuses,
        skips=skips,
        intervals=intervals,
    )
    return Operation(name, routes)


# -- masks as intervals ------------------------------------------------------------------------------------------------
#: The last argument of an op that takes masks as intervals. Where it is not 0, the mask is not bool, but int64 with a
#: leading dim of 2: the starts and ends of what is kept along that dim, which is counted from the right.
ALONG = ", int along=0)"


def takes_intervals(schema: str) -> bool:
    """Whether an op takes masks as intervals.

    >>> takes_intervals("(Tensor x, Tensor mask, int along=0) -> Tensor")
    True
    """
    return ALONG in schema


def kept_mask(mask: torch.Tensor, along: int, shape: Sequence[int]) -> MaskLike:
    """The mask of an op as functions take it: the bool tensor itself, or the intervals along a dim of x as a `Mask`.

    >>> kept_mask(torch.tensor([[[0], [1]], [[2], [3]]]), -1, (2, 4)).to_bool().int().tolist()
    [[1, 1, 0, 0], [0, 1, 1, 0]]
    """
    return mask if along == 0 else Mask._from_bounds(mask, along, tuple(shape)[1 - mask.dim() :])


def as_operand(mask: MaskLike, like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The mask as an op takes it, and the op's ``along``: the inverse of `kept_mask`. ``like`` is what it masks.

    >>> as_operand(Mask.from_lengths([1, 3], max_len=4), torch.ones(2, 4))[0].tolist()
    [[[0], [0]], [[1], [3]]]
    """
    if isinstance(mask, Mask) and like.device.type in INTERVALS_ON and not is_tracing():
        along = mask._along
        # A mask that is broadcast along the dim of its intervals has one byte for all of it.
        if along is not None and mask.shape[along] == like.shape[along]:
            return mask._bounds(like.device), along
    return as_bits(mask), 0


def _with_bits(schema: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a mask of bits as one of the op's arguments, which may hold intervals."""
    names = [argument.split(" ")[1] for argument in schema[1 : schema.index(")")].split(", ")]
    mask, count = names.index("mask"), len(names) - 1
    # What the mask lines up with: of a loss that is the target, since x may have classes.
    like = next((names.index(name) for name in ("target", "x") if name in names), None)

    def run_on_bits(*given: Any) -> Any:
        *arguments, along = given if len(given) > count else (*given, 0)
        if along:
            shape = arguments[names.index("shape")] if like is None else arguments[like].shape
            arguments[mask] = as_bits(kept_mask(arguments[mask], along, shape))
        return run(*arguments)

    return run_on_bits


def _with_along(
    schema: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A gradient that finds the dim of the intervals as ``ctx.along``, and need not return a gradient for it."""
    count = schema[: schema.index(")")].count(", ")

    def setup_with_along(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.along = inputs[count] if len(inputs) > count else 0
        if setup_context is not None:
            setup_context(ctx, inputs[:count], output)

    def backward_with_along(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (*backward(ctx, *grads), None)

    return backward_with_along, setup_with_along


# -- eager autograd ----------------------------------------------------------------------------------------------------


def eager_function(
    name: str,
    schema: str,
    run: Callable[..., Any],
    setup_context: Callable[..., Any] | None,
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """The kernel with its gradient as an autograd Function, which costs half as much as torch.library's autograd.

    torch.compile needs the registered op; eager code does not. Only tensors go through the Function: each further
    argument costs a microsecond or two. Other arguments are bound to a Function class of their own, which is cached.
    """
    is_tensor = [argument.startswith("Tensor") for argument in schema[1 : schema.index(")")].split(", ")]
    count = sum(is_tensor)
    if not all(is_tensor[:count]):
        raise ValueError(
            f"{name}: the tensors of a schema with an eager autograd function must come before its settings, got "
            f"{schema}. Hint: (Tensor x, int dim)."
        )

    # Typed, because 1, 1.0 and True are equal, but not the same argument.
    @lru_cache(maxsize=256, typed=True)
    def bound(*settings: Any) -> Callable[..., Any]:
        # With Function.setup_context, torch would inspect the signature on every call, which costs more than the rest.
        def forward(ctx: Any, *operands: Any) -> Any:
            output = run(*operands, *settings)
            if setup_context is not None:
                setup_context(ctx, (*operands, *settings), output)
            return output

        def tensor_backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return backward(ctx, *grads)[:count]

        members = {"forward": staticmethod(forward), "backward": staticmethod(tensor_backward)}
        return untransformed_apply(type(name, (torch.autograd.Function,), members))

    def eager(*arguments: Any) -> Any:
        settings = [tuple(value) if type(value) is list else value for value in arguments[count:]]
        return bound(*settings)(*arguments[:count])

    return eager


def define(
    op: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    gpu: Iterable[torch.dtype] = (),
    gpu_from: str | None = None,
    traces: bool = False,
    flops: Callable[..., int] | None = None,
    skipped_flops: Callable[..., int] | None = None,
) -> None:
    """Define one op with its reference, its fake and optionally its Triton kernel, such as that of a backward pass.

    With ``traces``, graphs that are compiled for a GPU contain its launches, as those of a ``torch.library.triton_op``;
    an op without a kernel of its own is traced as what its reference calls.

    ``flops`` and ``skipped_flops`` are for FLOP counters, and for products alone: see `register_formula`.
    """
    _library.define(op + schema, tags=(torch.Tag.pt2_compliant_tag,))
    if flops is not None:
        register_formula(f"maskwise::{op}", flops, skipped_flops)
    if takes_intervals(schema):
        reference, fake = _with_bits(schema, reference), _without_along(schema, fake)
    _library.impl(op, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"maskwise::{op}", fake, lib=_library)
    if gpu_from is not None:
        _library.impl(op, on_demand(gpu_from, frozenset(gpu), reference), KEY)
    if traces and not INTERPRETED:
        rule = _traced_on_demand(gpu_from, frozenset(gpu) if gpu_from else frozenset(FLOATING), reference)
        trace_launches(f"maskwise::{op}", rule, _library)


def _without_along(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake of an op that takes intervals: its result does not depend on them."""
    count = schema[: schema.index(")")].count(", ")
    return lambda *arguments: fake(*arguments[:count])


def on_demand(path: str, dtypes: frozenset[torch.dtype], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The function at ``path``, imported at its first call, since importing Triton is slow.

    Falls back to the reference without Triton, and for dtypes that the kernel does not support.
    """
    module, _, name = path.partition(":")
    found: list[Callable[..., Any]] = []

    def run(first: torch.Tensor, *rest: Any) -> Any:
        if first.dtype not in dtypes:
            return reference(first, *rest)
        if not found:
            found.append(reference if why_no_triton() else _launcher(module, name))
        return found[0](first, *rest)

    return run


def _traced_on_demand(
    path: str | None, dtypes: frozenset[torch.dtype], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """How a call of an op is traced into a graph: as the launches of the function at ``path``."""

    def run(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if why_no_triton():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        module, _, name = (path or "").partition(":")
        launcher = getattr(import_module(module), name) if path else reference
        in_graph = import_module("maskwise.ops.gpu.traced").in_graph
        return in_graph(launcher, dtypes, mode, op, types, args, kwargs)

    return run


def _launcher(module: str, name: str) -> Callable[..., Any]:
    """The launcher of an op, of which repeated calls are replayed."""
    replayed: Callable[..., Any] = import_module("maskwise.ops.gpu.replay").replayed
    launcher: Callable[..., Any] = replayed(f"{module}:{name}", getattr(import_module(module), name))
    return launcher


def differentiate(op: str, backward: Callable[..., Any], setup_context: Callable[..., Any] | None) -> None:
    """Register the gradient of one op."""
    torch.library.register_autograd(f"maskwise::{op}", backward, setup_context=setup_context, lib=_library)
