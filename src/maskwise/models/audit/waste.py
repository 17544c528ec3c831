"""What a model spends on what is not there: of every module time, FLOPs and bytes, and the share that is wasted."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.audit.batch import IGNORED, Batch, Tokens
from maskwise.models.audit.positions import Positions
from maskwise.models.audit.subject import Subject
from maskwise.models.compress.example import tensors_of
from maskwise.ops.torch_private import TorchDispatchMode

__all__ = ["CAUSES", "Cost", "Profile", "profile"]

#: What a share of a module's time may be spent on, with what is said of it.
CAUSES = {
    "padding": "padding",
    "attention": "attention that the mask drops",
    "labels": "logits without a label",
    "weights": "weights that are zero",
    "activations": "activations that are zero",
}
#: Below these shares of zeros a layer counts as dense: initialization and chance make some.
ZERO_WEIGHTS, ZERO_ACTIVATIONS = 0.05, 0.5
#: The fewest and the most passes that are timed, and about how many seconds they take where they are fast.
PASSES, PASSES_SECONDS = (2, 10), 0.1
_ATTENDS = ("scaled_dot_product", "attention_fused_forward", "flash_attention", "efficient_attention", "flex_attention")
_PAIRS = ("aten.bmm", "aten.baddbmm")


@dataclass
class Cost:
    """One module, over all its calls in a forward pass.

    Attributes:
        path: its name; ``""`` is the model.
        kind: its class.
        depth: how many modules it is in.
        calls: how often it ran.
        seconds: of its calls, the modules in it included.
        own_seconds: without the modules in it.
        flops: of its calls, the modules in it included; a multiply-add is two.
        own_flops: without the modules in it.
        bytes: of its inputs, outputs and own parameters.
        wasted: of ``own_seconds`` the share that each cause takes.
    """

    path: str
    kind: str
    depth: int
    calls: int = 0
    seconds: float = 0.0
    own_seconds: float = 0.0
    flops: int = 0
    own_flops: int = 0
    bytes: int = 0
    wasted: dict[str, float] = field(default_factory=dict)

    @property
    def useful(self) -> float:
        """The share of ``own_seconds`` that is spent on what is kept."""
        return max(0.0, 1.0 - sum(share for cause, share in self.wasted.items() if cause != "activations"))


@dataclass(frozen=True)
class Profile:
    """A forward pass in evaluation mode.

    Attributes:
        modules: every module that ran, in the order of the model.
        seconds: of the pass.
        flops: of the pass.
        tokens: positions of the batch, of all its masks.
        kept: those that are kept.
    """

    modules: tuple[Cost, ...]
    seconds: float
    flops: int
    tokens: int
    kept: int

    def share(self, cause: str) -> float:
        """The share of the time that a cause takes."""
        total = sum(each.own_seconds for each in self.modules)
        return sum(each.own_seconds * each.wasted.get(cause, 0.0) for each in self.modules) / total if total else 0.0

    def flops_share(self, cause: str) -> float:
        """The share of the FLOPs that a cause takes."""
        total = sum(each.own_flops for each in self.modules)
        return sum(each.own_flops * each.wasted.get(cause, 0.0) for each in self.modules) / total if total else 0.0

    @property
    def wasted(self) -> float:
        """The share of the time that is spent on what is not there."""
        return sum(self.share(cause) for cause in CAUSES if cause != "activations")

    def worst(self, cause: str) -> list[Cost]:
        """The modules with most time for a cause, worst first."""
        found = [each for each in self.modules if each.wasted.get(cause)]
        return sorted(found, key=lambda each: -each.own_seconds * each.wasted[cause])


def profile(subject: Subject, batch: Batch, tokens: list[Tokens]) -> Profile:
    """Run the batch, and measure every module."""
    watch = _Watch(subject.model, batch, tokens)
    subject.forward(batch, training=False)
    times: dict[str, float] = {}
    passes: list[float] = []
    while len(passes) < PASSES[0] or (len(passes) < PASSES[1] and sum(passes) < PASSES_SECONDS):
        with watch.timed() as found:
            start = time.perf_counter()
            subject.forward(batch, training=False)
            passes.append(time.perf_counter() - start)
        # Of each module the fastest pass: what disturbs one of them disturbs few modules.
        times = {name: min(took, times.get(name, took)) for name, took in found.items()}
    seconds = min(passes)
    with watch.counted():
        subject.forward(batch, training=False)
    costs = watch.costs(times)
    kept = sum(int(each.keep.sum()) for each in tokens)
    total = sum(each.keep.numel() for each in tokens)
    return Profile(tuple(costs), seconds, sum(each.own_flops for each in costs), total, kept)


class _Watch:
    """Hooks that measure modules."""

    def __init__(self, model: nn.Module, batch: Batch, tokens: list[Tokens]) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.stack: list[nn.Module] = []
        self.rows = tokens[0].keep.shape[0] if tokens else None
        self.positions = [Positions(each.keep) for each in tokens]
        self.cost = {m: Cost(name, type(m).__name__, name.count(".") + bool(name)) for m, name in self.names.items()}
        self.shares: dict[nn.Module, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        #: FLOPs of attention, and of them those on pairs that are dropped.
        self.attention: dict[nn.Module, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.head: nn.Module | None = None
        self.labels = batch.labels()

    @contextmanager
    def _hooked(self, enter: Any, leave: Any) -> Iterator[None]:
        handles = []
        for module in self.names:
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            self.stack.clear()
            for handle in handles:
                handle.remove()

    @contextmanager
    def timed(self) -> Iterator[dict[str, float]]:
        """The seconds of each module while the block runs."""
        found: dict[str, float] = defaultdict(float)
        starts: list[float] = []

        def enter(module: nn.Module, args: Any) -> None:
            starts.append(_now(args))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            found[self.names[module]] += _now(args) - starts.pop()

        with self._hooked(enter, leave):
            yield found

    @contextmanager
    def counted(self) -> Iterator[None]:
        """FLOPs, bytes and shares of each module while the block runs."""

        def enter(module: nn.Module, args: Any) -> None:
            self.stack.append(module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.stack.pop()
            self._look(module, args, output)

        # torch's fast path of attention is one operation, of which nothing is known.
        was = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with self._hooked(enter, leave), _Flops(self):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(was)

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        cost, shares = self.cost[module], self.shares[module]
        inputs, outputs = tensors_of(list(args)), tensors_of(output)
        for positions in self.positions:
            positions.through(module, args[0] if args else None, output)
        cost.calls += 1
        own = module.parameters(recurse=False)
        cost.bytes += sum(each.nbytes for each in (*inputs, *outputs, *own))
        if outputs:
            shares["padding"].append(self._dropped(max(outputs, key=Tensor.numel)))
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and weight is None:
            weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1 and not isinstance(module, nn.Embedding):
            shares["weights"].append(float((weight == 0).float().mean()))
            if inputs and inputs[0].is_floating_point():
                shares["activations"].append(self._zeros(inputs[0]))
        if isinstance(module, nn.Linear) and outputs and self._is_head(outputs[0]):
            self.head = module

    def _dropped(self, x: Tensor) -> float:
        """The share of a tensor's positions that is dropped."""
        for positions in self.positions:
            for length, keep in positions.by_length.items():
                rows, kept = keep.shape[0], int(keep.sum())
                shape = x.shape
                if not x.dim():
                    continue
                at_rows = x.dim() >= 2 and shape[0] == rows and length in shape[1:]
                if at_rows or shape[:2] == (length, rows) or shape[0] == rows * length:
                    return 1.0 - kept / max(keep.numel(), 1)
        return 0.0

    def _zeros(self, x: Tensor) -> float:
        for positions in self.positions:
            if rows := positions.rows(x):
                return float((rows[0] == 0).float().mean())
        return float((x == 0).float().mean())

    def _is_head(self, x: Tensor) -> bool:
        if self.labels is None:
            return False
        labels = self.labels[1]
        return x.dim() == labels.dim() + 1 and x.shape[:-1] == labels.shape and bool((labels == IGNORED).any())

    def costs(self, times: dict[str, float]) -> list[Cost]:
        """The modules that ran."""
        for module, cost in self.cost.items():
            cost.seconds = times.get(cost.path, 0.0)
            cost.own_seconds = max(0.0, cost.seconds - self._inside(module, times))
            cost.wasted = self._wasted(module)
            attends, _ = self.attention[module]
            cost.own_flops += round(attends)
        for module, cost in self.cost.items():
            cost.flops = sum(self.cost[each].own_flops for each in module.modules() if each in self.cost)
        return [cost for cost in self.cost.values() if cost.calls]

    def _inside(self, module: nn.Module, times: dict[str, float]) -> float:
        """The time of the modules in one; a ModuleList does not run, and those in it do."""
        children = set(module.children())
        ran = {child for child in children if self.names[child] in times}
        return sum(times[self.names[each]] for each in ran) + sum(self._inside(each, times) for each in children - ran)

    def _wasted(self, module: nn.Module) -> dict[str, float]:
        means = {cause: sum(values) / len(values) for cause, values in self.shares[module].items() if values}
        padding = means.get("padding", 0.0)
        if padding and self._is_packed_inside(module):
            padding = 0.0
        attends, dropped = self.attention[module]
        found: dict[str, float] = {}
        if attends:
            # Its own products, such as nn.MultiheadAttention's projections, are of positions; the rest is of pairs.
            others = self.cost[module].own_flops
            found |= {"attention": dropped / (attends + others)} if dropped else {}
            found |= {"padding": padding * others / (attends + others)} if padding and others else {}
        elif module is self.head and self.labels is not None:
            ignored = float((self.labels[1] == IGNORED).float().mean())
            found["labels"] = max(ignored, padding)
        elif padding:
            found["padding"] = padding
        left = 1.0 - sum(found.values())
        if means.get("weights", 0.0) >= ZERO_WEIGHTS:
            found["weights"] = left * means["weights"]
        if means.get("activations", 0.0) >= ZERO_ACTIVATIONS:
            found["activations"] = left * means["activations"]
        return found

    def _is_packed_inside(self, module: nn.Module) -> bool:
        """Whether what runs in a module has no padding, whatever shape its output has."""
        shares = [self.shares[each]["padding"] for each in module.modules() if each is not module]
        ran = [share for share in shares if share]
        return bool(ran) and not any(any(share) for share in ran)

    def pairs(self, length: int, keys: int) -> float:
        """The share of pairs of queries and keys of which one is padding."""
        for positions in self.positions:
            queries, kept = positions.by_length.get(length), positions.by_length.get(keys)
            if queries is not None and kept is not None and queries.shape[0] == kept.shape[0]:
                seen = (queries.sum(1).double() * kept.sum(1).double()).sum()
                return 1.0 - float(seen) / max(queries.shape[0] * length * keys, 1)
        return 0.0


