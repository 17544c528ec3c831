"""mw.audit: whether a model leaks, what it wastes, and whether its loss is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.models.audit.batch import Batch, MaskLike, Tokens, find_tokens
from maskwise.models.audit.denominator import find_denominator
from maskwise.models.audit.leaks import find_leaks
from maskwise.models.audit.report import Audit, Waste
from maskwise.models.audit.rewrites import measure_rewrites
from maskwise.models.audit.subject import Loss, Subject, preserved, same_random_state
from maskwise.models.audit.waste import CAUSES, Profile, profile
from maskwise.nn.arguments import check_module

__all__ = ["SMALL", "audit", "bound", "run_audit"]

OP = "audit"
#: Less of the time, and of the FLOPs, than this is no finding.
SMALL = 0.05


def audit(model: nn.Module, batch: Any, *, mask: MaskLike | None = None, loss: Loss | None = None) -> Audit:
    """Find whether a model leaks, what it wastes, and whether its loss is the same for every split of the batch.

    >>> import torch, maskwise as mw
    >>> class Pooled(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed = torch.nn.Embedding(100, 16)
    ...         self.head = torch.nn.Linear(16, 2)
    ...     def forward(self, input_ids, attention_mask):
    ...         return self.head(self.embed(input_ids).mean(1))
    >>> mask = mw.Mask.from_lengths([6, 2, 4]).to_attention_mask()
    >>> report = mw.audit(Pooled(), {"input_ids": torch.randint(100, (3, 6)), "attention_mask": mask})
    >>> report.leaks[0].cause, report.leaks[0].operation, report.leaks[0].repair
    ('mean without mask', 'mean', 'mw.mean(x, mask[..., None], dim=1)')

    **Leaks.** The audit changes dropped values: other token ids, large values and NaN, more padding, other sequences in
    a packed row, other values of masked weights. It does so in evaluation and in training mode, with the same random
    numbers for dropout. If a kept output, the loss or a parameter's gradient changes, it reports the first module whose
    kept outputs change, with the cause and the line that repairs it. It uses a few rows of the batch.

    **Waste.** Time, FLOPs and bytes of every module, and the share that goes into padding, into masked attention pairs,
    into logits without a label, and into zero weights; zero activations are reported too. The rewrites that save this
    work are applied to a copy of the model and measured.

    **Denominator.** The loss and its gradients for several splits of the batch into micro-batches.

    The model, its buffers, gradients and training mode, and the RNG state are restored, even if the audit raises.

    Args:
        model: any module. It is not changed.
        batch: what the model is called with: a tensor, a tuple, a dict, or a DataLoader or another iterable of them, of
            whose first 8 the one that drops most is taken. What ``forward`` does not take goes to the loss alone.
        mask: a Mask or a bool tensor (B, L); True means keep. By default it is found: ``attention_mask``,
            ``src_key_padding_mask`` and other names, ``lengths``, ``segment_ids`` or ``position_ids`` that restart, or
            labels of -100 at the end of rows.
        loss: ``loss(output, batch)``, a tensor of one element; one with a third parameter ``denominator`` gets a window
            of `mw.accumulate`. By default ``output.loss``, if there is one.

    Returns:
        An Audit: print it, or take ``.leaks``, ``.waste``, ``.denominator``, ``.to_json()`` or ``.to_html(path)``.

    Raises:
        DtypeError: ``model`` is not a module, ``batch`` nothing that a model is called with, ``mask`` no mask, or
            ``loss`` no function.
        ShapeError: ``mask`` does not have the positions of the batch.
        ArgumentError: ``batch`` is empty, a lazy module has no parameters yet, a tensor is on meta, ``model`` is a
            ScriptModule, or ``loss`` gives no single value.
    """
    return run_audit(model, batch, mask=mask, loss=loss)


def bound(
    op: str, model: nn.Module, batch: Any, mask: MaskLike | None, loss: Loss | None
) -> tuple[Batch, list[Tokens]]:
    """Check the arguments, and find the masks of the batch."""
    check_module(op, model)
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        must, hint = "have all its parameters", "model(batch) once, which initializes lazy modules"
        raise ArgumentError(say(op, "model", must=must, got=f"none yet at {lazy[0]!r}", hint=hint))
    if isinstance(model, torch.jit.ScriptModule):
        must, hint = "be an eager module, on which hooks see every call", "the module before torch.jit"
        raise ArgumentError(say(op, "model", must=must, got=type(model).__name__, hint=hint))
    stored = [*model.named_parameters(), *model.named_buffers()]
    if empty := [name for name, value in stored if value.is_meta]:
        must, hint = "have its values", "model.to_empty(device='cpu'), and load its weights"
        raise ArgumentError(say(op, "model", must=must, got=f"meta tensors, as {empty[0]!r}", hint=hint))
    if loss is not None and not callable(loss):
        hint = "loss=lambda output, batch: F.cross_entropy(output, batch['labels'])"
        raise DtypeError(say(op, "loss", must="be a function of output and batch", got=type(loss).__name__, hint=hint))
    with same_random_state():
        found = Batch.of(model, batch, op)
    for name, value in found.tensors():
        if value.is_meta or not value.numel():
            got = f"{name!r} on meta" if value.is_meta else f"{name!r} of shape {tuple(value.shape)}"
            hint = "next(iter(loader)), of typical sizes"
            raise ArgumentError(say(op, "batch", must="have values", got=got, hint=hint))
    return found, find_tokens(found, mask, op)


def run_audit(
    model: nn.Module,
    batch: Any,
    *,
    mask: MaskLike | None = None,
    loss: Loss | None = None,
    on_step: Callable[[str], None] = lambda name: None,
) -> Audit:
    """`audit`, with a call before each step, for a progress bar."""
    found, tokens = bound(OP, model, batch, mask, loss)
    notes = _notes(tokens)
    with preserved(model, loss) as subject:
        leaks = find_leaks(subject, found, tokens, on_step)
        on_step("time of every module")
        measured = profile(subject, found, tokens)
        waste = find_waste(subject, found, tokens, measured, on_step)
        on_step("splits of the batch")
        denominator = find_denominator(subject, found, tokens)
        if tokens and not subject.is_compared:
            notes += ("the model returns no tensor with rows of the batch, and no loss: a leak could not show",)
    masks = tuple((each.source, each.keep.cpu()) for each in tokens)
    return Audit(type(model).__name__, tuple(leaks), tuple(waste), denominator, measured, masks, notes)


def find_waste(
    subject: Subject, batch: Batch, tokens: list[Tokens], measured: Profile, on_step: Callable[[str], None]
) -> list[Waste]:
    """The causes that take more than a small share, with the rewrites that were measured."""
    shares = {cause: max(measured.share(cause), measured.flops_share(cause)) for cause in CAUSES}
    # No rewrite saves these, and their FLOPs are few where they take no time.
    shares["activations"] = measured.share("activations")
    causes = {cause for cause, share in shares.items() if share >= SMALL}
    if causes - {"activations"}:
        on_step("rewrites on a copy")
    rewrites = measure_rewrites(subject, batch, tokens, causes)
    found = [
        Waste(
            cause,
            measured.share(cause),
            measured.flops_share(cause),
            tuple(each.path for each in measured.worst(cause)),
            tuple(rewrites.get(cause, ())),
        )
        for cause in causes
    ]
    return sorted(found, key=lambda each: (each.cause == "activations", -each.share))


def _notes(tokens: list[Tokens]) -> tuple[str, ...]:
    if not tokens:
        return ("no mask was found in the batch, so padding cannot leak or be counted; mask= takes one",)
    if not any(bool(each.keep.any()) for each in tokens):
        return ("no position is kept in this batch: a leak could not show; take one with tokens",)
    if all(bool(each.keep.all()) and each.segments is None for each in tokens):
        return ("nothing is dropped in this batch: a leak could not show; take one with padding",)
    return ()
