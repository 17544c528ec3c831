"""Whole models: ``mw.unpad`` of MiniLM on real text, of SentenceTransformer, and of ``nn.TransformerEncoder``.

One batch is real paragraphs as they come, a fifth of whose tokens are real. The others are real text too, cut to
lengths that keep 10 to 80 % of the tokens, because one density alone says little; and one text by itself, which has no
padding.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import maskwise as mw
from benchmarks.case import Case, Side, at_least, at_most, never_slower
from benchmarks.cases.sides import Call, named
from benchmarks.cases.texts import no_sentence_transformers, sentence_encoder
from maskwise.cli.demo import minilm, no_minilm, paragraphs

__all__ = ["ENCODER", "KEPT", "MINILM", "cases"]

FRACTION = "padded, as much of the batch as is real"
NESTED = "its nested-tensor fast path"
SORTED = f"{named('sentence-transformers', 'sentence_transformers')}, sorted by length"
KEPT = (0.1, 0.2, 0.5, 0.8)
"""Which parts of the tokens are real; of forty rows, each is a number of whole rows."""


@dataclass(frozen=True)
class Texts:
    """A model twice, padded and unpadded, and one batch for both."""

    padded: Any
    unpadded: Any
    batch: dict[str, Tensor]
    keep: Tensor  # (B, L)

    @property
    def real_rows(self) -> int:
        """How many full rows the real tokens would fill."""
        return round(int(self.keep.sum()) / self.keep.shape[1])


def _texts(case: Case) -> Texts:
    model, tokenize = minilm()
    rows, length = case.shape
    batch = tokenize(paragraphs(rows), length)
    keep = batch["attention_mask"]
    # A few tokens are cut off, so that the real ones fill whole rows: then a part of the batch is exactly their share.
    surplus = int(keep.sum()) % length
    for row in keep.sum(1).argsort(descending=True).tolist():
        cut = min(surplus, int(keep[row].sum()) - 1)
        keep[row, int(keep[row].sum()) - cut :] = 0
        surplus -= cut
    return _both(model, batch)


def _both(model: Any, batch: dict[str, Tensor]) -> Texts:
    # A model moves to a device in place, and this one is shared by all cases.
    keep = batch["attention_mask"].bool()
    return Texts(copy.deepcopy(model), mw.unpad(copy.deepcopy(model)), batch, keep)


def _texts_of_lengths(case: Case) -> Texts:
    """Full rows of text, cut to lengths that are spread evenly around the kept fraction, in a fixed random order."""
    model, tokenize = minilm()
    rows, length = case.shape
    assert case.density is not None
    each = 12  # so many paragraphs have more tokens than a row
    found = paragraphs(rows * each)
    batch = tokenize([" ".join(found[i::rows]) for i in range(rows)], length)
    assert batch["attention_mask"].all()
    generator = torch.Generator().manual_seed(0)
    middle, spread = case.density * length, max(0.0, min(case.density, 1 - case.density) * length - 1)
    # Rounded as sums, so that the lengths add up to the kept fraction exactly.
    ends = torch.linspace(middle - spread, middle + spread, rows, dtype=torch.float64).cumsum(0).round().long()
    lengths = ends.diff(prepend=ends.new_zeros(1))
    keep = torch.arange(length) < lengths[torch.randperm(rows, generator=generator)][:, None]
    last = keep & ~keep.roll(-1, 1).index_fill(1, torch.tensor(length - 1), False)
    ids = batch["input_ids"]
    batch["input_ids"] = torch.where(last, ids[:, -1:], ids * keep)  # a text ends with the separator
    batch["attention_mask"] = keep.long()
    return _both(model, batch)


def _hidden(model: Any, i: Texts) -> Call:
    model.eval()

    def run() -> Tensor:
        with torch.no_grad():
            found: Tensor = model(**i.batch).last_hidden_state
        return found[i.keep]

    return run


def _part(i: Texts) -> Texts:
    """As many rows as the real tokens of the batch would fill."""
    rows = max(1, i.real_rows)
    return replace(i, batch={name: value[:rows] for name, value in i.batch.items()}, keep=i.keep[:rows])


def _step(model: Any, i: Texts) -> Call:
    model.train()
    weights = i.batch["attention_mask"][..., None] / i.batch["attention_mask"].sum(1)[:, None, None]
    # A rate of 0: the step is taken, and every round starts from the same weights.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run() -> Tensor:
        optimizer.zero_grad()
        pooled = (model(**i.batch).last_hidden_state * weights).sum(1)
        loss = pooled.square().sum()
        loss.backward()
        optimizer.step()
        gradient: Tensor = model.embeddings.LayerNorm.weight.grad
        return gradient.clone()

    return run


SIDES = (
    Side("mw.unpad", lambda i: _hidden(i.unpadded, i), "ours"),
    Side("padded", lambda i: _hidden(i.padded, i)),
    Side(FRACTION, lambda i: _hidden(i.padded, _part(i)), "floor"),
)
STEPS = (
    Side("mw.unpad", lambda i: _step(i.unpadded, i), "ours"),
    Side("padded", lambda i: _step(i.padded, i)),
    Side(FRACTION, lambda i: _step(i.padded, _part(i)), "floor"),
)
MINILM = Case(
    "models",
    "unpad",
    "MiniLM 64 paragraphs in 256",
    _texts,
    SIDES,
    (64, 256),
    0.2,
    targets=(at_most(1.05, FRACTION),),
    relative_tolerance=0.0,
    absolute_tolerance=1e-5,
    unavailable=no_minilm,
)


STEP = replace(
    MINILM,
    variant="MiniLM 64 paragraphs in 256, training step",
    sides=STEPS,
    targets=(at_most(1.2, FRACTION),),
    # Gradients are sums over thousands of tokens, up to 1e2 in size.
    relative_tolerance=1e-3,
    absolute_tolerance=1e-3,
)


def _over_densities(case: Case, ending: str) -> tuple[Case, ...]:
    """A case on forty rows of 256 tokens, with more and more of them real."""
    return tuple(
        replace(
            case,
            variant=f"MiniLM 40 texts in 256{ending} keep={kept:.0%}",
            setup=_texts_of_lengths,
            shape=(40, 256),
            density=kept,
            targets=(*case.targets, never_slower("padded")),
        )
        for kept in KEPT
    )


ALONE = replace(
    MINILM,
    variant="MiniLM one text of 128",
    setup=_texts_of_lengths,
    sides=SIDES[:2],
    shape=(1, 128),
    density=1.0,
    targets=(never_slower("padded"),),
)
"""A batch of one has no padding: there is nothing to gain, and little to lose."""


def _encoders(case: Case) -> dict[str, Any]:
    return {"padded": sentence_encoder(), "unpadded": mw.unpad(sentence_encoder()), "texts": paragraphs(*case.shape)}


def _encode(model: Any, texts: list[str]) -> Call:
    return lambda: model.encode(texts, convert_to_tensor=True, show_progress_bar=False)


ENCODE = Case(
    "models",
    "unpad",
    "SentenceTransformer.encode 512 paragraphs",
    _encoders,
    (
        Side("mw.unpad", lambda i: _encode(i["unpadded"], i["texts"]), "ours"),
        Side(SORTED, lambda i: _encode(i["padded"], i["texts"])),
    ),
    (512,),
    targets=(at_least(1.6, SORTED),),
    relative_tolerance=0.0,
    absolute_tolerance=1e-5,
    unavailable=no_sentence_transformers,
)


@dataclass(frozen=True)
class Encoding:
    """An encoder, and a batch of which about half is real."""

    model: nn.TransformerEncoder
    x: Tensor  # (B, L, D)
    padding: Tensor  # (B, L), True = ignore


def _halves(case: Case) -> Encoding:
    generator = torch.Generator().manual_seed(0)
    rows, length, size = case.shape
    layer = nn.TransformerEncoderLayer(size, 8, 4 * size, batch_first=True)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    # The fast path cuts the batch to its longest row; one full row keeps the work of the sides the same.
    lengths[0] = length
    padding = mw.Mask.from_lengths(lengths, max_len=length).to_key_padding()
    return Encoding(nn.TransformerEncoder(layer, 6).eval(), torch.randn(case.shape, generator=generator), padding)


def _encoded(i: Encoding, model: nn.Module) -> Call:
    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = model(i.x, src_key_padding_mask=i.padding)
        return out[~i.padding]

    return run


def _nested(i: Encoding) -> Call:
    run = _encoded(i, i.model)
    with warnings.catch_warnings():
        # Torch says once a process that nested tensors are a prototype.
        warnings.simplefilter("ignore")
        run()
    return run


def _slow(model: nn.TransformerEncoder) -> nn.TransformerEncoder:
    plain = copy.deepcopy(model)
    plain.enable_nested_tensor = plain.use_nested_tensor = False
    return plain


ENCODER = Case(
    "models",
    "unpad",
    "nn.TransformerEncoder 6 x 512, half real, eval",
    _halves,
    (
        Side("mw.unpad", lambda i: _encoded(i, mw.unpad(copy.deepcopy(i.model))), "ours"),
        Side(NESTED, _nested),
        Side("padded", lambda i: _encoded(i, _slow(i.model))),
    ),
    (32, 128, 512),
    0.5,
    targets=(at_least(1.2, NESTED),),
    absolute_tolerance=1e-4,
)


def cases() -> tuple[Case, ...]:
    """Return the cases of whole models."""
    return (
        MINILM,
        *_over_densities(MINILM, ""),
        STEP,
        *_over_densities(STEP, ", training step"),
        ALONE,
        ENCODE,
        ENCODER,
    )
