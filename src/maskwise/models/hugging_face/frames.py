"""What the running calls of unpadded models know: one frame a call, one stack a thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import nn

from maskwise.models.packing import Packing

__all__ = ["Frame", "enter", "leave", "packing_of", "running"]


@dataclass(frozen=True, eq=False)
class Frame:
    """One call: of which module, packed how, or else the reason why whatever it calls must run padded."""

    module: nn.Module
    packing: Packing | None = None
    padded: str | None = None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()


def enter(frame: Frame) -> None:
    """A call begins."""
    _stack.frames.append(frame)


def leave(module: nn.Module) -> Frame | None:
    """The module's call ends, also by an exception. None if it never began."""
    if _stack.frames and _stack.frames[-1].module is module:
        return _stack.frames.pop()
    return None


def running() -> Frame | None:
    """The innermost call, or None outside of any."""
    return _stack.frames[-1] if _stack.frames else None


def packing_of() -> Packing | None:
    """How the innermost call is packed, or None where it is not."""
    frame = running()
    return frame.packing if frame is not None else None
