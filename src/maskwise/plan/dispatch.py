"""The dispatcher: from the static facts of a call to the route that runs it.

A family states its routes once, in order of preference. A call collects its `Facts`, and `decide` picks: of the
routes that serve it, the one that `force` requires, else the one with the lowest predicted cost, else the first. The
outcome is a `Decision`. A repeated call is a hit in `cache`, keyed by its static facts, and costs one dictionary
look-up. `plan` is the same without the run, and `maskwise.plan.explain` reports what was decided.

    facts -> decide(facts, ROUTES) -> Decision(run, plan, ...) -> cache[key]

Nothing here reads a tensor, so nothing here causes a host-device sync.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.mask.structures import Operand
from maskwise.ops.torch_private import is_exporting, mark_constant_in_graphs
from maskwise.plan import calibration
from maskwise.plan.cost import Rates, Work, microseconds

__all__ = [
    "NOT_APPLICABLE",
    "ROUTES",
    "Decision",
    "Facts",
    "Plan",
    "Refusal",
    "Route",
    "Skips",
    "cache",
    "decide",
    "decide_in_graph",
    "force",
    "forced",
    "invalidate",
    "is_any_forced",
    "is_any_observing",
    "is_dry_run",
    "is_observed",
    "observers",
    "plan",
]

#: Every route that a call can take, and what it does. Those of one family are documented with it.
ROUTES = {
    "plain": "dense torch operations with dropped values replaced: leak-proof, differentiable by torch",
    "bare": "the kernel, without autograd around it",
    "fused": "the kernel with autograd",
    "kept": "kept rows or elements are gathered first, and the function runs on those",
    "filled": "losses: torch's own loss between the kernels of fill and sum",
    "pieces": "losses: in chunks that fit the cache; dropped rows are skipped",
    "whole": "attention: one call of scaled_dot_product_attention with a mask",
    "blocks": "attention: the CPU kernel of scaled_dot_product_attention on the blocks that are kept",
    "scored": "attention: scores are capped, biased by distance or shared with sinks, one block at a time",
    "sdpa": "attention: scaled_dot_product_attention on inputs that are zero where dropped, without a host-device sync",
    "varlen": "attention: torch.nn.attention.varlen on a GPU; dropped keys are not read, nothing is packed",
    "flex": "attention: flex_attention on a GPU, with the blocks that the mask keeps",
    "sequences": "attention: one call for each sequence of packed tokens",
    "sparse": "linear maps: a kernel that multiplies kept weights only",
    "bsr": "linear maps: torch's tuned kernel of block-sparse weights on a GPU",
    "csr": "linear maps: torch's product with an unstructured sparse weight on a GPU, for few kept weights",
    "semi_structured": "linear maps: torch's product on a GPU with a weight of which two of each four are kept",
    "units": "linear maps: a smaller dense product, without dead inputs and outputs",
    "rows": "depthwise convolutions: loops over the runs of what is wanted",
    "tiles": "convolutions: tiles with something wanted are gathered with their halo, and convolved as a batch",
    "pixels": "convolutions: the positions that are wanted are gathered with all taps, and multiplied as rows",
    "packed": "models: the kept tokens of all sequences in one row",
    "tokenwise": "models: linear layers on kept tokens only, all else with padding",
    "padded": "models: the original forward, with padding",
}
#: What `force` accepts besides route names.
ALIASES = {"dense": "plain", "kernel": "the family's own kernel"}

#: How a mask reaches a kernel (see `Mask.operand`), or that there is none.
MaskKind: TypeAlias = Operand | Literal["none"]


class Facts(NamedTuple):
    """The static facts of a call. Hashable; collecting them never causes a host-device sync.

    Attributes:
        op: the function.
        shape: of x, or of what the family counts as its elements.
        dtype: of x.
        device: the type of x's device, such as ``"cpu"``.
        grad: whether a gradient is required.
        transformed: whether a torch.func transform or forward-mode AD is active.
        traced: whether the call is traced into a graph.
        mask: how the mask reaches a kernel.
        kept: how many elements of x the mask keeps, where that is known.
        contiguous: whether x is contiguous.
        detail: further facts of the family.
    """

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    grad: bool = False
    transformed: bool = False
    traced: bool = False
    mask: MaskKind = "bits"
    kept: int | None = None
    contiguous: bool = True
    detail: Any = None


class Skips(Enum):
    """What a route skips for a dropped element, as declared with the route: never more than is guaranteed."""

    #: Nothing: it is read and computed like a kept one, and its result is discarded.
    NOTHING = 0
    #: It is not computed, though its memory may be read.
    COMPUTING = 1
    #: It is neither read nor computed.
    READING = 2


#: The reason of a route that does not apply to a call, such as a kernel without autograd where a gradient is required.
#: Reports leave it out.
NOT_APPLICABLE = ""
_TRANSFORMED = "torch.func transforms and forward-mode AD see through plain torch operations only"
_FORCED, _OTHER_FORCED = "forced", "another is forced"


def _serves(facts: Facts) -> None:
    """Support every call: the default of `Route.serves` and `Route.pays`."""


@dataclass(frozen=True)
class Route:
    """One implementation of the calls of a family.

    Attributes:
        name: one of `ROUTES`.
        run: what runs; its arguments are the family's own.
        serves: ``facts -> reason``: why the route does not support a call, or None where it does. `NOT_APPLICABLE`
            leaves it out of reports.
        pays: ``facts -> reason``: why the route supports a call but would not pay, or None; `force` overrides it.
        work: ``facts -> Work``, for the cost model. Without it, the order of the routes decides.
        cost: ``(facts, work, rates) -> microseconds``, where that is not what the work predicts.
        call: which per-call rate applies: ``"plain"``, ``"bare"`` or ``"fused"``.
        reason: why it is taken, where there is no prediction; a string, or ``facts -> str``.
        skips: what it skips for a dropped element; where that depends on strides, a function of the tensors that the
            family reports with, which may return how many elements are not read.
        flops: FLOPs per computed element: a number, ``facts -> int``, or None where unknown.
        is_kernel: whether ``mw.force("kernel")`` selects it.
        transforms: whether it runs under torch.func and forward-mode AD.
        in_graph: what runs instead in a traced graph.
        intervals: whether it takes masks as intervals; otherwise they reach it as bits.
    """

    name: str
    run: Callable[..., Any]
    serves: Callable[[Facts], str | None] = _serves
    work: Callable[[Facts], Work] | None = None
    pays: Callable[[Facts], str | None] = _serves
    cost: Callable[[Facts, Work, Rates], float] | None = None
    call: str = "plain"
    reason: str | Callable[[Facts], str] = ""
    skips: Skips | Callable[..., Skips | int] = Skips.NOTHING
    flops: int | Callable[[Facts], int] | None = None
    is_kernel: bool = False
    transforms: bool = False
    in_graph: Callable[..., Any] | None = None
    intervals: bool = False

    def __post_init__(self) -> None:
        if self.name not in ROUTES:
            raise ValueError(f"Route: `name` must be one of {', '.join(ROUTES)}, got {self.name!r}. Hint: ROUTES.")

    def refuses(self, facts: Facts) -> str | None:
        """Why the route does not support a call, or None."""
        return _TRANSFORMED if facts.transformed and not self.transforms else self.serves(facts)

    def predict(self, facts: Facts) -> tuple[Work, float] | None:
        """The work of a call and its time in microseconds; None where nothing can be predicted."""
        if self.work is None:
            return None
        work, rates = self.work(facts), calibration.rates_for(facts.device)
        if self.cost is not None:
            return work, self.cost(facts, work, rates)
        backward = (rates.plain_backward if self.call == "plain" else rates.fused_backward) if facts.grad else 0.0
        return work, microseconds(work, getattr(rates, f"{self.call}_call"), rates) + backward


@dataclass(frozen=True)
class Refusal:
    """A route that was not taken, and the reason."""

    route: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """How a call runs: its route, the reason, the predicted cost, and the rejected routes.

    >>> import torch, maskwise as mw
    >>> plan = mw.plan(mw.sum, torch.ones(512, 512), mw.Mask.causal(512), dim=-1)
    >>> plan.op, plan.route, [refusal.route for refusal in plan.refused]
    ('sum', 'bare', ['plain'])

    Attributes:
        op: the function.
        route: one of `ROUTES`.
        reason: why that one.
        microseconds: the predicted time; 0 where nothing can be predicted.
        refused: the other routes, each with the reason why not.
        work: the work of the route, where that is known.
        dense: the work of the dense route.
        skips: what the route skips for a dropped element.
        flops: FLOPs per computed element; None where unknown.
    """

    op: str
    route: str
    reason: str
    microseconds: float
    refused: tuple[Refusal, ...] = ()
    work: Work | None = None
    dense: Work | None = None
    skips: Skips = Skips.NOTHING
    flops: int | None = None

    def _repr_html_(self) -> str:
        """The routes as plain HTML, which notebooks show: the one that runs first, then those that were rejected."""
        # Only notebooks need it, and its table of entities takes a while to load.
        from html import escape

        time = f"{self.microseconds:.0f} µs" if self.microseconds else "–"
        rows = [(self.route, self.reason, time), *((each.route, each.reason, "") for each in self.refused)]
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        head = "<tr><th>route</th><th>why, or why not</th><th>predicted</th></tr>"
        caption = f"<caption>plan of {escape(self.op)}</caption>"
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"


class Decision:
    """A cached choice: what runs, the arguments that the checks prepared, the route, the facts and the plan.

    The plan is made when it is first read: a call that nobody observes does without one.
    """

    __slots__ = ("_make", "_plan", "facts", "is_forced", "prepared", "route", "run")

    def __init__(
        self,
        run: Callable[..., Any],
        prepared: Any,
        plan: Plan | Callable[[Facts], Plan],
        route: Route,
        facts: Facts | None = None,
        *,
        is_forced: bool = False,
    ) -> None:
        self.run, self.prepared, self.route, self.facts, self.is_forced = run, prepared, route, facts, is_forced
        self._plan: Plan | None = plan if isinstance(plan, Plan) else None
        self._make: Callable[[Facts], Plan] | None = None if isinstance(plan, Plan) else plan

    @property
    def plan(self) -> Plan:
        """Why the route is taken, and the others are not."""
        if self._plan is None:
            assert self._make is not None
            assert self.facts is not None
            self._plan = self._make(self.facts)
        return self._plan

    def plan_of(self, kept: int | None) -> Plan:
        """The plan of a call whose mask keeps so many elements of x: the choice is the same, the predictions differ.

        Masks of one shape share a decision whatever they keep, since a kernel that takes intervals is predicted to be
        the fastest even where everything is kept, or not at all.
        """
        if kept is None or self._make is None or self.facts is None or self.facts.kept is not None:
            return self.plan
        return self._make(self.facts._replace(kept=kept))


def decide(facts: Facts, routes: Sequence[Route], prepared: Any = None) -> Decision:
    """Pick the route of a call.

    >>> dense = Route("plain", print, work=lambda facts: Work(calls=2))
    >>> kernel = Route("bare", print, lambda facts: None if facts.dtype.is_floating_point else "no kernel for integers",
    ...                work=lambda facts: Work(calls=1))
    >>> facts = Facts("sum", (2, 3), torch.float32, "cpu")
    >>> decide(facts, (kernel, dense)).plan.refused
    (Refusal(route='plain', reason='predicted 6 µs against 3 µs'),)
    >>> decide(facts._replace(dtype=torch.int64), (kernel, dense)).plan.reason
    'no kernel for integers'

    Args:
        facts: the static facts of the call.
        routes: those of the family, in order of preference; the last one is dense, and supports every call.
        prepared: arguments for ``run`` that are cached with the decision.
    """
    served = [route for route in routes if route.refuses(facts) is None]
    best = required = _required(served)
    if best is None:
        served = [route for route in served if route.pays(facts) is None]
        best = served[0]
        # Where the cost of the preferred route cannot be predicted, the order of the list decides.
        if best.work is not None and len(served) > 1:
            known = [(found[1], route) for route in served if (found := route.predict(facts)) is not None]
            best = min(known, key=lambda each: each[0])[1]
    is_forced = required is not None
    plan = functools.partial(_plan, routes, best, is_forced)
    return Decision(best.run, prepared, plan, best, facts, is_forced=is_forced)


def _plan(routes: Sequence[Route], best: Route, is_forced: bool, facts: Facts) -> Plan:
    """The plan of a decision."""
    predictions = [route.predict(facts) for route in routes]
    best_found = predictions[routes.index(best)]
    refused = []
    for route, found in zip(routes, predictions, strict=True):
        why = route.refuses(facts)
        if why is None and not is_forced:
            why = route.pays(facts)
        if route is best or why == NOT_APPLICABLE or (why is None and route.name == best.name):
            continue
        if why is not None:
            refused.append(Refusal(route.name, why))
        elif is_forced:
            refused.append(Refusal(route.name, _OTHER_FORCED))
        elif best_found is not None and found is not None:
            refused.append(Refusal(route.name, f"predicted {found[1]:.0f} µs against {best_found[1]:.0f} µs"))
        else:
            refused.append(Refusal(route.name, _reason(best, facts)))
    dense = predictions[-1]
    return Plan(
        facts.op,
        best.name,
        _FORCED if is_forced else _reason(best, facts) or _by_elimination(refused),
        0.0 if best_found is None else best_found[1],
        tuple(refused),
        None if best_found is None else best_found[0],
        None if dense is None else dense[0],
        best.skips if isinstance(best.skips, Skips) else Skips.NOTHING,
        best.flops(facts) if callable(best.flops) else best.flops,
    )


def decide_in_graph(facts: Facts, routes: Sequence[Route]) -> Callable[..., Any]:
    """The first route that supports a traced call: it must be a constant of the graph, so no cost is predicted."""
    plain = forced() == "plain"
    for route in routes[:-1]:
        if not plain and route.serves(facts) is None:
            return route.in_graph or route.run
    return routes[-1].in_graph or routes[-1].run


def _required(served: Sequence[Route]) -> Route | None:
    """The forced route, if the family has it and it supports the call."""
    wanted = forced()
    if wanted is None:
        return None
    if wanted == "plain":
        # The dense route, which is the last one whatever its name.
        return served[-1]
    return next((route for route in served if route.name == wanted or (wanted == "kernel" and route.is_kernel)), None)


def _reason(route: Route, facts: Facts) -> str:
    return route.reason(facts) if callable(route.reason) else route.reason


def _by_elimination(refused: Sequence[Refusal]) -> str:
    """Why a route is taken: it is predicted to be the fastest, or no other one supports the call."""
    rivals = sum(refusal.reason.startswith("predicted ") for refusal in refused)
    if rivals:
        return f"predicted fastest of {rivals + 1}"
    return refused[0].reason if refused else "the only route"


# -- the cache ---------------------------------------------------------------------------------------------------------
class _Cache(dict[tuple[Any, ...], Any]):
    """Decisions by static facts: one cache for all families; the first item of a key is the family's name.

    It is cleared when it exceeds its limit, so dynamic shapes cost planning time, and never unbounded memory.

    >>> decisions = _Cache(limit=2)
    >>> decisions["sum", 3], decisions["sum", 4], decisions["sum", 5] = "bare", "bare", "plain"
    >>> list(decisions)
    [('sum', 5)]
    """

    def __init__(self, limit: int = 8192) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: tuple[Any, ...], decision: Any) -> None:
        if len(self) >= self._limit:
            self.clear()
        super().__setitem__(key, decision)


cache = _Cache()


def invalidate() -> None:
    """Clear the cache: something that decisions depend on, such as the measured rates, has changed."""
    cache.clear()


# -- context-local blocks ----------------------------------------------------------------------------------------------
Value = TypeVar("Value")


class _Entry(Generic[Value]):
    """One ``with`` block that was entered."""

    __slots__ = ("is_open", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.is_open = True


class ContextStack(Generic[Value]):
    """The values of the ``with`` blocks that are open in the current context (see `contextvars`).

    >>> routes = ContextStack[str]("routes")
    >>> with routes.entered("dense"), routes.entered("kernel"):
    ...     routes.values()
    ('dense', 'kernel')
    >>> routes.values()
    ()

    An exited block has no effect anywhere: neither in a context that was copied while it was open, nor after blocks
    that exit in another order than they were entered, as those of interleaved generators do.
    """

    def __init__(self, name: str) -> None:
        self._entries: ContextVar[tuple[_Entry[Value], ...]] = ContextVar(name, default=())
        #: Falsy unless a block may be open. This is ContextVar.get itself, for the fast path of tiny calls.
        self.any: Callable[[], tuple[object, ...]] = self._entries.get

    def values(self) -> tuple[Value, ...]:
        """The values of the open blocks, the innermost last."""
        return tuple(entry.value for entry in self._entries.get() if entry.is_open)

    @contextmanager
    def entered(self, value: Value) -> Iterator[Value]:
        """Push a value for the duration of the ``with`` block."""
        entry = _Entry(value)
        self._entries.set((*self._entries.get(), entry))
        try:
            yield value
        finally:
            entry.is_open = False
            # Not a reset to the state before this block: another may have been entered, or exited, in between.
            self._entries.set(tuple(other for other in self._entries.get() if other.is_open))


# -- mw.force ----------------------------------------------------------------------------------------------------------
_routes = ContextStack[str | None]("maskwise.force")


@contextmanager
def force(route: str | None) -> Iterator[None]:
    """Force one route inside the block, wherever it supports the call: for experiments, and to measure a route.

    >>> import torch, maskwise as mw
    >>> x, mask = torch.rand(512, 512), mw.Mask.causal(512)
    >>> with mw.force("dense"), mw.explain() as log:
    ...     total = mw.sum(x, mask)
    >>> log.calls[0].route
    'plain'

    Args:
        route: ``"dense"`` (or ``"plain"``), the leak-proof torch operations that every function has; ``"kernel"``, our
            own kernel even where it is predicted to be slower; or a route of one family, such as ``"kept"`` of
            `mw.apply` or ``"blocks"`` of `mw.attention`, which does not affect other families. None restores the
            default inside of an outer block.

    Raises:
        ArgumentError: there is no such route.

    It is context-local (see `contextvars`): it applies to its thread or asyncio task, and to tasks started inside of
    the block, until the block exits. A generator that yields inside of the block leaves it open for its consumer. A
    backward pass on the CPU runs in the calling thread, so a forced route applies to it; on a GPU it runs in autograd's
    threads, where nothing is forced. Compiled graphs keep the route that they were traced with.
    """
    if route is not None and route not in ALIASES and route not in ROUTES:
        names = ", ".join((*ALIASES, *ROUTES))
        raise ArgumentError(say("force", "route", must=f"be one of {names}", got=repr(route), hint='mw.force("dense")'))
    with _routes.entered("plain" if route == "dense" else route):
        yield


def forced() -> str | None:
    """The route that `force` sets in this context, or None. It is a part of the key of every cached decision.

    An export forces the plain one, so that an exported graph contains torch's own operators only.
    """
    return "plain" if is_exporting() else _forced_here()


@mark_constant_in_graphs
def _forced_here() -> str | None:
    if not is_any_forced():
        return None
    routes = _routes.values()
    return routes[-1] if routes else None


#: Falsy where no route is forced: the fast path of tiny calls, about 30 ns.
is_any_forced = _routes.any


# -- observers: mw.explain, and mw.plan --------------------------------------------------------------------------------
class Observer:
    """A receiver of reports: a log of `mw.explain`, or the dry run of `plan`."""


_DRY_RUN = Observer()
#: The observers of this context. Almost always none, so that a call costs one truth test.
observers = ContextStack[Observer]("maskwise.observers")
#: Falsy where there is no observer.
is_any_observing = observers.any


def is_observed() -> bool:
    """Whether calls in this context are observed; a traced graph reports nothing."""
    # In this order: the compiler does not trace context variables.
    return not torch.compiler.is_compiling() and bool(is_any_observing())


def is_dry_run() -> bool:
    """Whether calls return their plan instead of running: inside of `plan`."""
    return is_observed() and _DRY_RUN in observers.values()


#: The packages whose functions can be planned.
_HOMES = ("maskwise.ops.", "maskwise.nn.")


def plan(fn: Callable[..., Any], *arguments: Any, **options: Any) -> Plan:
    """Plan a call without running it: the route it would take, why, its predicted cost, and the rejected routes.

    >>> import torch, maskwise as mw
    >>> x, mask = torch.rand(512, 512), mw.Mask.causal(512)
    >>> mw.plan(mw.softmax, x, mask, dim=-1).route
    'bare'
    >>> with mw.force("dense"):
    ...     mw.plan(mw.softmax, x, mask, dim=-1).reason
    'forced'

    Args:
        fn: a masked function, such as `mw.softmax`, or a masked layer.
        arguments: its arguments; invalid ones raise what the call would raise.
        options: its keyword arguments.

    Returns:
        A `Plan`.

    Raises:
        DtypeError: ``fn`` is not a masked function of maskwise.
        ArgumentError: ``fn`` has a single route, so there is nothing to plan.
    """
    name = _name_of(fn)
    # A masked function ends with its dispatch, which in a dry run returns the plan instead of a result.
    with observers.entered(_DRY_RUN):
        planned = fn(*arguments, **options)
    if isinstance(planned, Plan):
        return planned
    hint = "mw.plan(mw.softmax, x, mask, dim=-1)"
    raise ArgumentError(say("plan", "fn", must="have routes to choose from", got=f"{name}, which has one", hint=hint))


def _name_of(fn: Any) -> str:
    """The name of a function that can be planned, or raise."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    home = str(getattr(inner, "__module__", ""))
    if callable(inner) and home.startswith(_HOMES):
        return str(name)
    # Looked up, not imported: this layer is below the package's root.
    public = sys.modules["maskwise"].__all__
    hint = "with mw.explain() as log: ..., which reports the plans of everything inside"
    if name in public and home != "maskwise" and not home.startswith("maskwise."):
        hint = f"mw.{name}"
    got = f"{home}.{name}" if home and callable(fn) else repr(fn)
    raise DtypeError(say("plan", "fn", must="be a masked function of maskwise", got=got, hint=hint))
