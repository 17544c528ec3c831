"""What an adapter is, and the registry of those there are: one for each kind of model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from maskwise.errors import ArgumentError, MaskwiseError, say

__all__ = [
    "MARK",
    "Adapter",
    "MixesTokens",
    "QuantizesBatch",
    "QuantizesBatchError",
    "ReadsDroppedError",
    "UnsupportedModelError",
    "adapters",
    "register",
    "unregister",
]

MARK = "_maskwise_adapter"
"""The attribute that names the adapter which serves a module."""


class MixesTokens(str):
    """A reason not to serve a module that holds for everything in it: it reads the outputs of dropped tokens."""

    __slots__ = ()


class QuantizesBatch(MixesTokens):
    """A reason of that kind that holds whatever adapter is tried: layers quantize by one range for a whole batch."""

    __slots__ = ()


class UnsupportedModelError(MaskwiseError, TypeError):
    """No adapter serves the model; the message holds each one's reason."""

    @property
    def reason(self) -> str:
        """The message without its hint, as a part of another."""
        return str(self).partition(" Hint: ")[0].rstrip(".")


class ReadsDroppedError(UnsupportedModelError):
    """A model was compared with its padded self, and differs: it reads the outputs of dropped tokens."""

    kind: type[MixesTokens] = MixesTokens


class QuantizesBatchError(ReadsDroppedError):
    """A layer of a model quantizes by one range for a whole batch."""

    kind = QuantizesBatch


@runtime_checkable
class Adapter(Protocol):
    """How one kind of module runs on kept tokens only. Write one, and pass it to `maskwise.models.register`.

    An adapter has no state of its own: one object serves every module of its kind. What it has to keep about a module
    it leaves on the module, in a form that survives ``copy.deepcopy`` and ``pickle``.

    >>> import torch, maskwise as mw
    >>> from torch import nn
    >>> class Tower(nn.Module):
    ...     '''Token-wise layers, and a (B, L) mask of what is real.'''
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = nn.Linear(4, 4)
    ...     def forward(self, x, keep):
    ...         return self.layers(x)
    >>> class PackTower:
    ...     name = "tower"
    ...     def serves(self, module):
    ...         return isinstance(module, Tower), ""
    ...     def install(self, module):
    ...         module.forward = lambda x, keep: mw.apply(module.layers, x, mask=keep)
    ...     def undo(self, module):
    ...         del module.forward
    >>> mw.models.register(PackTower())
    >>> tower = mw.unpad(Tower())
    >>> out = tower(torch.ones(1, 2, 4), torch.tensor([[True, False]]))
    >>> out[0, 1]
    tensor([0., 0., 0., 0.], grad_fn=<SelectBackward0>)
    >>> mw.models.unregister("tower")

    Attributes:
        name: unique, and what errors call it.
    """

    @property
    def name(self) -> str:
        """Unique, and what errors call it; a plain attribute will do."""
        ...

    def serves(self, module: nn.Module) -> tuple[bool, str]:
        """Whether this very module can be served (its children are checked on their own), and the reason where not."""
        ...

    def install(self, module: nn.Module) -> None:
        """Make the module run on kept tokens only. Raise `UnsupportedModelError` if that does not work."""
        ...

    def undo(self, module: nn.Module) -> None:
        """Bring back what `install` changed, exactly."""
        ...


_ADAPTERS: dict[str, Adapter] = {}


def register(adapter: Adapter) -> None:
    """Add an adapter. The latest is tried first, so that it may serve a model better than those already there.

    >>> import maskwise as mw
    >>> adapter = mw.models.adapters()["nn.TransformerEncoder"]
    >>> mw.models.unregister(adapter.name)
    >>> mw.models.register(adapter)
    >>> next(iter(mw.models.adapters()))
    'nn.TransformerEncoder'

    Args:
        adapter: an object with a ``name`` and the methods of `Adapter`.

    Raises:
        ArgumentError: it lacks one of them, or its name is taken.
    """
    if not isinstance(adapter, Adapter):
        missing = [each for each in ("name", "serves", "install", "undo") if not hasattr(adapter, each)]
        must, hint = "have name, serves, install, undo", "help(maskwise.models.Adapter) shows one"
        raise ArgumentError(say("register", "adapter", must=must, got=f"no {', '.join(missing)}", hint=hint))
    if adapter.name in _ADAPTERS:
        hint = f"maskwise.models.unregister({adapter.name!r}) removes the other"
        raise ArgumentError(say("register", "adapter", must="have a name of its own", got=adapter.name, hint=hint))
    _ADAPTERS[adapter.name] = adapter


def unregister(name: str) -> None:
    """Remove an adapter by its name.

    >>> import maskwise as mw
    >>> adapter = mw.models.adapters()["nn.TransformerEncoder"]
    >>> mw.models.unregister("nn.TransformerEncoder")
    >>> mw.models.register(adapter)

    Args:
        name: the adapter's ``name``.

    Raises:
        ArgumentError: there is none of that name.
    """
    if name not in _ADAPTERS:
        must, hint = f"be one of {', '.join(map(repr, _ADAPTERS))}", "list(maskwise.models.adapters())"
        raise ArgumentError(say("unregister", "name", must=must, got=repr(name), hint=hint))
    del _ADAPTERS[name]


def adapters() -> dict[str, Adapter]:
    """The adapters by name, in the order in which they are tried.

    >>> from maskwise.models import adapters
    >>> "nn.TransformerEncoder" in adapters()
    True
    """
    return dict(reversed(_ADAPTERS.items()))
