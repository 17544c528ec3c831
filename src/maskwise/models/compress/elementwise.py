"""What may stand between two layers for a unit of the first to be folded into the second: each unit for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Step", "step_of", "step_of_function"]

_ACTIVATIONS = (
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU),
    *(nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink),
    *(nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold),
)
_DROPOUTS = (nn.AlphaDropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
#: Of a channel that is the same everywhere they make one that is the same everywhere; no padding of theirs is read.
_POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.MaxPool2d)
_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(F.celu, F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid, F.mish, F.relu),
        *(F.relu6, F.selu, F.sigmoid, F.silu, F.softplus, F.softsign, F.tanh),
        *(torch.relu, torch.sigmoid, torch.tanh),
    }
)


@dataclass(frozen=True, eq=False)
class Step:
    """One thing between two layers: what it does to the values of units, and the module that does it, if one does."""

    run: Callable[[Tensor], Tensor]
    module: nn.Module | None = None

    @property
    def has_units(self) -> bool:
        """Whether it holds something for each unit, and shrinks with them."""
        return isinstance(self.module, _NORMS)


def step_of(module: nn.Module) -> Step | None:
    """The step that a module is in evaluation, or None if it is none.

    >>> step_of(nn.LayerNorm(3)) is None, step_of(nn.ReLU()).run(torch.tensor([-1.0, 1.0]))
    (True, tensor([0., 1.]))
    """
    kind = type(module)
    if kind in _DROPOUTS or kind in _POOLS:
        return Step(lambda x: x, module)
    if kind in _NORMS:
        assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
        # Without running statistics it looks at the batch, in evaluation too.
        return Step(module, module) if module.running_mean is not None else None
    if kind in _ACTIVATIONS:
        return Step(module, module)
    return None


def step_of_function(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
    """The step that a call is of which these are the arguments after the first, or None if it is none."""
    if function not in _FUNCTIONS or not all(isinstance(each, bool | int | float | str) for each in args):
        return None
    if not all(isinstance(each, bool | int | float | str) for each in kwargs.values()):
        return None
    return Step(partial(_call, function, args, {name: value for name, value in kwargs.items() if name != "inplace"}))


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Tensor:
    out: Tensor = function(x, *args, **kwargs)
    return out
