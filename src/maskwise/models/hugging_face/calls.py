"""The calls of unpadded Hugging Face models: the state of a model, how it is run, and which calls are running."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from maskwise.models.hugging_face.generation import new_cache, packed_cache
from maskwise.models.hugging_face.layout import Layout, keys_of, mask_of, pack_arguments
from maskwise.models.linear import fast_linear
from maskwise.models.packing import Packing, on_kept_tokens
from maskwise.models.quantized import QuantizedLayers
from maskwise.models.routes import Padded

__all__ = [
    "COVERED",
    "PREFIX",
    "STATE",
    "Frame",
    "State",
    "call",
    "calls",
    "is_recorded",
    "layout_for",
    "layout_of",
    "original",
    "packed_parts",
    "packing_of",
    "recording",
    "run_packed",
    "running",
    "state_of",
]

PREFIX = "maskwise_"
"""Before the name of the attention that padded calls go on using: maskwise_sdpa, maskwise_eager."""
STATE, COVERED = "_maskwise_state", "_maskwise_covered"
"""The attributes of a covered module: its state, and a forward that something else had put there."""


@dataclass
class State:
    """The state of an unpadded model; it is copied and pickled along with it.

    Attributes:
        implementation: the attention that its config names.
        base: whether it is packed itself, or holds models that are.
        causal: whether it is a decoder.
        embeddings: the path of embeddings that number only tokens which are not padding.
        limit: how many positions it has.
        spare: how many places a packed call leaves at its end.
        eager: whether a query that finds no key reads dropped ones, as torch's own attention does not.
        empty_windows: whether there are windows in which a query may find none.
        computes_first: whether a dropped first token, which heads read all the same, comes out as it does padded.
        routers: whether router logits do.
        prefills: whether a cache that a packed call fills does.
        cross: whether its cross attention reads packed tokens.
        kinds: the layout of its packed outputs, by their paths.
        layers: of a head, the linear layers that read one row for each token, with what they read.
        checked: whether it was compared with the padded model; a model without weights is, at its first call.
        quantized: which layers were quantized then; with others it is compared again.
    """

    implementation: str
    base: bool
    causal: bool = False
    embeddings: str | None = None
    limit: int | None = None
    spare: int = 0
    eager: bool = False
    empty_windows: bool = False
    computes_first: bool = True
    routers: bool = True
    prefills: bool = False
    cross: bool = False
    kinds: dict[str, str] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    checked: bool = False
    quantized: QuantizedLayers = field(default_factory=QuantizedLayers)

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        # In another process the attention is not registered yet. Imported here, since it imports this module.
        from maskwise.models.hugging_face.attention import register_for

        register_for(self.implementation.removeprefix(PREFIX))


def state_of(module: nn.Module) -> State:
    """The state of a covered module."""
    state: State = vars(module)[STATE]
    return state


def packed_parts(model: nn.Module) -> list[nn.Module]:
    """The modules in a model, itself included, that are packed."""
    return [each for each in model.modules() if STATE in vars(each) and state_of(each).base]


def original(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call what is covered: the class's own forward, or one that something else (a device map, say) had put there."""
    covered = vars(module).get(COVERED)
    return type(module).forward(module, *args, **kwargs) if covered is None else covered(*args, **kwargs)


def layout_for(state: State, named: dict[str, Any]) -> Layout:
    """The positions of the tokens that the masks of a call keep, in a packed call."""
    packing = Packing.of(mask_of(named) != 0, watch_first=not state.causal)
    return Layout.of(packing, limit=state.limit, spare=state.spare, keys=keys_of(named))


def run_packed(module: nn.Module, named: dict[str, Any], layout: Layout, *, fill: bool = False) -> Any:
    """The output of a packed call as it comes, packed.

    Args:
        module: the base model.
        named: the arguments of the padded call.
        layout: the positions of its tokens.
        fill: whether a cache is filled: the one that is given, or a new one.
    """
    packed = pack_arguments(module, named, layout, state_of(module).embeddings)
    given = named.get("past_key_values")
    cache = (new_cache(module) if given is None else given) if fill else None
    if cache is not None:
        packed |= {"past_key_values": packed_cache(cache, layout), "use_cache": True}
    frame = Frame(layout, ids=named.get("input_ids"))
    with call(frame), on_kept_tokens(layout.packing), fast_linear(tokens=layout.tokens):
        output = original(module, **packed)
    if cache is not None:
        output["past_key_values"] = cache
    return output


# -- the running calls: one frame for each, one stack for each thread --------------------------------------------------
@dataclass(frozen=True, eq=False)
class Frame:
    """One call of an unpadded module.

    Attributes:
        layout: the positions of the tokens, if they are packed.
        padded: why everything in the call must run padded.
        labelled: whether the call computes a loss.
        caches: what the caller has given as ``use_cache``; None for nothing.
        ids: the tokens of a packed call in the padded layout, if they were given as ids.
    """

    layout: Layout | None = None
    padded: Padded | None = None
    labelled: bool = False
    caches: bool | None = None
    ids: Tensor | None = None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.calls = 0
        self.record: list[Frame] | None = None


_stack = _Stack()


@contextmanager
def call(frame: Frame) -> Iterator[None]:
    """Push the frame of a call while it runs."""
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
    """Collect every call of this thread, for a comparison: it is no call of the user's, so nothing reports it."""
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
    """The layout of the innermost call's tokens, or None where it is not packed."""
    frame = running()
    return frame.layout if frame is not None else None


def packing_of() -> Packing | None:
    """How the innermost call is packed, or None where it is not."""
    layout = layout_of()
    return layout.packing if layout is not None else None
