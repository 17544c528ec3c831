"""The running calls of unpadded models: one frame for each call, one stack for each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from maskwise.models.hugging_face.layout import Layout
from maskwise.models.packing import Packing
from maskwise.models.report import Padded

__all__ = ["Frame", "call", "calls", "is_recorded", "layout_of", "packing_of", "recording", "running"]


@dataclass(frozen=True, eq=False)
class Frame:
    """One call of an unpadded module.

    Attributes:
        layout: where the tokens lie, if they are packed.
        padded: why whatever the call contains must run padded.
        labelled: whether the call computes a loss.
    """

    layout: Layout | None = None
    padded: Padded | None = None
    labelled: bool = False


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.calls = 0
        self.record: list[Frame] | None = None


_stack = _Stack()


@contextmanager
def call(frame: Frame) -> Iterator[None]:
    """The time in which a call runs."""
    _stack.frames.append(frame)
    _stack.calls += 1
    if _stack.record is not None:
        _stack.record.append(frame)
    try:
        yield
    finally:
        _stack.frames.pop()


@contextmanager
def recording() -> Iterator[list[Frame]]:
    """Collect every call of this thread, for a comparison: it is no call of the user's, and reported to nobody."""
    frames: list[Frame] = []
    outer, _stack.record = _stack.record, frames
    try:
        yield frames
    finally:
        _stack.record = outer


def is_recorded() -> bool:
    """Whether calls are collected."""
    return _stack.record is not None


def calls() -> int:
    """How many calls of unpadded models this thread has begun."""
    return _stack.calls


def running() -> Frame | None:
    """The innermost call, or None outside of any."""
    return _stack.frames[-1] if _stack.frames else None


def layout_of() -> Layout | None:
    """Where the tokens of the innermost call lie, or None where it is not packed."""
    frame = running()
    return frame.layout if frame is not None else None


def packing_of() -> Packing | None:
    """How the innermost call is packed, or None where it is not."""
    layout = layout_of()
    return layout.packing if layout is not None else None
