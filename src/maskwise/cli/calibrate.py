"""``maskwise calibrate``: measure the rates (`maskwise.plan.cost.Rates`) from which the dispatcher predicts costs."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import maskwise as mw
from maskwise.cli.terminal import progress
from maskwise.ops.reduce.sums import _sum
from maskwise.plan import calibration
from maskwise.plan.cost import BUILT_IN, Rates
from maskwise.plan.measure import Timer, event_timer, measure, synced_timer

__all__ = ["STEPS", "Bench", "Step", "devices", "measure_rates", "run"]

LARGE = 64 * 2**20
"""Bytes that no cache holds."""


@dataclass(frozen=True)
class Bench:
    """Where and how long to measure. ``shrink`` divides all sizes, for tests."""

    device: str = "cpu"
    seconds: float = 0.25
    shrink: int = 1

    @property
    def on_host(self) -> bool:
        """Whether a call is done when it returns."""
        return self.device == "cpu"

    def calls(self, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Microseconds from one call to the next, without a sync between them; interleaved."""
        return self._best(runs, None if self.on_host else synced_timer(self.device))

    def bulk(self, run: Callable[[], object]) -> float:
        """Microseconds of device time of a large call."""
        return self._best({"": run}, None if self.on_host else event_timer(self.device))[""]

    def rand(self, *shape: int) -> Tensor:
        """Values on the device."""
        return torch.rand(shape, device=self.device)

    def size(self, number: int) -> int:
        """A size, or a shrunken one."""
        return max(8, number // self.shrink)

    def _best(self, runs: dict[str, Callable[[], object]], timer: Timer | None) -> dict[str, float]:
        # The best of all rounds: a disturbed measurement is only ever longer.
        samples = measure(runs, budget=len(runs) * self.seconds, rounds=(5, 50), timer=timer)
        return {name: max(1e6 * samples.best(name), 1e-3) for name in runs}


@dataclass(frozen=True)
class Step:
    """One measurement: its name in the progress bar, and the rates that it gives."""

    name: str
    run: Callable[[Bench], dict[str, float]]


def _calls(b: Bench) -> dict[str, float]:
    x, keep = b.rand(4, 8), b.rand(4, 8) > 0.5
    traced = x.clone().requires_grad_()

    def plain(x: Tensor) -> Tensor:
        return torch.where(keep, x, 0.0).sum(-1)

    above = torch.ones_like(plain(x))
    # The ops themselves: the Python before them is the same for all routes.
    bare, fused = _sum.route("bare"), _sum.route("fused")
    took = b.calls(
        {
            "plain": lambda: plain(x),
            "bare": lambda: bare(x, keep, [1], False),
            "fused": lambda: fused(traced, keep, [1], False),
            "plain back": lambda: torch.autograd.grad(plain(traced), traced, above),
            "fused back": lambda: torch.autograd.grad(fused(traced, keep, [1], False), traced, above),
        }
    )
    return {
        "plain_call": took["plain"] / 2,
        "bare_call": took["bare"],
        "fused_call": took["fused"],
        "plain_backward": max(took["plain back"] - took["plain"], 0.1),
        "fused_backward": max(took["fused back"] - took["fused"], 0.1),
    }


def _streamed(b: Bench) -> dict[str, float]:
    count = b.size(LARGE // 4)
    source, target = b.rand(count), b.rand(count)
    # A copy reads as much as it writes.
    return {"streamed": 2 * source.nbytes / b.bulk(lambda: target.copy_(source))}


def _new(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8).zero_()


def _fresh(b: Bench) -> dict[str, float]:
    """What new memory costs, and from which size on a result needs it: the allocator reuses smaller blocks."""
    if not b.on_host:
        # torch's caching allocator keeps a GPU's memory, so none is new after the first step.
        return {"fresh": _streamed(b)["streamed"], "fresh_from": BUILT_IN["cuda"].fresh_from}
    rates: dict[int, float] = {}
    for power in range(18, 27):
        count = b.size(1 << power)
        rates[1 << power] = count / b.bulk(partial(_new, count))
    fresh, kept = rates[max(rates)], max(rates.values())
    threshold = (fresh * kept) ** 0.5
    # The first size from which on all are slow; the largest where none is.
    slow = (size for size in rates if all(rate < threshold for other, rate in rates.items() if other >= size))
    first = min(slow, default=max(rates))
    return {"fresh": fresh, "fresh_from": float(first)}


def _gathered(b: Bench) -> dict[str, float]:
    rows, features = b.size(16384), 256
    x, mask = b.rand(rows, features), mw.Mask(torch.arange(rows, device=b.device) % 2 == 0)
    moved, out = 2 * (x.nbytes // 2), x.new_empty(rows // 2 + rows % 2, features)
    mask.count()
    elements, keep = b.rand(64, 128), b.rand(64, 128) > 0.5
    return {
        "gathered": moved / b.bulk(lambda: mw.pack(x, mask, out=out)),
        "indexed": elements.nbytes / b.bulk(lambda: elements[keep]),
    }


def _flops(b: Bench) -> dict[str, float]:
    n = b.size(768 if b.on_host else 4096)
    x, weight = b.rand(n, n), b.rand(n, n)
    return {"flops": 2 * n**3 / b.bulk(lambda: F.linear(x, weight))}


def _attention(b: Bench) -> dict[str, float]:
    length = b.size(256 if b.on_host else 2048)
    q, k, v = (b.rand(4, 8, length, 64) for _ in range(3))
    keep = torch.ones(4, 1, 1, length, dtype=torch.bool, device=b.device)
    took = b.bulk(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep))
    return {"attention_flops": 4 * 4 * 8 * length * length * 64 / took}


STEPS = (
    Step("calls and gradients of tiny tensors", _calls),
    Step("streaming through memory", _streamed),
    Step("fresh memory", _fresh),
    Step("gathering rows", _gathered),
    Step("a matrix product", _flops),
    Step("attention", _attention),
)


def devices() -> tuple[str, ...]:
    """The kinds of devices that can be measured here."""
    return ("cpu", *(["cuda"] if torch.cuda.is_available() else []))


def measure_rates(bench: Bench, on_step: Callable[[str], None] = lambda name: None) -> Rates:
    """Measure one kind of device; ``on_step`` is called with the name of each step before it runs."""
    found: dict[str, float] = {}
    with torch.no_grad():
        for step in STEPS:
            on_step(step.name)
            with torch.enable_grad():
                found.update(step.run(bench))
    return Rates(**{name: float(f"{value:.5g}") for name, value in found.items()})


# -- the command -------------------------------------------------------------------------------------------------------
MEANINGS = {
    "plain_call": ("a torch operation on a tiny tensor", "µs"),
    "bare_call": ("one of our functions, without grad", "µs"),
    "fused_call": ("one of our functions, with grad", "µs"),
    "plain_backward": ("the gradient of the plain idiom", "µs"),
    "fused_backward": ("the gradient of one of our functions", "µs"),
    "streamed": ("memory that the allocator reuses", "GB/s"),
    "fresh": ("memory that is new", "GB/s"),
    "fresh_from": ("from this size on it is new", "MB"),
    "gathered": ("gathered rows", "GB/s"),
    "indexed": ("elements that x[mask] gives", "GB/s"),
    "flops": ("a matrix product", "GFLOP/s"),
    "attention_flops": ("attention", "GFLOP/s"),
}
#: From the unit of `Rates` to the one that is printed.
SCALES = {"µs": 1.0, "GB/s": 1e-3, "MB": 1e-6, "GFLOP/s": 1e-3}


def run(*, reset: bool = False, show: bool = False, json: bool = False) -> int:
    """Measure and save, show, or remove; return the exit code: 1 where a file cannot be read."""
    if reset and show:
        raise typer.BadParameter("--reset removes what --show would show: drop one of them.")
    path = str(calibration.path())
    if reset:
        removed = calibration.reset()
        report = {"path": path, "removed": removed}
        typer.echo(json_module.dumps(report) if json else f"{'removed' if removed else 'there was no'} {path}")
        return 0
    if not show:
        measure_and_save()
    found = calibration.state()
    if json:
        typer.echo(json_module.dumps(as_data(found), indent=2))
    else:
        _show(Console(), found)
    return 1 if found.fault else 0


def measure_and_save() -> None:
    """Measure every kind of device, with a progress bar, and save the rates."""
    kinds = devices()
    measured = {}
    with progress() as bar:
        task = bar.add_task("calibrating", total=len(kinds) * len(STEPS))
        for device in kinds:

            def on_step(name: str, device: str = device) -> None:
                bar.update(task, description=f"{device}: {name}")
                bar.advance(task)

            measured[device] = measure_rates(Bench(device), on_step)
    # After the last device: an interrupt leaves the file as it was.
    calibration.save(measured)


def as_data(found: calibration.Calibration) -> dict[str, object]:
    """The rates in use, as plain data."""
    return {
        "path": str(calibration.path()),
        "machine": calibration.key(),
        "date": found.date,
        "fault": found.fault,
        "calibrated": sorted(found.rates),
        "rates": {device: asdict(found.rates.get(device, built_in)) for device, built_in in BUILT_IN.items()},
    }


def _show(console: Console, found: calibration.Calibration) -> None:
    shown = {"cpu": found.rates.get("cpu", BUILT_IN["cpu"]), **found.rates}
    table = Table(title=f"measured on {found.date}" if found.rates else "built-in rates: nothing was measured here")
    table.add_column("rate")
    for device in shown:
        table.add_column(device, justify="right")
        table.add_column("built in", justify="right", style="dim")
    table.add_column("what")
    for field in fields(Rates):
        meaning, unit = MEANINGS[field.name]
        cells = [
            f"{getattr(rates, field.name) * SCALES[unit]:.3g} {unit}"
            for device, measured in shown.items()
            for rates in (measured, BUILT_IN[device])
        ]
        table.add_row(field.name, *cells, meaning)
    console.print(table)
    if found.fault:
        console.print(f"[red]cannot be read:[/] {found.fault}", soft_wrap=True)
    console.print(f"{calibration.path()}", soft_wrap=True, style="dim", highlight=False)
