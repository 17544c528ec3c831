"""The modules that a file can name, and the arguments that make one again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from maskwise.errors import ArgumentError, say
from maskwise.models.compress.live_units import LiveConv2d, LiveLinear
from maskwise.nn import SparseLinear

__all__ = ["arguments_of", "is_known", "made"]

_CONV = "in_channels out_channels kernel_size stride padding dilation groups bias padding_mode"
_NORM = "num_features eps momentum affine track_running_stats"
_POOL = "kernel_size stride padding"
#: The arguments of each class are attributes of the same name; a bias is whether there is one.
_KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "in_features out_features bias",
    nn.Bilinear: "in1_features in2_features out_features bias",
    nn.Conv1d: _CONV,
    nn.Conv2d: _CONV,
    nn.Conv3d: _CONV,
    nn.BatchNorm1d: _NORM,
    nn.BatchNorm2d: _NORM,
    nn.LayerNorm: "normalized_shape eps elementwise_affine bias",
    nn.GroupNorm: "num_groups num_channels eps affine",
    nn.Embedding: "num_embeddings embedding_dim padding_idx",
    nn.MaxPool1d: f"{_POOL} dilation ceil_mode",
    nn.MaxPool2d: f"{_POOL} dilation ceil_mode",
    nn.AvgPool2d: f"{_POOL} ceil_mode count_include_pad divisor_override",
    nn.AdaptiveAvgPool1d: "output_size",
    nn.AdaptiveAvgPool2d: "output_size",
    nn.AdaptiveMaxPool2d: "output_size",
    nn.Flatten: "start_dim end_dim",
    nn.Unflatten: "dim unflattened_size",
    nn.Dropout: "p inplace",
    nn.Dropout1d: "p inplace",
    nn.Dropout2d: "p inplace",
    nn.AlphaDropout: "p inplace",
    nn.Softmax: "dim",
    nn.LogSoftmax: "dim",
    nn.CELU: "alpha inplace",
    nn.ELU: "alpha inplace",
    nn.GELU: "approximate",
    nn.Hardshrink: "lambd",
    nn.Hardsigmoid: "inplace",
    nn.Hardswish: "inplace",
    nn.Hardtanh: "min_val max_val inplace",
    nn.Identity: "",
    nn.LeakyReLU: "negative_slope inplace",
    nn.LogSigmoid: "",
    nn.Mish: "inplace",
    nn.PReLU: "num_parameters",
    nn.ReLU: "inplace",
    nn.ReLU6: "inplace",
    nn.SELU: "inplace",
    nn.SiLU: "inplace",
    nn.Sigmoid: "",
    nn.Softplus: "beta threshold",
    nn.Softshrink: "lambd",
    nn.Softsign: "",
    nn.Tanh: "",
    nn.Tanhshrink: "",
    nn.Threshold: "threshold value inplace",
}
_OWN: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    SparseLinear: lambda m: {**_taken(m, "in_features out_features bias"), "block": m.block, "density": 0.0},
    LiveLinear: lambda m: {"in_features": m.in_units, "out_features": m.out_units, **_live(m)},
    LiveConv2d: lambda m: {
        "in_channels": m.in_units,
        "out_channels": m.out_units,
        **_taken(m.small, "kernel_size stride padding dilation padding_mode"),
        **_live(m),
    },
}
_BY_NAME: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (*_KINDS, *_OWN)}


def is_known(module: nn.Module) -> bool:
    """Whether a file can name this module.

    >>> is_known(nn.Linear(2, 2)), is_known(nn.LSTM(2, 2))
    (True, False)
    """
    return type(module) in _KINDS or type(module) in _OWN


def arguments_of(module: nn.Module) -> dict[str, Any]:
    """The arguments that make a module like this one, of what JSON has.

    >>> arguments_of(nn.Linear(2, 3, bias=False))
    {'in_features': 2, 'out_features': 3, 'bias': False}
    """
    kind = type(module)
    return _taken(module, _KINDS[kind]) if kind in _KINDS else _OWN[kind](module)


def made(kind: str, arguments: dict[str, Any]) -> nn.Module:
    """The module of this class and these arguments; only classes of the table can be made."""
    if kind not in _BY_NAME:
        must, hint = "name only layers that a file can hold", "pip install --upgrade maskwise"
        raise ArgumentError(say("load_compressed", "path", must=must, got=f"a file with {kind!r}", hint=hint))
    try:
        # JSON has lists for tuples.
        return _BY_NAME[kind](**{name: _untied(value) for name, value in arguments.items()})
    except (TypeError, ValueError, RuntimeError) as error:
        must, got = f"say how to make its {kind}", f"{str(arguments)[:80]}: {error}"
        hint = "mw.models.save_compressed(model, path) anew"
        raise ArgumentError(say("load_compressed", "path", must=must, got=got, hint=hint)) from error


def _untied(value: Any) -> Any:
    return tuple(map(_untied, value)) if isinstance(value, list) else value


def _taken(module: nn.Module, names: str) -> dict[str, Any]:
    found = {name: getattr(module, name) for name in names.split()}
    if "bias" in found:
        found["bias"] = found["bias"] is not None
    return found


def _live(module: LiveLinear | LiveConv2d) -> dict[str, Any]:
    return {
        "live_inputs": None if module.inputs is None else module.inputs.numel(),
        "live_outputs": None if module.outputs is None else module.outputs.numel(),
        "bias": module.bias is not None,
    }
