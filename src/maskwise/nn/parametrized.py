"""Copies and pickles of parametrized modules, which torch's own parametrize refuses or does by halves.

`torch.nn.utils.parametrize` gives each module a class of its own, with a property in place of the tensor. Pickle does
not find that class, so torch raises. A deepcopy shares the class, so that removing the parametrization from one of both
breaks the other. Here, a module is rebuilt from its own class, the names of its parametrized tensors and its state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

__all__ = ["make_copyable"]


def make_copyable(module: nn.Module) -> None:
    """Let a parametrized module be pickled, and be copied into one that stands on its own.

    >>> import pickle
    >>> layer = nn.Linear(2, 2)
    >>> _ = parametrize.register_parametrization(layer, "weight", nn.Identity())
    >>> make_copyable(layer)
    >>> torch.equal(pickle.loads(pickle.dumps(layer)).weight, layer.weight)
    True
    """
    # Torch made this class for this module alone.
    own: Any = type(module)
    own.__reduce_ex__ = _reduce
    own.__setstate__ = _set_state
    if "__deepcopy__" in vars(own):
        # Torch's stand-in for the class's own; without it, copy goes by __reduce_ex__.
        del own.__deepcopy__


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    base = parametrize.type_before_parametrizations(self)
    # object has it since Python 3.11.
    get = getattr(base, "__getstate__", None)
    state = get(self) if get is not None else self.__dict__
    if isinstance(self, nn.RNNBase):
        # Weights as they were computed for the last call. They are no leaves of a graph, and are computed again.
        state = {**state, "_flat_weights": [None] * len(state["_flat_weights"])}
    return _shell, (base, tuple(self.parametrizations)), state


def _set_state(self: Any, state: dict[str, Any]) -> None:
    super(type(self), self).__setstate__(state)
    if isinstance(self, nn.RNNBase):
        self._init_flat_weights()


def _shell(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A module of this class whose tensors of these names are parametrized, and that has no state yet."""
    shell = base.__new__(base)
    nn.Module.__init__(shell)
    for name in names:
        shell.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(shell, name, nn.Identity(), unsafe=True)
    shell.__dict__.clear()
    make_copyable(shell)
    return shell
