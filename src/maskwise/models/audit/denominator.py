"""Is a loss the same however a batch is split into micro-batches? If not, which weighting it follows, and the fix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
from torch import Tensor

from maskwise.distributed import Window, accumulate
from maskwise.models.audit.batch import IGNORED, Batch, Tokens
from maskwise.models.audit.subject import Subject

__all__ = ["Denominator", "find_denominator"]

#: Of the whole batch's value; sums of other sizes round differently.
TOLERANCE = 1e-4
#: At most so many micro-batches are tried.
LARGEST = 8
_FIX = (
    "with mw.accumulate(masks) as window: mw.loss(F.cross_entropy, logits, labels, mask, denominator=window)"
    " for each micro-batch"
)
_SUM_FIX = "divide each sum by the window's count: window.scale(total), window being mw.accumulate(masks)"


@dataclass(frozen=True)
class Denominator:
    """What happens to the loss when the batch is split.

    Attributes:
        invariant: whether the mean over micro-batches, or their sum for a loss with ``denominator``, is the loss of the
            whole batch for every split that was tried.
        weighting: what the loss of the whole batch weighs micro-batches by: ``"rows"``, ``"labels"``, ``"tokens"``,
            ``"sum"``, or ``"unknown"``.
        splits: the numbers of micro-batches that were tried.
        error: the largest error of the loss, as a share of it.
        gradient: the largest error of a parameter's gradient, as a share of its largest element.
        fix: what to change; empty if nothing.
    """

    invariant: bool
    weighting: str
    splits: tuple[int, ...]
    error: float
    gradient: float
    fix: str = ""


def find_denominator(subject: Subject, batch: Batch, tokens: list[Tokens]) -> Denominator | None:
    """Compare splits; None without a loss, or where the batch cannot be cut into equal micro-batches."""
    rows = batch.rows
    if rows is None or rows < 2:
        return None
    if rows > LARGEST and rows % 2:
        # Equal micro-batches: a mean over rows of others is no mean over all.
        rows -= 1
        batch = batch.take(list(range(rows)))
        tokens = [replace(each, keep=each.keep[:rows]) for each in tokens if each.keep.shape[0] > rows]
    counts = _weights(batch, tokens, rows)
    window = subject.takes_denominator
    whole = _loss(subject, [batch], [list(range(rows))], counts)
    if whole is None:
        return None
    value, gradients = whole
    sizes = sorted({parts for parts in (2, min(4, rows), rows) if rows % parts == 0 and parts <= LARGEST})
    worst, worst_gradient, weighting = 0.0, 0.0, "rows"
    for parts in sizes:
        order = _uneven(counts, rows)
        pieces = _chunks(order, parts)
        micro = [batch.take(piece) for piece in pieces]
        found = _loss(subject, micro, pieces, counts)
        if found is None:
            return None
        split, of_split = found
        # A micro-batch without labels may have a loss of NaN.
        error = abs(split - value) / max(abs(value), 1e-12) if isfinite(split) else inf
        gap = _gap(gradients, of_split)
        if error > worst:
            worst, weighting = error, _weighting(subject, value, micro, pieces, counts)
        worst_gradient = max(worst_gradient, gap)
    invariant = worst <= TOLERANCE and worst_gradient <= 10 * TOLERANCE
    if invariant:
        return Denominator(True, "window" if window else "rows", tuple(sizes), worst, worst_gradient)
    fix = _SUM_FIX if weighting == "sum" else _FIX
    return Denominator(False, weighting, tuple(sizes), worst, worst_gradient, fix)


def _chunks(order: list[int], parts: int) -> list[list[int]]:
    size = len(order) // parts
    return [order[index * size : (index + 1) * size] for index in range(parts)]


def _uneven(counts: dict[str, Tensor], rows: int) -> list[int]:
    """Rows by what they count, so that micro-batches differ as much as they can."""
    for name in ("labels", "tokens"):
        if name in counts:
            return [int(each) for each in counts[name].argsort(stable=True)]
    return list(range(rows))


def _weights(batch: Batch, tokens: list[Tokens], rows: int) -> dict[str, Tensor]:
    """What each row counts."""
    found: dict[str, Tensor] = {}
    labels = batch.labels()
    if labels is not None and labels[1].dim() > 1:
        kept = labels[1] != IGNORED
        found["labels"] = kept.flatten(1).sum(1).cpu()
        if kept.dim() == 2:
            # A model that predicts the next token has no use for the first label.
            found["labels but the first"] = kept[:, 1:].sum(1).cpu()
    for each in tokens:
        if each.keep.shape[0] == rows:
            found.setdefault("tokens", each.keep.sum(1).cpu())
    return found


def _loss(
    subject: Subject, micro: list[Batch], pieces: list[list[int]], counts: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]] | None:
    """The loss of some micro-batches, as a training loop adds it up, and its gradients."""
    if not subject.takes_denominator:
        return _added(subject, micro, None)
    name = next((each for each in ("labels", "tokens") if each in counts), None)
    if name is None:
        return None
    with accumulate([int(counts[name][piece].sum()) for piece in pieces]) as window:
        return _added(subject, micro, window)


def _added(subject: Subject, micro: list[Batch], window: Window | None) -> tuple[float, dict[str, Tensor]] | None:
    value, gradients = 0.0, dict[str, Tensor]()
    share = 1.0 if window is not None else 1.0 / len(micro)
    for each in micro:
        output = subject.forward(each, training=False, grad=True)
        loss = subject.loss_of(output, each, window)
        if loss is None:
            return None
        value += share * float(loss.detach())
        for name, gradient in subject.differentiate(loss).items():
            gradients[name] = share * gradient + gradients.get(name, 0.0)
    return value, gradients


def _gap(whole: dict[str, Tensor], split: dict[str, Tensor]) -> float:
    largest = max((float(each.abs().max()) for each in whole.values() if each.numel()), default=0.0)
    if not largest:
        return 0.0
    gaps = [float((split[name] - each).abs().max()) for name, each in whole.items() if name in split and each.numel()]
    return max((gap if isfinite(gap) else inf for gap in gaps), default=0.0) / largest


def _weighting(
    subject: Subject, value: float, micro: list[Batch], pieces: list[list[int]], counts: dict[str, Tensor]
) -> str:
    """The weights of micro-batches with which their losses add up to that of the whole batch."""
    losses = []
    for each in micro:
        with torch.no_grad():
            loss = subject.loss_of(subject.forward(each, training=False), each)
        if loss is None:
            return "unknown"
        losses.append(float(loss))
    if abs(sum(losses) - value) <= 1e-4 * abs(value):
        return "sum"
    for name, count in counts.items():
        weights = [float(count[piece].sum()) for piece in pieces]
        total = sum(weights)
        if total and abs(sum(w * x for w, x in zip(weights, losses, strict=True)) / total - value) <= 1e-4 * abs(value):
            return name.partition(" ")[0]
    return "unknown"
