"""The commands and their options. Each imports its module when it runs, so that ``--help`` stays fast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from maskwise.errors import MaskwiseError

__all__ = ["Command", "app", "guarded"]

INTERRUPTED = 130
"""The exit code that a shell expects after Ctrl-C."""

#: Where the benchmarks and the examples are, in a checkout; an installed package has neither.
ROOT = Path(__file__).parents[3]


def guarded(invoke: Callable[[], Any]) -> Any:
    """Run a command, and end with an exit code that scripts can rely on, never with a traceback for a user."""
    try:
        return invoke()
    except KeyboardInterrupt:
        # Files are written whole or not at all, so there is nothing to clean up.
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (MaskwiseError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _without_types(params: list[Any]) -> list[Any]:
    # Typer prints `<bool>` beside a flag, as if it took a value.
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments."""
        return _without_types(super().get_params(ctx))


class Commands(TyperGroup):
    """The commands, guarded."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments."""
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        return guarded(lambda: super(Commands, self).invoke(ctx))


app = typer.Typer(
    name="maskwise",
    cls=Commands,
    epilog="Exit codes: 0 all is well, 1 a check failed, 2 wrong usage, 130 interrupted.",
    help="Mask-aware computing for PyTorch: you pay for what you keep, and nothing else leaks.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]


def _version(wanted: bool) -> None:
    if wanted:
        from maskwise import __version__

        typer.echo(f"maskwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(cls=Command)
def doctor(json: Json = False) -> None:
    """Print versions, CPU, threads, devices and the state of the C++ extension, for a bug report.

    The exit code is 1 when the extension is installed and fails to load.
    """
    from maskwise.cli import doctor as command

    raise typer.Exit(command.run(json=json))


Train = Annotated[bool, typer.Option("--train", hidden=True)]


@app.command(cls=Command)
def demo(*, json: Json = False, train: Train = False) -> None:
    """Show what Maskwise does, in seconds: draw a mask, stop a leak, time a sum, a model and a pruned block."""
    if train:
        raise MaskwiseError(
            "demo: training with every gate is an example of the repository, not a part of the installed package. "
            "Hint: python examples/train_digits.py --quick, in a clone of it."
        )
    from maskwise.cli import demo as command

    raise typer.Exit(command.run(json=json))


@app.command(
    cls=Command, add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def bench(ctx: typer.Context) -> None:
    """Run the benchmarks, in a clone of the repository; the same as `python -m benchmarks`."""
    if not (ROOT / "benchmarks" / "command.py").exists():
        raise MaskwiseError(
            "bench: the benchmarks are in the repository, not in the installed package. "
            f"Hint: make bench, or python -m benchmarks {' '.join(ctx.args) or '--help'}, in a clone of it."
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    benchmarks = import_module("benchmarks.command")
    raise typer.Exit(benchmarks.app(ctx.args, prog_name="maskwise bench", standalone_mode=False) or 0)


Open = Annotated[bool, typer.Option("--open", help="Open the picture that --plot writes.")]
Expression = Annotated[str, typer.Argument(help='A mask, such as "causal(16) & lengths(5, 9)".', show_default=False)]
Drawing = Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Also write a picture: .png or .svg.")]


@app.command(cls=Command)
def draw(expression: Expression, *, json: Json = False, plot: Drawing = None, open_: Open = False) -> None:
    """Draw a mask on the terminal.

    Masks:

    - `causal(16)`
    - `window(16, 3, right=1)`
    - `segments(0, 0, 1, 1, -1)`
    - `lengths(5, 9, max_len=16, side=left)`
    - `indices(2, 5, 7, size=10)`
    - `values([[7, 0, 3], [0, 0, 5]], 0)`
    - `full(3, 5)`
    - `none(3, 5)`

    Operators, as in Python: `&` and, `|` or, `^` xor, `-` difference, `~` not, `.T` transpose; and parentheses.

    `lengths` without max_len takes the length of the other masks. Combined with `causal`, `window` or `segments`, it
    gives key lengths, one per batch entry.
    """
    from maskwise.cli import draw as command

    raise typer.Exit(command.run(command.Options(expression, json=json, plot=plot, open=open_)))


Reset = Annotated[bool, typer.Option("--reset", help="Delete the measured rates and use the built-in ones.")]
Show = Annotated[bool, typer.Option("--show", help="Print the rates in use without measuring.")]


@app.command(cls=Command)
def calibrate(*, reset: Reset = False, show: Show = False, json: Json = False) -> None:
    """Measure this machine, in seconds, for the cost model that picks routes.

    The rates (call overhead, memory bandwidth, gathers, FLOPs) are cached in the user's cache directory, or in
    MASKWISE_CACHE_DIR, keyed by CPU, number of threads, torch and maskwise. A GPU is measured too, if there is one.
    """
    from maskwise.cli import calibrate as command

    raise typer.Exit(command.run(reset=reset, show=show, json=json))


Target = Annotated[str, typer.Argument(help="module:function or file.py:name.", show_default=False)]
LossOf = Annotated[str | None, typer.Option("--loss", help="The loss, loss(output, batch), as module:function.")]
Page = Annotated[Path | None, typer.Option("--html", dir_okay=False, help="Also write a page.")]
FailOn = Annotated[str, typer.Option("--fail-on", help="Exit with 1 on: leak, nan, denominator, waste>30%, none.")]


@app.command(cls=Command)
def audit(
    target: Target, *, loss: LossOf = None, json: Json = False, html: Page = None, fail_on: FailOn = "leak"
) -> None:
    """Find whether a model leaks, what it wastes, and whether its loss depends on micro-batches.

    TARGET is a function without arguments that returns a model and a batch, or a model, a batch and a loss.

    The exit code is 1 if a check of `--fail-on` fails: checks are separated by commas, as in `leak,waste>30%`. It is 2
    if nothing was checked: wrong usage, or an exception of the model's own.
    """
    from maskwise.cli import audit as command

    raise typer.Exit(command.run(command.Options(target, loss=loss, json=json, html=html, fail_on=fail_on)))
