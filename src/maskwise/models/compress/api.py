"""mw.compress: skip the dropped weights of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from maskwise.errors import ArgumentError, say
from maskwise.models.compress.candidates import DENSE, Choice, Layer, Times, choose, time_calls
from maskwise.models.compress.chains import links
from maskwise.models.compress.example import CallRecord, Example, largest_difference, record_calls
from maskwise.models.compress.folding import Swap, choose_folded, connected
from maskwise.models.compress.guards import guard, unguard
from maskwise.models.compress.report import CompressionReport, LayerReport, Measured, flops_per_position
from maskwise.models.compress.surgery import (
    Origin,
    clone_model,
    has_hooks,
    materialize_masks,
    must_stay_dense,
    replace_module,
    update_fast_paths,
)
from maskwise.nn import SparseLinear
from maskwise.nn.arguments import check_module

__all__ = ["compress"]

OP = "compress"
#: The ratio of times above which a whole model counts as slower.
NOISE = 1.05


def compress(
    model: nn.Module, example: Any, *, tolerance: float | None = None, seconds: float = 0.2
) -> tuple[nn.Module, CompressionReport]:
    """Make a model with dropped weights faster on this machine, with the same outputs.

    >>> import torch, maskwise as mw
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
    >>> _ = model[0].weight.data[32:].zero_()  # most units are dead: they output their bias
    >>> x = torch.randn(64, 512)
    >>> small, report = mw.compress(model, x)
    >>> small[2].in_features, torch.allclose(small(x), model(x), atol=1e-5)
    (32, True)

    Every linear layer and every convolution with dropped weights, be it by a gate, by `MaskedLinear`, by
    `SparseLinear`, by `torch.nn.utils.prune` or by zeros in the weight, takes the form that is measured to be the
    fastest on its input in the example: sparse, in blocks of 4x1 or 16x16, dense without dead inputs and outputs, or
    dense as it is. Along nn.Sequential, in torch's encoder layers, and in modules whose forward is nothing but calls of
    its children and of torch's functions, units that are dead or unread are removed from both layers; the contribution
    of a dead unit's bias is folded into the bias of the next layer. Such layers run only there: a call from elsewhere,
    which another argument of forward may make, raises a FoldedLayerError instead of returning fewer units. Where the
    whole model would be slower, nothing is changed. The report gives the reason for each layer.

    Args:
        model: any module. It is not changed.
        example: a tensor, a tuple of positional arguments, or a dict of keyword arguments, of typical sizes.
        tolerance: the largest difference allowed in any output; by default 1e-4 of the largest one in float32.
        seconds: about how long each layer is measured.

    Returns:
        A copy of the model for evaluation, without gates, and a CompressionReport.

    Raises:
        DtypeError: ``model`` is not a module, or ``example`` none of the three.
        ArgumentError: the model returns no tensors for the example, a lazy module has no parameters yet, or
            ``seconds`` is not more than 0.
        CompressionError: outputs differ by more than the tolerance.
    """
    check_module(OP, model)
    if not seconds > 0:
        raise ArgumentError(say(OP, "seconds", must="be more than 0", got=seconds, hint="seconds=0.2"))
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        must, hint = "have all its parameters", "model(example) once, which initializes lazy modules"
        raise ArgumentError(say(OP, "model", must=must, got=f"none yet at {lazy[0]!r}", hint=hint))
    call = Example.of(example)
    before = clone_model(model).eval()
    expected = call.run(before)
    largest_difference(expected, expected, tolerance)
    inspected = _Inspected.of(before, clone_model(model).eval(), call)
    alone = _choose_alone(inspected, seconds)
    swapped = _Swapped(inspected, call, _choose_swaps(inspected, alone, seconds))
    difference = largest_difference(expected, call.run(swapped.model), tolerance)
    times = _time_models(before, swapped.model, call, seconds)
    if not _fast_enough(times):
        # The layers are faster one by one, and not together; or the model has a fast path that needs its own layers.
        swapped.undo("the whole model is slower with it")
        difference = largest_difference(expected, call.run(swapped.model), tolerance)
        times = _time_models(before, swapped.model, call, seconds)
        if not _fast_enough(times):
            swapped.model, swapped.is_original = clone_model(model).eval(), True
            difference, times = 0.0, {"before": times["before"], "after": times["before"]}
    return swapped.model, _report(inspected, alone, swapped, times, difference)


def _time_models(before: nn.Module, after: nn.Module, call: Example, seconds: float) -> dict[str, Times]:
    return time_calls({"before": partial(call.call, before), "after": partial(call.call, after)}, 4 * seconds)


def _fast_enough(times: dict[str, Times]) -> bool:
    before, after = times["before"], times["after"]
    return after.best <= NOISE * before.best + 5e-6 or after.median <= NOISE * before.median


@dataclass(frozen=True)
class _Inspected:
    """A model, with dense layers instead of masked ones, and the calls of these in the example."""

    before: nn.Module
    dense: nn.Module
    origins: dict[str, Origin]
    layers: dict[nn.Module, Layer]
    records: dict[nn.Module, CallRecord]
    why_dense: dict[nn.Module, str]

    @classmethod
    def of(cls, before: nn.Module, model: nn.Module, call: Example) -> _Inspected:
        """Inspect a model, which is changed."""
        dense, origins = materialize_masks(model)
        layers: dict[nn.Module, Layer] = {}
        for name, module in dense.named_modules():
            if type(module) is nn.Linear or type(module) is nn.Conv2d:
                layers[module] = Layer.of(module, origins[name].mask if name in origins else None)
        records = record_calls(dense, call, list(layers))
        return cls(before, dense, origins, layers, records, must_stay_dense(dense))


def _choose_alone(model: _Inspected, seconds: float) -> dict[nn.Module, Choice]:
    """The choice for each layer by itself."""
    holders = Counter(id(p) for module in model.dense.modules() for p in module._parameters.values() if p is not None)
    found: dict[nn.Module, Choice] = {}
    for name, module in model.dense.named_modules():
        layer = model.layers.get(module)
        if layer is None:
            if name in model.origins:
                found[module] = Choice(DENSE, module, f"there is no other form of {type(module).__name__}")
            continue
        x, fixed = model.records[module].x, None
        if has_hooks(module):
            fixed = "it has hooks, which may read its weight"
        elif any(holders[id(parameter)] > 1 for parameter in module.parameters()):
            fixed = "its weight or its bias is shared with another layer"
        elif x is None:
            fixed = "the example does not call it"
        if layer.kept == layer.live.numel():
            found[module] = Choice(DENSE, module, "nothing is dropped", is_fixed=fixed is not None)
        elif fixed is not None or x is None:
            found[module] = Choice(DENSE, module, fixed or "", is_fixed=True)
        else:
            before = model.before.get_submodule(name) if name in model.origins else None
            found[module] = choose(layer, x, seconds, before, why_dense=model.why_dense.get(module))
    return found


def _choose_swaps(model: _Inspected, alone: dict[nn.Module, Choice], seconds: float) -> list[Swap]:
    """The modules to swap: those of a folded chain as one, all others one by one."""
    swaps: list[Swap] = []
    chosen = links(model.dense, model.records)
    chosen = [link for link in chosen if not (alone[link.first].is_fixed or alone[link.second].is_fixed)]
    # Under autocast, the input may have another dtype than the weight.
    inputs = {
        module: record.x.to(model.layers[module].module.weight.dtype)
        for module, record in model.records.items()
        if record.x is not None
    }
    folded: set[nn.Module] = set()
    for chain in connected(chosen):
        timed = dict(alone)
        for module in {layer for link in chain for layer in (link.first, link.second)}:
            if timed[module].times is None:
                # Nothing is dropped from it, but folding may change it all the same.
                with torch.no_grad():
                    dense = time_calls({DENSE: partial(module, inputs[module])}, seconds / 4)[DENSE]
                timed[module] = Choice(DENSE, module, timed[module].reason, dense, dense)
        swap = choose_folded(chain, model.layers, inputs, timed, model.why_dense, seconds)
        if swap is not None:
            swaps.append(swap)
            folded |= swap.choices.keys()
    swaps += [Swap({layer: found}) for layer, found in alone.items() if found.kind != DENSE and layer not in folded]
    return swaps


class _Swapped:
    """A model with those of the swaps with which it runs."""

    def __init__(self, inspected: _Inspected, call: Example, swaps: list[Swap]) -> None:
        self.model, self._before = inspected.dense, inspected.before
        self.names = {module: name for name, module in self.model.named_modules()}
        #: The choices that were applied or refused; all other layers are as chosen alone.
        self.choices: dict[nn.Module, Choice] = {}
        self.is_original = False
        self._swaps = swaps
        self._apply(swaps)
        if self._error(call) is None:
            return
        # The model does more than call some layer. Which one, is found by swapping one by one.
        self._revert(swaps)
        self._swaps = []
        for swap in swaps:
            self._apply([swap])
            error = self._error(call)
            self._revert([swap])
            if error is None:
                self._swaps.append(swap)
            else:
                self._refuse(swap, f"the model does more than call it: {error}")
        self._apply(self._swaps)

    def undo(self, reason: str) -> None:
        """Put the old layers back."""
        self._revert(self._swaps)
        for swap in self._swaps:
            self._refuse(swap, reason)
        self._swaps = []

    def _error(self, call: Example) -> str | None:
        try:
            call.run(self.model)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _apply(self, swaps: list[Swap]) -> None:
        for swap in swaps:
            for old, choice in swap.choices.items():
                self.model = replace_module(self.model, old, choice.module)
                self.choices[old] = choice
            for norm, smaller in swap.norms.items():
                self.model = replace_module(self.model, norm, smaller)
            if swap.owner is not None:
                self.model = guard(self.model, swap.owner, [choice.module for choice in swap.choices.values()])
        update_fast_paths(self.model, self._before)

    def _revert(self, swaps: list[Swap]) -> None:
        for swap in swaps:
            if swap.owner is not None:
                self.model = unguard(self.model, swap.owner, [choice.module for choice in swap.choices.values()])
            for old, choice in swap.choices.items():
                self.model = replace_module(self.model, choice.module, old)
                del self.choices[old]
            for norm, smaller in swap.norms.items():
                self.model = replace_module(self.model, smaller, norm)
        update_fast_paths(self.model, self._before)

    def _refuse(self, swap: Swap, reason: str) -> None:
        for old, choice in swap.choices.items():
            self.choices[old] = Choice(DENSE, old, f"{choice.kind} was faster, but {reason}", None, None)


def _report(
    model: _Inspected, alone: dict[nn.Module, Choice], swapped: _Swapped, times: dict[str, Times], difference: float
) -> CompressionReport:
    rows = []
    for module, first in alone.items():
        name = swapped.names[module]
        old, choice = model.before.get_submodule(name), swapped.choices.get(module, first)
        units = getattr(module, "out_features", None) or getattr(module, "out_channels", None) or 0
        # Tokens, or pixels.
        positions = model.records[module].output_numel // units if isinstance(units, int) and units else 0
        kind = model.origins[name].kind if name in model.origins else type(module).__name__
        flops = positions * flops_per_position(old if isinstance(old, SparseLinear) else module)
        before = Measured.of(kind, old, flops, first.before or choice.before)
        if swapped.is_original:
            rows.append(LayerReport(name, before, before, "as it was, since the whole model is faster so"))
            continue
        if choice.kind != DENSE or name in model.origins:
            kind = choice.kind
        after = Measured.of(kind, choice.module, positions * flops_per_position(choice.module), choice.times)
        rows.append(LayerReport(name, before, after, choice.reason))
    kind = type(model.before).__name__
    return CompressionReport(
        tuple(rows),
        Measured.of(kind, model.before, sum(row.before.flops for row in rows), times["before"]),
        Measured.of(kind, swapped.model, sum(row.after.flops for row in rows), times["after"]),
        difference,
    )