def _now(values: Any) -> float:
    if torch.cuda.is_available() and any(each.is_cuda for each in tensors_of(list(values))):
        torch.cuda.synchronize()
    return time.perf_counter()


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs by torch's formulas and ours, for the module that runs."""

    def __init__(self, watch: _Watch) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()  # type: ignore[no-untyped-call]
        self.watch, self.registry = watch, flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self.registry.get(func.overloadpacket)
        if formula is None or not self.watch.stack:
            return out
        flops = int(formula(*args, **kwargs, out_val=out))
        module, name = self.watch.stack[-1], str(func.overloadpacket)
        if any(each in name for each in _ATTENDS):
            dropped = self._dropped_pairs(name, args, kwargs)
        elif name in _PAIRS and (share := self._dropped_in(out, args)) is not None:
            dropped = share
        else:
            self.watch.cost[module].own_flops += flops
            return out
        found = self.watch.attention[module]
        found[0] += flops
        found[1] += flops * dropped
        return out

    def _dropped_pairs(self, name: str, args: Any, kwargs: Any) -> float:
        """The share of pairs that a call of an attention kernel computes and a mask drops."""
        if "maskwise" in name:
            # Its formula counts kept pairs alone.
            return 0.0
        q, k = args[0], args[1]
        if q.dim() != 4:
            return 0.0
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        masks = [each for each in (*args[3:], *kwargs.values()) if isinstance(each, Tensor) and each.dim() == 4]
        # A packed sequence may be as long as a padded row, and has no padding.
        by_padding = self.watch.pairs(q.shape[2], k.shape[2]) if q.shape[0] == self.watch.rows else 0.0
        if not masks:
            return by_padding
        mask = masks[0] if masks[0].dtype is torch.bool else masks[0] > -1e4
        share = 1.0 - float(mask.expand(shape).float().mean())
        return max(share, by_padding)

    def _dropped_in(self, out: Tensor, args: Any) -> float | None:
        """Products of scores, by their sizes: of queries and keys, or of scores and values."""
        scores = next((x for x in (out, *args) if isinstance(x, Tensor) and x.dim() == 3 and self._is_scores(x)), None)
        return None if scores is None else self.watch.pairs(scores.shape[1], scores.shape[2])

    def _is_scores(self, x: Tensor) -> bool:
        lengths = {length for each in self.watch.positions for length in each.by_length}
        return x.shape[1] in lengths and x.shape[2] in lengths
