"""What runs a model on a CPU beside torch: ``torch.compile``, ONNX Runtime and OpenVINO, in float32 and int8.

Each takes a `Served` and gives a function of a batch. What is exported or compiled once is kept for all cases.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Batch", "Forward", "Int8Linear", "Served", "compiled", "eager", "int8", "needs", "onnx_runtime", "openvino"]

Batch = dict[str, Tensor]
Forward = Callable[[Batch], Tensor]
"""A batch of token ids with its mask to one tensor of the model's output."""
EXAMPLE = (2, 64)


@dataclass(frozen=True, eq=False)
class Served:
    """A model, what it is called with, and which of its outputs is wanted.

    Attributes:
        model: a model of transformers, in evaluation mode.
        names: its arguments, in order.
        output: the name of the output.
        calibration: batches from which int8 engines take their ranges.
    """

    model: Any
    names: tuple[str, ...]
    output: str
    calibration: tuple[Batch, ...] = ()


def eager(model: Any, output: str) -> Forward:
    """The model itself."""

    def run(batch: Batch) -> Tensor:
        found: Tensor = getattr(model(**batch), output)
        return found

    return run


def needs(*modules: str) -> Callable[[], str | None]:
    """Why a side cannot run here: which modules are missing."""

    def reason() -> str | None:
        missing = [module for module in modules if find_spec(module) is None]
        return f"needs {', '.join(missing)}: pip install {' '.join(missing)}" if missing else None

    return reason


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


class _Wanted(nn.Module):
    """The model with positional arguments and one output."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        self.model, self.names, self.output = served.model, served.names, served.output

    def forward(self, *values: Tensor) -> Tensor:
        found: Tensor = getattr(self.model(**dict(zip(self.names, values, strict=True))), self.output)
        return found


# -- torch.compile -----------------------------------------------------------------------------------------------------
@lru_cache(maxsize=8)
def compiled(served: Served) -> Forward:
    """The padded model under torch.compile, with dynamic shapes: a graph for each would take minutes."""
    torch.compiler.reset()
    call = torch.compile(_Wanted(served), dynamic=True)
    return lambda batch: call(*(batch[name] for name in served.names))


# -- ONNX Runtime ------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=8)
def _onnx_file(served: Served) -> str:
    path = str(Path(tempfile.mkdtemp()) / "model.onnx")
    example = tuple(torch.ones(EXAMPLE, dtype=torch.long) for _ in served.names)
    dims = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}

    def export(model: _Wanted) -> None:
        torch.onnx.export(
            model.eval(),
            example,
            path,
            input_names=list(served.names),
            output_names=["wanted"],
            dynamic_shapes=(tuple(dims for _ in served.names),),
            dynamo=True,
            verbose=False,
        )

    with _silent():
        try:
            export(_Wanted(served))
        except torch.onnx.OnnxExporterError:
            # torch cannot export its fused attention with a bias, as in T5.
            plain = copy.deepcopy(served.model)
            plain.set_attn_implementation("eager")
            export(_Wanted(replace(served, model=plain)))
    return path


@lru_cache(maxsize=8)
def onnx_runtime(served: Served, is_int8: bool = False) -> Forward:
    """ONNX Runtime; int8 by its dynamic quantization: weights by channel, inputs by the range of the whole tensor."""
    import onnxruntime

    path = _onnx_file(served)
    if is_int8:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        source = onnx.load(path)
        # Shapes that the exporter wrote down, and that do not hold for the weights that are transposed for int8.
        del source.graph.value_info[:]
        path = path.replace("model", "int8")
        with _silent():
            quantize_dynamic(source, path, weight_type=QuantType.QInt8, per_channel=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, {name: batch[name].numpy() for name in served.names})[0])


# -- OpenVINO ----------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=8)
def openvino(served: Served, is_int8: bool = False) -> Forward:
    """OpenVINO, whose precision is said to be float32, since it may take less; int8 by NNCF, with fixed ranges."""
    import openvino

    example = tuple(torch.ones(EXAMPLE, dtype=torch.long) for _ in served.names)
    with _silent():
        converted = openvino.convert_model(_Wanted(served).eval(), example_input=example)
        if is_int8:
            import nncf

            data = nncf.Dataset(served.calibration, lambda batch: [batch[name].numpy() for name in served.names])
            converted = nncf.quantize(converted, data, model_type=nncf.ModelType.TRANSFORMER)
    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    call = openvino.compile_model(converted, "CPU", {**options, "INFERENCE_PRECISION_HINT": "f32"})
    return lambda batch: torch.from_numpy(call([batch[name].numpy() for name in served.names])[0])


# -- int8 in torch -----------------------------------------------------------------------------------------------------
class Int8Linear(nn.Module):
    """int8 weights with a range per channel, int8 inputs with a range per token: the recipe of docs/models.md."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale[:, None]).round().to(torch.int8).t())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        rows = x.reshape(-1, x.shape[-1])
        step = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        out = torch._int_mm((rows / step).round_().to(torch.int8), self.weight).float()
        return out.mul_(step).mul_(self.scale).add_(self.bias).view(*x.shape[:-1], -1)


def int8(model: Any) -> Any:
    """A copy of a model whose linear layers are `Int8Linear`."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
    return model
