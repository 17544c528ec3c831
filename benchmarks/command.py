"""``python -m benchmarks``: run the cases, with a progress bar, a table, CSV, JSON and a picture."""

from __future__ import annotations

import json as json_module
import shlex
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import cuda, keeping, means, registry, sweeping
from benchmarks.case import Case
from benchmarks.report import (
    Provenance,
    describe_machine,
    geometric_means,
    large_ratios,
    legend,
    table,
    to_json,
    write_csv,
)
from benchmarks.run import BenchmarkError, Result, run_case
from maskwise.cli import app as commands
from maskwise.cli.app import Json, Open, guarded
from maskwise.cli.terminal import check_picture, progress, show_picture
from maskwise.errors import ArgumentError

__all__ = ["Options", "app", "list_cases", "run"]

COMMAND = ("python", "-m", "benchmarks")


class Command(commands.Command):
    """The command, guarded like those of ``maskwise``, which records its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Record the arguments for the rows of the CSV."""
        ctx.meta["command"] = shlex.join([*COMMAND, *args])
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        return guarded(lambda: super(Command, self).invoke(ctx))


Pattern = Annotated[
    str,
    typer.Option(
        "--filter",
        "-f",
        metavar="WORDS",
        help="Run the cases whose family or name contains all these words; commas separate alternatives.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Small inputs, two rounds: checks that all sides agree.")]
Csv = Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write every measurement to this file.")]
Plot = Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Write a picture: .png or .svg.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with code 1 when a target is missed.")]
Budget = Annotated[float, typer.Option("--budget", min=0.1, metavar="SECONDS", help="Timing per case, roughly.")]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, or cuda (also for ROCm).")]
List = Annotated[bool, typer.Option("--list", help="List the cases and their targets, and exit.")]

