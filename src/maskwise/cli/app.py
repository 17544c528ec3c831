"""The commands and their options. Each imports what it needs when it runs, so that ``--help`` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from maskwise.errors import MaskwiseError

__all__ = ["app"]

INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended."""


class Commands(TyperGroup):
    """The commands, each of which ends with a code that scripts can trust, and never with a traceback for a user."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Files are written whole or not at all, so there is nothing to clean up.
            typer.echo("interrupted: nothing was written", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except (MaskwiseError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    name="maskwise",
    cls=Commands,
    epilog="Exit codes: 0 all is well, 1 a check failed, 2 wrong usage, 130 interrupted.",
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
Open = Annotated[bool, typer.Option("--open", help="Open the picture that --plot draws.")]


@app.command()
def demo(
    *, json: Json = False, train: Train = False, quick: Fast = False, plot: Picture = None, open_: Open = False
) -> None:
    """Show in some seconds what Maskwise does: draw a mask, stop a leak, time a sum; or train with every gate."""
    if train:
        from maskwise.cli.digits import command as training

        raise typer.Exit(training.run(quick=quick, plot=plot, open_=open_, json=json))
    if quick or open_ or plot is not None:
        raise typer.BadParameter("--quick, --plot and --open go with --train: add it.")
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
    open_: Open = False,
    json: Json = False,
) -> None:
    """Measure Maskwise beside the plain idioms, torch.masked and torch.compile.

    All sides run in one process, interleaved, on the same inputs; each must agree with ours before it is timed.
    """
    from maskwise.cli import bench as command

    options = command.Options(
        pattern=pattern,
        quick=quick,
        csv=csv,
        plot=plot,
        open=open_,
        check=check,
        json=json,
        budget=budget,
        device=device,
    )
    raise typer.Exit(command.list_cases(options) if list_ else command.run(options))


Expression = Annotated[str, typer.Argument(help='A mask, such as "causal(16) & lengths(5, 9)".', show_default=False)]
Drawing = Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Draw a picture, too: .png or .svg.")]


@app.command()
def draw(expression: Expression, *, json: Json = False, plot: Drawing = None, open_: Open = False) -> None:
    """Draw a mask on the terminal.

    Masks: causal(16)  window(16, 3, right=1)  segments(0, 0, 1, 1, -1)  lengths(5, 9, max_len=16, side=left)
    indices(2, 5, 7, size=10)  values([[7, 0, 3], [0, 0, 5]], 0)  full(3, 5)  none(3, 5)

    Operators, as in Python: & both, | either, ^ one of them, - the first without the second, ~ what is dropped,
    .T the last two dims exchanged; and parentheses.

    Lengths without max_len are as long as the masks around them; beside causal, window or segments they are the
    lengths of keys, one for each entry of a batch.
    """
    from maskwise.cli import draw as command

    raise typer.Exit(command.run(command.Options(expression, json=json, plot=plot, open=open_)))


Reset = Annotated[bool, typer.Option("--reset", help="Remove what was measured: built-in rates serve again.")]
Show = Annotated[bool, typer.Option("--show", help="Show the rates in use, and measure nothing.")]


@app.command()
def calibrate(*, reset: Reset = False, show: Show = False, json: Json = False) -> None:
    """Measure this machine for some seconds, so that plans are predicted from what it does.

    The rates (of calls, memory, rows and products) are kept in the user's cache directory, for this processor, number
    of threads, torch and maskwise; MASKWISE_CACHE_DIR puts them elsewhere. A GPU is measured too, if there is one.
    """
    from maskwise.cli import calibrate as command

    raise typer.Exit(command.run(reset=reset, show=show, json=json))
