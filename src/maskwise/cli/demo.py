"""``maskwise demo``: what Maskwise does, in some seconds and on this machine."""

from __future__ import annotations

import json as json_module
from typing import Any

import torch
import typer
from rich.console import Console
from rich.rule import Rule

import maskwise as mw
from maskwise.benchmarks.case import Case
from maskwise.benchmarks.cases.reduce import SUM_AGAINST_WHERE
from maskwise.benchmarks.report import in_words
from maskwise.benchmarks.run import Result, run_case
from maskwise.cli.progress import progress

__all__ = ["run"]

LENGTHS = (2, 4, 3)


def run(*, json: bool = False) -> int:
    """Run the walk and return the exit code."""
    mask = mw.Mask.from_lengths(LENGTHS, max_len=5)
    leak = _leak(mask)
    result = _time(SUM_AGAINST_WHERE)
    with mw.explain() as log:
        for size in (4, 1024):
            mw.sum(torch.ones(size, size), mw.Mask.causal(size), dim=-1)
    if json:
        peer = result.side("where+sum")
        found = {
            "lengths": LENGTHS,
            "leak": leak,
            "timing": {
                "case": result.case.name,
                "ours_seconds": result.ours.median,
                "where_sum_seconds": peer.median,
                "ratio": peer.ratio.median,
            },
            "explain": json_module.loads(log.to_json()),
        }
        typer.echo(json_module.dumps(found, indent=2))
    else:
        _show(Console(), mask, leak, result, log)
    return 0


def _leak(mask: mw.Mask) -> dict[str, Any]:
    """Put garbage where nothing should be read, and look at the gradient of the usual idiom and of ours."""
    keep = mask.to_bool()
    garbage = torch.where(keep, 1.0, torch.nan)
    found = {}
    for name, reduce in (
        ("(x * mask).sum(-1)", lambda x: (x * keep).sum(-1)),
        ("mw.sum(x, mask, -1)", lambda x: mw.sum(x, mask, -1)),
    ):
        x = garbage.clone().requires_grad_()
        loss = reduce(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x)
        # JSON has no NaN; the words do.
        found[name] = {"loss": str(loss.item()), "gradient": [[f"{v:g}" for v in row] for row in gradient.tolist()]}
    return found


def _time(case: Case) -> Result:
    with progress() as bar:
        task = bar.add_task("timing a masked sum of 4096 x 4096", total=None)
        return run_case(case, on_round=lambda done, total: bar.update(task, completed=done, total=total))


def _show(console: Console, mask: mw.Mask, leak: dict[str, Any], result: Result, log: object) -> None:
    console.print(Rule("1  A mask says what is kept", align="left"))
    console.print(f"[dim]>>>[/] print(mw.Mask.from_lengths({list(LENGTHS)}, max_len=5))", highlight=False)
    console.print(str(mask), markup=False, highlight=False)

    console.print(Rule("2  Nothing leaks", align="left"))
    console.print("The padding holds NaN, as it may after a division or a log. The loss is sum(-1).square().sum().\n")
    for name, found in leak.items():
        bad = found["loss"] == "nan"
        console.print(f"  [bold {'red' if bad else 'green'}]{name:<22}[/] loss {found['loss']}", highlight=False)
        for row in found["gradient"]:
            console.print("      " + " ".join(f"{value:>4}" for value in row), highlight=False)

    console.print(Rule("3  What is masked out costs nothing", align="left"))
    peer, floor = result.side("where+sum"), result.floor
    console.print(f"{result.case.name}, float32, {torch.get_num_threads()} threads; median, sides interleaved\n")
    longest = max(side.median for side in result.sides if side.kind != "memory")
    for side in (peer, result.ours, *([floor] if floor else [])):
        bar = "█" * max(1, round(40 * side.median / longest))
        console.print(f"  {side.name:<12} {in_words(side.median):>10}  [cyan]{bar}[/]", highlight=False)
    console.print(f"\n  mw.sum is [bold green]{peer.ratio.median:.1f} ×[/] as fast as where+sum.", highlight=False)

    console.print(Rule("4  Every plan can be asked why", align="left"))
    console.print("[dim]>>>[/] with mw.explain() as log: ...", highlight=False)
    console.print(log)
    console.print("\nNext: [bold]maskwise bench[/] measures everything, [bold]maskwise doctor[/] checks the install.")
