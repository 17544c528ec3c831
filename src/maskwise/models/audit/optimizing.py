"""mw.optimize: the rewrites that were measured to pay, in the best order, on a copy of the model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maskwise.errors import MaskwiseError
from maskwise.models.audit.api import SMALL, bound
from maskwise.models.audit.batch import Batch, MaskLike, Tokens
from maskwise.models.audit.rewrites import ATTENTION, MARGIN, Rewrite, attending, compare, compare_training, compressed
from maskwise.models.audit.subject import Loss, Subject, preserved
from maskwise.models.audit.waste import profile
from maskwise.models.compress.surgery import clone_model
from maskwise.models.unpadding import unpad
from maskwise.nn.kept_head import kept_head
from maskwise.plan.explain import Tabular
from maskwise.plan.measure import in_words

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Optimization", "optimize"]

OP = "optimize"


@dataclass(frozen=True)
class Optimization(Tabular):
    """What `mw.optimize` applied. Print it for a table, or take ``to_json()``.

    Attributes:
        steps: the rewrites in the order in which they were applied, each measured beside the model before all of them.
        refused: those that were tried and left out, with the reason.
        mode: ``"eval"``, or ``"train"`` for a forward and a backward pass.
        before: seconds of the model.
        after: seconds of the model that is returned.
        difference: the largest difference at kept positions, or of loss and gradients, as a share of the largest value.
    """

    steps: tuple[Rewrite, ...]
    refused: tuple[Rewrite, ...]
    mode: str
    before: float
    after: float
    difference: float

    @property
    def speedup(self) -> float:
        """How many times faster."""
        return self.before / self.after if self.after else 1.0

    def to_json(self) -> str:
        """All of it as a JSON object."""
        steps, refused = ([each.to_dict() for each in rows] for rows in (self.steps, self.refused))
        rest = {"mode": self.mode, "before": self.before, "after": self.after, "difference": self.difference}
        return json.dumps({"steps": steps, "refused": refused, **rest, "speedup": self.speedup})

    def table(self) -> Table:
        """The rewrites as a rich table."""
        from rich.markup import escape
        from rich.table import Table

        title = f"optimized: {self.speedup:.2f} × as fast in {self.mode}, within {self.difference:.1e}"
        table = Table(title=title)
        for heading in ("rewrite", "applied", "before", "after", "difference", "note"):
            table.add_column(heading, overflow="fold")
        for row in (*self.steps, *self.refused):
            applied = "yes" if row in self.steps else "no"
            times = ["–" if each is None else in_words(each) for each in (row.before, row.after)]
            gap = "–" if row.difference is None else f"{row.difference:.0e}"
            table.add_row(*map(escape, (row.line, applied, *times, gap, row.note)))
        return table


def optimize(
    model: nn.Module, batch: Any, *, mask: MaskLike | None = None, loss: Loss | None = None
) -> tuple[nn.Module, Optimization]:
    """Apply the rewrites that pay for this model and batch, and check that results agree.

    >>> import torch, maskwise as mw
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)).eval()
    >>> _ = model[0].weight.data[32:].zero_()  # most units are dead
    >>> small, report = mw.optimize(model, torch.randn(64, 512))
    >>> [step.name for step in report.steps], small[2].in_features
    (['mw.compress'], 32)

    A model in evaluation gets `mw.compress`, where weights are zero, and `mw.unpad`, where positions are padding, in
    the order that is measured to be faster. A model in training gets `mw.nn.kept_head`, where rows have no label, and
    `mw.unpad`; its loss and gradients are compared too. A Hugging Face model whose mask drops pairs gets
    ``attn_implementation="maskwise"`` where that is faster than `mw.unpad`. A rewrite that does not pay or does not
    agree is left out.

    Args:
        model: any module. It is not changed, which is how to go back; the result is a copy, so an optimizer is made
            from its parameters.
        batch: what the model is called with, as for `mw.audit`, of typical sizes.
        mask: a Mask or a bool tensor (B, L); True means keep. By default it is found, as for `mw.audit`.
        loss: as for `mw.audit`; for a model in training.

    Returns:
        The new model, and an Optimization: print it for a table.

    Raises:
        DtypeError: ``model`` is not a module, ``batch`` nothing that a model is called with, or ``mask`` no mask.
        ShapeError: ``mask`` does not have the positions of the batch.
        ArgumentError: ``batch`` is empty, or a lazy module has no parameters yet.
    """
    found, tokens = bound(OP, model, batch, mask, loss)
    training = model.training
    with preserved(model, loss) as subject:
        report, result = _search(subject, found, tokens, training)
    for name, module in result.named_modules():
        original = dict(model.named_modules()).get(name)
        module.training = training if original is None else original.training
    return result, report


Step = Callable[[nn.Module], nn.Module]
#: Both replace a model's attention: one of them is applied.
ALTERNATIVES = {"mw.unpad", ATTENTION[0]}


def _search(subject: Subject, batch: Batch, tokens: list[Tokens], training: bool) -> tuple[Optimization, nn.Module]:
    measured = profile(subject, batch, tokens)
    padded = any(not bool(each.keep.all()) for each in tokens)
    steps: dict[str, Step] = {}
    if not training and measured.share("weights") >= SMALL:
        steps["mw.compress"] = lambda model: compressed(subject.of(model), batch, seconds=0.2)
    if training and measured.share("labels") >= SMALL:
        steps["mw.nn.kept_head"] = kept_head
    if padded:
        steps["mw.unpad"] = _unpadded
    if measured.share("attention") >= SMALL:
        steps[ATTENTION[0]] = attending
    lines = {
        "mw.compress": "model, report = mw.compress(model, batch)",
        "mw.nn.kept_head": "model = mw.nn.kept_head(model)",
        "mw.unpad": "model = mw.unpad(model)",
        ATTENTION[0]: ATTENTION[1],
    }
    both = len(steps) > 1 and (not training or steps.keys() >= ALTERNATIVES)
    orders = [list(steps), list(reversed(steps))] if both else [list(steps)]
    best: tuple[float, list[Rewrite], nn.Module] | None = None
    refused: dict[str, Rewrite] = {}
    for order in orders:
        done: list[Rewrite] = []
        current = clone_model(subject.model)
        fastest: float | None = None
        for name in order:
            if name in ALTERNATIVES and ALTERNATIVES & {step.name for step in done}:
                continue
            try:
                candidate = steps[name](clone_model(current))
                rewrite = _measured(name, lines[name], subject, candidate, batch, tokens, training)
            except MaskwiseError as error:
                refused[name] = Rewrite(name, lines[name], note=str(error).partition(" Hint:")[0].splitlines()[0])
                continue
            gains = rewrite.pays and (fastest is None or (rewrite.after or 0.0) < MARGIN * fastest)
            # Of many that are tried, noise makes some fast: what is applied was faster twice.
            if gains and _measured(name, lines[name], subject, candidate, batch, tokens, training).pays:
                done, current, fastest = [*done, rewrite], candidate, rewrite.after
            else:
                refused[name] = rewrite
        if fastest is not None and (best is None or fastest < best[0]):
            best = fastest, done, current
    mode = "train" if training else "eval"
    if best is None:
        return Optimization((), tuple(refused.values()), mode, measured.seconds, measured.seconds, 0.0), clone_model(
            subject.model
        )
    _, done, result = best
    last = done[-1]
    assert last.before is not None
    assert last.after is not None
    assert last.difference is not None
    left = tuple(each for name, each in refused.items() if name not in {step.name for step in done})
    return Optimization(tuple(done), left, mode, last.before, last.after, last.difference), result


def _unpadded(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return unpad(model)


def _measured(
    name: str, line: str, subject: Subject, candidate: nn.Module, batch: Batch, tokens: list[Tokens], training: bool
) -> Rewrite:
    other = subject.of(candidate)
    if training:
        found = compare_training(name, line, subject, other, batch, tokens)
        if found is not None:
            return found
    with torch.no_grad():
        return compare(name, line, subject, other, batch, tokens)
