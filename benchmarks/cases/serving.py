"""Models as they are served from a CPU, each engine at its best: embeddings, pairs, an encoder of T5, a training step.

Every side sorts its texts by length as ``SentenceTransformer.encode`` does, tokenizes them and runs the model batch by
batch. Batches of one have no padding at all, so they are the peer that unpadding has to beat. int8 sides do other sums,
and are compared with each other in cases of their own; ``python -m benchmarks.cosines`` prints how near each side is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import maskwise as mw
from benchmarks.case import Case, Side, at_least, never_slower
from benchmarks.cases import engines, models
from benchmarks.cases.engines import Batch, Forward, Served, needs
from benchmarks.cases.sides import Call, named, no_compiler
from maskwise.cli.demo import minilm, minilm_path, no_minilm, paragraphs

__all__ = ["FAMILY", "Work", "cases", "serve"]

FAMILY = "serving"
BATCH = 32
"""What ``SentenceTransformer.encode`` takes by default."""
LENGTH = 256
NAMES = ("input_ids", "attention_mask", "token_type_ids")
ONNX, OPENVINO = named("ONNX Runtime", "onnxruntime"), named("OpenVINO", "openvino")
DANLING = f"{named('DanLing', 'danling')} NestedTensor"
BY_HAND = "packed by hand, SDPA per sequence"

Text = Any
"""A text, or a pair of texts."""


@dataclass(frozen=True)
class Work:
    """Texts, longest first, and what is made of them.

    Attributes:
        texts: the texts, or pairs.
        tokenize: from some of them to a batch, padded to the longest.
        served: the model.
        finish: from the model's output and the mask to one row for each text.
    """

    texts: tuple[Text, ...]
    tokenize: Callable[[list[Text]], Batch]
    served: Served
    finish: Callable[[Tensor, Tensor], Tensor]


# -- the work ----------------------------------------------------------------------------------------------------------
@cache
def _tokenizer() -> Any:
    path = minilm_path()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _tokenize(names: tuple[str, ...], texts: list[Text]) -> Batch:
    first, *second = zip(*texts, strict=True) if isinstance(texts[0], tuple) else (texts,)
    pairs = [list(each) for each in second]
    batch = _tokenizer()(list(first), *pairs, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    return {name: batch[name] for name in names}


def _pooled(hidden: Tensor, keep: Tensor) -> Tensor:
    weights = keep[..., None].to(hidden.dtype)
    return functional.normalize((hidden * weights).sum(1) / weights.sum(1))


def _work(texts: list[Text], model: Any, names: tuple[str, ...], output: str, finish: Any) -> Work:
    ordered = sorted(texts, key=lambda text: len(text) if isinstance(text, str) else sum(map(len, text)), reverse=True)
    tokenize = partial(_tokenize, names)
    # Ranges of int8 come from texts that are not served.
    others = paragraphs(len(texts) + 64)[len(texts) :]
    if texts and isinstance(texts[0], tuple):
        others = list(zip(others, reversed(others), strict=True))
    calibration = tuple(tokenize([text]) for text in others)
    return Work(tuple(ordered), tokenize, Served(model.eval(), names, output, calibration), finish)


@cache
def _embeddings(count: int) -> Work:
    return _work(paragraphs(count), minilm()[0], NAMES, "last_hidden_state", _pooled)


@cache
def _pairs(count: int) -> Work:
    """Questions with passages: the first words of a paragraph, and another paragraph."""
    from transformers import BertForSequenceClassification

    found = paragraphs(2 * count)
    pairs = [(" ".join(one.split()[:12]), other) for one, other in zip(found[:count], found[count:], strict=True)]
    trunk = minilm()[0]
    torch.manual_seed(0)
    config = copy.deepcopy(trunk.config)
    config.num_labels = 1
    model = BertForSequenceClassification(config)
    model.bert.load_state_dict(trunk.state_dict())
    return _work(pairs, model, NAMES, "logits", lambda logits, keep: logits)


@cache
def _t5(count: int) -> Work:
    """The encoder of a small T5, with random weights and the tokens of MiniLM."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=len(_tokenizer()), d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8)
    return _work(paragraphs(count), T5EncoderModel(config), NAMES[:2], "last_hidden_state", _pooled)


# -- sides -------------------------------------------------------------------------------------------------------------
def serve(i: Work, forward: Forward, rows: int) -> Call:
    """All texts, in batches of so many rows."""

    def run() -> Tensor:
        found = []
        with torch.no_grad():
            for start in range(0, len(i.texts), rows):
                batch = i.tokenize(list(i.texts[start : start + rows]))
                found.append(i.finish(forward(batch), batch["attention_mask"]))
        return torch.cat(found)

    return run


def _unpadded(i: Work) -> Forward:
    return engines.eager(mw.unpad(copy.deepcopy(i.served.model)), i.served.output)


def _unpadded_int8(i: Work) -> Forward:
    return engines.eager(mw.unpad(engines.int8(i.served.model)), i.served.output)


def _sides(name: str, forward: Callable[[Work], Forward], reason: Callable[[], str | None]) -> tuple[Side, ...]:
    """An engine in batches of one, and in batches as they come."""
    return tuple(
        Side(f"{name}, by {rows}", lambda i, rows=rows: serve(i, forward(i), rows), unavailable=reason)
        for rows in (1, BATCH)
    )


def _ours(forward: Callable[[Work], Forward]) -> Side:
    return Side("mw.unpad", lambda i: serve(i, forward(i), BATCH), "ours")


