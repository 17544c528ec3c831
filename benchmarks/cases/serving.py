"""Embeddings of real paragraphs as they are served from a CPU: texts in, vectors out, each engine at its best.

Every side sorts the texts by length as ``SentenceTransformer.encode`` does, tokenizes them, runs MiniLM batch by
batch and averages its tokens. Batches of one have no padding at all, so they are the peer that unpadding has to beat.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maskwise as mw
from benchmarks.case import Case, Side, at_least
from benchmarks.cases.sides import Call, named
from maskwise.cli.demo import minilm, no_minilm, paragraphs

__all__ = ["FAMILY", "cases"]

FAMILY = "serving"
BATCH = 32
"""What ``SentenceTransformer.encode`` takes by default."""
LENGTH = 256
NAMES = ("input_ids", "attention_mask", "token_type_ids")

Batch = dict[str, Tensor]
Forward = Callable[[Batch], Tensor]
"""Token ids and their mask to the hidden states of the last layer."""


@dataclass(frozen=True)
class Texts:
    """The paragraphs, longest first, and what turns them into token ids."""

    longest_first: tuple[str, ...]
    tokenize: Callable[[list[str]], Batch]
    model: Any


def _texts(case: Case) -> Texts:
    model, tokenize = minilm()
    found = sorted(paragraphs(*case.shape), key=len, reverse=True)
    return Texts(tuple(found), partial(_padded_to_longest, tokenize), model.eval())


def _padded_to_longest(tokenize: Callable[[list[str], int], Batch], texts: list[str]) -> Batch:
    batch = tokenize(texts, LENGTH)
    longest = int(batch["attention_mask"].sum(1).max())
    return {name: value[:, :longest].contiguous() for name, value in batch.items()}


# -- engines -----------------------------------------------------------------------------------------------------------
def _torch(model: Any) -> Forward:
    def run(batch: Batch) -> Tensor:
        found: Tensor = model(**batch).last_hidden_state
        return found

    return run


@contextmanager
def _silent() -> Iterator[None]:
    """Exporters warn about packages that are not needed and about Python values that do not change."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


@lru_cache(maxsize=1)
def _onnx_file(model: Any, tokens: int) -> str:
    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
            found: Tensor = self.inner(
                input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            ).last_hidden_state
            return found

    path = str(Path(tempfile.mkdtemp()) / "model.onnx")
    example = tuple(torch.ones(2, tokens, dtype=torch.long) for _ in NAMES)
    dims = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    with _silent():
        torch.onnx.export(
            Hidden().eval(),
            example,
            path,
            input_names=list(NAMES),
            output_names=["hidden"],
            dynamic_shapes=dict.fromkeys(NAMES, dims),
            dynamo=True,
            verbose=False,
        )
    return path


@lru_cache(maxsize=1)
def _onnx_session(model: Any) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(_onnx_file(model, 64), options, providers=["CPUExecutionProvider"])


def _onnx_runtime(i: Texts) -> Forward:
    session = _onnx_session(i.model)
    return lambda batch: torch.from_numpy(session.run(None, {name: batch[name].numpy() for name in NAMES})[0])


@lru_cache(maxsize=1)
def _openvino_model(model: Any) -> Any:
    import openvino

    example = {name: torch.ones(2, 64, dtype=torch.long) for name in NAMES}
    with _silent():
        converted = openvino.convert_model(model, example_input=example)
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    return openvino.compile_model(converted, "CPU", {**threads, "INFERENCE_PRECISION_HINT": "f32"})


def _openvino(i: Texts) -> Forward:
    compiled = _openvino_model(i.model)
    return lambda batch: torch.from_numpy(compiled({name: batch[name].numpy() for name in NAMES})[0])


# -- sides -------------------------------------------------------------------------------------------------------------
def _pooled(hidden: Tensor, keep: Tensor) -> Tensor:
    weights = keep[..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1))


def _embed(i: Texts, forward: Forward, rows: int) -> Call:
    def run() -> Tensor:
        found = []
        with torch.no_grad():
            for start in range(0, len(i.longest_first), rows):
                batch = i.tokenize(list(i.longest_first[start : start + rows]))
                found.append(_pooled(forward(batch), batch["attention_mask"]))
        return torch.cat(found)

    return run


def _needs(*modules: str) -> Callable[[], str | None]:
    def reason() -> str | None:
        missing = [module for module in modules if find_spec(module) is None]
        return f"needs {', '.join(missing)}: pip install {' '.join(missing)}" if missing else None

    return reason


def _sides(name: str, forward: Callable[[Texts], Forward], needs: Callable[[], str | None]) -> tuple[Side, ...]:
    """An engine in batches of one, and in batches as they come."""
    return tuple(
        Side(f"{name}, by {rows}", lambda i, rows=rows: _embed(i, forward(i), rows), unavailable=needs)
        for rows in (1, BATCH)
    )


def cases() -> tuple[Case, ...]:
    """The cases of the family."""
    onnx = named("ONNX Runtime", "onnxruntime")
    openvino = named("OpenVINO", "openvino")
    sides = (
        Side("mw.unpad", lambda i: _embed(i, _torch(mw.unpad(copy.deepcopy(i.model))), BATCH), "ours"),
        *_sides("padded", lambda i: _torch(i.model), lambda: None),
        *_sides(onnx, _onnx_runtime, _needs("onnxruntime", "onnx", "onnxscript")),
        *_sides(openvino, _openvino, _needs("openvino")),
    )
    return (
        Case(
            FAMILY,
            "unpad",
            "MiniLM embeddings of 96 paragraphs",
            _texts,
            sides,
            (96,),
            targets=(at_least(1.3, "best peer"),),
            relative_tolerance=0.0,
            absolute_tolerance=1e-4,
            unavailable=no_minilm,
        ),
    )
