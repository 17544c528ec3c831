"""Copies of models, and putting one module where another was."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["copied", "has_hooks", "places", "put"]

Model = TypeVar("Model", bound=nn.Module)

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def copied(model: Model) -> Model:
    """A deep copy, also of a model that `torch.nn.utils.prune` has been at.

    >>> import torch
    >>> from torch.nn.utils import prune
    >>> layer = prune.random_unstructured(nn.Linear(2, 2), "weight", amount=2)
    >>> torch.equal(copied(layer).weight, layer.weight)
    True
    """
    # Deepcopy refuses tensors that are no leaves of a graph, such as prune leaves behind. They are computed again.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at what goes into or comes out of this module."""
    return any(getattr(module, name, None) for name in _HOOKS)


def places(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where a module is held: each parent, and under which name; a module may be in several places, or in none."""
    return [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is module]


def put(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put a module wherever another was, and return the model, which is the new module if it was the old one.

    >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
    >>> put(model, model[0], nn.Tanh())[0]
    Tanh()
    """
    if model is old:
        return new
    for parent, name in places(model, old):
        parent._modules[name] = new
    return model
