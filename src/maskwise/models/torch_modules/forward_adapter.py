"""The adapter of a kind of torch's modules that is served by a forward in front of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from maskwise.models.binding import bind, unbind

__all__ = ["ForwardAdapter", "Parts", "not_torchs_own"]

Parts: TypeAlias = Iterable[tuple[nn.Module, Callable[..., Any]]]


def not_torchs_own(module: nn.Module, kind: type[nn.Module]) -> str:
    """Why a module of this kind does not do what torch's does, or nothing."""
    if type(module).forward is not kind.forward:
        return f"{type(module).__name__} has a forward of its own"
    return "something else has replaced its forward already" if "forward" in vars(module) else ""


def no_parts(module: nn.Module) -> Parts:
    """What a module has that calls no other."""
    return ()


@dataclass(frozen=True)
class ForwardAdapter:
    """Serves one kind of module.

    Attributes:
        kind: the class in torch.nn.
        reason: why a module of that kind cannot run packed, or nothing.
        forward: what stands in front of the module's own forward, which it gets with the module before its arguments.
        parts: the modules that it calls with packed tokens, each with what stands in front of its own forward. They
            are called as torch calls them, so that all hooks fire.
    """

    kind: type[nn.Module]
    reason: Callable[[Any], str]
    forward: Callable[..., Any]
    parts: Callable[[Any], Parts] = no_parts

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

    def install(self, module: nn.Module) -> None:
        """Put the packed forward in front."""
        bind(module, "forward", self.forward)
        for part, forward in self.parts(module):
            bind(part, "forward", forward)

    def undo(self, module: nn.Module) -> None:
        """Uncover torch's own."""
        unbind(module, "forward")
        for part, _ in self.parts(module):
            unbind(part, "forward")
