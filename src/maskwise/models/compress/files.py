"""Files of compressed models: safetensors, with a header that describes each layer. They contain no code."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from maskwise.errors import ArgumentError, DtypeError, MaskwiseError, say
from maskwise.models.adapter import MARK, UnsupportedModelError
from maskwise.models.compress.guards import chain_of, chains, guard, unfolded_class
from maskwise.models.compress.live_units import LiveConv2d, LiveLinear
from maskwise.models.compress.surgery import has_hooks, hooks, replace_module, update_fast_paths
from maskwise.models.unpadding import unpad
from maskwise.nn import SparseLinear
from maskwise.nn.arguments import check_module

__all__ = ["MissingSafetensorsError", "load_compressed", "save_compressed"]

FORMAT = "maskwise.compressed"
VERSION = 2
LOAD, SAVE = "load_compressed", "save_compressed"
_SAVE_AGAIN = "mw.models.save_compressed(model, path)"
_NEW_MODEL = "a new model of the class that was compressed"


class MissingSafetensorsError(MaskwiseError, ImportError):
    """Files of compressed models are safetensors, and that package is not installed."""


def save_compressed(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a compressed model to a safetensors file.

    >>> import tempfile, torch, maskwise as mw
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    >>> small, _ = mw.compress(model, torch.ones(2, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mw.models.save_compressed(small, f"{folder}/small.safetensors")
    ...     loaded = mw.models.load_compressed(f"{folder}/small.safetensors")
    >>> torch.equal(loaded(torch.ones(2, 4)), small(torch.ones(2, 4)))
    True

    The header has the class and the sizes of every layer of torch or Maskwise, which layers run only in their chain,
    and which modules are unpadded. For nn.Sequential of such layers it has the whole structure, unless there are hooks,
    which are code; any other model is loaded into a new one of its own class.

    Args:
        model: a result of `mw.compress`, or any model.
        path: where to write; an existing file is replaced atomically.

    Raises:
        MissingSafetensorsError: safetensors is not installed.
        DtypeError: ``model`` is not a module, or its state_dict has something other than tensors with data.
    """
    save_file, _ = _safetensors(SAVE)
    check_module(SAVE, model)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or is_lazy(tensor) or tensor.is_meta:
            hint = "a state_dict of tensors only; a lazy module gets its own by a first call"
            must = f"have only tensors in its state_dict, at {name!r}"
            raise DtypeError(say(SAVE, "model", must=must, got=type(tensor).__name__, hint=hint))
        # Shared tensors are written once, under the first of their names.
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    header = {
        "format": FORMAT,
        "version": VERSION,
        "model": type(model).__name__,
        "layers": _describe_layers(model),
        "structure": _structure("", model, {}),
        "aliases": aliases,
        "chains": chains(model),
        "unpadded": _unpadded(model),
    }
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, partial, metadata={FORMAT: json.dumps(header)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_compressed(path: str | os.PathLike[str], into: nn.Module | None = None) -> nn.Module:
    """Load a model that `save_compressed` wrote; the code that pruned and compressed it is not needed.

    >>> import tempfile, torch, maskwise as mw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mw.models.save_compressed(torch.nn.Sequential(torch.nn.Linear(4, 3)), f"{folder}/small.safetensors")
    ...     mw.models.load_compressed(f"{folder}/small.safetensors")
    Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
    )

    Args:
        path: the file.
        into: a new model of the class that was compressed, with any weights: its layers are replaced by those of the
            file, and it is unpadded if the saved model was. Not needed where the file has the structure: for
            nn.Sequential of torch's layers without hooks, parametrizations, recurrent layers or Transformer encoders.

    Returns:
        The model in evaluation, on the CPU: ``into``, changed in place, or a new one.

    Raises:
        MissingSafetensorsError: safetensors is not installed.
        FileNotFoundError: there is no such file.
        DtypeError: ``into`` is not a module.
        ArgumentError: the file was not written by `save_compressed`, needs ``into``, or does not fit it; or only one
            of both is unpadded, and `mw.unpad` does not support ``into``.
    """
    if into is not None:
        check_module(LOAD, into, "into")
    tensors, header = _read(path)
    if into is None:
        if header["structure"] is None:
            kind = header["model"]
            must = f"be a {kind}, since the file has its layers and not its forward"
            raise ArgumentError(say(LOAD, "into", must=must, got="None", hint=f"into={kind}(...)"))
        model = _build_structure("", header["structure"], header["layers"], {})
    else:
        model = _replace_layers(_match_unpadding(into, header["unpadded"]), header["layers"])
    model = _add_guards(model, header["chains"])
    update_fast_paths(model)
    _match_sharing(model, header["aliases"])
    _match_dtypes(model, tensors)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        must, got = "have the layers of the file", f"others: {error}"
        raise ArgumentError(say(LOAD, "into", must=must, got=got, hint=_NEW_MODEL)) from error
    return model.eval()


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file."""
    _, safe_open = _safetensors(LOAD)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except Exception as error:
        must, got = "be a safetensors file", f"{path} ({error})"
        raise ArgumentError(say(LOAD, "path", must=must, got=got, hint=_SAVE_AGAIN)) from error
    try:
        header = json.loads(metadata[FORMAT])
        version, _, _ = header["version"], header["layers"].items(), header["structure"]
        # Files of version 1 have neither.
        header["chains"] = [(owner, list(layers)) for owner, layers in header.get("chains", ())]
        header["unpadded"] = dict(header.get("unpadded", {}))
        tensors.update({name: tensors[other] for name, other in header["aliases"].items()})
    except (KeyError, ValueError, TypeError, AttributeError):
        must = "be a file of save_compressed"
        raise ArgumentError(say(LOAD, "path", must=must, got=str(path), hint=_SAVE_AGAIN)) from None
    if version > VERSION:
        must, got, hint = f"be of version {VERSION} or older", f"version {version}", "pip install --upgrade maskwise"
        raise ArgumentError(say(LOAD, "path", must=must, got=got, hint=hint))
    return tensors, header


def _safetensors(op: str) -> tuple[Any, Any]:
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError:
        raise MissingSafetensorsError(
            f"{op}: files of compressed models need the package safetensors. Hint: pip install 'maskwise[safetensors]'."
        ) from None
    return save_file, safe_open


def _describe_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that a file can describe, except for those inside of one."""
    found: dict[str, Any] = {}
    inner: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inner and _is_describable(module):
            found[name] = _describe(module)
            inner.update(module.modules())
    return found


def _describe(module: nn.Module) -> dict[str, Any]:
    dtype = next((str(p.dtype).removeprefix("torch.") for p in module.parameters()), None)
    return {"kind": unfolded_class(module).__name__, "arguments": _constructor_arguments(module), "dtype": dtype}


def _structure(name: str, model: nn.Module, seen: dict[nn.Module, str]) -> Any:
    """The tree of a model: a dict per nn.Sequential, "layer" per layer that a file can describe; None for other models.

    A shared module is, at all places but the first, a list with the name of the first.
    """
    if model in seen:
        return [seen[model]]
    seen[model] = name
    if _is_describable(model):
        return "layer"
    if type(model) is not nn.Sequential or "forward" in vars(model) or _has_foreign_hooks(model):
        return None
    children = {
        each: None if child is None else _structure(_join(name, each), child, seen)
        for each, child in model._modules.items()
    }
    return None if None in children.values() else children


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Whether there are hooks other than the guards of a chain."""
    return any(chain_of(hook) is None for hook in hooks(module))


def _build_structure(name: str, structure: Any, layers: dict[str, Any], built: dict[str, nn.Module]) -> nn.Module:
    if isinstance(structure, list):
        return built[structure[0]]
    if structure == "layer":
        built[name] = _build_layer(layers[name])
        return built[name]
    built[name] = sequential = nn.Sequential()
    for child, inner in structure.items():
        sequential.add_module(child, _build_structure(_join(name, child), inner, layers, built))
    return sequential


def _build_layer(described: dict[str, Any]) -> nn.Module:
    module = _construct(described["kind"], described["arguments"])
    name = described["dtype"]
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return module.to(dtype) if isinstance(dtype, torch.dtype) else module


def _replace_layers(into: nn.Module, layers: dict[str, Any]) -> nn.Module:
    """Replace each layer that differs from that of the file."""
    found = dict(into.named_modules())
    missing = [name for name in layers if name not in found]
    if missing:
        must = f"have a module {missing[0]!r}, as the file has"
        raise ArgumentError(say(LOAD, "into", must=must, got=type(into).__name__, hint=_NEW_MODEL))
    # All are built before the first is replaced: an error leaves the model unchanged.
    built = {
        name: _build_layer(described)
        for name, described in layers.items()
        if not _is_describable(found[name]) or _describe(found[name]) != described
    }
    for name, layer in built.items():
        into = replace_module(into, found[name], layer)
    return into


def _unpadded(model: nn.Module) -> dict[str, str]:
    """The unpadded modules, and the adapter of each."""
    return {name: getattr(module, MARK) for name, module in model.named_modules() if hasattr(module, MARK)}


def _match_unpadding(into: nn.Module, adapters: dict[str, str]) -> nn.Module:
    """Unpad the model if the saved one was: at padded positions, only unpadded models output 0."""
    if adapters and not _unpadded(into):
        try:
            into = unpad(into)
        except UnsupportedModelError as error:
            must = "be a model that mw.unpad supports, as the saved one is"
            got = f"{type(into).__name__}: {str(error).partition('Hint: ')[0].strip()}"
            raise ArgumentError(say(LOAD, "into", must=must, got=got, hint=_NEW_MODEL)) from error
    if _unpadded(into) != adapters:
        must = f"be unpadded as the saved model, in {sorted(adapters) or 'no module'}"
        hint = "into=mw.unpad(Model(...))" if adapters else "into=Model(...), and mw.unpad(model) afterwards"
        got = f"{sorted(_unpadded(into)) or 'no module'}"
        raise ArgumentError(say(LOAD, "into", must=must, got=got, hint=hint))
    return into


def _add_guards(model: nn.Module, saved: list[tuple[str, list[str]]]) -> nn.Module:
    """Guard the chains of a file, except for those that are guarded already."""
    guarded = chains(model)
    for owner, layers in saved:
        if (owner, layers) in guarded:
            continue
        try:
            model = guard(model, model.get_submodule(owner), [model.get_submodule(name) for name in layers])
        except (AttributeError, KeyError) as error:
            must, got = f"have the layers {layers} in {owner!r}, as the file has", f"others: {error}"
            raise ArgumentError(say(LOAD, "into", must=must, got=got, hint=_NEW_MODEL)) from error
    return model


def _match_sharing(model: nn.Module, aliases: dict[str, str]) -> None:
    """Share parameters where the file has one tensor for both, and nowhere else."""
    held = {
        _join(prefix, name): (module, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    owners: dict[int, str] = {}
    for full, (module, name) in held.items():
        parameter, first = module._parameters[name], aliases.get(full, full)
        assert parameter is not None
        if first in held and first != full:
            other, key = held[first]
            shared = other._parameters[key]
            if shared is not None and shared.shape == parameter.shape:
                module._parameters[name] = shared
        elif owners.setdefault(id(parameter), full) != full:
            # Tied in this model, and not in the file.
            module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def _match_dtypes(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Convert each tensor of the model to its dtype in the file: load_state_dict would round to the model's."""
    for prefix, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                saved = tensors.get(_join(prefix, name))
                if tensor is not None and saved is not None and tensor.dtype != saved.dtype:
                    tensor.data = tensor.data.to(saved.dtype)


# -- the layers that a file can describe -------------------------------------------------------------------------------
#: Arguments that do not change what a module computes: its device, its initialization, and deprecated names.
_SKIPPED = (
    *("self", "device", "dtype", "init", "min_value", "max_value", "size_average", "reduce"),
    *("_weight", "_freeze", "_random_samples"),
)
#: Modules that contain other modules, functions or process groups.
_COMPOSITE = (
    *(nn.DataParallel, nn.Sequential, nn.SyncBatchNorm, nn.Transformer, nn.TransformerDecoder, nn.TransformerEncoder),
    *(nn.TransformerDecoderLayer, nn.TransformerEncoderLayer, nn.TripletMarginWithDistanceLoss),
    nn.modules.lazy.LazyModuleMixin,
)
#: The one argument whose attribute has another name.
_RENAMED: dict[tuple[type[nn.Module], str], str] = {(nn.PairwiseDistance, "p"): "norm"}
_OWN: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    SparseLinear: lambda m: {
        **_attributes(m, ("in_features", "out_features", "bias")),
        "block": m.block,
        "density": 0.0,
    },
    LiveLinear: lambda m: {"in_features": m.in_units, "out_features": m.out_units, **_live(m)},
    LiveConv2d: lambda m: {
        "in_channels": m.in_units,
        "out_channels": m.out_units,
        **_attributes(m.small, ("kernel_size", "stride", "padding", "dilation", "padding_mode")),
        **_live(m),
    },
}


