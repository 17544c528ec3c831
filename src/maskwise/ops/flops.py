"""FLOPs of our ops for ``torch.utils.flop_counter``: what a call computes, which is what its mask keeps.

torch counts matrix products, convolutions and attention, and nothing else; so do the formulas beside our ops. A
multiply-add is two. They are registered when ``torch.utils.flop_counter`` is imported, by any code: it loads Triton,
which takes longer than everything else here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.torch_private import TorchDispatchMode
from maskwise.plan.explain import explain

__all__ = ["FORMULAS", "FlopCounter", "count_kept", "on_kept_rows", "register_formula"]

COUNTER = "torch.utils.flop_counter"
#: The calls that torch's counter counts: a sum, for example, has none.
PRODUCTS = ("linear", "conv", "attention")
#: By the name of the op.
FORMULAS: dict[str, Callable[..., int]] = {}
#: What dropped rows would add, for ops whose calls no log of `mw.explain` has.
SKIPPED: dict[str, Callable[..., int]] = {}


def register_formula(op: str, formula: Callable[..., int], skipped: Callable[..., int] | None = None) -> None:
    """Register the FLOPs of an op with torch's counter, now or when it is imported.

    Args:
        op: such as ``"maskwise::linear_product"``.
        formula: of the op's arguments, tensors included, and ``out_val``.
        skipped: what masks save, for an op whose calls are not in the log of `mw.explain`.
    """
    FORMULAS[op] = formula
    if skipped is not None:
        SKIPPED[op] = skipped
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class FlopCounter:
    """Count the FLOPs that calls compute, and the FLOPs of the same calls without masks.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.SparseLinear.from_linear(torch.nn.Linear(512, 512), torch.eye(512).bool())
    >>> with mw.FlopCounter() as counter:
    ...     _ = layer(torch.ones(10, 512))
    >>> counter.kept, counter.dense
    (10240, 5242880)

    What is computed is counted by ``torch.utils.flop_counter``: products, convolutions and attention, forward and
    backward, of any torch code in the block. What masks skip is what `mw.explain` reports for forward passes, what a
    function passed to `mw.apply` or an unpadded model would compute for dropped rows in its forward pass, and rows that
    `mw.linear_cross_entropy` leaves out, gradients included.

    Attributes:
        kept: FLOPs that were computed; a multiply-add is two.
        skipped: FLOPs that masks saved.
        dense: both.
        by_op: FLOPs that were computed, by the name of the op.
    """

    def __init__(self) -> None:
        self.kept = self.skipped = 0
        self.by_op: dict[str, int] = {}

    @property
    def dense(self) -> int:
        """What the same calls compute without masks."""
        return self.kept + self.skipped

    def __enter__(self) -> FlopCounter:
        from torch.utils.flop_counter import FlopCounterMode

        self._stack = ExitStack()
        self._extra = _Skipped()
        _open.append(self)
        self._stack.callback(_open.remove, self)
        self._log = self._stack.enter_context(explain())
        self._stack.enter_context(self._extra)
        self._counter = self._stack.enter_context(FlopCounterMode(display=False))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        counts = self._counter.get_flop_counts().get("Global", {})
        self.by_op = {str(op): count for op, count in counts.items()}
        self.kept = sum(self.by_op.values())
        products = [call for call in self._log if any(name in call.op.lower() for name in PRODUCTS)]
        self.skipped = self._extra.flops + sum(call.skipped_flops or 0 for call in products)

    def __repr__(self) -> str:
        share = 1.0 if not self.dense else self.kept / self.dense
        return f"FlopCounter(kept={self.kept:,}, dense={self.dense:,}: {share:.0%})"


_open: list[FlopCounter] = []
"""The counters of running blocks."""


def on_kept_rows(kept: int, total: int, pairs: tuple[int, int] | None = None) -> AbstractContextManager[Any]:
    """Let open counters know that products in a block compute some rows of a batch only.

    Args:
        kept: how many rows they compute.
        total: how many they would compute without a mask.
        pairs: the same of attention: pairs of positions; None where it is counted by rows.
    """
    return _KeptRows(kept, total, pairs) if _open and kept else nullcontext()


class _KeptRows:
    """Adds to every open counter what dropped rows would take; within another one, nothing."""

    depth = 0

    def __init__(self, kept: int, total: int, pairs: tuple[int, int] | None) -> None:
        self.kept, self.total, self.pairs = kept, total, pairs

    def __enter__(self) -> None:
        type(self).depth += 1
        self.before = [_counts(counter) for counter in _open]

    def __exit__(self, *error: object) -> None:
        type(self).depth -= 1
        if type(self).depth:
            return
        for counter, before in zip(_open, self.before, strict=True):
            for op, count in _counts(counter).items():
                kept, total = self.pairs if self.pairs is not None and "attention" in op else (self.kept, self.total)
                counter._extra.flops += (count - before.get(op, 0)) * (total - kept) // max(kept, 1)


def _counts(counter: FlopCounter) -> dict[str, int]:
    return {str(op): count for op, count in counter._counter.get_flop_counts().get("Global", {}).items()}


class _Skipped(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what ops leave out that no log has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = SKIPPED.get(func.name().partition(".")[0])
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}))
        return out


def _register(counter: ModuleType) -> None:
    for name, formula in FORMULAS.items():
        library, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, library), op, None)
        # A later torch may know its own kernel.
        if packet is not None and packet not in counter.flop_registry:
            counter.register_flop_formula(packet, get_raw=True)(formula)


class _WhenImported(MetaPathFinder):
    """Registers the formulas after torch's counter was imported; once."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the counter as Python does, and add the registration to its loading."""
        if fullname != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _register(module)

        loader.exec_module = exec_module
        return spec


def count_kept(mask: Tensor | None, shape: Sequence[int]) -> int:
    """How many elements of this shape a mask keeps, which broadcasts to it; all of them where it has no data.

    >>> count_kept(torch.tensor([[True, False]]), (3, 2)), count_kept(None, (3, 2))
    (3, 6)
    """
    if mask is None or mask.device.type == "meta" or type(mask) is not Tensor:
        return prod(shape)
    return int(mask.sum()) * (prod(shape) // max(mask.numel(), 1))


# -- torch's own CPU kernels that are called here, and that its counter does not know ----------------------------------
def _flash_attention_for_cpu(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Torch's own CPU kernel, which its counter does not know; masks and the causal triangle count in full there."""
    batch, heads, queries, width = q.shape
    return 2 * batch * heads * queries * k.shape[2] * (width + v.shape[-1])


def _flash_attention_for_cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Scores again, and four products of gradients."""
    batch, heads, queries, width = q.shape
    return 2 * batch * heads * queries * k.shape[2] * (3 * width + 2 * v.shape[-1])


def _onednn_linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """A linear layer by oneDNN, which packed models call."""
    return 2 * x.numel() * weight.shape[0]


register_formula("mkldnn::_linear_pointwise", _onednn_linear)
register_formula("aten::_scaled_dot_product_flash_attention_for_cpu", _flash_attention_for_cpu)
register_formula("aten::_scaled_dot_product_flash_attention_for_cpu_backward", _flash_attention_for_cpu_backward)
