"""Files of compressed models: safetensors, with a header that says what each layer is. Nothing in them is code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.models.adapter import MARK, UnsupportedModelError
from maskwise.models.compress.copying import has_hooks, put
from maskwise.models.compress.fast_paths import turn_off_fast_paths
from maskwise.models.compress.guarding import Chain, chains, guard, kind_of
from maskwise.models.compress.kinds import arguments_of, is_known, made
from maskwise.models.compress.problems import MissingSafetensorsError
from maskwise.models.unpadding import unpad
from maskwise.nn.modules import check_module

__all__ = ["load_compressed", "save_compressed"]

FORMAT = "maskwise.compressed"
VERSION = 2


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

    The header says of every layer which class of torch or Maskwise it is and what its sizes are, which layers run only
    in their chain, and which modules are unpadded. Of nn.Sequential made of such layers the file has the whole
    structure, unless there are hooks, which are code; any other model is loaded into a new one of its own class.

    Args:
        model: what `mw.compress` gave, or any model.
        path: where to write; a file that is there is replaced at once or not at all.

    Raises:
        MissingSafetensorsError: safetensors is not installed.
        DtypeError: ``model`` is not a module, or its state_dict holds something else than tensors with data.
    """
    save_file, _ = _safetensors("save_compressed")
    check_module("save_compressed", model)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor) or is_lazy(tensor) or tensor.is_meta:
            hint = "a state_dict of tensors only; a lazy module gets its own by a first call"
            must = f"have nothing but tensors in its state_dict, at {name!r}"
            raise DtypeError(say("save_compressed", "model", must=must, got=type(tensor).__name__, hint=hint))
        # A file has each tensor once, under the first of its names.
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
        "layers": _layers(model),
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
    """Read a model that `save_compressed` wrote; what pruned and compressed it is not needed.

    >>> import tempfile, torch, maskwise as mw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mw.models.save_compressed(torch.nn.Sequential(torch.nn.Linear(4, 3)), f"{folder}/small.safetensors")
    ...     mw.models.load_compressed(f"{folder}/small.safetensors")
    Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
    )

    Args:
        path: the file.
        into: a new model of the class that was compressed, with weights of any kind: its layers are replaced by those
            of the file, and it is unpadded if that of the file was. Not needed where the file has the structure, for
            nn.Sequential of torch's layers without hooks, parametrizations, recurrent layers or Transformer encoders.

    Returns:
        The model in evaluation, on the CPU: ``into``, changed in place, or a new one.

    Raises:
        MissingSafetensorsError: safetensors is not installed.
        FileNotFoundError: there is no such file.
        DtypeError: ``into`` is not a module.
        ArgumentError: the file is not of `save_compressed`, needs ``into``, or does not fit it; or only one of both is
            unpadded, and `mw.unpad` does not serve ``into``.
    """
    op = "load_compressed"
    if into is not None:
        check_module(op, into, "into")
    tensors, header = _read(path)
    if into is None:
        if header["structure"] is None:
            kind = header["model"]
            must = f"be a {kind}, since the file has the layers of one and not how they are joined"
            raise ArgumentError(say(op, "into", must=must, got="None", hint=f"into={kind}(...)"))
        model = _joined("", header["structure"], header["layers"], {})
    else:
        model = _fitted(_unpadded_as(into, header["unpadded"]), header["layers"])
    model = _guarded_as(model, header["chains"])
    turn_off_fast_paths(model)
    _share_as(model, header["aliases"])
    _take_dtypes(model, tensors)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        must, got, hint = (
            "have the layers of the file",
            f"others: {error}",
            "a new model of the class that was compressed",
        )
        raise ArgumentError(say(op, "into", must=must, got=got, hint=hint)) from error
    return model.eval()


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file."""
    op = "load_compressed"
    _, safe_open = _safetensors(op)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except Exception as error:
        must, got, hint = "be a safetensors file", f"{path} ({error})", "mw.models.save_compressed(model, path)"
        raise ArgumentError(say(op, "path", must=must, got=got, hint=hint)) from error
    try:
        header = json.loads(metadata[FORMAT])
        version, _, _ = header["version"], header["layers"].items(), header["structure"]
        # Files of version 1 have neither.
        header["chains"] = [(owner, list(layers)) for owner, layers in header.get("chains", ())]
        header["unpadded"] = dict(header.get("unpadded", {}))
        tensors.update({name: tensors[other] for name, other in header["aliases"].items()})
    except (KeyError, ValueError, TypeError, AttributeError):
        hint = "mw.models.save_compressed(model, path)"
        raise ArgumentError(say(op, "path", must="be a file of save_compressed", got=str(path), hint=hint)) from None
    if version > VERSION:
        must, got, hint = f"be of version {VERSION} or older", f"version {version}", "pip install --upgrade maskwise"
        raise ArgumentError(say(op, "path", must=must, got=got, hint=hint))
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


def _layers(model: nn.Module) -> dict[str, Any]:
    """What each layer is that a file can name, but for those inside of one."""
    found: dict[str, Any] = {}
    inner: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inner and is_known(module):
            found[name] = _described(module)
            inner.update(module.modules())
    return found


def _described(module: nn.Module) -> dict[str, Any]:
    dtype = next((str(p.dtype).removeprefix("torch.") for p in module.parameters()), None)
    return {"kind": kind_of(module).__name__, "arguments": arguments_of(module), "dtype": dtype}


def _structure(name: str, model: nn.Module, seen: dict[nn.Module, str]) -> Any:
    """The tree of a model of nn.Sequential and known layers: a layer is "layer"; None if there is anything else.

    A module that is there a second time is a list of one name, that of its first place.
    """
    if model in seen:
        return [seen[model]]
    seen[model] = name
    if is_known(model):
        return "layer"
    if type(model) is not nn.Sequential or "forward" in vars(model) or _has_foreign_hooks(model):
        return None
    inside = f"{name}." if name else ""
    children = {
        each: None if child is None else _structure(f"{inside}{each}", child, seen)
        for each, child in model._modules.items()
    }
    return None if None in children.values() else children


def _has_foreign_hooks(module: nn.Module) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ours = all(isinstance(getattr(hook, "__self__", None), Chain) for hook in hooks)
    return has_hooks(module) and not (ours and hooks and not module._backward_hooks and not module._backward_pre_hooks)


def _joined(name: str, structure: Any, layers: dict[str, Any], built: dict[str, nn.Module]) -> nn.Module:
    if isinstance(structure, list):
        return built[structure[0]]
    if structure == "layer":
        built[name] = _layer(layers[name])
        return built[name]
    built[name] = sequential = nn.Sequential()
    for child, inner in structure.items():
        sequential.add_module(child, _joined(f"{name}.{child}" if name else child, inner, layers, built))
    return sequential


def _layer(described: dict[str, Any]) -> nn.Module:
    module = made(described["kind"], described["arguments"])
    name = described["dtype"]
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return module.to(dtype) if isinstance(dtype, torch.dtype) else module


def _fitted(into: nn.Module, layers: dict[str, Any]) -> nn.Module:
    """The model with each layer that is another one in the file replaced by that."""
    found = dict(into.named_modules())
    missing = [name for name in layers if name not in found]
    if missing:
        must, hint = f"have a module {missing[0]!r}, as the file has", "the class that was compressed"
        raise ArgumentError(say("load_compressed", "into", must=must, got=type(into).__name__, hint=hint))
    news = {name: _layer(described) for name, described in layers.items() if _differs(found[name], described)}
    for name, new in news.items():
        into = put(into, found[name], new)
    return into


def _differs(module: nn.Module, described: dict[str, Any]) -> bool:
    return not is_known(module) or bool(json.loads(json.dumps(_described(module))) != described)


def _unpadded(model: nn.Module) -> dict[str, str]:
    """The modules that `mw.unpad` serves, and by which adapter."""
    return {name: getattr(module, MARK) for name, module in model.named_modules() if hasattr(module, MARK)}


def _unpadded_as(into: nn.Module, adapters: dict[str, str]) -> nn.Module:
    """The model, unpadded if that of the file was: what padded positions give is 0 in the one and not in the other."""
    if adapters and not _unpadded(into):
        try:
            into = unpad(into)
        except UnsupportedModelError as error:
            must, hint = "be a model that mw.unpad serves, as that of the file", "the class that was compressed"
            got = f"{type(into).__name__}: {str(error).partition('Hint: ')[0].strip()}"
            raise ArgumentError(say("load_compressed", "into", must=must, got=got, hint=hint)) from error
    if _unpadded(into) != adapters:
        must = f"be unpadded as that of the file, in {sorted(adapters) or 'no module'}"
        hint = "into=mw.unpad(Model(...))" if adapters else "into=Model(...), and mw.unpad(model) afterwards"
        got = f"{sorted(_unpadded(into)) or 'no module'}"
        raise ArgumentError(say("load_compressed", "into", must=must, got=got, hint=hint))
    return into


def _guarded_as(model: nn.Module, found: list[tuple[str, list[str]]]) -> nn.Module:
    """The model with the chains of a file, but for those that it has."""
    have = chains(model)
    for owner, layers in found:
        if (owner, layers) in have:
            continue
        try:
            model = guard(model, model.get_submodule(owner), [model.get_submodule(name) for name in layers])
        except (AttributeError, KeyError) as error:
            must, got = f"have the layers {layers} in {owner!r}, as the file has", f"others: {error}"
            hint = "a new model of the class that was compressed"
            raise ArgumentError(say("load_compressed", "into", must=must, got=got, hint=hint)) from error
    return model


def _share_as(model: nn.Module, aliases: dict[str, str]) -> None:
    """Let parameters be shared where the file has one tensor for both, and nowhere else."""
    held = {
        f"{prefix}.{name}" if prefix else name: (module, name)
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


def _take_dtypes(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give each tensor of the model the dtype that it has in the file: copied into another, it would be rounded."""
    for prefix, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                saved = tensors.get(f"{prefix}.{name}" if prefix else name)
                if tensor is not None and saved is not None and tensor.dtype != saved.dtype:
                    tensor.data = tensor.data.to(saved.dtype)