@cache
def _classes() -> dict[str, type[nn.Module]]:
    """The classes that a file can name: ours, and those of torch.nn that are determined by their arguments."""
    modules = [each for each in vars(nn).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return {kind.__name__: kind for kind in (*modules, *_OWN) if kind in _OWN or _argument_names(kind) is not None}


def _argument_names(kind: type[nn.Module]) -> tuple[str, ...] | None:
    """The constructor arguments of a class of torch.nn, which are also attributes; None if they do not determine it."""
    if issubclass(kind, _COMPOSITE) or kind.forward is nn.Module.forward:
        return None
    found = inspect.signature(kind).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in found):
        # Activations without arguments ignore any.
        return () if kind is nn.Identity or "__init__" not in vars(kind) else None
    return tuple(each.name for each in found if each.name not in _SKIPPED)


def _is_describable(module: nn.Module) -> bool:
    """Whether a file can describe this module: one constructed from its arguments has the same arguments and shapes.

    >>> _is_describable(nn.Linear(2, 2)), _is_describable(nn.LSTM(2, 2))
    (True, False)
    """
    kind = unfolded_class(module)
    if kind in _OWN:
        return not has_hooks(module)
    if _classes().get(kind.__name__) is not kind or module._modules or has_hooks(module) or "forward" in vars(module):
        return False
    try:
        arguments = _constructor_arguments(module)
        with torch.device("meta"):
            twin = _construct(kind.__name__, arguments)
    except (ArgumentError, AttributeError, TypeError, ValueError):
        return False
    shapes = ({name: tensor.shape for name, tensor in each.state_dict().items()} for each in (module, twin))
    return next(shapes) == next(shapes) and _constructor_arguments(twin) == arguments


