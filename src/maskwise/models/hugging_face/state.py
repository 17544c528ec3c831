"""What is known of an unpadded model, and how it is run: as it was, or packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from maskwise.models.hugging_face.frames import Frame, call
from maskwise.models.hugging_face.inputs import pack_arguments
from maskwise.models.hugging_face.interface import PREFIX, register_for
from maskwise.models.hugging_face.layout import Layout
from maskwise.models.packing import Packing

__all__ = ["COVERED", "STATE", "State", "layout_for", "original", "packed_parts", "run_packed", "state_of"]

STATE, COVERED = "_maskwise_state", "_maskwise_covered"
"""The attributes of a covered module: what is known of it, and a forward that something else had put there."""


@dataclass
class State:
    """What is known of an unpadded model; it is copied and pickled along with it.

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
        kinds: how its outputs lie when they are packed, by their paths.
        checked: whether it was compared with the padded model; a model without weights is, at its first call.
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
    kinds: dict[str, str] = field(default_factory=dict)
    checked: bool = False

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        # In another process nobody has registered the attention yet.
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


def layout_for(state: State, mask: Tensor) -> Layout:
    """Where the tokens that a mask keeps lie in a packed call."""
    return Layout.of(Packing.of(mask != 0, watch_first=not state.causal), limit=state.limit, spare=state.spare)


def run_packed(module: nn.Module, named: dict[str, Any], layout: Layout) -> Any:
    """The output of a packed call as it comes, packed."""
    packed = pack_arguments(module, named, layout, state_of(module).embeddings)
    with call(Frame(layout)):
        return original(module, **packed)
