"""``mw.unpad(model)`` and ``mw.models.repad``: find the parts that an adapter serves, and install or undo it."""

from __future__ import annotations

import inspect
from typing import TypeVar

from torch import nn

from maskwise.errors import ArgumentError, say
from maskwise.models.adapter import MARK, Adapter, MixesTokens, UnsupportedModelError, adapters
from maskwise.models.routes import clear_warnings, warn_once
from maskwise.nn.arguments import check_module

__all__ = ["repad", "unpad"]

Model = TypeVar("Model", bound=nn.Module)


def unpad(model: Model) -> Model:
    """Make an existing model run on kept tokens only: same inputs, same outputs, in training and in evaluation.

    >>> import torch, maskwise as mw
    >>> from torch import nn
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> x, padding = torch.randn(2, 5, 8), mw.Mask.from_lengths([5, 2]).to_key_padding()
    >>> padded = model(x, src_key_padding_mask=padding)
    >>> unpadded = mw.unpad(model)(x, src_key_padding_mask=padding)
    >>> torch.allclose(padded[~padding], unpadded[~padding], atol=1e-5), unpadded[1, 2:].abs().max().item()
    (True, 0.0)

    The model is changed in place, and so is every part of it that an adapter serves: ``nn.TransformerEncoder``,
    ``nn.TransformerEncoderLayer``, ``nn.MultiheadAttention``, and Hugging Face models from their ``attention_mask``
    (also inside of a SentenceTransformer). Parameters, ``state_dict`` and signatures stay what they were. What cannot
    run packed (no mask, a cache, requested attention weights) runs padded, as before; ``mw.explain()`` lists which, and
    where the caller can change it, the first such call warns with a `maskwise.models.PaddedRunWarning`.

    Outputs are equal at every kept position. At a padded one, where a padded model computes what must not be read,
    there is 0.

    Args:
        model: the module, or one that holds such modules.

    Returns:
        The same object.

    Raises:
        DtypeError: ``model`` is not a module.
        UnsupportedModelError: no adapter serves it or a part of it; the message has the reasons.
    """
    check_module("unpad", model)
    refused: dict[str, str] = {}
    if not _install(model, "", refused):
        raise UnsupportedModelError(_refusal(model, refused))
    for path, reason in refused.items():
        part = model.get_submodule(path)
        if _takes_padding(part) and not any(hasattr(each, MARK) for each in part.modules()):
            warn_once(part, reason, "help(maskwise.models.Adapter) shows how to support it")
    return model


def repad(model: Model) -> Model:
    """Undo `unpad`: the model runs as it did before.

    >>> import maskwise as mw
    >>> from torch import nn
    >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> mw.models.repad(mw.unpad(attention)) is attention
    True

    Args:
        model: what `unpad` was given, or returned.

    Returns:
        The same object.

    Raises:
        DtypeError: ``model`` is not a module.
        ArgumentError: nothing in it is unpadded.
    """
    check_module("repad", model)
    if not _undo(model):
        raise ArgumentError(say("repad", "model", must="be unpadded", got=type(model).__name__, hint="mw.unpad(model)"))
    return model


def _install(module: nn.Module, path: str, refused: dict[str, str]) -> int:
    """Serve the module, or else its children, and return how many were served."""
    if hasattr(module, MARK):
        return 1
    adapter = _adapter_of(module, path, refused)
    if adapter is not None:
        try:
            adapter.install(module)
        except UnsupportedModelError as error:
            refused[path] = f"{adapter.name}: {error.reason}"
        else:
            setattr(module, MARK, adapter.name)
            return 1
    if isinstance(refused.get(path), MixesTokens):
        return 0
    served = sum(
        _install(child, f"{path}.{name}" if path else name, refused) for name, child in module.named_children()
    )
    return served if served and _enclose(module, path, refused) else 0


def _takes_padding(module: nn.Module) -> bool:
    """Whether a module is called with tokens and a mask of their padding."""
    names = set(inspect.signature(module.forward).parameters)
    return bool(names & {"input_ids", "src", "query"}) and any("mask" in name for name in names)


def _enclose(module: nn.Module, path: str, refused: dict[str, str]) -> bool:
    """Let adapters know of a module that holds served ones; where one objects, the served ones are undone."""
    for adapter in adapters().values():
        enclose = getattr(adapter, "enclose", None)
        try:
            if enclose is not None and enclose(module):
                setattr(module, MARK, adapter.name)
        except UnsupportedModelError as error:
            refused[path] = f"{adapter.name}: {error.reason}"
            _undo(module)
            return False
    return True


def _undo(model: nn.Module) -> int:
    """Undo every served module, the outer ones first, and return how many there were."""
    served = [module for module in model.modules() if hasattr(module, MARK)]
    for module in served:
        # What serves an outer module may undo those in it along with it.
        if (name := vars(module).pop(MARK, None)) is not None:
            adapters()[name].undo(module)
    for module in model.modules():
        clear_warnings(module)
    return len(served)


def _adapter_of(module: nn.Module, path: str, refused: dict[str, str]) -> Adapter | None:
    for adapter in adapters().values():
        served, reason = adapter.serves(module)
        if served:
            return adapter
        # An adapter that does not know the module at all has nothing to say of it.
        if reason:
            refused[path] = type(reason)(f"{adapter.name}: {reason}")
    return None


def _refusal(model: nn.Module, refused: dict[str, str]) -> str:
    kind = type(model).__name__
    # By where they stand in the model, not by when each was found: its own reason first, then those of its parts, and
    # last those of parts that read no tokens, such as a model of images.
    places = {path: (place, part) for place, (path, part) in enumerate(model.named_modules(remove_duplicate=False))}
    ordered = sorted(refused, key=lambda path: (path != "" and not _takes_padding(places[path][1]), places[path][0]))
    found = [f"  {path or kind}: {refused[path]}" for path in ordered[:8]]
    listed = "\n".join(found) if found else f"  no part of it is of a kind that {', '.join(adapters())} know"
    return (
        f"unpad: no adapter serves this {kind}.\n{listed}\n"
        "Hint: write an adapter (help(maskwise.models.Adapter) shows one) and maskwise.models.register(it)."
    )