def _constructor_arguments(module: nn.Module) -> dict[str, Any]:
    """The constructor arguments of a module, as JSON has them: lists for tuples.

    >>> _constructor_arguments(nn.Linear(2, 3, bias=False))
    {'in_features': 2, 'out_features': 3, 'bias': False}
    """
    kind = unfolded_class(module)
    arguments = _OWN[kind](module) if kind in _OWN else _attributes(module, _argument_names(kind) or ())
    found: dict[str, Any] = json.loads(json.dumps(arguments))
    return found


def _construct(kind: str, arguments: dict[str, Any]) -> nn.Module:
    """Construct a module; only of the classes that a file can name."""
    if kind not in _classes():
        must, hint = "name only layers that a file can hold", "pip install --upgrade maskwise"
        raise ArgumentError(say(LOAD, "path", must=must, got=f"a file with {kind!r}", hint=hint))
    try:
        return _classes()[kind](**{name: _to_tuples(value) for name, value in arguments.items()})
    except Exception as error:
        must, got = f"have the arguments of its {kind}", f"{str(arguments)[:80]}: {error}"
        raise ArgumentError(say(LOAD, "path", must=must, got=got, hint=f"{_SAVE_AGAIN} again")) from error


def _to_tuples(value: Any) -> Any:
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _attributes(module: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """The attributes of these names; for a bias that is a parameter, whether there is one."""
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
