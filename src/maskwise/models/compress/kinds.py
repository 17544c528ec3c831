"""The modules that a file can name, and the arguments that make one again."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from maskwise.errors import ArgumentError, say
from maskwise.models.compress.copying import has_hooks
from maskwise.models.compress.guarding import kind_of
from maskwise.models.compress.live_units import LiveConv2d, LiveLinear
from maskwise.nn import SparseLinear

__all__ = ["arguments_of", "is_known", "made"]

#: Arguments that are no part of what a module does: where it is, how it starts, and old names of others.
_SKIPPED = (
    *("self", "device", "dtype", "init", "min_value", "max_value", "size_average", "reduce"),
    *("_weight", "_freeze", "_random_samples"),
)
#: Modules that are made of other modules, of functions or of process groups.
_OF_OTHERS = (
    *(nn.DataParallel, nn.Sequential, nn.SyncBatchNorm, nn.Transformer, nn.TransformerDecoder, nn.TransformerEncoder),
    *(nn.TransformerDecoderLayer, nn.TransformerEncoderLayer, nn.TripletMarginWithDistanceLoss),
    nn.modules.lazy.LazyModuleMixin,
)
#: The one argument that is kept under another name.
_RENAMED: dict[tuple[type[nn.Module], str], str] = {(nn.PairwiseDistance, "p"): "norm"}
_OWN: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    SparseLinear: lambda m: {**_taken(m, ("in_features", "out_features", "bias")), "block": m.block, "density": 0.0},
    LiveLinear: lambda m: {"in_features": m.in_units, "out_features": m.out_units, **_live(m)},
    LiveConv2d: lambda m: {
        "in_channels": m.in_units,
        "out_channels": m.out_units,
        **_taken(m.small, ("kernel_size", "stride", "padding", "dilation", "padding_mode")),
        **_live(m),
    },
}


@cache
def _kinds() -> dict[str, type[nn.Module]]:
    """The classes that a file can name: ours, and all of torch.nn whose arguments say everything."""
    modules = [each for each in vars(nn).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return {kind.__name__: kind for kind in (*modules, *_OWN) if kind in _OWN or _arguments(kind) is not None}


def _arguments(kind: type[nn.Module]) -> tuple[str, ...] | None:
    """The arguments of a class of torch.nn, which are attributes of the same name; None if that is not all there is."""
    if issubclass(kind, _OF_OTHERS) or kind.forward is nn.Module.forward:
        return None
    found = inspect.signature(kind).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in found):
        # Whatever they are given, activations without arguments do not look at it.
        return () if kind is nn.Identity or "__init__" not in vars(kind) else None
    return tuple(each.name for each in found if each.name not in _SKIPPED)


def is_known(module: nn.Module) -> bool:
    """Whether a file can name this module: whether one that is made of its arguments has the same state, and is alike.

    >>> is_known(nn.Linear(2, 2)), is_known(nn.LSTM(2, 2))
    (True, False)
    """
    kind = kind_of(module)
    if kind in _OWN:
        return not has_hooks(module)
    if _kinds().get(kind.__name__) is not kind or module._modules or has_hooks(module) or "forward" in vars(module):
        return False
    try:
        arguments = json.loads(json.dumps(arguments_of(module)))
        with torch.device("meta"):
            twin = made(kind.__name__, arguments)
    except (ArgumentError, AttributeError, TypeError, ValueError):
        return False
    shapes = ({name: tensor.shape for name, tensor in each.state_dict().items()} for each in (module, twin))
    return next(shapes) == next(shapes) and json.loads(json.dumps(arguments_of(twin))) == arguments


def arguments_of(module: nn.Module) -> dict[str, Any]:
    """The arguments that make a module like this one, of what JSON has.

    >>> arguments_of(nn.Linear(2, 3, bias=False))
    {'in_features': 2, 'out_features': 3, 'bias': False}
    """
    kind = kind_of(module)
    return _OWN[kind](module) if kind in _OWN else _taken(module, _arguments(kind) or ())


def made(kind: str, arguments: dict[str, Any]) -> nn.Module:
    """The module of this class and these arguments; only classes of the table can be made."""
    if kind not in _kinds():
        must, hint = "name only layers that a file can hold", "pip install --upgrade maskwise"
        raise ArgumentError(say("load_compressed", "path", must=must, got=f"a file with {kind!r}", hint=hint))
    try:
        # JSON has lists for tuples.
        return _kinds()[kind](**{name: _untied(value) for name, value in arguments.items()})
    except Exception as error:
        must, got = f"say how to make its {kind}", f"{str(arguments)[:80]}: {error}"
        hint = "mw.models.save_compressed(model, path) anew"
        raise ArgumentError(say("load_compressed", "path", must=must, got=got, hint=hint)) from error


def _untied(value: Any) -> Any:
    return tuple(map(_untied, value)) if isinstance(value, list) else value


def _taken(module: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """The attributes of these names; where a bias is a parameter, whether there is one."""
    found = {name: getattr(module, _RENAMED.get((type(module), name), name)) for name in names}
    if "bias" in found and "bias" in module._parameters:
        found["bias"] = module._parameters["bias"] is not None
    return found


def _live(module: LiveLinear | LiveConv2d) -> dict[str, Any]:
    return {
        "live_inputs": None if module.inputs is None else module.inputs.numel(),
        "live_outputs": None if module.outputs is None else module.outputs.numel(),
        "bias": module.bias is not None,
    }
