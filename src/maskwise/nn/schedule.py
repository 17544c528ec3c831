"""How dense a model is at every step of its training: cubic, linear, constant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from maskwise.errors import ArgumentError, say
from maskwise.nn.arguments import check_module
from maskwise.nn.attaching import gated
from maskwise.nn.gates import Selecting
from maskwise.nn.gates.selecting import check_density
from maskwise.nn.pruning import reselect

__all__ = ["DensityScheduler", "Schedule", "constant", "cubic", "linear"]


@dataclass(frozen=True)
class Schedule:
    """A density for every step: ``start`` until ``begin``, ``end`` from ``begin + steps`` on, a curve in between.

    >>> Schedule("linear", 1.0, 0.5, steps=4)(2)
    0.75
    """

    kind: Literal["cubic", "linear", "constant"]
    start: float
    end: float
    steps: int
    begin: int = 0

    def __post_init__(self) -> None:
        for density in (self.start, self.end):
            check_density(self.kind, density)
        for argument, value in (("steps", self.steps), ("begin", self.begin)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                hint = f"{argument}=1000"
                raise ArgumentError(say(self.kind, argument, must="be a number of steps", got=value, hint=hint))

    def __call__(self, step: int) -> float:
        """The density at this step, counted from 0."""
        if step >= self.last:
            return self.end
        if step <= self.begin:
            return self.start
        left = 1.0 - (step - self.begin) / self.steps
        return self.end + (self.start - self.end) * left ** (3 if self.kind == "cubic" else 1)

    @property
    def last(self) -> int:
        """The step from which on nothing changes."""
        return self.begin + self.steps


def cubic(end: float, steps: int, start: float = 1.0, begin: int = 0) -> Schedule:
    """Fall fast while much can go, and slowly towards the end: ``end + (start - end) * (1 - t)**3``.

    >>> import maskwise as mw
    >>> [round(mw.nn.schedule.cubic(0.1, steps=4)(step), 3) for step in range(6)]
    [1.0, 0.48, 0.213, 0.114, 0.1, 0.1]

    This is gradual pruning as of Zhu and Gupta (2017), written in densities.

    Args:
        end: the density at the end, between 0 and 1.
        steps: how many steps it takes to get there.
        start: the density at the beginning.
        begin: the step at which it begins to fall.

    Returns:
        A Schedule: call it with a step, or pass it to `DensityScheduler`.

    Raises:
        ArgumentError: a density is not between 0 and 1, or steps are not a number of steps.
        DtypeError: a density is not a number.
    """
    return Schedule("cubic", start, end, steps, begin)


def linear(end: float, steps: int, start: float = 1.0, begin: int = 0) -> Schedule:
    """Fall by the same amount at every step.

    >>> import maskwise as mw
    >>> [mw.nn.schedule.linear(0.0, steps=4)(step) for step in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]

    Args:
        end: the density at the end, between 0 and 1.
        steps: how many steps it takes to get there.
        start: the density at the beginning.
        begin: the step at which it begins to fall.

    Returns:
        A Schedule: call it with a step, or pass it to `DensityScheduler`.

    Raises:
        ArgumentError: a density is not between 0 and 1, or steps are not a number of steps.
        DtypeError: a density is not a number.
    """
    return Schedule("linear", start, end, steps, begin)


def constant(density: float, steps: int = 0) -> Schedule:
    """Stay at one density; what is kept is chosen again during the first ``steps`` steps, and then stays.

    >>> import maskwise as mw
    >>> mw.nn.schedule.constant(0.1)(7)
    0.1

    Args:
        density: the density, between 0 and 1.
        steps: for how many steps a `DensityScheduler` goes on choosing.

    Returns:
        A Schedule: call it with a step, or pass it to `DensityScheduler`.

    Raises:
        ArgumentError: the density is not between 0 and 1, or steps are not a number of steps.
        DtypeError: the density is not a number.
    """
    return Schedule("constant", density, density, steps)


class DensityScheduler:
    """Drive the gates of a model along a schedule, as torch's schedulers drive the learning rate.

    >>> import torch, maskwise as mw
    >>> model = mw.nn.prune(torch.nn.Linear(10, 10), lambda: mw.nn.gates.TopK(1.0))
    >>> scheduler = mw.nn.schedule.DensityScheduler(model, mw.nn.schedule.cubic(0.1, steps=100))
    >>> for _ in range(100):
    ...     scheduler.step()  # after optimizer.step()
    >>> mw.nn.report(model).density
    0.1

    At every step of the schedule, all gates that choose (TopK, Block, NM) choose again, at the density of that step;
    those of global scope share it. After the last step of the schedule nothing is chosen any more: the topology stays,
    and what is dropped stays dropped.

    Args:
        model: a model with gates, at least one of which has a density.
        schedule: `cubic`, `linear`, `constant`, or a `Schedule` of your own.
        every: the number of steps between two selections. The last step of the schedule is always one.

    Raises:
        DtypeError: ``model`` is not a module.
        ArgumentError: no gate of the model has a density, or ``every`` is not positive.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, every: int = 1) -> None:
        check_module("DensityScheduler", model)
        if not isinstance(every, int) or every < 1:
            raise ArgumentError(say("DensityScheduler", "every", must="be a positive int", got=every, hint="every=10"))
        if not any(isinstance(found.gate, Selecting) and found.gate.density is not None for found in gated(model)):
            hint = "mw.nn.prune(model, lambda: TopK(1.0))"
            must = "have a gate with a density, TopK or Block"
            raise ArgumentError(say("DensityScheduler", "model", must=must, got="none", hint=hint))
        self.model, self.schedule, self.every = model, schedule, every
        self.steps = 0
        reselect(model, density=schedule(0))

    @property
    def density(self) -> float:
        """What the schedule says of the step that was reached."""
        return self.schedule(self.steps)

    def step(self) -> None:
        """Go one step on, and choose again if one is due."""
        self.steps += 1
        last = self.schedule.last
        if (self.steps < last and self.steps % self.every == 0) or self.steps == last:
            reselect(self.model, density=self.schedule(self.steps))

    def state_dict(self) -> dict[str, Any]:
        """Where the scheduler is; the topology itself is in the model's state_dict."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another scheduler was. The model's own state_dict brings its topology."""
        self.steps = int(state["steps"])
        for found in gated(self.model):
            if isinstance(found.gate, Selecting) and found.gate.density is not None:
                found.gate.density = self._last_chosen()

    def _last_chosen(self) -> float:
        if self.steps >= self.schedule.last:
            return self.schedule.end
        return self.schedule(self.steps - self.steps % self.every)
