"""Does a model's output depend on what is dropped? By how much, from which module on, and what repairs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maskwise.models.audit.batch import Batch, Tokens
from maskwise.models.audit.causes import Cause, cause_of, cause_of_loss
from maskwise.models.audit.perturb import Probe, change_masked_weights, probes
from maskwise.models.audit.positions import Positions, difference
from maskwise.models.audit.subject import Mode, Result, Subject
from maskwise.models.audit.tracing import Place, locate
from maskwise.models.compress.surgery import clone_model

__all__ = ["Leak", "few_rows", "find_leaks"]

#: A leak shows on a few sequences as well as on many.
ROWS, TOKENS = 8, 4096
_KINDS = {
    "values": "other values in dropped positions",
    "nan": "NaN in dropped positions",
    "amount": "more padding",
    "packed": "other sequences in the same row",
    "weights": "other values of masked weights",
}


@dataclass(frozen=True)
class Leak:
    """Something that must not depend on what is dropped, and does.

    Attributes:
        module: the path of the first module at which kept positions change; ``""`` is the model itself, and ``"loss"``
            the loss.
        kind: the class of the module.
        cause: a short name, such as ``"BatchNorm over padding"``.
        reason: why, in a sentence.
        repair: the line that repairs it.
        probe: what was changed: ``"values"``, ``"nan"``, ``"amount"`` of padding, ``"packed"`` or ``"weights"``.
        modes: ``"eval"``, ``"train"`` or both.
        output: the largest change of a kept output, as a share of the largest one.
        loss: the change of the loss, as a share of it; None without a loss.
        gradient: the largest change of a parameter's gradient, as a share of its largest element; None if not computed.
        parameter: the parameter with that change.
        operation: the function that reads what is dropped, where it was found.
        line: its file and line, where it is not torch's own.
        path: the modules by which the change reaches the output.
    """

    module: str
    kind: str
    cause: str
    reason: str
    repair: str
    probe: str
    modes: tuple[str, ...]
    output: float
    loss: float | None
    gradient: float | None
    parameter: str | None
    operation: str | None = None
    line: str | None = None
    path: tuple[str, ...] = ()

    @property
    def only_nan(self) -> bool:
        """Whether finite values do not leak: NaN and infinities in padding do, since 0 * NaN is NaN."""
        return self.probe == "nan"

    @property
    def summary(self) -> str:
        """Where and why, in a line."""
        return f"{self.module or 'the model itself'}: {self.cause}"

    @property
    def shown_by(self) -> str:
        """What was changed, and in which modes something noticed."""
        return f"{_KINDS[self.probe]}, {' and '.join(self.modes)}"

    def __str__(self) -> str:
        return f"{self.summary} ({self.shown_by})"


@dataclass(frozen=True)
class _Change:
    output: float
    loss: float | None
    gradient: float | None
    parameter: str | None

    def __bool__(self) -> bool:
        return bool(self.output or self.loss or self.gradient)


def few_rows(batch: Batch, tokens: list[Tokens]) -> list[int] | None:
    """Some rows with much, with some and with little padding; None where the batch cannot be cut."""
    rows = batch.rows
    if rows is None or not tokens or any(each.keep.shape[0] != rows for each in tokens):
        return None
    keep = tokens[0].keep
    wanted = max(2, min(ROWS, TOKENS // max(keep.shape[1], 1)))
    order = keep.sum(1).argsort(stable=True).tolist()
    if rows <= wanted:
        return None
    # Evenly over the lengths, the shortest and the longest included.
    return sorted({order[round(index * (rows - 1) / (wanted - 1))] for index in range(wanted)})


def find_leaks(
    subject: Subject, batch: Batch, tokens: list[Tokens], on_step: Callable[[str], None] = lambda name: None
) -> list[Leak]:
    """All leaks of a model, those of finite values first."""
    chosen = few_rows(batch, tokens)
    if chosen is not None:
        batch = batch.take(chosen)
        tokens = [_taken(each, chosen) for each in tokens]
    found: dict[tuple[str, str, str], Leak] = {}
    for each in tokens:
        finite = False
        for probe in probes(batch, each, subject.stride):
            if finite and probe.kind in ("nan", "amount"):
                continue
            on_step(_KINDS[probe.kind])
            for leak in _tested(subject, probe):
                finite = finite or probe.kind == "values"
                key = (leak.module, leak.cause, leak.probe)
                found[key] = _joined(found[key], leak) if key in found else leak
    found |= {(leak.module, leak.cause, leak.probe): leak for leak in _weights(subject, batch, tokens)}
    return sorted(found.values(), key=lambda leak: leak.only_nan)


def _joined(first: Leak, second: Leak) -> Leak:
    """The same leak in both modes."""
    modes = tuple(dict.fromkeys((*first.modes, *second.modes)))
    losses = [each for each in (first.loss, second.loss) if each is not None]
    worst = max((first, second), key=lambda leak: leak.gradient or 0.0)
    return replace(
        first, modes=modes, output=max(first.output, second.output), loss=max(losses, default=None),
        gradient=worst.gradient, parameter=worst.parameter,
    )  # fmt: skip


def _taken(tokens: Tokens, rows: list[int]) -> Tokens:
    segments = None if tokens.segments is None else tokens.segments[rows]
    return replace(tokens, keep=tokens.keep[rows], segments=segments)


def _tested(subject: Subject, probe: Probe) -> list[Leak]:
    """The leaks that a probe shows.

    One that changes the ids of padding may change a mask that the model makes of them: it shows a leak if other
    embeddings of the same ids show it too.
    """
    found = list(_test(subject, probe))
    if not found or probe.by_embedding is None:
        return found
    again = list(_test(subject, probe.by_embedding))
    embedded = probe.by_embedding.after.embedded
    return again if embedded is not None and embedded.embedded else found


def _test(subject: Subject, probe: Probe) -> Iterator[Leak]:
    modes: tuple[Mode, ...] = (False, True)
    if probe.kind == "amount":
        # Dropout draws other numbers for another shape.
        modes = (False, "norms") if subject.has_batch_norms else (False,)
    elif probe.kind == "packed":
        # Statistics of a batch count the other sequences too.
        modes = (False,) if subject.has_batch_norms else (False, True)
    for training in modes:
        # So does a loss.
        grad = training is True and probe.kind != "packed"
        positions, others = probe.positions()
        try:
            before = subject.run(probe.before, positions, training=training, grad=grad)
            after = subject.run(probe.after, others, training=training, grad=grad)
        except Exception:
            if probe.kind == "amount":
                # There may be no position for a longer row, and a model may refuse it with any error.
                return
            raise
        change = _compare(before, after, probe)
        if not change:
            continue
        noise = _noise(subject, probe, training, before)
        change = _compare(before, after, probe, noise)
        if change:
            yield _leak(subject, probe, change, training, noise, is_loss_alone=not before.outputs)


def _noise(subject: Subject, probe: Probe, training: Mode, before: Result) -> float:
    """How much two equal runs differ: not at all, for most models."""
    grad = bool(before.gradients)
    again = subject.run(probe.before, probe.positions()[0], training=training, grad=grad)
    change = _compare(before, again, probe)
    return max(change.output, change.loss or 0.0, change.gradient or 0.0)


def _compare(before: Result, after: Result, probe: Probe, noise: float = 0.0) -> _Change:
    across, packed = probe.across_shapes, probe.kind == "packed"

    def gap(a: list[Tensor], b: list[Tensor]) -> float:
        return difference(a, b, across_shapes=across, noise=noise)

    output = max((gap(a, b) for a, b in zip(before.outputs, after.outputs, strict=False)), default=0.0)
    loss = None
    if before.loss is not None and after.loss is not None and not packed:
        loss = gap([before.loss], [after.loss])
    worst: float | None = 0.0 if before.gradients else None
    parameter: str | None = None
    if not packed:
        for name, old in before.gradients.items():
            new = after.gradients.get(name)
            share = float("inf") if new is None else _gradient_gap(old, new, before, noise)
            if worst is not None and share > worst:
                worst, parameter = share, name
    return _Change(output, loss, worst, parameter)


def _gradient_gap(old: Tensor, new: Tensor, result: Result, noise: float) -> float:
    # A gradient that is 0 but for rounding, such as that of a bias before a norm, is compared with the others.
    largest = max((float(each.abs().max()) for each in result.gradients.values() if each.numel()), default=0.0)
    share = difference([old], [new], noise=noise + 1e-5)
    own = float(old.abs().max()) if old.numel() else 0.0
    return share if share * own > 1e-6 * largest or not own else 0.0


def _leak(
    subject: Subject, probe: Probe, change: _Change, training: Mode, noise: float, *, is_loss_alone: bool
) -> Leak:
    is_searched = change.output or change.gradient or is_loss_alone
    place = locate(subject, probe, training=training, noise=noise) if is_searched else None
    mode = ("train" if training else "eval",)
    gradient, parameter = change.gradient, change.parameter
    if place is None or (not change.output and change.loss and not is_loss_alone):
        if change.loss and not change.output:
            return _of(cause_of_loss(probe.before, probe.checked), "loss", "loss", None, probe, mode, change)
        name = (parameter or "").rpartition(".")[0]
        cause = Cause(
            "gradient of dropped positions",
            "outputs stay as they are and gradients change",
            "mw.fill(x, mask[..., None], 0) before the first operation that reads dropped positions",
        )
        module = dict(subject.model.named_modules()).get(name, subject.model)
        return _of(cause, name, type(module).__name__, None, probe, mode, replace(change, gradient=gradient))
    return _of(cause_of(place, probe), place.path, place.kind, place, probe, mode, change)


def _of(
    cause: Cause, module: str, kind: str, place: Place | None, probe: Probe, modes: tuple[str, ...], change: _Change
) -> Leak:
    return Leak(
        module, kind, cause.name, cause.reason, cause.repair, probe.kind, modes, change.output, change.loss,
        change.gradient, change.parameter, place.operation if place else None, place.line if place else None,
        place.route if place else (),
    )  # fmt: skip


def _weights(subject: Subject, batch: Batch, tokens: list[Tokens]) -> Iterator[Leak]:
    """Whether outputs depend on weights that a mask drops."""
    try:
        twin = clone_model(subject.model)
    except Exception:
        return
    changed = change_masked_weights(twin)
    if not changed:
        return
    keep = tokens[0].keep if tokens else torch.ones(batch.rows or 1, 1, dtype=torch.bool)
    other = subject.of(twin)
    probe = Probe("weights", batch, batch, keep, keep)
    before = subject.run(batch, Positions(keep), training=False, grad=False)
    after = other.run(batch, Positions(keep), training=False, grad=False)
    change = _compare(before, after, probe)
    if change:
        cause = Cause(
            "masked weights are read",
            "outputs depend on weights that a mask drops",
            f"mw.nn.attach(model.{changed[0]}, mask), whose weight is 0 where the mask drops",
        )
        module = subject.model.get_submodule(changed[0])
        yield _of(cause, changed[0], type(module).__name__, None, probe, ("eval",), change)
