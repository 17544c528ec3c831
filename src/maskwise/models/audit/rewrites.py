"""The rewrites that save what is wasted, each applied to a copy of the model and measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from maskwise.errors import ArgumentError, MaskwiseError, say
from maskwise.mask import Mask
from maskwise.models.audit.batch import Batch, Tokens
from maskwise.models.audit.positions import Positions
from maskwise.models.audit.subject import Subject
from maskwise.models.compress import compress
from maskwise.models.compress.example import tensors_of
from maskwise.models.compress.surgery import clone_model
from maskwise.models.hugging_face.interface import NAME
from maskwise.models.routes import PaddedRunWarning
from maskwise.models.unpadding import unpad
from maskwise.nn.kept_head import kept_head
from maskwise.ops.attention import attention
from maskwise.plan.measure import measure, synced_timer

__all__ = [
    "ATTENTION",
    "MARGIN",
    "Rewrite",
    "attending",
    "compare",
    "compare_training",
    "compressed",
    "measure_rewrites",
]

#: A rewrite pays if it takes less than this share of the time: less is noise.
MARGIN = 0.97
#: Rounds of before and after, each beside the other: many for a model of microseconds, which anything disturbs.
ROUNDS = (2, 60)
#: Seconds for the rounds of one rewrite; of a slow model the fewest rounds are taken.
BUDGET = 0.4
#: How far a rewrite may move an output, as a share of the largest one: sums in another order, layer by layer.
TOLERANCE = 1e-3
#: Half precision rounds each layer.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Rewrite:
    """A rewrite as it was measured.

    Attributes:
        name: such as ``"mw.unpad"``.
        line: the line of code.
        mode: ``"eval"`` for a forward pass, ``"train"`` for a forward and a backward pass.
        before: seconds without it; None where it does not apply.
        after: seconds with it.
        difference: the largest difference at kept positions, or of the loss and gradients, as a share of the largest
            value.
        note: why it does not apply, or what it depends on.
        tolerance: the largest difference that counts as rounding, which depends on the dtype.
    """

    name: str
    line: str
    mode: str = "eval"
    before: float | None = None
    after: float | None = None
    difference: float | None = None
    note: str = ""
    tolerance: float = TOLERANCE

    @property
    def speedup(self) -> float | None:
        """How many times faster."""
        return None if self.before is None or not self.after else self.before / self.after

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**asdict(self), "speedup": self.speedup, "pays": self.pays}

    @property
    def agrees(self) -> bool:
        """Whether results are the same to rounding."""
        return self.difference is not None and self.difference <= self.tolerance

    @property
    def pays(self) -> bool:
        """Whether it is faster beyond noise, with the same results."""
        return self.before is not None and self.after is not None and self.after < MARGIN * self.before and self.agrees


def measure_rewrites(
    subject: Subject, batch: Batch, tokens: list[Tokens], causes: set[str]
) -> dict[str, list[Rewrite]]:
    """The rewrites for each cause of waste."""
    found: dict[str, list[Rewrite]] = {}
    if causes & {"padding", "attention"} and tokens:
        rewrite = _try_unpad(subject, batch, tokens)
        found["padding"] = [rewrite]
        if not rewrite.pays:
            found["padding"].append(_try_budget(subject, batch, tokens))
            if "attention" in causes:
                found["attention"] = [_try_attention(subject, batch, tokens)]
        else:
            found["attention"] = [rewrite]
    if "weights" in causes:
        found["weights"] = [_try_compress(subject, batch, tokens)]
    if "labels" in causes:
        found["labels"] = [_try_kept_head(subject, batch)]
    return found


# -- each --------------------------------------------------------------------------------------------------------------
def _try_unpad(subject: Subject, batch: Batch, tokens: list[Tokens]) -> Rewrite:
    """`mw.unpad` of a copy."""
    name, line = "mw.unpad", "model = mw.unpad(model)"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            twin = unpad(clone_model(subject.model))
            found = compare(name, line, subject, subject.of(twin), batch, tokens)
        # What runs padded says why, and what to change.
        padded = [str(each.message) for each in caught if issubclass(each.category, PaddedRunWarning)]
        return replace(found, note=padded[0]) if padded else found
    except MaskwiseError as error:
        return Rewrite(name, line, note=_first_line(error))


def compressed(subject: Subject, batch: Batch, seconds: float = 0.1) -> nn.Module:
    """A compressed copy, for this batch."""
    names = [each for each in batch.values if each not in batch.spare]
    example: Any = {each: batch.values[each] for each in names}
    if batch.positional:
        example = tuple(batch.values[each] for each in batch.positional if each not in batch.spare)
    subject.prepare(training=False)
    return compress(subject.model, example, seconds=seconds)[0]


def _try_compress(subject: Subject, batch: Batch, tokens: list[Tokens]) -> Rewrite:
    """`mw.compress` of a copy, on this batch."""
    name, line = "mw.compress", "model, report = mw.compress(model, batch)"
    try:
        small = compressed(subject, batch)
    except MaskwiseError as error:
        return Rewrite(name, line, note=_first_line(error))
    return compare(name, line, subject, subject.of(small), batch, tokens)


def _try_kept_head(subject: Subject, batch: Batch) -> Rewrite:
    """`mw.nn.kept_head` of a copy, in training."""
    name, line = "mw.nn.kept_head", "model = mw.nn.kept_head(model)"
    by_hand = Rewrite(
        "mw.linear_cross_entropy",
        "mw.linear_cross_entropy(hidden, head.weight, labels, labels != -100)",
        "train",
        note="it takes the place of the head and the loss, which only the model's code can name",
    )
    try:
        twin = kept_head(clone_model(subject.model))
    except MaskwiseError:
        return by_hand
    found = compare_training(name, line, subject, subject.of(twin), batch, [])
    return by_hand if found is None else replace(found, note="the output has no logits in training")


def _try_budget(subject: Subject, batch: Batch, tokens: list[Tokens]) -> Rewrite:
    """Batches of sequences of similar lengths: the same rows in four groups, each cut to its longest."""
    name, line = "mw.TokenBudgetSampler", "DataLoader(data, batch_sampler=mw.TokenBudgetSampler(lengths, budget))"
    note = "batches hold sequences of similar lengths: other batches, as many tokens"
    rows, keep = batch.rows, tokens[0].keep
    if rows is None or rows < 4 or len(tokens) > 1:
        return Rewrite(name, line, note="the batch cannot be cut into rows")
    order = keep.sum(1).argsort(stable=True)
    groups = [_cut(batch.take(part.tolist()), keep[part]) for part in order.chunk(4)]

    def run() -> list[Any]:
        return [subject.forward(each, training=False) for each, _ in groups]

    try:
        found, whole = run(), subject.forward(batch, training=False)
    except (RuntimeError, IndexError) as error:
        return Rewrite(name, line, note=_first_line(error))
    difference = 0.0
    for (_, kept), part, outputs in zip(groups, order.chunk(4), found, strict=True):
        expected = [x[part] for x in tensors_of(whole) if x.dim() and x.shape[0] == rows]
        pairs = zip(expected, (x for x in tensors_of(outputs) if x.dim()), strict=False)
        for old, new in pairs:
            a, b = Positions(keep[part]).rows(old)[:1], Positions(kept).rows(new)[:1]
            if a and b and a[0].shape == b[0].shape:
                difference = max(difference, _share(a[0], b[0]))
    times = _timed(lambda: subject.forward(batch, training=False), run)
    return Rewrite(name, line, "eval", *times, difference, note)


def _cut(batch: Batch, keep: Tensor) -> tuple[Batch, Tensor]:
    """Without the positions that no row keeps."""
    used = keep.any(0)
    length = keep.shape[1]
    found: dict[str, Tensor] = {}
    for name, given in batch.tensors():
        x = given
        dims = [dim for dim in range(1, x.dim()) if x.shape[dim] == length]
        for dim in dims if "mask" in name else dims[:1]:
            x = x.index_select(dim, used.nonzero()[:, 0].to(x.device))
        found[name] = x
    return batch.with_values(found), keep[:, used]


class _Attention(TorchFunctionMode):
    """`mw.attention` in the place of torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v, *rest = args
        names = ("attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, rest, strict=False)), **kwargs}
        mask, bias = given.pop("attn_mask", None), None
        given.pop("enable_gqa", None)
        if isinstance(mask, Tensor) and mask.dtype is not torch.bool:
            mask = Mask.from_additive(mask) if bool(((mask == 0) | (mask < -1e4)).all()) else mask
            if isinstance(mask, Tensor):
                mask, bias = None, mask
        return attention(q, k, v, mask, bias=bias, **given)


ATTENTION = "mw.attention", 'model.set_attn_implementation("maskwise")'


def attending(model: nn.Module) -> nn.Module:
    """A Hugging Face model with the attention of Maskwise; others are refused: only their code can call it."""
    switch = getattr(model, "set_attn_implementation", None)
    if switch is None:
        raise ArgumentError(
            say(
                "attention", "model", must="be a Hugging Face model", got=type(model).__name__,
                hint="mw.attention(q, k, v, mask) in its code",
            )
        )  # fmt: skip
    try:
        switch(NAME)
    except (ValueError, ImportError) as error:
        must, hint = "have an attention that can be replaced", "mw.attention(q, k, v, mask) in its code"
        raise ArgumentError(say("attention", "model", must=must, got=_first_line(error), hint=hint)) from error
    return model


def _try_attention(subject: Subject, batch: Batch, tokens: list[Tokens]) -> Rewrite:
    """`mw.attention` in the place of torch's, on a copy: by the model's own switch, or in each call."""
    name, line = ATTENTION
    try:
        return compare(name, line, subject, subject.of(attending(clone_model(subject.model))), batch, tokens)
    except MaskwiseError:
        line = "mw.attention(q, k, v, mask)"

    class Other(Subject):
        def forward(self, batch: Batch, *, training: Any, grad: bool = False) -> Any:
            with _Attention():
                return super().forward(batch, training=training, grad=grad)

    try:
        return compare(name, line, subject, Other(subject.model, None), batch, tokens)
    except (MaskwiseError, RuntimeError) as error:
        return Rewrite(name, line, note=_first_line(error))


# -- comparing ---------------------------------------------------------------------------------------------------------
def compare_training(
    name: str, line: str, before: Subject, after: Subject, batch: Batch, tokens: list[Tokens]
) -> Rewrite | None:
    """A training step with a rewrite beside one without it, compared without dropout; None without gradients.

    Without a loss, gradients are those of a value of the kept outputs.
    """
    with WithoutDropout():
        old, new = _gradients(before, batch, tokens), _gradients(after, batch, tokens)
    if not old or not new:
        return None
    times = _timed(lambda: _gradients(before, batch, tokens), lambda: _gradients(after, batch, tokens))
    return Rewrite(name, line, "train", *times, _gradient_share(old, new), tolerance=_tolerance(old.values()))


def compare(name: str, line: str, before: Subject, after: Subject, batch: Batch, tokens: list[Tokens]) -> Rewrite:
    """A forward pass with a rewrite beside one without it."""
    keep = tokens[0].keep if tokens else torch.ones(batch.rows or 1, 1, dtype=torch.bool)
    old = before.run(batch, Positions(keep), training=False, grad=False)
    new = after.run(batch, Positions(keep), training=False, grad=False)
    gaps = [
        _share(a[0], b[0])
        for a, b in zip(old.outputs, new.outputs, strict=False)
        if a and b and a[0].shape == b[0].shape
    ]
    if old.loss is not None and new.loss is not None:
        gaps.append(_share(old.loss, new.loss))
    times = _timed(lambda: before.forward(batch, training=False), lambda: after.forward(batch, training=False))
    outputs = [each for rows in old.outputs for each in rows]
    return Rewrite(name, line, "eval", *times, max(gaps, default=0.0), tolerance=_tolerance(outputs))


def _tolerance(values: Iterable[Tensor]) -> float:
    """Of the coarsest dtype."""
    return max((TOLERANCES.get(each.dtype, TOLERANCE) for each in values), default=TOLERANCE)


class WithoutDropout(TorchFunctionMode):
    """A dropout of 0: padded and packed rows draw different numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is F.multi_head_attention_forward and len(args) > 10:
            args = (*args[:10], 0.0, *args[11:])
        kwargs |= dict.fromkeys(kwargs.keys() & {"dropout_p", "dropout"}, 0.0)
        return func(*args, **kwargs)


DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.native_dropout,
}  # fmt: skip


def _share(old: Tensor, new: Tensor) -> float:
    if not old.numel() or not old.is_floating_point():
        return 0.0 if torch.equal(old, new) else 1.0
    gap = torch.where((old == new) | (old.isnan() & new.isnan()), 0.0, (new.double() - old.double()).abs())
    finite = old[old.isfinite()]
    return float(gap.max()) / (float(finite.abs().max()) if finite.numel() and bool(finite.any()) else 1.0)


def _gradient_share(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest gradient: some are 0 but for rounding."""
    largest = max(float(each.abs().max()) for each in before.values() if each.numel())
    gaps = [float((after[name] - each).abs().max()) for name, each in before.items() if name in after and each.numel()]
    return max(gaps) / largest if largest else 0.0


def _gradients(subject: Subject, batch: Batch, tokens: list[Tokens]) -> dict[str, Tensor]:
    output = subject.forward(batch, training=True, grad=True)
    loss = subject.loss_of(output, batch)
    if loss is None and tokens:
        loss = subject.objective([each for each in tensors_of(output) if each.dim()], Positions(tokens[0].keep))
    return {} if loss is None else {"loss": loss.detach(), **subject.differentiate(loss)}


def _timed(before: Callable[[], object], after: Callable[[], object]) -> tuple[float, float]:
    """The best times, or the medians, whichever gain less: on a busy machine they disagree."""
    timer = synced_timer("cuda") if torch.cuda.is_available() else None
    sides = {"before": before, "after": after}
    samples = measure(sides, budget=BUDGET, rounds=ROUNDS, sample_seconds=1e-3, timer=timer)
    pairs = [(each("before"), each("after")) for each in (samples.best, samples.median)]
    return min(pairs, key=lambda pair: pair[0] / max(pair[1], 1e-12))


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    reason = " ".join(line.strip() for line in lines[:2])
    return reason.partition(" Hint:")[0]
