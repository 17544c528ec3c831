"""What is compared with what: a case, its sides, and the targets that must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from maskwise.errors import ArgumentError, say

__all__ = ["SAME_WORK", "Case", "Kind", "Side", "Target", "at_least", "at_most", "never_slower", "within"]

Kind = Literal["ours", "full", "peer", "leaky", "floor", "memory", "route"]
"""How a side counts: `peer` does the same work; `leaky` does it only on clean data, so it is shown and never counted
as the best peer; `floor` does less work (the unmasked op) and is there as a limit; `full` is ours with everything kept;
`memory` is a plain copy or write, to tell what the memory gives; `route` is ours by one of its routes, whichever one
dispatch would choose."""
SAME_WORK: frozenset[Kind] = frozenset({"ours", "peer", "leaky", "route"})
"""The kinds of sides that must give what ours gives."""

SHRUNK = 32
"""The longest dim of a case in its shrunken form, which tests and ``--quick`` run."""


@dataclass(frozen=True)
class Side:
    """One way to do the work of a case.

    ``prepare`` takes what the case's ``setup`` returned and gives a call without arguments, so that whatever can be
    done once (compiling, wrapping a mask) stays out of the timing.
    """

    name: str
    prepare: Callable[[Any], Callable[[], object]]
    kind: Kind = "peer"
    unavailable: Callable[[], str | None] = lambda: None
    """The reason why this side cannot run here, or None when it can."""
    force: str | None = None
    """The route that is forced while this side is timed; see `mw.force`."""


@dataclass(frozen=True)
class Target:
    """What must hold between ours and another side: ours <= max(factor * side + plus, side + slack).

    ``side`` is the name of a side, or ``"best peer"``. ``slack`` is in seconds. ``plus`` names a side whose time is
    allowed on top.

    >>> at_least(15, "best peer").text
    'at least 15 x faster than best peer'
    >>> at_most(2, "x.sum").holds(ratio=0.6, difference=1e-3)
    True
    """

    side: str
    factor: float
    slack: float | None
    text: str
    plus: str | None = None

    def holds(self, *, ratio: float, difference: float, plus: float = 0.0) -> bool:
        """Judge from ``ratio`` = side's time / our time and ``difference`` = our time - side's time, in seconds.

        ``plus`` is the time of the side that is allowed on top / our time.
        """
        return ratio * self.factor + plus >= 1.0 or (self.slack is not None and difference <= self.slack)

    @property
    def allowance(self) -> str:
        """What the text leaves out: by how much "never slower" may be slower.

        >>> never_slower("idiom").allowance
        'within 5 % or 5 µs'
        """
        if self.slack is None or self.factor == 1.0:
            return ""
        return f"within {100 * (self.factor - 1):.0f} % or {1e6 * self.slack:.0f} µs"


def at_least(factor: float, side: str) -> Target:
    """Ours must be this many times faster than the side."""
    return Target(side, 1.0 / factor, None, f"at least {factor:g} x faster than {side}")


def at_most(factor: float, side: str) -> Target:
    """Ours may take this many times the side's time."""
    return Target(side, factor, None, f"at most {factor:g} x the time of {side}")


def within(seconds: float, side: str) -> Target:
    """Ours may take this much longer than the side, in seconds."""
    return Target(side, 1.0, seconds, f"at most {seconds * 1e3:g} ms more than {side}")


def never_slower(side: str = "best peer") -> Target:
    """The fourth law: not slower than the plain idiom, beyond 5 % or 5 µs.

    >>> never_slower().holds(ratio=0.5, difference=4e-6)
    True
    >>> never_slower().holds(ratio=0.5, difference=1e-3)
    False
    """
    return Target(side, 1.05, 5e-6, f"never slower than {side}")


@dataclass(frozen=True)
class Case:
    """One measurement: the same inputs handed to every side.

    >>> from benchmarks.registry import all_cases
    >>> case = all_cases()[0]
    >>> case.name
    'sum 4096x4096 dim=-1 keep=10%'
    >>> case.shrunk().shape
    (32, 32)
    """

    family: str
    function: str
    variant: str
    """What tells this case from others of the same function, in a few words."""
    setup: Callable[[Case], Any]
    sides: tuple[Side, ...]
    shape: tuple[int, ...] = ()
    density: float | None = None
    dim: int | tuple[int, ...] | None = None
    dtype: str = "float32"
    targets: tuple[Target, ...] = ()
    relative_tolerance: float = 1e-4
    """How far the sides may differ: they add in different orders, which in float32 costs up to 1e-5 on long rows."""
    absolute_tolerance: float = 1e-6
    """The same, for values near zero."""
    unavailable: Callable[[], str | None] = lambda: None
    """The reason why the whole case cannot run here (an extra that is not installed), or None when it can."""
    moved_bytes: Callable[[Case], int] | None = None
    """How many bytes the work must read and write at least; None where that says nothing (tiny inputs)."""
    route: Callable[[Any], str] | None = None
    """What takes the inputs and tells the side of kind `route` that dispatch chooses; None where that is not asked."""
    budget: float | None = None
    """About how many seconds the case is timed at most; a case of a sweep that seems to lose is timed again, longer."""

    def __post_init__(self) -> None:
        """Refuse a case that could not be judged: that is a mistake in the registry, not in a run."""
        names = [side.name for side in self.sides]
        if [side.kind for side in self.sides].count("ours") != 1 or len(set(names)) != len(names):
            must, hint = "have one side of kind 'ours', and distinct names", "Side(..., kind='ours') once"
            raise ArgumentError(say(self.name, "sides", must=must, got=names, hint=hint))
        for target in self.targets:
            if unknown := {target.side, target.plus} - {*names, "best peer", None}:
                must, hint = f"name a side, one of {names}", 'side="best peer"'
                raise ArgumentError(say(self.name, "targets", must=must, got=repr(unknown.pop()), hint=hint))

    @property
    def name(self) -> str:
        """The name in tables and for ``--filter``."""
        return f"{self.function} {self.variant}"

    @property
    def ours(self) -> Side:
        """The side that is Maskwise."""
        return next(side for side in self.sides if side.kind == "ours")

    def shrunk(self) -> Case:
        """Return the same case on small inputs: the same code runs, and the time says nothing, so no target is kept."""
        return replace(self, shape=tuple(min(size, SHRUNK) for size in self.shape), targets=())
