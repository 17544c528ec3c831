"""Which layers provably feed one another, and nobody else: in nn.Sequential, in torch's encoder layers, in a trace."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch import nn

from maskwise.models.compress.copying import has_hooks, places
from maskwise.models.compress.elementwise import Step, step_of, step_of_function
from maskwise.models.compress.example import Watched
from maskwise.models.compress.straight import is_straight

__all__ = ["Link", "links"]


@dataclass(frozen=True, eq=False)
class Link:
    """A layer whose every output goes through some steps into another layer, and nowhere else."""

    first: nn.Linear | nn.Conv2d
    steps: tuple[Step, ...]
    second: nn.Linear | nn.Conv2d
    #: The module whose forward calls all of them, one after the other, whatever else happens.
    owner: nn.Module


def links(model: nn.Module, seen: Mapping[nn.Module, Watched]) -> list[Link]:
    """All links of a model in evaluation, in order; ``seen`` tells how often each module was called.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
    >>> seen = {module: Watched(1, torch.ones(4, 2)) for module in model.modules()}
    >>> [(link.first, link.second) == (model[0], model[2]) for link in links(model, seen)]
    [True]
    """
    found: list[Link] = []
    for link in _possible(model):
        owner = link.owner
        layers = [link.first, link.second]
        modules = [*layers, *(step.module for step in link.steps if step.module is not None)]
        # Called as often as what they are in: nobody calls them from elsewhere.
        once = all(seen[module].calls == seen[owner].calls for module in layers) and seen[owner].calls > 0
        held_once = all(len(places(model, module)) == 1 for module in layers)
        if once and held_once and not any(map(has_hooks, modules)) and _fit(link, seen):
            found.append(link)
    return found


def _possible(model: nn.Module) -> Iterator[Link]:
    inner = {child for module in model.modules() if _is_sequential(module) for child in module.children()}
    for module in model.modules():
        if _is_sequential(module):
            # The leaves of an inner one are among those of the outer one, which are looked at there.
            if module not in inner or has_hooks(module):
                yield from _in_order([_step_or_layer(leaf) for leaf in _leaves(module)], module)
        elif type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
            first, second, act = module.linear1, module.linear2, module.activation
            step = step_of(act) if isinstance(act, nn.Module) else step_of_function(act, (), {})
            is_torchs = not {"forward", "_ff_block"} & vars(module).keys()
            if is_torchs and type(first) is nn.Linear and type(second) is nn.Linear and step is not None:
                yield Link(first, (step,), second, module)
        else:
            yield from _in_order_of_trace(module)


def _is_sequential(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Sequential.forward and type(module).__iter__ is nn.Sequential.__iter__


def _leaves(sequential: nn.Module) -> Iterator[nn.Module]:
    for child in sequential.children():
        if _is_sequential(child) and not has_hooks(child):
            yield from _leaves(child)
        else:
            yield child


def _step_or_layer(module: nn.Module) -> Any:
    """A layer with units, a step, or None for what breaks a chain."""
    if type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1):
        return module
    return step_of(module)


def _in_order(parts: list[Any], owner: nn.Module) -> Iterator[Link]:
    last: nn.Linear | nn.Conv2d | None = None
    steps: list[Step] = []
    for part in parts:
        if isinstance(part, nn.Linear | nn.Conv2d):
            if last is not None and type(last) is type(part) and last is not part:
                yield Link(last, tuple(steps), part, owner)
            last, steps = part, []
        elif isinstance(part, Step):
            steps.append(part)
        else:
            last = None


def _fit(link: Link, seen: Mapping[nn.Module, Watched]) -> bool:
    """Whether the steps treat the units of this layer each for itself, and the sizes are those of a chain."""
    x = seen[link.first].x
    if x is None or link.first.weight.shape[0] != link.second.weight.shape[1]:
        return False
    kinds = [type(step.module) for step in link.steps]
    if isinstance(link.first, nn.Linear):
        # In three dims, a batch norm takes the second for its units, and a linear layer the last.
        flat = x.dim() == 2 or nn.BatchNorm1d not in kinds
        images = (nn.BatchNorm2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
        return flat and not any(kind in images for kind in kinds)
    return x.dim() == 4 and nn.BatchNorm1d not in kinds


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _in_order_of_trace(module: nn.Module) -> Iterator[Link]:
    """The links of a module's own forward, if that can be traced and is the same for every call."""
    layers = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    if len(layers) < 2 or len(inspect.signature(module.forward).parameters) != 1 or not is_straight(module):
        return
    try:
        graph = _Tracer().trace(module)
    except Exception:
        # Whatever it is that cannot be traced is not proven to be a chain.
        return
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in layers or called.count(node.target) != 1:
            continue
        steps: list[Step] = []
        at = node
        while len(at.users) == 1:
            (at,) = at.users
            if (
                not at.args
                or not isinstance(at.args[0], torch.fx.Node)
                or at.op not in ("call_module", "call_function")
            ):
                break
            if at.op == "call_module" and at.target in layers and called.count(at.target) == 1 and not at.kwargs:
                yield Link(layers[node.target], tuple(steps), layers[at.target], module)
                break
            if at.op == "call_module":
                step = step_of(module.get_submodule(str(at.target))) if len(at.args) == 1 else None
            else:
                step = step_of_function(at.target, at.args[1:], dict(at.kwargs))
            if step is None:
                break
            steps.append(step)
