"""Which form each layer takes: all that are exact are timed on what the layer got, and the fastest wins."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from maskwise.models.compress.candidates import Layer, candidates
from maskwise.models.compress.chains import Link
from maskwise.models.compress.folding import fold, shrunk
from maskwise.models.compress.timing import MARGIN, Times, measured

__all__ = ["Choice", "Swap", "choose", "choose_folded"]

DENSE = "dense"


@dataclass(frozen=True)
class Choice:
    """The form of one layer: its module, how long it took, how long the layer took before, and why."""

    kind: str
    module: nn.Module
    reason: str
    times: Times | None = None
    before: Times | None = None
    #: Whether it must stay as it is, and neighbours cannot change it either.
    is_fixed: bool = False


@dataclass
class Swap:
    """Modules that take the place of others, all or none of them."""

    choices: dict[nn.Module, Choice]  # by the layer whose place it takes
    others: dict[nn.Module, nn.Module] = field(default_factory=dict)
    #: The module that joins layers which have fewer units now, and in which alone they run.
    owner: nn.Module | None = None


def choose(
    layer: Layer, x: Tensor, seconds: float, before: nn.Module | None = None, *, why_dense: str | None = None
) -> Choice:
    """Time the forms of a layer on an input; dense wins unless another is faster by more than noise, or may not be.

    >>> layer = Layer.of(nn.Linear(2, 2))
    >>> choose(layer, torch.ones(1, 2), 0.01).kind
    'dense'
    """
    # Under autocast, what comes in may have another dtype than the weight.
    x = x.to(layer.module.weight.dtype)
    forms, refused = candidates(layer, x) if why_dense is None else ({}, [why_dense] if layer.density < 1 else [])
    ways: dict[str, nn.Module] = {DENSE: layer.module, **forms}
    if before is not None:
        ways["before"] = before
    with torch.no_grad():
        times = measured({name: partial(module, x) for name, module in ways.items()}, seconds)
    faster = [name for name in forms if times[name].beats(times[DENSE])]
    best = min(faster, key=lambda name: times[name].best, default=DENSE)
    was = times["before"] if before is not None else times[DENSE]
    told = f"{layer.density:.1%} kept"
    if best == DENSE:
        why = [f"{name} took {times[name].best / times[DENSE].best:.2f} × as long" for name in forms]
        reason = "; ".join([told, *refused, *why])
        return Choice(DENSE, layer.module, reason, times[DENSE], was)
    reason = f"{told}; {times[DENSE].best / times[best].best:.2f} × as fast as dense"
    return Choice(best, ways[best], reason, times[best], was)


def choose_folded(
    links: list[Link],
    layers: dict[nn.Module, Layer],
    inputs: dict[nn.Module, Tensor],
    alone: dict[nn.Module, Choice],
    why_dense: dict[nn.Module, str],
    seconds: float,
) -> Swap | None:
    """The forms of layers that hang together without the units that need not be computed, if that is faster.

    Args:
        links: how they hang together.
        layers: the layers, by module.
        inputs: what each got.
        alone: what would be chosen for each by itself.
        why_dense: which of them stay dense, and why.
        seconds: about how long to measure each.
    """
    group = fold(links, layers)
    changed = {module: folded for module, folded in group.layers.items() if folded.changed}
    if not changed:
        return None
    found: dict[nn.Module, Choice] = {}
    for module, folded in changed.items():
        layer, x = folded.built(layers[module].module), inputs[module]
        x = x.index_select(-1 if isinstance(module, nn.Linear) else -3, folded.inputs)
        choice = choose(layer, x, seconds, why_dense=why_dense.get(module))
        kind = "smaller dense" if choice.kind == DENSE else f"smaller {choice.kind}"
        reason = f"{', '.join(dict.fromkeys(folded.notes))}; {choice.reason}"
        found[module] = Choice(kind, choice.module, reason, choice.times, alone[module].before)
    # Between the layers there is less to do as well, so what is as fast but for noise is folded.
    if _total(found) * MARGIN > _total({module: alone[module] for module in found}):
        return None
    steps = [step for link in links for step in link.steps if step.module in group.norms]
    others = {step.module: shrunk(step, group.norms[step.module]) for step in steps if step.module is not None}
    return Swap(found, others, links[0].owner)


def _total(choices: dict[nn.Module, Choice]) -> float:
    return sum(choice.times.best for choice in choices.values() if choice.times is not None)
