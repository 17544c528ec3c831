"""mw.compress: masks and zeros of a model's weights become speed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from maskwise.errors import ArgumentError, say
from maskwise.models.compress.candidates import Layer
from maskwise.models.compress.chains import links
from maskwise.models.compress.choosing import DENSE, Choice, Swap, choose, choose_folded
from maskwise.models.compress.copying import copied, has_hooks
from maskwise.models.compress.example import Example, Watched, largest_difference, watched
from maskwise.models.compress.fast_paths import why_dense
from maskwise.models.compress.folding import groups
from maskwise.models.compress.plain import Origin, make_plain
from maskwise.models.compress.report import CompressionReport
from maskwise.models.compress.rows import described
from maskwise.models.compress.swapping import Swapped
from maskwise.models.compress.timing import Times, measured
from maskwise.nn.modules import check_module

__all__ = ["compress"]

Model = TypeVar("Model", bound=nn.Module)
OP = "compress"
#: What a whole model may take longer before it counts as slower.
NOISE = 1.05


def compress(
    model: nn.Module, example: Any, *, tolerance: float | None = None, seconds: float = 0.2
) -> tuple[nn.Module, CompressionReport]:
    """Make a model with dropped weights run as fast as what is kept allows: same outputs, on this machine.

    >>> import torch, maskwise as mw
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
    >>> _ = model[0].weight.data[32:].zero_()  # most units are dead: what they give is their bias
    >>> x = torch.randn(64, 512)
    >>> small, report = mw.compress(model, x)
    >>> small[2].in_features, torch.allclose(small(x), model(x), atol=1e-5)
    (32, True)

    Every linear layer and every convolution of which something is dropped, be it by a gate, by `MaskedLinear`, by
    `SparseLinear`, by `torch.nn.utils.prune` or by zeros in the weight, takes the form that is measured to be the
    fastest on what the example gives it: sparse, in blocks of 4x1 or 16x16, dense without dead inputs and outputs, or
    dense as it is. Along nn.Sequential, in torch's encoder layers, and in modules whose forward is nothing but calls of
    its children and of torch's functions, units that are dead or that nobody reads are left out of both layers; what a
    dead unit's bias contributes goes into the bias of the next. Such layers run only there: whatever calls one of them
    from elsewhere, as another argument of forward may, gets a FoldedLayerError instead of fewer units. Where the whole
    model would be slower, nothing is done. The report says why a layer is what it is.

    Args:
        model: any module. It is not changed.
        example: a tensor, a tuple of positional arguments, or a dict of keyword arguments, of the sizes that count.
        tolerance: how far any output may be from what it was; by default 1e-4 of the largest one in float32.
        seconds: about how long each layer is measured.

    Returns:
        A copy of the model for evaluation, made of ordinary modules without gates, and a CompressionReport.

    Raises:
        DtypeError: ``model`` is not a module, or ``example`` none of the three.
        ArgumentError: the model gives no tensors for the example, a lazy module has no parameters yet, or ``seconds``
            is not more than 0.
        CompressionError: outputs would change by more than the tolerance.
    """
    check_module(OP, model)
    if not seconds > 0:
        raise ArgumentError(say(OP, "seconds", must="be more than 0", got=seconds, hint="seconds=0.2"))
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        must, hint = "have all its parameters", "model(example) once, which makes those of lazy modules"
        raise ArgumentError(say(OP, "model", must=must, got=f"none yet at {lazy[0]!r}", hint=hint))
    call = Example.of(example)
    before = copied(model).eval()
    expected = call.run(before)
    largest_difference(expected, expected, tolerance)
    plain, origins = make_plain(copied(model).eval())
    layers = _layers(plain, origins)
    seen = watched(plain, call, list(layers))
    alone = _alone(plain, layers, seen, origins, before, seconds)
    swaps = _swaps(plain, layers, seen, alone, seconds)
    swapped = Swapped(plain, before, call, swaps)
    found = call.run(swapped.model)
    difference = largest_difference(expected, found, tolerance)
    times = _whole(before, swapped.model, call, seconds)
    if not _fast_enough(times):
        # Layers were faster one by one, and are not together; or the model has a way of its own that needs its layers.
        swapped.undo("the whole model is slower with it")
        difference = largest_difference(expected, call.run(swapped.model), tolerance)
        times = _whole(before, swapped.model, call, seconds)
        if not _fast_enough(times):
            swapped.model = copied(model).eval()
            difference, times = 0.0, {"before": times["before"], "after": times["before"]}
            swapped.is_as_it_was = True
    report = described(before, swapped, alone, seen, origins, times, difference)
    return swapped.model, report


def _layers(plain: nn.Module, origins: dict[str, Origin]) -> dict[nn.Module, Layer]:
    found: dict[nn.Module, Layer] = {}
    for name, module in plain.named_modules():
        if type(module) is nn.Linear or type(module) is nn.Conv2d:
            origin = origins.get(name)
            found[module] = Layer.of(module, None if origin is None else origin.bits)
    return found


def _alone(
    plain: nn.Module,
    layers: dict[nn.Module, Layer],
    seen: dict[nn.Module, Watched],
    origins: dict[str, Origin],
    before: nn.Module,
    seconds: float,
) -> dict[nn.Module, Choice]:
    """What each layer would be by itself."""
    dense = why_dense(plain)
    holders = Counter(id(p) for m in plain.modules() for p in m._parameters.values() if p is not None)
    found: dict[nn.Module, Choice] = {}
    for name, module in plain.named_modules():
        layer = layers.get(module)
        if layer is None:
            if name in origins:
                found[module] = Choice(DENSE, module, f"there is no other form of {type(module).__name__}")
            continue
        x, fixed = seen[module].x, _why_fixed(layer.module, seen[module], holders)
        if layer.kept == layer.live.numel():
            found[module] = Choice(DENSE, module, "nothing is dropped", is_fixed=fixed is not None)
        elif fixed is not None or x is None:
            found[module] = Choice(DENSE, module, fixed or "", is_fixed=True)
        else:
            was = before.get_submodule(name) if name in origins else None
            found[module] = choose(layer, x, seconds, was, why_dense=dense.get(module))
    return found


def _why_fixed(module: nn.Linear | nn.Conv2d, seen: Watched, holders: Counter[int]) -> str | None:
    """Why a layer cannot be changed, or None if it can."""
    if has_hooks(module):
        return "it has hooks, which may look at its weight"
    if any(holders[id(parameter)] > 1 for parameter in module.parameters()):
        return "its weight or its bias is shared with another layer"
    return "the example does not call it" if seen.x is None else None


def _swaps(
    plain: nn.Module,
    layers: dict[nn.Module, Layer],
    seen: dict[nn.Module, Watched],
    alone: dict[nn.Module, Choice],
    seconds: float,
) -> list[Swap]:
    """What takes whose place: layers that hang together as one, all others one by one."""
    swaps: list[Swap] = []
    free = [link for link in links(plain, seen) if not (alone[link.first].is_fixed or alone[link.second].is_fixed)]
    inputs = {module: seen[module].x for module in layers}
    # Under autocast, what comes in may have another dtype than the weight.
    known: dict[nn.Module, Tensor] = {
        module: x.to(layers[module].module.weight.dtype) for module, x in inputs.items() if x is not None
    }
    folded: set[nn.Module] = set()
    for group in groups(free):
        timed = dict(alone)
        for linked in {layer for link in group for layer in (link.first, link.second)}:
            if timed[linked].times is None:
                # A layer of which nothing is dropped; its neighbour may change it all the same.
                with torch.no_grad():
                    dense = measured({DENSE: partial(linked, known[linked])}, seconds / 4)[DENSE]
                timed[linked] = Choice(DENSE, linked, timed[linked].reason, dense, dense)
        swap = choose_folded(group, layers, known, timed, why_dense(plain), seconds)
        if swap is not None:
            swaps.append(swap)
            folded |= set(swap.choices)
    for module, choice in alone.items():
        if choice.kind != DENSE and module not in folded:
            swaps.append(Swap({module: choice}))
    return swaps


def _whole(before: nn.Module, after: nn.Module, call: Example, seconds: float) -> dict[str, Times]:
    return measured({"before": lambda: call.time(before), "after": lambda: call.time(after)}, 4 * seconds)


def _fast_enough(times: dict[str, Times]) -> bool:
    before, after = times["before"], times["after"]
    return after.best <= NOISE * before.best + 5e-6 or after.median <= NOISE * before.median
