"""The commands and their options. Each imports what it needs when it runs, so that ``--help`` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    name="maskwise",
    help="Mask-aware computing for PyTorch: what is masked out costs nothing and never leaks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]


def _version(wanted: bool) -> None:
    if wanted:
        from maskwise.benchmarks.machine import version_of

        typer.echo(f"maskwise {version_of('maskwise')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(json: Json = False) -> None:
    """Print what a bug report needs.

    Versions, processor, threads, devices, and whether the C++ extension is built and loaded. The exit code is 1 when an
    extension is there and cannot be loaded.
    """
    from maskwise.cli import doctor as command

    raise typer.Exit(command.run(json=json))


Train = Annotated[bool, typer.Option("--train", help="Train on digits to 95 % sparsity with every gate, instead.")]
Fast = Annotated[bool, typer.Option("--quick", help="With --train: a few steps only, to see that all runs.")]
Picture = Annotated[
    Path | None, typer.Option("--plot", dir_okay=False, help="With --train: draw a picture, .png or .svg.")
]


@app.command()
def demo(*, json: Json = False, train: Train = False, quick: Fast = False, plot: Picture = None) -> None:
    """Show in some seconds what Maskwise does: draw a mask, stop a leak, time a sum; or train with every gate."""
    if train:
        from maskwise.cli.digits import command as training

        raise typer.Exit(training.run(quick=quick, plot=plot, json=json))
    if quick or plot is not None:
        raise typer.BadParameter("--quick and --plot go with --train.")
    from maskwise.cli import demo as command

    raise typer.Exit(command.run(json=json))


Pattern = Annotated[
    str,
    typer.Option("--filter", "-f", help="Run the cases whose name holds all these words; commas part alternatives."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Small inputs, two rounds: does everything run and agree?")]
Csv = Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write every figure to this file.")]
Plot = Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Draw a picture: .png or .svg.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with code 1 when a target is missed.")]
Budget = Annotated[float, typer.Option("--budget", min=0.1, help="About how many seconds a case is timed.")]
Device = Annotated[str, typer.Option("--device", help="Where to measure: cpu, or cuda (also for ROCm).")]
List = Annotated[bool, typer.Option("--list", help="List the cases and their targets, and leave.")]


@app.command()
def bench(
    *,
    pattern: Pattern = "",
    quick: Quick = False,
    csv: Csv = None,
    plot: Plot = None,
    check: Check = False,
    budget: Budget = 8.0,
    device: Device = "cpu",
    list_: List = False,
    json: Json = False,
) -> None:
    """Measure Maskwise beside the plain idioms, torch.masked and torch.compile.

    All sides run in one process, interleaved, on the same inputs; each must agree with ours before it is timed.
    """
    from maskwise.cli import bench as command

    options = command.Options(
        pattern=pattern, quick=quick, csv=csv, plot=plot, check=check, json=json, budget=budget, device=device
    )
    raise typer.Exit(command.list_cases(options) if list_ else command.run(options))
