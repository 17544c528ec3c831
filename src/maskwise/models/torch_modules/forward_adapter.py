"""The adapter of a kind of torch's modules that is served by a forward in front of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

__all__ = ["ForwardAdapter", "not_torchs_own"]


def not_torchs_own(module: nn.Module, kind: type[nn.Module]) -> str:
    """Why a module of this kind does not do what torch's does, or nothing."""
    if type(module).forward is not kind.forward:
        return f"{type(module).__name__} has a forward of its own"
    return "something else has replaced its forward already" if "forward" in vars(module) else ""


@dataclass(frozen=True)
class ForwardAdapter:
    """Serves one kind of module.

    Attributes:
        kind: the class in torch.nn.
        reason: why a module of that kind cannot run packed, or nothing.
        forward: what stands in front of the module's own forward, which it gets with the module before its arguments.
    """

    kind: type[nn.Module]
    reason: Callable[[Any], str]
    forward: Callable[..., Any]

    @property
    def name(self) -> str:
        """As one writes it."""
        return f"nn.{self.kind.__name__}"

    def serves(self, module: nn.Module) -> tuple[bool, str]:
        """Any of the kind for which there is no reason why not."""
        if not isinstance(module, self.kind):
            return False, ""
        reason = self.reason(module)
        return not reason, reason

    def install(self, module: Any) -> None:
        """Put the packed forward in front."""
        # A partial, unlike a closure or a bound method, is copied and pickled along with its module.
        module.forward = partial(self.forward, module)

    def undo(self, module: nn.Module) -> None:
        """Uncover torch's own."""
        del module.forward
