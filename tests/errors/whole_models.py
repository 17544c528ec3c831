"""Mistakes with whole models: unpad, compress, their files."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError
from maskwise.models import CompressionError, FoldedLayerError, PackedMask, Packing, UnsupportedModelError
from maskwise.models.compress import MissingSafetensorsError
from maskwise.models.compress.files import FORMAT
from maskwise.models.compress.guards import FoldedLinear, guard
from maskwise.models.compress.report import CompressionReport, Measured
from maskwise.models.hugging_face import attention
from maskwise.models.hugging_face.calls import Frame, call
from maskwise.models.hugging_face.interface import attention_forward
from maskwise.models.hugging_face.layout import Layout
from tests.errors.row import Row

X = torch.ones(2, 3)
LINEAR = nn.Linear(3, 2)
PACKING = Packing.of(torch.ones(1, 4, dtype=torch.bool))
TOKENS = torch.ones(1, 2, 4, 8)
NOTHING = Measured("", 0, 0, 0, None)


class Says(nn.Module):
    """Gives one thing after the other, however often it is copied."""

    given: Iterator[Any]

    def __init__(self, *outputs: Any) -> None:
        super().__init__()
        self.outputs = list(outputs)

    def __deepcopy__(self, memo: Any) -> Says:
        return self

    def forward(self, x: Tensor) -> Any:
        return self.outputs.pop(0) if len(self.outputs) > 1 else self.outputs[0]


def packed(cu_seq_lens_q: Sequence[int] = (0, 2, 4), position_bias: Tensor | None = None) -> Callable[[], Any]:
    """A call of attn_implementation="maskwise" with the boundaries of packed sequences."""
    options = {"cu_seq_lens_q": torch.tensor(cu_seq_lens_q), "position_bias": position_bias}
    return lambda: attention_forward(nn.Module(), TOKENS, TOKENS, TOKENS, None, **options)


def compress(*outputs: Any) -> Callable[[], Any]:
    return lambda: mw.compress(Says(*outputs), X, seconds=1e-3)


def outside_of_its_chain(use: Callable[[Any], Any]) -> Callable[[], Any]:
    """Use a layer of which units were left out from elsewhere."""

    def run() -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        use(guard(model, model, [model[0], model[2]])[0])  # type: ignore[index]

    return run


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def load(saved: nn.Module, into: nn.Module | None) -> Callable[[], Any]:
    """Save a model, and load it into another."""

    def run() -> None:
        with folder() as path:
            mw.models.save_compressed(saved, path / "model")
            mw.models.load_compressed(path / "model", into)

    return run


def read(header: dict[str, Any] | bytes | None) -> Callable[[], Any]:
    """Load a file with this header, or with these bytes."""

    def run() -> None:
        from safetensors.torch import save_file

        with folder() as path:
            if isinstance(header, bytes):
                (path / "model").write_bytes(header)
            else:
                save_file({}, path / "model", metadata=header and {FORMAT: json.dumps(header)})
            mw.models.load_compressed(path / "model")

    return run


def file_of(kind: str, version: int = 1, **arguments: Any) -> dict[str, Any]:
    layer = {"kind": kind, "arguments": arguments, "dtype": None}
    return {"version": version, "layers": {"": layer}, "structure": "layer", "aliases": {}}


class Noted(nn.Module):
    """A model whose state_dict holds more than tensors."""

    def get_extra_state(self) -> Any:
        return "a note"

    def set_extra_state(self, state: Any) -> None:
        """Nothing to set."""


def without_safetensors() -> None:
    with patch.dict(sys.modules, {"safetensors": None, "safetensors.torch": None}):
        mw.models.save_compressed(LINEAR, "model")


def load_without_safetensors() -> None:
    with patch.dict(sys.modules, {"safetensors": None, "safetensors.torch": None}):
        mw.models.load_compressed("model")


def attend(mask: Any, **asked: Any) -> Callable[[], Any]:
    """What transformers would call within a packed call."""

    def run() -> None:
        with call(Frame(Layout.of(PACKING, limit=None))):
            attention.attention("sdpa", nn.Identity(), TOKENS, TOKENS, TOKENS, mask, **asked)

    return run


ROWS = [
    # -- unpad
    Row("mw.unpad", lambda: mw.unpad(X), DtypeError, "torch.nn.Sequential(...)"),
    Row("mw.unpad", lambda: mw.unpad(nn.Linear(3, 2)), UnsupportedModelError, "write an adapter"),
    Row("mw.models.repad", lambda: mw.models.repad(X), DtypeError, "torch.nn.Sequential(...)"),
    Row("mw.models.repad", lambda: mw.models.repad(nn.Linear(3, 2)), ArgumentError, "mw.unpad(model)"),
    Row("mw.models.report", lambda: mw.models.report(X), DtypeError, "torch.nn.Sequential(...)"),
    Row("mw.models.report", lambda: mw.models.report(nn.Linear(3, 2)), ArgumentError, "mw.unpad(model)"),
    Row("UnpadReport", lambda: mw.models.UnpadReport(())["fc"], KeyError, "[row.name for row in"),
    Row(
        "mw.models.register",
        lambda: mw.models.register(SimpleNamespace(name="x")),
        ArgumentError,
        "help(maskwise.models.",
    ),
    Row(
        "mw.models.register",
        lambda: mw.models.register(next(iter(mw.models.adapters().values()))),
        ArgumentError,
        "maskwise.models.unregister(",
    ),
    Row(
        "mw.models.unregister", lambda: mw.models.unregister("none"), ArgumentError, "list(maskwise.models.adapters())"
    ),
    Row("hugging_face.interface", packed(cu_seq_lens_q=[0, 3]), ArgumentError, "[0, *lengths.cumsum()]"),
    Row("hugging_face.interface", packed(position_bias=TOKENS), ArgumentError, "an attention_mask, and padding"),
    Row("hugging_face.attention", attend(None), UnsupportedModelError, "mw.models.repad(model)"),
    Row(
        "hugging_face.attention",
        attend(PackedMask(PACKING), position_bias=TOKENS),
        UnsupportedModelError,
        "mw.models.repad(model)",
    ),
    # -- compress
    Row("mw.compress", lambda: mw.compress(nn.Linear, X), DtypeError, "Linear(...)"),
    Row("mw.compress", lambda: mw.compress(LINEAR, X, seconds=0), ArgumentError, "seconds=0.2"),
    Row("mw.compress", lambda: mw.compress(LINEAR, 3), DtypeError, "(argument,)"),
    Row("mw.compress", compress("text"), ArgumentError, "wrap it in a module that returns them"),
    Row("mw.compress", compress(X, X, X.T), CompressionError, "is it deterministic in eval()?"),
    Row("mw.compress", compress(X.long(), X.long(), X.long() + 1), CompressionError, "what is rounded or an index"),
    Row("mw.compress", compress(X, X, X * torch.nan), CompressionError, "torch.isfinite(model(example)).all()"),
    Row("mw.compress", compress(X, X, X + 1), CompressionError, "tolerance= allows more"),
    Row("mw.compress", lambda: mw.compress(nn.LazyLinear(2), X), ArgumentError, "model(example) once"),
    Row(
        "FoldedLayerError",
        outside_of_its_chain(lambda layer: layer(X)),
        FoldedLayerError,
        "mw.compress(model, example)",
    ),
    Row("FoldedLayerError", outside_of_its_chain(lambda layer: layer.weight), FoldedLayerError, "layer.state_dict()"),
    Row("FoldedLayerError", lambda: FoldedLinear(3, 2)(X), FoldedLayerError, "mw.compress(model, example)"),
    Row(
        "CompressionReport",
        lambda: CompressionReport((), NOTHING, NOTHING, 0.0)["fc"],
        KeyError,
        "[row.name for row in",
    ),
    Row("mw.models.unpad", lambda: mw.models.unpad(X), DtypeError, "torch.nn.Sequential(...)"),
    Row("mw.models.unpad", lambda: mw.models.unpad(nn.Linear(3, 2)), UnsupportedModelError, "write an adapter"),
    # -- files
    Row("mw.models.load_compressed", load_without_safetensors, MissingSafetensorsError, "pip install 'maskwise[safe"),
    Row(
        "mw.models.save_compressed", without_safetensors, MissingSafetensorsError, "pip install 'maskwise[safetensors]'"
    ),
    Row(
        "mw.models.save_compressed",
        lambda: mw.models.save_compressed(X, "model"),
        DtypeError,
        "torch.nn.Sequential(...)",
    ),
    Row(
        "mw.models.save_compressed",
        lambda: mw.models.save_compressed(Noted(), "model"),
        DtypeError,
        "a state_dict of tensors",
    ),
    Row(
        "mw.models.load_compressed",
        lambda: mw.models.load_compressed("model", X),
        DtypeError,
        "torch.nn.Sequential(...)",
    ),
    Row(
        "mw.models.load_compressed",
        load(nn.Sequential(nn.LSTM(2, 2)), None),
        ArgumentError,
        "into=Sequential(...)",
    ),
    Row(
        "mw.models.load_compressed",
        load(nn.LSTM(2, 2), nn.LSTM(2, 3)),
        ArgumentError,
        "a new model of the class",
    ),
    Row(
        "mw.models.load_compressed",
        load(nn.Sequential(LINEAR), nn.ReLU()),
        ArgumentError,
        "the class that was compressed",
    ),
    Row(
        "mw.models.load_compressed",
        load(mw.unpad(nn.MultiheadAttention(4, 2)), nn.ReLU()),
        ArgumentError,
        "the class that was compressed",
    ),
    Row(
        "mw.models.load_compressed",
        load(nn.MultiheadAttention(4, 2), mw.unpad(nn.MultiheadAttention(4, 2))),
        ArgumentError,
        "mw.unpad(model) afterwards",
    ),
    Row("mw.models.load_compressed", read(b"no file"), ArgumentError, "mw.models.save_compressed(model, path)"),
    Row("mw.models.load_compressed", read(None), ArgumentError, "mw.models.save_compressed(model, path)"),
    Row(
        "mw.models.load_compressed",
        read(file_of("Linear", version=99)),
        ArgumentError,
        "pip install --upgrade maskwise",
    ),
    Row(
        "mw.models.load_compressed",
        read({**file_of("ReLU"), "chains": [["", ["0"]]]}),
        ArgumentError,
        "a new model of the class",
    ),
    Row("mw.models.load_compressed", read(file_of("Telescope")), ArgumentError, "pip install --upgrade maskwise"),
    Row(
        "mw.models.load_compressed",
        read(file_of("Linear", size=3)),
        ArgumentError,
        "save_compressed(model, path) again",
    ),
]
