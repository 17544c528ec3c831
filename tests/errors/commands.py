"""Mistakes on the command line, and with benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import typer

from benchmarks import command
from benchmarks.case import Case, Side, at_least, never_slower
from benchmarks.registry import select
from benchmarks.run import BenchmarkError, run_case
from maskwise.cli import app, calibrate
from maskwise.cli.draw import _check_size
from maskwise.cli.expressions import parse_mask
from maskwise.cli.terminal import check_picture
from maskwise.errors import ArgumentError, MaskwiseError
from maskwise.plan import calibration
from tests.errors.row import Row


def draw(expression: str) -> Callable[[], Any]:
    return lambda: parse_mask(expression)


def measure(**options: Any) -> Callable[[], Any]:
    return lambda: command.run(command.Options(**options))


def picture(name: str | None, open_: bool = False) -> Callable[[], Any]:
    return lambda: check_picture(None if name is None else Path(name), open_)


def without_matplotlib() -> None:
    with patch.dict(sys.modules, {"matplotlib": None}):
        check_picture(Path("mask.png"))


def a_folder_in_the_place_of_the_rates() -> None:
    with patch.object(calibration, "path", lambda: Path(__file__).parent):
        calibration.reset()


def bench_without_a_checkout() -> None:
    with patch.object(app, "ROOT", Path(__file__).parent):
        app.bench(SimpleNamespace(args=["--list"]))


def side(name: str, value: float, kind: Any = "peer") -> Side:
    return Side(name, lambda inputs: lambda: torch.tensor(value), kind)


def broken(inputs: Any) -> Callable[[], Any]:
    raise ValueError("no such thing")


OURS = side("ours", 1.0, "ours")
CASE = Case("family", "fn", "variant", lambda case: None, (OURS, side("theirs", 1.0)), shape=(8,))

ROWS = [
    # -- draw
    Row("maskwise draw", draw(""), ArgumentError, "causal(16), or lengths(5, 9)"),
    Row("maskwise draw", draw("causal(4) " * 5000), ArgumentError, "Mask.from_lengths in Python"),
    Row("maskwise draw", draw("(causal(4)"), ArgumentError, "(causal(4) | full(4))"),
    Row("maskwise draw", draw("causal"), ArgumentError, "causal(...)"),
    Row("maskwise draw", draw("causal(4.5)"), ArgumentError, "causal(...)"),
    Row("maskwise draw", draw("full([3)"), ArgumentError, "[3, 5]"),
    Row("maskwise draw", draw("causal(4) causal(4)"), ArgumentError, "& (both), | (either)"),
    Row("maskwise draw", draw("(" * 60 + "causal(4)"), ArgumentError, "fewer parentheses"),
    Row("maskwise draw", draw("causal(4).mT"), ArgumentError, ".T transposes the last two dims"),
    Row("maskwise draw", draw("causal(4, k=2, k=3)"), ArgumentError, "each option once"),
    Row("maskwise draw", draw("lengths(max_len=3, 2)"), ArgumentError, "lengths(5, 9, max_len=12)"),
    Row("maskwise draw", draw("causal(-x)"), ArgumentError, "window(8, left=2, right=-1)"),
    Row("maskwise draw", draw("causal(&)"), ArgumentError, "lengths(5, 9), full([3, 5])"),
    Row("maskwise draw", draw(f"causal({'9' * 20})"), ArgumentError, "causal(16)"),
    Row("maskwise draw", draw("lenghts(2)"), ArgumentError, "lengths(5, 9"),
    Row("maskwise draw", draw("causal(x=4)"), ArgumentError, "causal(16)"),
    Row("maskwise draw", draw("full(3, 5) & full(4)"), ArgumentError, "sizes line up from the right"),
    Row("maskwise draw", draw("full(3) & lengths(5)"), ArgumentError, "max_len=max(lengths)"),
    Row("maskwise draw", draw("window(3)"), ArgumentError, "window(16, 3"),
    Row("maskwise draw --plot", lambda: _check_size("none(0)", parse_mask("none(0)")), ArgumentError, "without --plot"),
    # -- options
    Row(
        "maskwise demo --train", lambda: app.demo(train=True), MaskwiseError, "python examples/train_digits.py --quick"
    ),
    Row("maskwise bench", bench_without_a_checkout, MaskwiseError, "make bench, or python -m benchmarks --list"),
    Row("benchmarks --device", measure(device="tpu"), typer.BadParameter, "run on 'cpu' and 'cuda'"),
    Row("benchmarks --quick", measure(quick=True, check=True), typer.BadParameter, "drop it, or drop --check"),
    Row("benchmarks --filter", measure(pattern="nothing"), typer.BadParameter, "python -m benchmarks --list"),
    Row("maskwise calibrate", lambda: calibrate.run(reset=True, show=True), typer.BadParameter, "drop one of them"),
    Row("maskwise calibrate", a_folder_in_the_place_of_the_rates, MaskwiseError, "rm "),
    Row("maskwise draw --open", picture(None, True), typer.BadParameter, "add --plot picture.png"),
    Row("maskwise draw --plot", picture("mask.gif"), typer.BadParameter, "--plot mask.png"),
    Row("maskwise draw --plot", without_matplotlib, typer.BadParameter, "pip install 'maskwise[plot]'"),
    # -- benchmarks
    Row("benchmarks.select", lambda: select("nothing"), ArgumentError, "python -m benchmarks --list"),
    Row("benchmarks.Case", lambda: replace(CASE, sides=(OURS, OURS)), ArgumentError, "kind='ours'"),
    Row("benchmarks.Case", lambda: replace(CASE, targets=(never_slower("x"),)), ArgumentError, 'side="best peer"'),
    Row(
        "run_case",
        lambda: run_case(replace(CASE, sides=(OURS, side("x", 2.0))), quick=True),
        BenchmarkError,
        "has a bug",
    ),
    Row(
        "run_case",
        lambda: run_case(replace(CASE, sides=(OURS, Side("x", broken))), quick=True),
        BenchmarkError,
        "--filter 'fn variant'",
    ),
    Row(
        "run_case",
        lambda: run_case(replace(CASE, sides=(OURS,), targets=(at_least(2, "best peer"),)), budget=0.01),
        BenchmarkError,
        "run without --check",
    ),
]
