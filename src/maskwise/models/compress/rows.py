"""The rows of the report."""

from __future__ import annotations

from torch import Tensor, nn

from maskwise.models.compress.choosing import DENSE, Choice
from maskwise.models.compress.example import Watched
from maskwise.models.compress.live_units import LiveConv2d, LiveLinear
from maskwise.models.compress.plain import Origin
from maskwise.models.compress.report import CompressionReport, LayerReport, Measured
from maskwise.models.compress.swapping import Swapped
from maskwise.models.compress.timing import Times
from maskwise.nn import SparseLinear

__all__ = ["described"]


def described(
    before: nn.Module,
    swapped: Swapped,
    alone: dict[nn.Module, Choice],
    seen: dict[nn.Module, Watched],
    origins: dict[str, Origin],
    times: dict[str, Times],
    difference: float,
) -> CompressionReport:
    """Tell what each layer was and is, and the whole model."""
    rows = []
    for module, first in alone.items():
        name = swapped.names[module]
        old, choice = before.get_submodule(name), swapped.choices.get(module, first)
        positions = _positions(module, seen[module])
        was = origins[name].kind if name in origins else type(module).__name__
        taken = first.before or choice.before
        told = _measured(was, old, positions * _multiplied(module, old), taken)
        if swapped.is_as_it_was:
            rows.append(LayerReport(name, told, told, "as it was, since the whole model is faster so"))
            continue
        kind = was if choice.kind == DENSE and name not in origins else choice.kind
        now = _measured(kind, choice.module, positions * _multiplied(choice.module), choice.times)
        rows.append(LayerReport(name, told, now, choice.reason))
    flops = [sum(row.before.flops for row in rows), sum(row.after.flops for row in rows)]
    return CompressionReport(
        tuple(rows),
        _measured(type(before).__name__, before, flops[0], times["before"]),
        _measured(type(before).__name__, swapped.model, flops[1], times["after"]),
        difference,
    )


def _measured(kind: str, module: nn.Module, flops: int, times: Times | None) -> Measured:
    parameters = sum(parameter.numel() for parameter in module.parameters())
    size = sum(tensor.numel() * tensor.element_size() for tensor in _distinct(module))
    return Measured(kind, parameters, size, flops, None if times is None else times.best)


def _distinct(module: nn.Module) -> list[Tensor]:
    """The tensors of a state_dict, those that are there under two names once."""
    found = {(tensor.data_ptr(), tensor.shape): tensor for tensor in module.state_dict().values()}
    return list(found.values())


def _positions(module: nn.Module, seen: Watched) -> int:
    """At how many places the weight was applied: tokens, or pixels."""
    units = getattr(module, "out_features", None) or getattr(module, "out_channels", None) or 0
    return seen.given // units if isinstance(units, int) and units else 0


def _multiplied(module: nn.Module, was: nn.Module | None = None) -> int:
    """How many operations one position takes: two for each weight that is multiplied."""
    if isinstance(was, SparseLinear):
        return 2 * was.values.numel()
    if isinstance(module, SparseLinear):
        return 2 * module.values.numel()
    held = module.small if isinstance(module, LiveLinear | LiveConv2d) else module
    weight = held._parameters.get("weight")
    return 0 if weight is None else 2 * weight.numel()
