"""The example input that a model is compressed for: run it, record the calls of layers, compare outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from maskwise.errors import ArgumentError, DtypeError, MaskwiseError, say
from maskwise.models.compress.surgery import without_nested_tensors

__all__ = ["CallRecord", "CompressionError", "Example", "largest_difference", "record_calls", "tensors_of"]

OP = "compress"
#: How far outputs may differ, by dtype and as a share of the largest output: sums in another order, layer by layer.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class CompressionError(MaskwiseError, RuntimeError):
    """A compressed model does not compute what the model does; the model itself is unchanged."""


@dataclass(frozen=True)
class Example:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, example: Any) -> Example:
        """A tensor is the only argument, a tuple or a list holds positional ones, a mapping keyword ones."""
        if isinstance(example, Tensor):
            return cls((example,), {})
        if isinstance(example, tuple | list):
            return cls(tuple(example), {})
        if isinstance(example, Mapping):
            return cls((), dict(example))
        must = "be a tensor, a tuple of positional arguments or a dict of keyword arguments"
        raise DtypeError(say(OP, "example", must=must, got=type(example).__name__, hint="(argument,)"))

    def run(self, model: nn.Module) -> Any:
        """Call the model without gradients, with the same random numbers each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.call(model)

    @torch.no_grad()
    def call(self, model: nn.Module) -> Any:
        """Call the model without gradients; nothing else, to be timed."""
        return model(*self.args, **self.kwargs)


@dataclass
class CallRecord:
    """The calls of one module."""

    calls: int = 0
    #: The input of the largest call.
    x: Tensor | None = None
    #: Of the outputs of all calls.
    output_numel: int = 0


def record_calls(model: nn.Module, example: Example, layers: list[nn.Module]) -> dict[nn.Module, CallRecord]:
    """Run the example; count the calls of every module, and record inputs and outputs of these layers."""
    records = {module: CallRecord() for module in model.modules()}
    hook = partial(_record, records, set(layers))
    handles = [module.register_forward_hook(hook) for module in records]
    try:
        with without_nested_tensors(model):
            example.run(model)
    finally:
        for handle in handles:
            handle.remove()
    return records


def _record(
    records: dict[nn.Module, CallRecord], layers: set[nn.Module], module: nn.Module, args: tuple[Any, ...], output: Any
) -> None:
    record = records[module]
    record.calls += 1
    if module not in layers or not isinstance(output, Tensor):
        return
    record.output_numel += output.numel()
    if args and isinstance(args[0], Tensor) and (record.x is None or args[0].numel() > record.x.numel()):
        # Cloned, since later modules may write into it.
        record.x = args[0].detach().clone()


def largest_difference(before: Any, after: Any, tolerance: float | None) -> float:
    """The largest difference between two outputs; raises if it exceeds the tolerance."""
    ours, theirs = tensors_of(after), tensors_of(before)
    if not theirs:
        must, hint = "return tensors for the example, to be compared", "wrap it in a module that returns them"
        raise ArgumentError(say(OP, "model", must=must, got=type(before).__name__, hint=hint))
    shapes = [tuple(t.shape) for t in ours], [tuple(t.shape) for t in theirs]
    if shapes[0] != shapes[1]:
        raise CompressionError(
            f"compress: outputs have the shapes {shapes[0]} instead of {shapes[1]}; the model is unchanged. "
            "Hint: is it deterministic in eval()?"
        )
    return max(_difference(new, old, tolerance) for new, old in zip(ours, theirs, strict=True))


def _difference(new: Tensor, old: Tensor, tolerance: float | None) -> float:
    if not old.numel():
        return 0.0
    if not old.is_floating_point() and not old.is_complex():
        if not torch.equal(new, old):
            raise CompressionError(
                f"compress: an output of {old.dtype} differs; the model is unchanged. Hint: is it deterministic in "
                "eval()? Leave out of the outputs what is rounded or an index."
            )
        return 0.0
    # The same infinity, or NaN in both, is no difference.
    same = (new == old) | (new.isnan() & old.isnan())
    differences = torch.where(same, 0.0, (new - old).abs().double())
    if not bool(differences.isfinite().all()):
        raise CompressionError(
            "compress: an output that was finite is not any more, or the other way round; the model is unchanged. "
            "Hint: torch.isfinite(model(example)).all() for an example with finite outputs only."
        )
    difference = float(differences.max())
    finite = old[old.isfinite()]
    scale = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
    allowed = TOLERANCES.get(old.dtype, 1e-4) * scale if tolerance is None else tolerance
    if difference > allowed:
        raise CompressionError(
            f"compress: outputs differ by {difference:.2e}, more than the tolerance of {allowed:.2e}; the model is "
            "unchanged. Hint: is it deterministic in eval()? tolerance= allows more."
        )
    return difference


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output: of tuples, lists, mappings, data classes and registered pytree nodes."""
    leaves = []
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        elif isinstance(leaf, Mapping):
            leaves += tensors_of(dict(leaf))
        elif hasattr(leaf, "__dataclass_fields__"):
            leaves += tensors_of([getattr(leaf, name) for name in leaf.__dataclass_fields__])
    return leaves
