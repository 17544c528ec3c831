"""Layers without the units that only their neighbour reads, which therefore nobody else may call.

What an example does not show cannot be proven: another argument of the model's forward may call the layer by itself,
for its features. So the layers of a chain run only while the module is running whose forward joins them, thread by
thread; called from elsewhere they raise, instead of giving fewer units than the model had.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.compress.copying import put
from maskwise.models.compress.live_units import LiveConv2d, LiveLinear
from maskwise.models.compress.problems import FoldedLayerError
from maskwise.nn import SparseLinear

__all__ = ["Chain", "chains", "guard", "kind_of", "unguard"]


class Chain:
    """Layers that fit only each other: which of them have run in the call of their owner that is running now.

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
        # Dynamo traces one call at a time, and cannot see what belongs to a thread.
        self._traced: list[set[int]] = []

    def __reduce__(self) -> tuple[type[Chain], tuple[()]]:
        # A copy of a model is not running.
        return type(self), ()

    def enter(self, *_: Any) -> None:
        """The owner begins; a forward pre-hook."""
        self._calls().append(set())

    def leave(self, *_: Any) -> None:
        """The owner ends, be it by an error; a forward hook."""
        self._calls().pop()

    @property
    def is_running(self) -> bool:
        """Whether the owner runs in this thread."""
        return bool(self._calls())

    def check(self, layer: nn.Module) -> None:
        """Raise unless the owner is running, and has not called this layer before."""
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
        f"compress: a layer {what} outside of the module that joins it with its neighbour, which the example did not "
        "show: units that only the neighbour reads are left out of it. Hint: mw.compress(model, example) with this "
        f"call as the example leaves the layer as it was{hint}."
    )


class _Guarded(nn.Module):
    """A layer that runs only in its chain."""

    chain: Chain | None = None
    #: Whether its weight may be read from elsewhere: torch's encoders do, in their fast path.
    is_readable = False

    def forward(self, input: Tensor) -> Tensor:
        """What the layer gives, in its chain."""
        if self.chain is None:
            raise FoldedLayerError(_message("without its chain is called"))
        self.chain.check(self)
        out: Tensor = super().forward(input)
        return out

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not self.is_readable and self.chain is not None and not self.chain.is_running:
            raise FoldedLayerError(_message("has its weight read", "; layer.state_dict()['weight'] to look at it"))
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """What is printed."""
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
_KINDS: dict[type[nn.Module], type[nn.Module]] = {folded: kind for kind, folded in _FOLDED.items()}


class FoldedEncoderLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer`` as the owner of a chain. Torch's fast path is for layers without hooks."""

    chain: Chain

    def _ff_block(self, x: Tensor) -> Tensor:
        self.chain.enter()
        try:
            return super()._ff_block(x)
        finally:
            self.chain.leave()


_KINDS[FoldedEncoderLayer] = nn.TransformerEncoderLayer


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, or that of the layer which it is in a chain.

    >>> kind_of(nn.ReLU())
    <class 'torch.nn.modules.activation.ReLU'>
    """
    return _KINDS.get(type(module), type(module))


def guard(model: nn.Module, owner: nn.Module, layers: list[nn.Module]) -> nn.Module:
    """Let layers run in their owner alone: all of them become others of the same state. Returns the model."""
    chain = Chain()
    for layer in layers:
        new = _same_state(layer, _FOLDED[type(layer)])
        new.chain, new.is_readable = chain, isinstance(owner, nn.TransformerEncoderLayer)
        model = put(model, layer, new)
    if isinstance(owner, nn.TransformerEncoderLayer):
        folded = _same_state(owner, FoldedEncoderLayer)
        folded.chain = chain
        return put(model, owner, folded)
    owner.register_forward_pre_hook(chain.enter)
    owner.register_forward_hook(chain.leave, always_call=True)
    return model


def unguard(model: nn.Module, owner: nn.Module, layers: list[nn.Module]) -> nn.Module:
    """Undo `guard`: the very modules that were given to it are back in their places. Returns the model."""
    places = {id(found._parameters): found for found in model.modules() if isinstance(found, _Guarded)}
    for layer in layers:
        new = places[id(layer._parameters)]
        chain = new.chain
        model = put(model, new, layer)
        for hooks in (owner._forward_pre_hooks, owner._forward_hooks):
            for key, hook in list(hooks.items()):
                if chain is not None and getattr(hook, "__self__", None) is chain:
                    del hooks[key]
                    owner._forward_hooks_always_called.pop(key, None)
        for found in list(model.modules()):
            if isinstance(found, FoldedEncoderLayer) and found.chain is chain:
                model = put(model, found, owner)
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
        for hook in module._forward_pre_hooks.values():
            if isinstance(getattr(hook, "__self__", None), Chain):
                owners[hook.__self__] = name
    return [(owners[chain], found) for chain, found in layers.items()]


def _same_state(module: nn.Module, kind: Any) -> Any:
    new = kind.__new__(kind)
    new.__dict__.update(module.__dict__)
    return new
