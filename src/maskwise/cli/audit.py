"""``maskwise audit module:function``: audit a model that a function returns, for people and for CI."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from maskwise.cli.terminal import progress
from maskwise.errors import MaskwiseError
from maskwise.models.audit import Audit
from maskwise.models.audit.api import run_audit
from maskwise.models.audit.waste import CAUSES

__all__ = ["Options", "checks_of", "failures", "run"]

#: About how many steps an audit has, for the progress bar.
STEPS = 7
KINDS = ("leak", "nan", "waste", "denominator", "none")


@dataclass(frozen=True)
class Options:
    """What the command takes."""

    target: str
    loss: str | None = None
    json: bool = False
    html: Path | None = None
    fail_on: str = "leak"


Check = tuple[str, float]


def run(options: Options) -> int:
    """Audit, print, and return 1 if a check of ``--fail-on`` fails, 2 if there is nothing to check."""
    checks = checks_of(options.fail_on)
    if options.html is not None and not options.html.absolute().parent.is_dir():
        raise typer.BadParameter(f"--html: there is no directory {str(options.html.parent)!r}: mkdir -p, before it.")
    try:
        report = _report(options)
    except (typer.BadParameter, OSError):
        raise
    except MaskwiseError as error:
        raise typer.BadParameter(str(error)) from error
    except Exception:
        # Of the user's code, so with its traceback; 1 would read as a leak.
        traceback.print_exc()
        typer.echo(f"error: {options.target} raised before the audit ended: nothing was checked", err=True)
        return 2
    if options.json:
        typer.echo(report.to_json())
    else:
        Console(width=80, highlight=False).print(report, soft_wrap=True)
    if options.html is not None:
        report.to_html(options.html)
        if not options.json:
            typer.echo(f"\n{options.html} has the page")
    failed = failures(report, checks)
    for each in failed:
        typer.echo(f"failed: {each}", err=True)
    return int(bool(failed))


def _report(options: Options) -> Audit:
    """Load the functions, call the one of the model, and audit with a progress bar."""
    given = _load("TARGET", options.target)()
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise typer.BadParameter(
            f"{options.target} must return a model and a batch, got {type(given).__name__}. "
            "Hint: return model, batch, or model, batch, loss."
        )
    model, batch, *rest = given
    loss = _load("--loss", options.loss) if options.loss else (rest[0] if rest else None)
    with progress() as bar:
        task = bar.add_task("audit", total=STEPS)

        def on_step(name: str) -> None:
            bar.update(task, description=name, advance=1)

        return run_audit(model, batch, loss=loss, on_step=on_step)


def checks_of(text: str) -> list[Check]:
    """The checks of ``--fail-on``: a kind, and the share above which waste fails.

    >>> checks_of("leak,waste>30%")
    [('leak', 0.0), ('waste', 0.3)]
    """
    found: list[Check] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*(?:>\s*([\d.]+)\s*%\s*)?", part)
        kind = match.group(1) if match else ""
        if match is None or kind not in KINDS or (match.group(2) and kind != "waste"):
            raise typer.BadParameter(
                f"--fail-on takes {', '.join(KINDS)}, or waste>30%, not {part.strip()!r}: leak,waste>30%."
            )
        found.append((kind, float(match.group(2)) / 100 if match.group(2) else 0.0))
    return found


def failures(report: Audit, checks: list[Check]) -> list[str]:
    """What failed, in a line each."""
    found: list[str] = []
    for kind, limit in checks:
        if kind == "leak":
            found += [str(leak) for leak in report.leaks if not leak.only_nan]
        elif kind == "nan":
            found += [str(leak) for leak in report.leaks if leak.only_nan]
        elif kind == "waste" and report.waste and report.wasted > limit:
            causes = ", ".join(CAUSES[each.cause] for each in report.waste)
            found.append(f"{report.wasted:.0%} of the time is wasted on {causes}; allowed are {limit:.0%}")
        elif kind == "denominator" and report.denominator is not None and not report.denominator.invariant:
            found.append(f"the loss depends on the split into micro-batches, by {report.denominator.error:.1%}")
    return found


def _load(option: str, target: str) -> Callable[..., Any]:
    """The function of ``module:function`` or ``file.py:name``."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise typer.BadParameter(f"{option} is module:function or file.py:name, not {target!r}: training.py:example.")
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise typer.BadParameter(
                f"{option}: there is no file {place!r}: a path from here, such as ./training.py:example."
            )
        spec = spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.path.insert(0, str(file.parent.resolve()))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = import_module(place)
        except ModuleNotFoundError as error:
            raise typer.BadParameter(
                f"{option}: {error}: a module that can be imported from here, or a file.py."
            ) from error
        finally:
            sys.path.pop(0)
    found = getattr(module, name, None)
    if not callable(found):
        raise typer.BadParameter(f"{option}: {place} has no function {name!r}: def {name}(): return model, batch.")
    return found  # type: ignore[no-any-return]
