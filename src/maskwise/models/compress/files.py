"""Files of compressed models: safetensors, with a header that says what each layer is. Nothing in them is code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.models.compress.copying import put
from maskwise.models.compress.fast_paths import turn_off_fast_paths
from maskwise.models.compress.kinds import arguments_of, is_known, made
from maskwise.models.compress.problems import MissingSafetensorsError
from maskwise.nn.modules import check_module

__all__ = ["load_compressed", "save_compressed"]

FORMAT = "maskwise.compressed"
VERSION = 1


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

    The header says of every layer which class of torch or Maskwise it is and what its sizes are. Of nn.Sequential made
    of such layers the file has the whole structure; any other model is loaded into a new one of its own class.

    Args:
        model: what `mw.compress` gave, or any model.
        path: where to write; a file that is there is replaced at once or not at all.

    Raises:
        MissingSafetensorsError: safetensors is not installed.
        DtypeError: ``model`` is not a module.
    """
    save_file, _ = _safetensors("save_compressed")
    check_module("save_compressed", model)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            hint = "a state_dict of tensors only"
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
        "layers": {name: _described(m) for name, m in model.named_modules() if is_known(m)},
        "structure": _structure(model),
        "aliases": aliases,
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
            of the file. Not needed where the file has the structure, for nn.Sequential of torch's layers.

    Returns:
        The model in evaluation, on the CPU: ``into``, changed in place, or a new one.

    Raises:
        MissingSafetensorsError: safetensors is not installed.
        FileNotFoundError: there is no such file.
        DtypeError: ``into`` is not a module.
        ArgumentError: the file is not of `save_compressed`, needs ``into``, or does not fit it.
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
        model = _joined("", header["structure"], header["layers"])
    else:
        model = _fitted(into, header["layers"])
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


def _described(module: nn.Module) -> dict[str, Any]:
    dtype = next((str(p.dtype).removeprefix("torch.") for p in module.parameters()), None)
    return {"kind": type(module).__name__, "arguments": arguments_of(module), "dtype": dtype}


def _structure(model: nn.Module) -> Any:
    """The tree of a model of nn.Sequential and known layers: a layer is "layer"; None if there is anything else."""
    if is_known(model):
        return "layer"
    if type(model) is not nn.Sequential:
        return None
    children = {name: _structure(child) for name, child in model.named_children()}
    return None if None in children.values() else children


def _joined(name: str, structure: Any, layers: dict[str, Any]) -> nn.Module:
    if structure == "layer":
        return _layer(layers[name])
    sequential = nn.Sequential()
    for child, inner in structure.items():
        sequential.add_module(child, _joined(f"{name}.{child}" if name else child, inner, layers))
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
    turn_off_fast_paths(into)
    return into


def _differs(module: nn.Module, described: dict[str, Any]) -> bool:
    return not is_known(module) or bool(json.loads(json.dumps(_described(module))) != described)
