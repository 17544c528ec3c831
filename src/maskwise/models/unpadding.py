"""``mw.unpad(model)`` and its way back: find the parts that an adapter serves, and let it."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from maskwise.errors import ArgumentError, say
from maskwise.models.adapter import Adapter, UnsupportedModelError, adapters
from maskwise.models.report import forget_warnings
from maskwise.nn.modules import check_module

__all__ = ["repad", "unpad"]

Model = TypeVar("Model", bound=nn.Module)
MARK = "_maskwise_adapter"
"""The attribute that names the adapter which serves a module."""


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
    run packed (no mask, a cache, requested attention weights) runs padded, as before; ``mw.explain()`` says which, and
    where the caller can change it, the first such call warns with a `maskwise.models.PaddedRunWarning`.

    Outputs are equal at every kept position. At a padded one, where a padded model computes what nobody should read,
    there is 0.

    Args:
        model: the module, or one that holds such modules.

    Returns:
        The same object.

    Raises:
        DtypeError: ``model`` is not a module.
        UnsupportedModelError: no adapter serves it or a part of it; says why, and how to write one.
    """
    check_module("unpad", model)
    reasons: dict[str, str] = {}
    if not _install(model, "", reasons):
        raise UnsupportedModelError(_refusal(model, reasons))
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
    served = [module for module in model.modules() if hasattr(module, MARK)]
    if not served:
        raise ArgumentError(say("repad", "model", must="be unpadded", got=type(model).__name__, hint="mw.unpad(model)"))
    for module in served:
        adapters()[getattr(module, MARK)].undo(module)
        delattr(module, MARK)
    for module in model.modules():
        forget_warnings(module)
    return model


def _install(module: nn.Module, path: str, reasons: dict[str, str]) -> int:
    """Serve the module, or else its children, and return how many were served."""
    if hasattr(module, MARK):
        return 1
    adapter = _adapter_of(module, path, reasons)
    if adapter is not None:
        try:
            adapter.install(module)
        except UnsupportedModelError as error:
            # The whole refusal has a hint of its own.
            reasons[path] = str(error).partition(" Hint: ")[0].rstrip(".")
        else:
            setattr(module, MARK, adapter.name)
            return 1
    return sum(_install(child, f"{path}.{name}" if path else name, reasons) for name, child in module.named_children())


def _adapter_of(module: nn.Module, path: str, reasons: dict[str, str]) -> Adapter | None:
    for adapter in adapters().values():
        served, reason = adapter.serves(module)
        if served:
            return adapter
        # An adapter that does not know the module at all has nothing to say of it.
        if reason:
            reasons[path] = f"{adapter.name}: {reason}"
    return None


def _refusal(model: nn.Module, reasons: dict[str, str]) -> str:
    kind = type(model).__name__
    found = [f"  {path or kind}: {reason}" for path, reason in reasons.items()][:8]
    listed = "\n".join(found) if found else f"  no part of it is of a kind that {', '.join(adapters())} know"
    return (
        f"unpad: no adapter serves this {kind}.\n{listed}\n"
        "Hint: write an adapter (help(maskwise.models.Adapter) shows one) and maskwise.models.register(it)."
    )
