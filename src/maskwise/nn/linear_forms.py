"""The forms that a linear layer's effective weight is kept in, and which of them is the fastest for an input.

Exact ways only. ``dense``: the product with the effective weight. ``units``: a smaller dense product, without the
inputs and outputs of which nothing is kept. ``sparse``: the kernel, which multiplies only what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from maskwise.errors import ArgumentError
from maskwise.ops.linear import BLOCKS, Sizes, SparseLayout, sparse_linear
from maskwise.ops.linear.layouts import Block
from maskwise.ops.linear.routes import build_cost, choose, dense_cost
from maskwise.plan import planner
from maskwise.plan.dispatch import Plan, Refusal, Skips

__all__ = ["Forms", "indices_unless_all"]

# Microseconds, on two AVX2 cores; only ratios matter. The moving of one number by an index, and what more calls cost.
MOVE = 0.0012
CALLS = 20.0
# A prediction this much off must not make the layer slower than a dense one.
MARGIN = 1.25


OP = "MaskedLinear"
_NEW = Plan(OP, "dense", "the weight is new, and nothing is made of it before it is used again", 0.0)


_UNREADY = Plan(OP, "dense", "a layout would cost more than it has been worth so far", 0.0)


class Product(NamedTuple):
    """A product, the plan that it followed, and how many weights were multiplied."""

    out: Tensor
    plan: Plan
    weights: int


@dataclass(frozen=True)
class Parts:
    """What of a weight is not 0.

    >>> parts = Parts.of(torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
    >>> parts.small, parts.outputs, parts.inputs, parts.kept
    (tensor([[1., 2.]]), tensor([0]), tensor([1, 2]), 2)
    """

    live: Tensor  # bool, (outputs, inputs)
    kept: int
    small: Tensor | None  # without dead units, or None if none is dead
    outputs: Tensor | None  # the live ones, or None if all are
    inputs: Tensor | None  # the live ones, or None if all are

    @classmethod
    def of(cls, weight: Tensor, bits: Tensor | None = None) -> Parts:
        """The parts of a weight that a gate keeps by these bits; if they are not known, of what is not 0."""
        nonzero = weight != 0
        # What is kept must be all there is; a soft gate lets something of everything through.
        live = bits.clone() if bits is not None and not bool((nonzero & ~bits).any()) else nonzero
        outputs, inputs = indices_unless_all(nonzero.any(1)), indices_unless_all(nonzero.any(0))
        if outputs is None and inputs is None:
            return cls(live, int(live.sum()), None, None, None)
        small = weight if outputs is None else weight.index_select(0, outputs)
        small = small if inputs is None else small.index_select(1, inputs)
        return cls(live, int(live.sum()), small.contiguous(), outputs, inputs)

    @cached_property
    def block(self) -> Block:
        """The largest block of which whole ones only are kept."""
        return whole_block(self.live) if self.kept else (1, 1)


class Forms:
    """An effective weight, and what was made of it for speed.

    >>> forms = Forms(torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
    >>> forms.run(torch.tensor([[9.0, 1.0, 1.0]]), None).out
    tensor([[3., 0.]])

    The first call is dense: whoever changes the weight between any two calls does not pay for what is never used.

    Args:
        effective: the effective weight.
        bits: what the gate keeps, if that is known: a kept weight may be 0 by chance, and its block is whole all the
            same.
    """

    def __init__(
        self,
        effective: Tensor,  # (outputs, inputs)
        bits: Tensor | None = None,  # (outputs, inputs)
    ) -> None:
        self.weight = effective.detach()
        self.bits = bits
        self.calls = 0
        self.parts: Parts | None = None
        self.layout: SparseLayout | None = None
        self.values: Tensor | None = None
        # What the kernel would have saved so far, if there were a layout for it.
        self.forgone = 0.0
        self.plans: dict[tuple[int, torch.dtype, str | None], Plan] = {}
        # The last input's shape, dtype and forced route, and its plan: most are like the one before. One tuple, so that
        # no thread sees the facts of one call and the plan of another.
        self.last: tuple[tuple[torch.Size, torch.dtype, str | None] | None, Plan] = (None, _NEW)

    def run(self, x: Tensor, bias: Tensor | None) -> Product:
        """The product, by the way that is predicted to be the fastest."""
        self.calls += 1
        like = (x.shape, x.dtype, planner.forced())
        facts, plan = self.last
        if facts != like:
            plan = self.plan(x)
            if plan is not _NEW:
                self.last = like, plan
        if plan.route == "units":
            assert self.parts is not None
            assert self.parts.small is not None
            return Product(self._without_dead_units(x, bias), plan, self.parts.small.numel())
        if plan.route == "sparse":
            if self._ready(x, plan):
                assert self.parts is not None
                return Product(self._sparse(x, bias), plan, self.parts.kept)
            plan = _UNREADY
        return Product(F.linear(x, self.weight, bias), plan, self.weight.numel())

    def plan(self, x: Tensor) -> Plan:
        """Which way this input goes, and why."""
        if (self.calls < 2 and planner.forced() is None) or not x.dim() or x.shape[-1] != self.weight.shape[1]:
            return _NEW
        batch = x.numel() // max(self.weight.shape[1], 1)
        key = (batch, x.dtype, planner.forced())
        found = self.plans.get(key)
        if found is None:
            found = self.plans[key] = self._planned(batch, x)
        return found

    def _planned(self, batch: int, x: Tensor) -> Plan:
        if self.parts is None:
            with torch.inference_mode(False), torch.no_grad():
                self.parts = Parts.of(self.weight, self.bits)
        parts, (outputs, inputs) = self.parts, self.weight.shape
        dense = dense_cost(Sizes(batch, inputs, outputs, parts.kept))
        best, refused = Plan(OP, "dense", "predicted fastest", dense), []
        if parts.small is not None and planner.forced() != "plain":
            n, k = parts.small.shape
            moved = (0 if parts.inputs is None else k) + (0 if parts.outputs is None else n + outputs)
            units = dense_cost(Sizes(batch, k, n, 0)) + MARGIN * (moved * batch * MOVE + CALLS)
            if units < dense:
                best = Plan(OP, "units", f"{n} of {outputs} outputs and {k} of {inputs} inputs are live", units)
            else:
                refused.append(Refusal("units", f"predicted {units:.0f} µs against {dense:.0f} µs"))
        sparse = self._sparse_plan(batch, x, parts)
        if sparse.route == "sparse" and (sparse.microseconds < best.microseconds or planner.forced() == "kernel"):
            best = sparse
        else:
            refused += [refusal for refusal in sparse.refused if refusal.route == "sparse"]
        # The forms other than the dense one are copies without what they leave out.
        skips = Skips.NOTHING if best.route == "dense" else Skips.READING
        return Plan(OP, best.route, best.reason, best.microseconds, tuple(refused), skips=skips, flops=2 * batch)

    def _sparse_plan(self, batch: int, x: Tensor, parts: Parts) -> Plan:
        if x.dtype != self.weight.dtype:
            return Plan(OP, "dense", "", 0.0, (Refusal("sparse", "input and weight have different dtypes"),))
        outputs, inputs = self.weight.shape
        # As if all of it were in the best of blocks: most masks are told from this alone.
        hoped = choose(OP, Sizes(batch, inputs, outputs, parts.kept, BLOCKS[-1]), x.dtype, x.device.type)
        if hoped.route != "sparse":
            return hoped
        return choose(OP, Sizes(batch, inputs, outputs, parts.kept, parts.block), x.dtype, x.device.type)

    def _ready(self, x: Tensor, plan: Plan) -> bool:
        """Whether there is a layout, which is made when what it would have saved so far pays for it."""
        if self.layout is not None:
            return True
        assert self.parts is not None
        outputs, inputs = self.weight.shape
        sizes = Sizes(x.numel() // max(inputs, 1), inputs, outputs, self.parts.kept)
        self.forgone += dense_cost(sizes) - plan.microseconds
        if self.forgone < build_cost(sizes) and planner.forced() is None:
            return False
        with torch.inference_mode(False), torch.no_grad():
            layout = SparseLayout.from_mask(self.parts.live, self.parts.block)
            self.values = layout.gather(self.weight)
        self.layout = layout
        return True

    def _sparse(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self.layout is not None
        assert self.values is not None
        values = self.values
        if torch.is_autocast_enabled("cpu"):
            # As torch's own linear does under autocast: all in the lower precision.
            low = torch.get_autocast_dtype("cpu")
            x, values, bias = x.to(low), values.to(low), None if bias is None else bias.to(low)
        return sparse_linear(x, values, self.layout, bias)

    def _without_dead_units(self, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = self.parts
        assert parts is not None
        assert parts.small is not None
        if parts.inputs is not None:
            x = x.index_select(-1, parts.inputs)
        if parts.outputs is None:
            return F.linear(x, parts.small, bias)
        out = F.linear(x, parts.small)
        room = out.new_zeros((*out.shape[:-1], self.weight.shape[0])).index_copy(-1, parts.outputs, out)
        # What a dead output has is its bias.
        return room if bias is None else room + bias.to(room.dtype)


def whole_block(bits: Tensor) -> Block:
    """The largest block that kernels serve of which a mask keeps whole ones only.

    >>> whole_block(torch.ones(16, 16, dtype=torch.bool)), whole_block(torch.eye(2, dtype=torch.bool))
    ((16, 16), (1, 1))
    """
    for block in sorted(BLOCKS, key=lambda block: -block[0] * block[1]):
        try:
            SparseLayout.from_mask(bits, block)
        except ArgumentError:
            continue
        return block
    return (1, 1)


def indices_unless_all(live: Tensor) -> Tensor | None:
    """Where it is True, or None if it is True everywhere."""
    return None if bool(live.all()) else live.nonzero().reshape(-1)
