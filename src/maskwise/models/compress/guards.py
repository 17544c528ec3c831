"""Guards of folded layers: they lack the units that only their neighbour reads, so nothing else may call them.

An example covers one path through a model: another argument of forward may call a layer by itself, for its features.
So the layers of a chain run only while the module runs whose forward joins them, per thread; called from elsewhere
they raise, instead of returning fewer units than the model had.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from maskwise.models.compress.example import CompressionError
from maskwise.models.compress.live_units import LiveConv2d, LiveLinear
from maskwise.models.compress.surgery import hooks, replace_module
from maskwise.nn import SparseLinear

__all__ = ["Chain", "FoldedLayerError", "chain_of", "chains", "guard", "unfolded_class", "unguard"]


class FoldedLayerError(CompressionError, AttributeError):
    """A folded layer is used from outside of its chain, but lacks the units that only its neighbour reads."""


class Chain:
    """The guard of layers that fit only each other: records which of them ran in the current call of their owner.

    >>> chain = Chain()
    >>> chain.enter()
    >>> chain.is_running
    True
    >>> chain.leave()
    >>> chain.is_running
    False
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        # Dynamo traces one call at a time, and does not support thread-locals.
        self._traced: list[set[int]] = []
        #: Of the owner's hooks.
        self.handles: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[type[Chain], tuple[()]]:
        # A copy of a model is not running.
        return type(self), ()

    def enter(self, *_: Any) -> None:
        """A forward pre-hook of the owner."""
        self._calls().append(set())

    def leave(self, *_: Any) -> None:
        """A forward hook of the owner, called after an error too."""
        self._calls().pop()

    @property
    def is_running(self) -> bool:
        """Whether the owner runs in this thread."""
        return bool(self._calls())

    def check(self, layer: nn.Module) -> None:
        """Raise unless the owner is running and has not called this layer yet."""
        calls = self._calls()
        if not calls or id(layer) in calls[-1]:
            raise FoldedLayerError(_message("is called"))
        calls[-1].add(id(layer))

    def _calls(self) -> list[set[int]]:
        if torch.compiler.is_compiling():
            return self._traced
        found: list[set[int]] | None = getattr(self._threads, "calls", None)
        if found is None:
            found = self._threads.calls = []
        return found


def _message(what: str, hint: str = "") -> str:
    return (
        f"compress: a folded layer {what} outside of the module that joins it with its neighbour, which the example "
        "did not do: units that only the neighbour reads are removed from it. Hint: mw.compress(model, example) with "
        f"this call as the example leaves the layer as it was{hint}."
    )


class _Guarded(nn.Module):
    """A layer that runs only in its chain."""

    chain: Chain | None = None
    #: Whether its weight may be read outside of the chain: the fast path of torch's encoders does.
    is_readable = False

    def forward(self, input: Tensor) -> Tensor:
        """The output of the layer, in its chain."""
        if self.chain is None:
            raise FoldedLayerError(_message("without its chain is called"))
        self.chain.check(self)
        out: Tensor = super().forward(input)
        return out

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not self.is_readable and self.chain is not None and not self.chain.is_running:
            raise FoldedLayerError(_message("has its weight read", "; layer.state_dict()['weight'] to inspect it"))
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """The sizes, and that it is folded."""
        return f"{super().extra_repr()}, folded"


class FoldedLinear(_Guarded, nn.Linear):
    """``torch.nn.Linear`` in a chain."""


class FoldedConv2d(_Guarded, nn.Conv2d):
    """``torch.nn.Conv2d`` in a chain."""


class FoldedSparseLinear(_Guarded, SparseLinear):
    """SparseLinear in a chain."""


class FoldedLiveLinear(_Guarded, LiveLinear):
    """LiveLinear in a chain."""


class FoldedLiveConv2d(_Guarded, LiveConv2d):
    """LiveConv2d in a chain."""


_FOLDED: dict[type[nn.Module], type[_Guarded]] = {
    nn.Linear: FoldedLinear,
    nn.Conv2d: FoldedConv2d,
    SparseLinear: FoldedSparseLinear,
    LiveLinear: FoldedLiveLinear,
    LiveConv2d: FoldedLiveConv2d,
}
_UNFOLDED: dict[type[nn.Module], type[nn.Module]] = {folded: kind for kind, folded in _FOLDED.items()}


class FoldedEncoderLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer`` as the owner of a chain; hooks would disable its fast path."""

    chain: Chain

    def _ff_block(self, x: Tensor) -> Tensor:
        self.chain.enter()
        try:
            return super()._ff_block(x)
        finally:
            self.chain.leave()


_UNFOLDED[FoldedEncoderLayer] = nn.TransformerEncoderLayer


def unfolded_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module; for a layer in a chain, its class outside of one.

    >>> unfolded_class(nn.ReLU())
    <class 'torch.nn.modules.activation.ReLU'>
    """
    return _UNFOLDED.get(type(module), type(module))


def guard(model: nn.Module, owner: nn.Module, layers: list[nn.Module]) -> nn.Module:
    """Replace layers by guarded ones of the same state, which run only in their owner. Returns the model."""
    chain = Chain()
    for layer in layers:
        new = _same_state(layer, _FOLDED[type(layer)])
        new.chain, new.is_readable = chain, isinstance(owner, nn.TransformerEncoderLayer)
        model = replace_module(model, layer, new)
    if isinstance(owner, nn.TransformerEncoderLayer):
        folded = _same_state(owner, FoldedEncoderLayer)
        folded.chain = chain
        return replace_module(model, owner, folded)
    chain.handles = [
        owner.register_forward_pre_hook(chain.enter),
        owner.register_forward_hook(chain.leave, always_call=True),
    ]
    return model


def unguard(model: nn.Module, owner: nn.Module, layers: list[nn.Module]) -> nn.Module:
    """Undo `guard`: put back the very modules that were passed to it. Returns the model."""
    guarded = {id(module._parameters): module for module in model.modules() if isinstance(module, _Guarded)}
    chain = guarded[id(layers[0]._parameters)].chain
    assert chain is not None
    for layer in layers:
        model = replace_module(model, guarded[id(layer._parameters)], layer)
    for handle in chain.handles:
        handle.remove()
    for module in list(model.modules()):
        if isinstance(module, FoldedEncoderLayer) and module.chain is chain:
            model = replace_module(model, module, owner)
    return model


def chains(model: nn.Module) -> list[tuple[str, list[str]]]:
    """The chains of a model: the name of each owner, and those of its layers."""
    owners: dict[Chain, str] = {}
    layers: dict[Chain, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FoldedEncoderLayer):
            owners[module.chain] = name
        elif isinstance(module, _Guarded) and module.chain is not None:
            layers.setdefault(module.chain, []).append(name)
        for hook in hooks(module):
            if (chain := chain_of(hook)) is not None:
                owners[chain] = name
    return [(owners[chain], found) for chain, found in layers.items()]


def chain_of(hook: Any) -> Chain | None:
    """The chain whose guard this hook is, or None for any other hook."""
    chain = getattr(hook, "__self__", None)
    return chain if isinstance(chain, Chain) else None


def _same_state(module: nn.Module, kind: Any) -> Any:
    new = kind.__new__(kind)
    new.__dict__.update(module.__dict__)
    return new
