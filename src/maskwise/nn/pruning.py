"""Gate a whole model, and choose its topology again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.nn.attaching import attach, check_attach
from maskwise.nn.gated import gated
from maskwise.nn.gates import Gate, Selecting, TopK
from maskwise.nn.gates.fitting import check_density, share
from maskwise.nn.gates.selecting import largest, scores_of
from maskwise.nn.modules import check_module
from maskwise.nn.weights import weights_of

__all__ = ["prune", "reselect"]

M = TypeVar("M", bound=nn.Module)
Pattern: TypeAlias = str | type[nn.Module]


def prune(
    model: M,
    gate_factory: Callable[[], Gate],
    include: Pattern | Sequence[Pattern] | None = None,
    exclude: Pattern | Sequence[Pattern] = (),
    name: str | None = None,
) -> M:
    """Put a gate on every layer of a model, with one budget for each layer or one for all of them.

    >>> import torch, maskwise as mw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> _ = mw.nn.prune(model, lambda: mw.nn.gates.TopK(0.1, scope="global"))
    >>> mw.nn.report(model).kept, round(0.1 * (8 * 16 + 16 * 4))
    (19, 19)

    With ``TopK(density, scope="global")`` the largest weights of all these layers together are kept, exactly
    ``round(density * all weights)`` of them. Other gates see to their own layer.

    Weights are what an input is multiplied by: those of linear layers, convolutions, recurrent layers, the projections
    of ``nn.MultiheadAttention``, the ``Conv1D`` of transformers (GPT-2), and experts, whose weights have three dims.
    Tables of embeddings and whatever else has two dims or more are left out, and `mw.nn.report` lists them with the
    reason. A weight that is tied to an embedding is masked where it is multiplied, and not where it is looked up.

    ``NM`` takes the dims as the weight holds them: the input of a Conv1D is dim 0.

    Args:
        model: any module; it may itself be a layer.
        gate_factory: called without arguments for each layer, and returns a new gate.
        include: which modules: types, or patterns of their names such as ``"encoder.*.linear?"``; each must match one.
            By default, every one with weights.
        exclude: which of these not, in the same way.
        name: the tensor of each module that is gated. By default its weights; of a module of another kind that
            ``include`` matches, the tensor ``"weight"``.

    Returns:
        The model, changed in place; if one layer cannot be gated, none is.

    Raises:
        DtypeError: ``model`` is not a module, the factory cannot be called or does not return a gate, or a pattern is
            neither a name nor a type.
        ArgumentError: a pattern matches nothing, no layer is left, or a layer has a gate already or is a lazy one that
            is not initialized.
        ShapeError: a gate does not fit a layer's weight.
    """
    check_module("prune", model)
    if isinstance(gate_factory, Gate) or not callable(gate_factory):
        kind = type(gate_factory).__name__
        must = "be a function that makes a gate, since each layer needs its own"
        raise DtypeError(say("prune", "gate_factory", must=must, got=kind, hint=f"lambda: {kind}(...)"))
    chosen = _chosen(model, include, exclude, name)
    gates = [gate_factory() for _ in chosen]
    # Everything is tried before anything is changed.
    weights = [check_attach(module, gate, tensor) for (module, tensor), gate in zip(chosen, gates, strict=True)]
    if len({id(gate) for gate in gates}) < len(gates):
        must = "make a new gate at every call"
        raise ArgumentError(say("prune", "gate_factory", must=must, got="the same one twice", hint="lambda: TopK(0.1)"))
    _one_density("prune", [*gates, *(found.gate for found in gated(model))])
    try:
        for gate, weight in zip(gates, weights, strict=True):
            gate.bind(weight)
    finally:
        for gate in gates:
            gate.bound = False
    for (module, tensor), gate in zip(chosen, gates, strict=True):
        attach(module, gate, tensor)
    _select_together(model)
    return model


def reselect(model: nn.Module, density: float | None = None) -> None:
    """Choose again what is kept, in every gate of a model that chooses: TopK, NM, Block.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.attach(torch.nn.Linear(10, 10), mw.nn.gates.TopK(0.5))
    >>> mw.nn.reselect(layer, density=0.2)
    >>> mw.nn.report(layer).density
    0.2

    Args:
        model: a model with gates.
        density: the share that is kept from now on; by default, each gate's own. NM has none to set.

    Raises:
        ArgumentError: the density is not between 0 and 1, or no gate of the model has one.
        DtypeError: ``model`` is not a module, or the density is not a number.
    """
    check_module("reselect", model)
    choosing = [(found, found.gate) for found in gated(model) if isinstance(found.gate, Selecting)]
    if density is not None:
        value = check_density("reselect", density)
        settable = [gate for _, gate in choosing if gate.density is not None]
        if not settable:
            must = "have a gate with a density, TopK or Block"
            kinds = sorted({type(found.gate).__name__ for found in gated(model)})
            got = ", ".join(kinds) if kinds else "no gates"
            hint = "mw.nn.prune(model, lambda: TopK(0.1))"
            raise ArgumentError(say("reselect", "model", must=must, got=got, hint=hint))
        for gate in settable:
            gate.density = value
    _one_density("reselect", [gate for _, gate in choosing])
    for found, gate in choosing:
        if not _is_global(gate):
            gate.select(found.weight())
    _select_together(model)


def _is_global(gate: Gate) -> bool:
    return isinstance(gate, TopK) and gate.scope == "global"


def _one_density(op: str, gates: Iterable[Gate]) -> None:
    """Raise unless the gates of global scope, which share one budget, agree on it."""
    densities = sorted({gate.density for gate in gates if isinstance(gate, TopK) and _is_global(gate)})
    if len(densities) > 1:
        must = "be the same for all gates of global scope, which share one budget"
        hint = "mw.nn.reselect(model, density=0.1)"
        raise ArgumentError(say(op, "density", must=must, got=densities, hint=hint))


@torch.no_grad()
def _select_together(model: nn.Module) -> None:
    """Share one budget among all the gates of global scope."""
    together = [(found, found.gate) for found in gated(model) if isinstance(found.gate, TopK)]
    together = [(found, gate) for found, gate in together if _is_global(gate)]
    if not together:
        return
    weights = [found.weight() for found, _ in together]
    scores = [scores_of(weight).reshape(-1) for weight in weights]
    # In one order, of the widest dtype, where the first weight is.
    ranked = torch.cat([score.to(device=scores[0].device) for score in scores])
    kept = largest(ranked, share(together[0][1].density, ranked.shape))
    start = 0
    for (_, gate), weight in zip(together, weights, strict=True):
        bits = kept[start : start + weight.numel()]
        gate.hold(bits.reshape(weight.shape).to(weight.device))
        start += weight.numel()


def _chosen(
    model: nn.Module,
    include: Pattern | Sequence[Pattern] | None,
    exclude: Pattern | Sequence[Pattern],
    name: str | None,
) -> list[tuple[nn.Module, str]]:
    """The tensors to gate: of modules that are included and not excluded, each once."""
    wanted, unwanted = None if include is None else _patterns("include", include), _patterns("exclude", exclude)
    named = dict(model.named_modules())
    for argument, patterns in (("include", wanted or ()), ("exclude", unwanted)):
        for pattern in patterns:
            if isinstance(pattern, str) and not any(fnmatchcase(each, pattern) for each in named):
                some = [each for each in named if each][:5]
                must = "match the name of a module"
                raise ArgumentError(say("prune", argument, must=must, got=repr(pattern), hint=f"names are {some}, ..."))
    chosen = [
        (module, tensor)
        for each, module in named.items()
        if (wanted is None or any(_matches(pattern, each, module) for pattern in wanted))
        and not any(_matches(pattern, each, module) for pattern in unwanted)
        for tensor in _names(module, name, by_pattern=wanted is not None)
    ]
    if not chosen:
        kinds = sorted({type(module).__name__ for module in named.values()})
        must = "have a layer to gate" + ("" if name is None else f", with a {name!r}")
        hint = "include=nn.Linear, exclude=()"
        raise ArgumentError(say("prune", "model", must=must, got=f"modules of {kinds}", hint=hint))
    return chosen


def _names(module: nn.Module, name: str | None, *, by_pattern: bool) -> list[str]:
    if name is not None:
        # A pattern of names reaches activations and containers too.
        return [name] if hasattr(module, name) else []
    found = weights_of(module)
    return ["weight"] if by_pattern and not found and hasattr(module, "weight") else found


def _patterns(argument: str, given: Pattern | Sequence[Pattern]) -> list[Pattern]:
    patterns = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for pattern in patterns:
        if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            hint = f'{argument}=nn.Linear, or {argument}="encoder.*"'
            raise DtypeError(say("prune", argument, must="be names or types of modules", got=repr(pattern), hint=hint))
    return patterns


def _matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern)
