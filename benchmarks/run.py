"""Run a case: build the inputs, check that the sides agree, time them, judge the targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import cuda
from benchmarks.case import SAME_WORK, Case, Kind, Side, Target
from maskwise import Packed
from maskwise.errors import MaskwiseError
from maskwise.plan.dispatch import force
from maskwise.plan.measure import Samples, Spread, Timer, clock_timer, event_timer, measure

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BenchmarkError", "Result", "SideResult", "Verdict", "run_case"]

COPY_BYTES = 64 * 2**20
LONGER = 6
OnRound = Callable[[int, int], None]


class BenchmarkError(MaskwiseError, RuntimeError):
    """A side raised or disagreed: whatever was timed would not be the same work."""


@dataclass(frozen=True)
class SideResult:
    """What was measured for one side. ``ratio`` is its time over ours: above 1, ours is faster."""

    name: str
    kind: Kind
    best: float
    median: float
    ratio: Spread


@dataclass(frozen=True)
class Verdict:
    """A target with what was measured for it."""

    target: Target
    side: str
    holds: bool


@dataclass(frozen=True)
class Result:
    """Everything that was measured for one case."""

    case: Case
    sides: tuple[SideResult, ...]
    verdicts: tuple[Verdict, ...]
    skipped: Mapping[str, str]
    """The sides that cannot run here, each with the reason."""
    bandwidth: float | None
    """Bytes a second that ours moves, as a fraction of what ``copy_`` moved in the same rounds."""
    route: str | None = None
    """The route that dispatch chose, where the case asks."""
    roofline: float | None = None
    """On a GPU: the seconds that our launches take at least, by their bytes; None where none of our kernels runs."""

    def side(self, name: str) -> SideResult:
        """Return a side by its name."""
        return next(side for side in self.sides if side.name == name)

    @property
    def ours(self) -> SideResult:
        """The side that is Maskwise."""
        return next(side for side in self.sides if side.kind == "ours")

    @property
    def best_peer(self) -> SideResult | None:
        """The fastest side that does the same work without leaking."""
        return min((s for s in self.sides if s.kind == "peer"), key=lambda s: s.median, default=None)

    @property
    def off_best(self) -> float | None:
        """How many times longer ours takes than by the fastest of its routes; None where the case does not ask.

        Of the route that dispatch chose the time is ours: to force it forces its steps too, which plans do not.
        """
        routes = {side.name: side.median for side in self.sides if side.kind == "route"}
        if self.route not in routes or len(routes) < 2:
            return None
        routes[self.route] = self.ours.median
        return self.ours.median / min(routes.values())

    @property
    def loses(self) -> bool:
        """Whether a target is missed, or dispatch is wrong by more than a tenth."""
        return not all(verdict.holds for verdict in self.verdicts) or (self.off_best or 1.0) > 1.1

    @property
    def floor(self) -> SideResult | None:
        """The side that does less work, if there is one."""
        return next((side for side in self.sides if side.kind == "floor"), None)


def run_case(
    case: Case,
    *,
    quick: bool = False,
    budget: float = 8.0,
    device: str = "cpu",
    on_round: OnRound = lambda done, total: None,
) -> Result:
    """Measure one case, for about ``budget`` seconds.

    ``quick`` runs the shrunken form for a few rounds: it shows that it works, not how fast. On a GPU times are those of
    the device's own events, with its cache flushed before each call.
    """
    case = case.shrunk() if quick else case
    inputs = cuda.moved(case.setup(case), device)
    timer = forcing(clock_timer() if device == "cpu" else event_timer(device))
    skipped = {side.name: reason for side in case.sides if (reason := side.unavailable()) is not None}
    calls = {side.name: _prepare(case, side, inputs) for side in case.sides if side.name not in skipped}
    check_agreement(case, calls)
    route = None if case.route is None else case.route(inputs)
    least = None if device == "cpu" else cuda.roofline(calls[case.ours.name], device)
    kinds = {side.name: side.kind for side in case.sides}
    copied = 2**16 if quick else COPY_BYTES
    if case.moved_bytes is not None:
        calls["copy_"], kinds["copy_"] = _copy(copied, device), "memory"
    if quick:
        samples = measure(calls, budget=0.0, rounds=(2, 2), sample_seconds=0.0, timer=timer, on_round=on_round)
    else:
        most = budget if case.budget is None else min(budget, case.budget)
        samples = measure(calls, budget=most, timer=timer, on_round=on_round, **_short(case))
    result = replace(_judge(case, samples, kinds, skipped, copied), route=route, roofline=least)
    if case.budget is not None and not quick and result.loses:
        # A short measurement says what wins, not what loses by a little: that takes more rounds to tell from noise.
        samples = measure(calls, budget=LONGER * most, timer=timer, on_round=on_round)
        result = replace(_judge(case, samples, kinds, skipped, copied), route=route, roofline=least)
    return result


def _short(case: Case) -> dict[str, Any]:
    return {} if case.budget is None else {"rounds": (3, 40), "sample_seconds": case.budget / 100}


def check_agreement(case: Case, calls: Mapping[str, Callable[[], object]]) -> None:
    """Run every side once, and raise unless each that does the same work gives what ours gives."""
    values = {name: _padded(_guarded(case, name, call)) for name, call in calls.items()}
    expected = values[case.ours.name]
    for side in case.sides:
        if side.name not in values or side.kind not in SAME_WORK:
            continue
        try:
            torch.testing.assert_close(
                values[side.name], expected, rtol=case.relative_tolerance, atol=case.absolute_tolerance
            )
        except AssertionError as error:
            raise BenchmarkError(
                f"{case.name}: {side.name} disagrees with {case.ours.name}: {error}. Hint: one of both has a bug; "
                f"python -m benchmarks --quick --filter '{case.name}' repeats it."
            ) from error


def _padded(value: object) -> object:
    return value.unpack() if isinstance(value, Packed) else value


def _prepare(case: Case, side: Side, inputs: object) -> Callable[[], object]:
    call = _guarded(case, side.name, lambda: side.prepare(inputs))
    assert callable(call)
    return call if side.force is None else Forced(call, side.force)


def _guarded(case: Case, name: str, call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        raise BenchmarkError(
            f"{case.name}: {name} raised {type(error).__name__}: {error}. Hint: python -m benchmarks --quick "
            f"--filter '{case.name}' repeats it."
        ) from error


@dataclass(frozen=True)
class Forced:
    """A call by one route."""

    call: Callable[[], object]
    route: str

    def __call__(self) -> object:
        """Make the call once."""
        with force(self.route):
            return self.call()


def forcing(timer: Timer) -> Timer:
    """The timer, with a route forced outside of what is timed."""

    def seconds(call: Callable[[], object], times: int) -> float:
        if not isinstance(call, Forced):
            return timer(call, times)
        with force(call.route):
            call.call()
            return timer(call.call, times)

    return seconds


def _copy(size: int, device: str) -> Callable[[], object]:
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.fill_(1)
    return lambda: target.copy_(source)


def _judge(case: Case, samples: Samples, kinds: Mapping[str, Kind], skipped: Mapping[str, str], copied: int) -> Result:
    ours = case.ours.name
    sides = tuple(
        SideResult(name, kinds[name], samples.best(name), samples.median(name), samples.ratio(name, ours))
        for name in samples.seconds
    )
    bandwidth = None
    if case.moved_bytes is not None:
        # copy_ reads and writes, so it moves its size twice.
        bandwidth = case.moved_bytes(case) / (2 * copied) * samples.ratio("copy_", ours).median
    result = Result(case, sides, (), skipped, bandwidth)
    return replace(result, verdicts=tuple(_verdict(target, result, samples) for target in case.targets))


def _verdict(target: Target, result: Result, samples: Samples) -> Verdict:
    side = result.best_peer if target.side == "best peer" else result.side(target.side)
    if side is None:
        raise BenchmarkError(
            f"{result.case.name}: no peer could run, so {target.text!r} cannot be judged. Hint: install one of "
            f"{', '.join(result.skipped)}, or run without --check."
        )
    ours = result.ours.name
    difference = samples.difference(side.name, ours)
    plus = 0.0 if target.plus is None else result.side(target.plus).ratio.median
    return Verdict(target, side.name, target.holds(ratio=side.ratio.median, difference=difference, plus=plus))
