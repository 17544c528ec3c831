"""``maskwise calibrate``: measure this machine, so that plans are predicted from what it does."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, fields

import typer
from rich.console import Console
from rich.table import Table

from maskwise.benchmarks import calibrate as measuring
from maskwise.cli.progress import progress
from maskwise.plan import calibration
from maskwise.plan.cost import BUILT_IN, Rates

__all__ = ["run"]

MEANINGS = {
    "plain_call": ("a torch operation on a tiny tensor", "µs"),
    "bare_call": ("one of our functions, without a gradient", "µs"),
    "fused_call": ("one of our functions, with a gradient to come", "µs"),
    "plain_backward": ("the gradient of the plain idiom", "µs"),
    "fused_backward": ("the gradient of one of our functions", "µs"),
    "streamed": ("memory that is there already", "GB/s"),
    "fresh": ("memory that is new", "GB/s"),
    "fresh_from": ("from this size on it is new", "MB"),
    "gathered": ("rows that are moved together", "GB/s"),
    "indexed": ("elements that x[mask] gives", "GB/s"),
    "flops": ("a matrix product", "GFLOP/s"),
    "attention_flops": ("attention", "GFLOP/s"),
}
#: From what `Rates` holds to the unit that is shown.
SCALES = {"µs": 1.0, "GB/s": 1e-3, "MB": 1e-6, "GFLOP/s": 1e-3}


def run(*, reset: bool = False, show: bool = False, json: bool = False) -> int:
    """Measure and save, show, or remove; return the exit code: 1 where a file cannot be read."""
    if reset and show:
        raise typer.BadParameter("--reset removes what --show would show: drop one of them.")
    path = str(calibration.path())
    if reset:
        removed = measuring.reset()
        told = {"path": path, "removed": removed}
        typer.echo(json_module.dumps(told) if json else f"{'removed' if removed else 'there was no'} {path}")
        return 0
    if not show:
        measure()
    found = calibration.state()
    if json:
        typer.echo(json_module.dumps(as_data(found), indent=2))
    else:
        _show(Console(), found)
    return 1 if found.fault else 0


def measure() -> dict[str, Rates]:
    """Measure every kind of device, with a progress bar, and save it."""
    kinds = measuring.devices()
    measured = {}
    with progress() as bar:
        task = bar.add_task("calibrating", total=len(kinds) * len(measuring.STEPS))
        for device in kinds:

            def on_step(name: str, device: str = device) -> None:
                bar.update(task, description=f"{device}: {name}")
                bar.advance(task)

            measured[device] = measuring.measure_rates(measuring.Bench(device), on_step)
    # After the last device: an interrupt leaves what was there.
    measuring.save(measured)
    return measured


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
