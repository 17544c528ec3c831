"""The example that a model is compressed for: running it, watching layers meanwhile, comparing outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.models.compress.fast_paths import without_nested_tensors
from maskwise.models.compress.problems import CompressionError

__all__ = ["Example", "Watched", "largest_difference", "watched"]

OP = "compress"
#: How far outputs may differ, by dtype and as a share of the largest output: sums in another order, layer by layer.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Example:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, example: Any) -> Example:
        """A tensor is the one argument, a tuple or a list are positional ones, a mapping holds them by name."""
        if isinstance(example, Tensor):
            return cls((example,), {})
        if isinstance(example, tuple | list):
            return cls(tuple(example), {})
        if isinstance(example, Mapping):
            return cls((), dict(example))
        must = "be a tensor, a tuple of positional arguments or a dict of keyword arguments"
        raise DtypeError(say(OP, "example", must=must, got=type(example).__name__, hint="(argument,)"))

    def run(self, model: nn.Module) -> Any:
        """Call the model without gradients; what it draws, it draws the same each time."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model(*self.args, **self.kwargs)

    def time(self, model: nn.Module) -> Any:
        """Call the model without gradients, and without more."""
        with torch.no_grad():
            return model(*self.args, **self.kwargs)


@dataclass
class Watched:
    """What a layer got, and gave."""

    calls: int = 0
    #: The input of its largest call.
    x: Tensor | None = None
    #: How many numbers all its calls gave.
    given: int = 0


@dataclass
class _Watch:
    chosen: set[nn.Module]
    found: dict[nn.Module, Watched]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen = self.found[module]
        seen.calls += 1
        if module not in self.chosen or not isinstance(output, Tensor):
            return
        seen.given += output.numel()
        if args and isinstance(args[0], Tensor) and (seen.x is None or args[0].numel() > seen.x.numel()):
            # What comes later may write into it.
            seen.x = args[0].detach().clone()


def watched(model: nn.Module, example: Example, layers: list[nn.Module]) -> dict[nn.Module, Watched]:
    """Run the example and tell what these layers got, and how often every module was called."""
    watch = _Watch(set(layers), {module: Watched() for module in model.modules()})
    with _hooked(model, watch), without_nested_tensors(model):
        example.run(model)
    return watch.found


@contextmanager
def _hooked(model: nn.Module, watch: _Watch) -> Iterator[None]:
    handles = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def largest_difference(before: Any, after: Any, tolerance: float | None) -> float:
    """The largest difference between two outputs; raises if it is more than the tolerance."""
    ours, theirs = _tensors(after), _tensors(before)
    if not theirs:
        must, hint = "give tensors for the example, to be compared", "wrap it in a module that returns them"
        raise ArgumentError(say(OP, "model", must=must, got=type(before).__name__, hint=hint))
    if [tuple(t.shape) for t in ours] != [tuple(t.shape) for t in theirs]:
        shapes = [tuple(t.shape) for t in ours], [tuple(t.shape) for t in theirs]
        raise CompressionError(
            f"compress: outputs have the shapes {shapes[0]} instead of {shapes[1]}; the model is unchanged. "
            "Hint: is it deterministic in eval()?"
        )
    largest = 0.0
    for new, old in zip(ours, theirs, strict=True):
        if not old.numel():
            continue
        if not old.is_floating_point() and not old.is_complex():
            if not torch.equal(new, old):
                raise CompressionError(
                    f"compress: an output of {old.dtype} differs; the model is unchanged. Hint: is it deterministic in "
                    "eval()? Leave out of the outputs what is rounded or an index."
                )
            continue
        # The same infinity, or no number in both, is no difference.
        same = (new == old) | (new.isnan() & old.isnan())
        apart = torch.where(same, 0.0, (new - old).abs().double())
        if not bool(apart.isfinite().all()):
            raise CompressionError(
                "compress: an output that was finite is not any more, or the other way round; the model is unchanged. "
                "Hint: torch.isfinite(model(example)).all() for an example that gives numbers only."
            )
        difference = float(apart.max())
        finite = old[old.isfinite()]
        scale = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
        allowed = TOLERANCES.get(old.dtype, 1e-4) * scale if tolerance is None else tolerance
        if difference > allowed:
            raise CompressionError(
                f"compress: outputs differ by {difference:.2e}, more than the tolerance of {allowed:.2e}; the model is "
                "unchanged. Hint: is it deterministic in eval()? tolerance= allows more."
            )
        largest = max(largest, difference)
    return largest


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of an output: of tuples, lists, dicts, data classes and what torch knows how to take apart."""
    leaves = []
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        elif isinstance(leaf, Mapping):
            leaves += _tensors(dict(leaf))
        elif hasattr(leaf, "__dataclass_fields__"):
            leaves += _tensors([getattr(leaf, name) for name in leaf.__dataclass_fields__])
    return leaves
