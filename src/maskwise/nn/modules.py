"""Whether what is given as a module is one."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from maskwise.errors import ArgumentError, DtypeError, say

__all__ = ["check_initialized", "check_linear", "check_module"]


def check_module(op: str, module: object, argument: str = "model") -> None:
    """Raise unless it is a module, and no class of them."""
    if not isinstance(module, nn.Module):
        hint = f"{module.__name__}(...)" if isinstance(module, type) else "torch.nn.Sequential(...)"
        raise DtypeError(say(op, argument, must="be a torch.nn.Module", got=type(module).__name__, hint=hint))


def check_linear(op: str, linear: object) -> None:
    """Raise unless it is a torch.nn.Linear with weights."""
    if not isinstance(linear, nn.Linear):
        hint = "module.linear, or mw.nn.prune(model, ...) for a whole model; convolutions have no such form"
        raise DtypeError(say(op, "linear", must="be a torch.nn.Linear", got=type(linear).__name__, hint=hint))
    check_initialized(op, "linear", linear.weight)


def check_initialized(op: str, argument: str, weight: Tensor | None) -> None:
    """Raise for the weight of a lazy module that has had no input yet."""
    if weight is not None and is_lazy(weight):
        must, hint = "have weights of a known shape", "model(example) once before, which initializes lazy modules"
        raise ArgumentError(say(op, argument, must=must, got="an uninitialized parameter of a lazy module", hint=hint))