FLOAT = (
    _ours(_unpadded),
    *_sides("padded", lambda i: engines.eager(i.served.model, i.served.output), lambda: None),
    *_sides("torch.compile", lambda i: engines.compiled(i.served), no_compiler),
    *_sides(ONNX, lambda i: engines.onnx_runtime(i.served), needs("onnxruntime", "onnx", "onnxscript")),
    *_sides(OPENVINO, lambda i: engines.openvino(i.served), needs("openvino")),
)
INT8 = (
    _ours(_unpadded_int8),
    *_sides(f"{ONNX} int8", lambda i: engines.onnx_runtime(i.served, True), needs("onnxruntime", "onnx", "onnxscript")),
    *_sides(f"{OPENVINO} int8", lambda i: engines.openvino(i.served, True), needs("openvino", "nncf")),
)


# -- an encoder of torch's own layers ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Encoder:
    """Six layers of width 512, and a padded batch of embedded sequences."""

    model: nn.TransformerEncoder
    x: Tensor  # (B, L, 512)
    lengths: tuple[int, ...]

    @property
    def keep(self) -> Tensor:
        """Which tokens are real, (B, L)."""
        return torch.arange(self.x.shape[1]) < torch.tensor(self.lengths)[:, None]


def _encoder(case: Case) -> Encoder:
    rows, length = case.shape
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(1, length, rows).round().long()[torch.randperm(rows, generator=generator)]
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval()
    return Encoder(model, torch.randn(rows, length, 512, generator=generator), tuple(lengths.tolist()))


def _padded_encoder(i: Encoder, model: nn.Module) -> Call:
    keep, padding = i.keep, ~i.keep

    def run() -> Tensor:
        with torch.no_grad():
            found: Tensor = model(i.x, src_key_padding_mask=padding)[keep]
        return found

    return run


def _by_hand(i: Encoder) -> Call:
    """What one writes without a library: kept rows, and attention over each sequence by itself."""
    keep, lengths = i.keep, list(i.lengths)

    def attend(layer: Any, x: Tensor) -> Tensor:
        attention = layer.self_attn
        q, k, v = functional.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
        parts = zip(*(each.unflatten(-1, (8, -1)).split(lengths) for each in (q, k, v)), strict=True)
        outs = [
            functional.scaled_dot_product_attention(*(each.transpose(0, 1)[None] for each in part))[0].transpose(0, 1)
            for part in parts
        ]
        return attention.out_proj(torch.cat(outs).flatten(1))

    def run() -> Tensor:
        with torch.no_grad():
            x = i.x[keep]
            for layer in i.model.layers:
                x = layer.norm1(x + attend(layer, x))
                x = layer.norm2(x + layer.linear2(functional.gelu(layer.linear1(x))))
        return x

    return run


def _danling(i: Encoder) -> Call:
    from danling.tensors import NestedTensor

    x = NestedTensor([row[:length] for row, length in zip(i.x, i.lengths, strict=True)])

    def run() -> Tensor:
        found = x
        with torch.no_grad():
            for layer in i.model.layers:
                found = layer(found)
        return torch.cat(list(found))

    return run


ENCODER = (
    Side("mw.unpad", lambda i: _padded_encoder(i, mw.unpad(copy.deepcopy(i.model))), "ours"),
    Side("padded", lambda i: _padded_encoder(i, i.model)),
    Side(BY_HAND, _by_hand),
    Side(DANLING, _danling, unavailable=needs("danling")),
)


# -- a training step ---------------------------------------------------------------------------------------------------
STEPS = (
    *models.STEPS[:2],
    Side(
        "torch.compile, padded",
        lambda i: models._step(torch.compile(i.padded, dynamic=False), i),
        unavailable=no_compiler,
    ),
)


def cases() -> tuple[Case, ...]:
    """The cases of the family."""
    embeddings = Case(
        FAMILY,
        "unpad",
        "MiniLM embeddings of 96 paragraphs",
        lambda case: _embeddings(*case.shape),
        FLOAT,
        (96,),
        targets=(at_least(1.3, "best peer"),),
        relative_tolerance=0.0,
        absolute_tolerance=1e-4,
        unavailable=no_minilm,
    )
    pairs = replace(
        embeddings,
        variant="MiniLM cross-encoder, 96 pairs",
        setup=lambda case: _pairs(*case.shape),
        absolute_tolerance=1e-3,
    )
    int8 = {"sides": INT8, "targets": (), "absolute_tolerance": 0.2}
    return (
        embeddings,
        replace(embeddings, variant="MiniLM embeddings of 96 paragraphs, int8", **int8),
        pairs,
        replace(pairs, variant="MiniLM cross-encoder, 96 pairs, int8", **int8),
        replace(
            embeddings,
            variant="T5 encoder (6 x 512), 48 paragraphs",
            setup=lambda case: _t5(*case.shape),
            shape=(48,),
            targets=(never_slower("padded, by 32"),),
        ),
        replace(
            models.STEP,
            family=FAMILY,
            variant="MiniLM training step, half of the tokens real",
            setup=models._texts_of_lengths,
            sides=STEPS,
            shape=(40, 256),
            density=0.5,
            targets=(at_least(2, "padded"),),
        ),
        Case(
            FAMILY,
            "unpad",
            "nn.TransformerEncoder (6 x 512), 32 sequences in 256",
            _encoder,
            ENCODER,
            (32, 256),
            0.5,
            targets=(never_slower(BY_HAND), *(() if needs("danling")() else (at_least(1.3, DANLING),))),
            relative_tolerance=0.0,
            absolute_tolerance=1e-4,
        ),
    )