app = typer.Typer(
    add_completion=False, pretty_exceptions_show_locals=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command(cls=Command, epilog="Exit codes: 0 all is well, 1 a check failed, 2 wrong usage, 130 interrupted.")
def main(
    ctx: typer.Context,
    *,
    pattern: Pattern = "",
    quick: Quick = False,
    csv: Csv = None,
    plot: Plot = None,
    check: Check = False,
    budget: Budget = 8.0,
    device: Device = "cpu",
    list_: List = False,
    open_: Open = False,
    json: Json = False,
) -> None:
    """Measure Maskwise beside the plain idioms, torch.masked and torch.compile.

    All sides run in one process, interleaved, on the same inputs; each must agree with ours before it is timed.
    """
    options = Options(pattern, quick, csv, plot, check, json, budget, device, open_, ctx.meta["command"])
    raise typer.Exit(list_cases(options) if list_ else run(options))


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    pattern: str = ""
    quick: bool = False
    csv: Path | None = None
    plot: Path | None = None
    check: bool = False
    json: bool = False
    budget: float = 8.0
    device: str = "cpu"
    open: bool = False
    command: str = shlex.join(COMMAND)


def run(options: Options) -> int:
    """Run the chosen cases and return the exit code: 1 when a side fails, or a target is missed under ``--check``."""
    _refuse_what_cannot_work(options)
    cases = _chosen(options)
    if (text := estimate(cases, options)) is not None:
        Console(stderr=True).print(text, soft_wrap=True, highlight=False, markup=False)
    results, failed = _measure(cases, options)
    if not results:
        return 1 if failed else 0
    provenance = Provenance(
        command=options.command,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        quick=options.quick,
        machine=describe_machine(options.device),
    )
    if options.csv:
        write_csv(options.csv, results, provenance)
    if options.plot:
        from benchmarks.plot import write_plot

        write_plot(options.plot, results, provenance)
    if options.json:
        typer.echo(
            json_module.dumps(
                {**to_json(results, provenance), **_families_data(results), **_means_data(results, options)}, indent=2
            )
        )
    else:
        _show(results, provenance, options)
    show_picture(options.plot, options.open)
    missed = [verdict for result in results for verdict in result.verdicts if not verdict.holds]
    missed_means = [mean for mean, _, holds in _means(results, options) if not holds]
    return 1 if failed or (options.check and (missed or missed_means)) else 0


def estimate(cases: tuple[Case, ...], options: Options) -> str | None:
    """What is about to run and how long it takes; None for a quick run.

    >>> print(estimate(registry.select("sum 4x8 bool"), Options("sum 4x8 bool")))
    1 case matches 'sum 4x8 bool': about 8 s of timing.
    >>> print(estimate(registry.select(), Options()).rpartition("; ")[2])
    --budget 2 times each case for 2 s.
    """
    if options.quick:
        return None
    count = f"{len(cases)} case{'' if len(cases) == 1 else 's'}"
    matching = f" match{'es' if len(cases) == 1 else ''} {options.pattern!r}" if options.pattern else ""
    seconds = sum(min(options.budget, case.budget or options.budget) for case in cases)
    if seconds < 120:
        return f"{count}{matching}: about {seconds:.0f} s of timing."
    return (
        f"{count}{matching}: about {seconds / 60:.0f} min of timing, and setup and torch.compile on top. "
        "--quick only checks that all sides run and agree; --filter runs a part; --budget 2 times each case for 2 s."
    )


def list_cases(options: Options) -> int:
    """Print the chosen cases with their sides and targets."""
    cases = _chosen(options)
    if options.json:
        plain = [
            {
                "case": case.name,
                "family": case.family,
                "sides": [side.name for side in case.sides],
                "targets": [target.text for target in case.targets],
            }
            for case in cases
        ]
        typer.echo(json_module.dumps(plain, indent=2))
        return 0
    out = Table("family", "case", "beside", "target")
    for case in cases:
        beside = ", ".join(side.name for side in case.sides if side.kind != "ours")
        out.add_row(case.family, case.name, beside, "\n".join(target.text for target in case.targets))
    Console().print(out)
    return 0


def _refuse_what_cannot_work(options: Options) -> None:
    # Said before anything is measured: minutes of work must not end in a usage error.
    if options.device != "cpu" and (reason := cuda.why_not(options.device)):
        raise typer.BadParameter(reason, param_hint="--device")
    if options.quick and options.check:
        raise typer.BadParameter("--quick runs shrunken inputs, whose times say nothing: drop it, or drop --check.")
    check_picture(options.plot, options.open)


def _chosen(options: Options) -> tuple[Case, ...]:
    try:
        return registry.select(options.pattern)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--filter") from error


def _measure(cases: tuple[Case, ...], options: Options) -> tuple[list[Result], int]:
    """The results, and how many cases failed: a failure is reported, and the run continues."""
    results: list[Result] = []
    failed = 0
    with progress() as bar:
        overall = bar.add_task("all cases", total=len(cases))
        for case in (cuda.for_device(each, options.device) for each in cases):
            if (reason := case.unavailable()) is not None:
                bar.console.print(f"skipped {case.name}: {reason}", style="dim", highlight=False)
                bar.advance(overall)
                continue
            current = bar.add_task(f"{case.name} (preparing)", total=None)

            def on_round(done: int, total: int, current: object = current, case: Case = case) -> None:
                bar.update(current, completed=done, total=total, description=case.name)  # type: ignore[arg-type]

            try:
                results.append(
                    run_case(case, quick=options.quick, budget=options.budget, device=options.device, on_round=on_round)
                )
            except BenchmarkError as error:
                failed += 1
                Console(stderr=True).print(f"[bold red]error:[/] {error}", soft_wrap=True)
            bar.remove_task(current)
            bar.advance(overall)
    return results, failed


def _families_data(results: list[Result]) -> dict[str, object]:
    of_sweep, of_kept = sweeping.swept(results), keeping.kept(results)
    tally = keeping.tally(keeping.verdicts(of_kept))
    return {
        **({"sweep": sweeping.summarise(of_sweep).as_data()} if of_sweep else {}),
        **({"kept": {text: {"met": met, "rows": rows} for text, (met, rows) in tally.items()}} if of_kept else {}),
    }


def _means(results: list[Result], options: Options) -> list[tuple[means.Mean, float, bool]]:
    if options.quick:
        return []
    return means.judged(
        [(result.case.name, side.name, side.ratio.median) for result in results for side in result.sides]
    )


def _means_data(results: list[Result], options: Options) -> dict[str, object]:
    found = _means(results, options)
    told = [{"text": mean.text, "measured": value, "holds": holds} for mean, value, holds in found]
    return {"means": told} if told else {}


def _show(results: list[Result], provenance: Provenance, options: Options) -> None:
    console = Console()
    of_sweep, of_kept = sweeping.swept(results), keeping.kept(results)
    shown_apart = {result.case.family for result in (*of_sweep, *of_kept)}
    others = [result for result in results if result.case.family not in shown_apart]
    for found, build in ((others, table), (of_kept, keeping.table)):
        if found:
            console.print(build(found))
            if (targets := legend(found)) is not None:
                console.print(targets)
    if of_sweep:
        console.print(sweeping.table(of_sweep))
        console.print(f"sweep: {sweeping.summarise(of_sweep)}", soft_wrap=True)
        for line in sweeping.lines(of_sweep):
            if line.off_best is not None and line.off_best > sweeping.NEVER_BEYOND:
                told = f"{line.case}: {line.off_best:.2f} x the time of the best route"
                console.print(f"[yellow]off:[/] {escape(told)}", soft_wrap=True, highlight=False)
    console.print(
        "× is the other side's time over ours, median and quartiles of the rounds: above 1, ours is faster. "
        "The floor is the op without a mask. copy_ is how much of a plain copy's bandwidth ours reaches. "
        "t(1) is the time of ours with everything kept. ok: ✓ a target is met, ✗ it is missed; the number is the "
        "target's, in the legend below the table.",
        style="dim",
    )
    of_functions = geometric_means(large_ratios(results))
    if of_functions:
        told = ", ".join(f"{function} {mean:.1f}" for function, mean in of_functions.items())
        console.print(f"geometric mean of × best peer over the large forward cases: {told}", soft_wrap=True)
    for asked, value, holds in _means(results, options):
        word = "[green]met:[/]" if holds else "[red]missed:[/]"
        console.print(f"{word} {escape(asked.text)}, measured × {value:.2f}", soft_wrap=True, highlight=False)
    for result in results:
        for verdict in result.verdicts:
            if not verdict.holds:
                ratio = result.side(verdict.side).ratio
                told = f"{result.case.name}: {verdict.target.text}, measured × {ratio} ({verdict.side})"
                console.print(f"[red]missed:[/] {escape(told)}", soft_wrap=True, highlight=False)
    m = provenance.machine
    console.print(f"{m['gpu']}, Triton {m['triton']}; " if "gpu" in m else "", end="")
    console.print(f"{m['cpu']}, {m['threads']} threads, {m['simd']}; torch {m['torch']}, maskwise {m['maskwise']}")
    if options.quick:
        console.print("[yellow]--quick:[/] everything runs and agrees; the times above say nothing.")
    for result in results:
        for name, reason in result.skipped.items():
            console.print(f"[yellow]skipped:[/] {result.case.name}: {name}: {reason}")
    for path in (options.csv, options.plot):
        if path:
            console.print(f"wrote {path}", soft_wrap=True)
