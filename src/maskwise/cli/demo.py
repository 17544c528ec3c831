"""``maskwise demo``: what Maskwise does, in some seconds and on this machine."""

from __future__ import annotations

import json as json_module
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule

import maskwise as mw
from maskwise.benchmarks.case import Case
from maskwise.benchmarks.cases import compress, models
from maskwise.benchmarks.cases.reduce import SUM_AGAINST_WHERE
from maskwise.benchmarks.cases.texts import no_minilm
from maskwise.benchmarks.report import in_words
from maskwise.benchmarks.run import Result, SideResult, run_case
from maskwise.cli.progress import progress

__all__ = ["run"]

LENGTHS = (2, 4, 3)
SECONDS = 4.0
"""About how long each timing takes."""


def run(*, json: bool = False) -> int:
    """Run the walk and return the exit code."""
    mask = mw.Mask.from_lengths(LENGTHS, max_len=5)
    leak = _leak(mask)
    result = _time(SUM_AGAINST_WHERE, "timing a masked sum of 4096 x 4096")
    case = models.for_the_demo()
    agreement = _agreement(case)
    model = _time(case, "timing a model, padded and unpadded")
    pruned_case = compress.for_the_demo()
    pruned_difference = _difference(pruned_case)
    pruned = _time(pruned_case, "timing a pruned block, dense and compressed")
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
            "model": {
                "case": model.case.name,
                "kept": agreement["kept"],
                "largest_difference": agreement["difference"],
                "seconds": {side.name: side.median for side in model.sides},
                "ratio": model.side("padded").ratio.median,
            },
            "pruned": {
                "case": pruned.case.name,
                "kept": pruned_case.density,
                "largest_difference": pruned_difference,
                "seconds": {side.name: side.median for side in pruned.sides},
                "ratio": pruned.side(compress.DENSE).ratio.median,
            },
            "explain": json_module.loads(log.to_json()),
        }
        typer.echo(json_module.dumps(found, indent=2))
    else:
        _show(Console(), mask, leak, result, log)
        _show_model(Console(), model, agreement)
        _show_pruned(Console(), pruned, pruned_difference)
        Console().print(
            "\nNext: [bold]maskwise bench[/] measures everything, [bold]maskwise doctor[/] checks the install."
        )
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


def _agreement(case: Case) -> dict[str, float]:
    """The largest difference between the padded and the unpadded model, and the share of tokens that is real."""
    inputs = case.setup(case)
    padded, unpadded = (side.prepare(inputs)() for side in case.sides if side.name in {"padded", "mw.unpad"})
    assert isinstance(padded, torch.Tensor)
    assert isinstance(unpadded, torch.Tensor)
    kept = padded.shape[0] / (case.shape[0] * case.shape[1])
    return {"difference": (padded - unpadded).abs().max().item(), "kept": kept}


def _difference(case: Case) -> float:
    """The largest difference between the outputs of the sides."""
    inputs = case.setup(case)
    first, second = (side.prepare(inputs)() for side in case.sides)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    return (first - second).abs().max().item()


def _time(case: Case, doing: str) -> Result:
    with progress() as bar:
        task = bar.add_task(doing, total=None)

        def on_round(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return run_case(case, budget=SECONDS, on_round=on_round)


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
    _bars(console, [peer, result.ours, *([floor] if floor else [])], 12)
    console.print(f"\n  mw.sum is [bold green]{peer.ratio.median:.1f} ×[/] as fast as where+sum.", highlight=False)

    console.print(Rule("4  Every plan can be asked why", align="left"))
    console.print("[dim]>>>[/] with mw.explain() as log: ...", highlight=False)
    console.print(log)


def _bars(console: Console, sides: list[SideResult], width: int) -> None:
    longest = max(side.median for side in sides)
    for side in sides:
        bar = "█" * max(1, round(40 * side.median / longest))
        console.print(f"  {side.name:<{width}} {in_words(side.median):>10}  [cyan]{bar}[/]", highlight=False)


def _show_model(console: Console, result: Result, agreement: dict[str, float]) -> None:
    console.print(Rule("5  Whole models, without their padding", align="left"))
    console.print("[dim]>>>[/] mw.unpad(model)", highlight=False)
    console.print(f"{result.case.name}; {agreement['kept']:.0%} of the tokens are real\n", highlight=False)
    sides = sorted(result.sides, key=lambda side: side.name != "padded")
    _bars(console, sides, max(len(side.name) for side in sides))
    console.print(
        f"\n  Unpadded it is [bold green]{result.side('padded').ratio.median:.1f} ×[/] as fast, and no output differs "
        f"by more than [bold green]{agreement['difference']:.0e}[/].",
        highlight=False,
    )
    if (reason := no_minilm()) is not None:
        console.print(f"  [dim]A real model on real text {escape(reason)}.[/]", highlight=False)


def _show_pruned(console: Console, result: Result, difference: float) -> None:
    console.print(Rule("6  Pruned weights, as fast as what is kept", align="left"))
    console.print("[dim]>>>[/] model, report = mw.compress(model, example)", highlight=False)
    console.print(f"{result.case.name}\n", highlight=False)
    sides = sorted(result.sides, key=lambda side: side.name != compress.DENSE)
    _bars(console, sides, max(len(side.name) for side in sides))
    console.print(
        f"\n  Compressed it is [bold green]{result.side(compress.DENSE).ratio.median:.1f} ×[/] as fast, and no output "
        f"differs by more than [bold green]{difference:.0e}[/].",
        highlight=False,
    )
