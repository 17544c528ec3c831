"""A linear layer with a gate on its weight, which multiplies what is kept by the fastest exact route.

``plain`` is the dense product with the effective weight; ``units`` a smaller dense product, without the inputs and
outputs of which nothing is kept; ``sparse`` the kernel, which multiplies kept weights only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maskwise.distributed.group import whole
from maskwise.errors import ArgumentError
from maskwise.mask import Mask
from maskwise.nn.arguments import check_features, check_linear
from maskwise.nn.gates import Gate
from maskwise.nn.gates.gate import fill_gated, gate_for
from maskwise.nn.weight_cache import WeightCache
from maskwise.ops.arguments import MaskLike
from maskwise.ops.linear import (
    BLOCKS,
    Block,
    DeferredLayout,
    Product,
    SparseLayout,
    decide_product,
    dense_cost,
    gpu_cost,
    is_sparse_promising,
    is_two_of_four,
    linear,
    multiply,
    product_routes,
    semi_structured,
)
from maskwise.ops.torch_private import is_tracing
from maskwise.plan import dispatch
from maskwise.plan.cost import Rates, Work
from maskwise.plan.dispatch import NOT_APPLICABLE, Decision, Facts, Plan, Route, Skips
from maskwise.plan.explain import record

__all__ = ["MaskedLinear", "indices_unless_all"]

_OP = "MaskedLinear"
#: Multiplications below which, in training, deciding about a sparse product takes longer than it could save.
WORTHWHILE = 1 << 23
#: A weight that was multiplied so often without a change is one of evaluation: its layout pays over the calls to come.
_PATIENCE = 6
# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_cached, _forced, _is_any_forced = dispatch.cache.get, dispatch.forced, dispatch.is_any_forced
_is_any_observing = dispatch.is_any_observing


class MaskedLinear(nn.Linear):
    """``torch.nn.Linear`` with a gate on its weight: same arguments, same parameters, one more module.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.MaskedLinear(4, 2, gate=mw.nn.gates.NM(2, 4))
    >>> list(layer.state_dict()), layer.mask.count()
    (['weight', 'bias', 'gate.kept'], 4)
    >>> layer(torch.ones(3, 4)).shape
    torch.Size([3, 2])

    The weight stays dense, and is trained by any optimizer; the layer computes with the effective weight, in which what
    the gate drops is 0 whatever an optimizer does to it. Where the weight does not require grad, what depends on
    weight and gate only is cached until one of them changes, and the product takes the fastest exact route: dense on
    the effective weight, a smaller dense product without the inputs and outputs of which nothing is kept, or the sparse
    kernel; on a GPU, also torch's own sparse products. ``mw.explain()`` reports which. In training it is that of
    `mw.linear`, if the gate holds its mask.

    Args:
        in_features: the size of each input.
        out_features: the size of each output.
        bias: whether there is a bias.
        gate: a gate, or a mask (a Mask or a bool tensor that broadcasts to (out_features, in_features)); by default,
            a mask that keeps everything, for a state_dict to be loaded into.
        device: where the parameters are.
        dtype: of the parameters.

    Raises:
        DtypeError: ``gate`` is neither a gate nor a mask.
        ShapeError: the gate does not fit the weight; the hint says what would.
        ArgumentError: the gate belongs to another weight.
    """

    gate: Gate

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gate: Gate | MaskLike | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.gate = gate_for(type(self).__name__, gate, self.weight)
        self._cache: WeightCache[EffectiveWeight] = WeightCache()

    @classmethod
    def from_linear(cls, linear: nn.Linear, gate: Gate | MaskLike | None = None) -> MaskedLinear:
        """A MaskedLinear with the parameters of a Linear: the same objects, so that an optimizer goes on as before.

        >>> import torch, maskwise as mw
        >>> linear = torch.nn.Linear(4, 2)
        >>> mw.nn.MaskedLinear.from_linear(linear, mw.nn.gates.TopK(0.5)).weight is linear.weight
        True

        Args:
            linear: a torch.nn.Linear.
            gate: as for the layer itself.

        Raises:
            DtypeError: ``linear`` is not a torch.nn.Linear, or ``gate`` neither a gate nor a mask.
            ShapeError: the gate does not fit the weight; the hint says what would.
            ArgumentError: the gate belongs to another weight, or the Linear is a lazy one that is not initialized.
        """
        check_linear(f"{cls.__name__}.from_linear", linear)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.gate = gate_for(cls.__name__, gate, layer.weight)
        layer._cache = WeightCache()
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """A Linear with the effective weight of evaluation, copied: what is dropped is 0, and free to grow again.

        >>> import torch, maskwise as mw
        >>> layer = mw.nn.MaskedLinear(4, 2, gate=mw.nn.gates.TopK(0.5))
        >>> int((layer.to_linear().weight != 0).sum())
        4
        """
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, self.weight.device, self.weight.dtype
        )
        with torch.no_grad():
            linear.weight.copy_(whole(evaluated(self.gate, self.weight)))
            if self.bias is not None:
                linear.bias.copy_(whole(self.bias))
        return linear.train(self.training)

    @property
    def mask(self) -> Mask:
        """What the gate keeps at the moment, of shape (out_features, in_features)."""
        return self.gate.mask(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """The product of (..., in_features) with the effective weight, plus the bias: (..., out_features).

        Raises:
            ShapeError: the input does not end in the layer's features.
            DtypeError: the input is not a tensor, or not of the layer's dtype.
            DeviceError: the input is on another device.
        """
        own = self._parameters
        # Attributes of a module take a microsecond each to look up, which a small layer would notice.
        weight = own["weight"] if "weight" in own else self.weight  # noqa: SIM401
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401
        gate = self._modules["gate"]
        assert isinstance(gate, Gate)
        assert weight is not None
        check_features(_OP, input, weight.shape[1], weight)
        found = self._cache.get(weight, gate, bias, lambda: EffectiveWeight(gate(weight), gate.bits(weight)))
        if found is None:
            held = gate.held
            if held is None:
                return F.linear(input, gate(weight), bias)
            if is_tracing() or input.numel() * weight.shape[0] < WORTHWHILE:
                # What the gate itself would do, without the calls in between. A graph is not bound to a size of batch.
                return F.linear(input, fill_gated(weight, held), bias)
            return linear(input, weight, held, bias)
        decision = found.decide(input)
        if _is_any_observing() and (planned := _report(decision.plan, found, weight, gate)):
            return planned  # type: ignore[return-value]
        out: Tensor = decision.run(found, input, bias)
        return out

    def forget(self) -> None:
        """Invalidate what is cached of weight and gate; needed only after few values were written through ``.data``."""
        self._cache.invalidate()


def _report(plan: Plan, found: EffectiveWeight, weight: Tensor, gate: Gate) -> Plan | None:
    return record(plan, weight, gate.bits(weight), skipped=found.skipped(plan.route))


def evaluated(gate: Gate, weight: Tensor) -> Tensor:
    """The effective weight in evaluation mode, for any mode of the gate."""
    training = gate.training
    gate.eval()
    try:
        effective: Tensor = gate(weight)
        return effective
    finally:
        gate.train(training)


# -- what is derived from an effective weight --------------------------------------------------------------------------
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
        """The parts of a weight that a gate keeps by these bits; without bits, of what is not 0."""
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

    @cached_property
    def is_two_of_four(self) -> bool:
        """Whether at most two of each four neighbours along the inputs are kept."""
        return is_two_of_four(self.live)


def whole_block(bits: Tensor) -> Block:
    """The largest block that kernels serve of which a mask keeps whole ones only.

    >>> whole_block(torch.ones(16, 16, dtype=torch.bool)), whole_block(torch.eye(2, dtype=torch.bool))
    ((16, 16), (1, 1))
    """
    for block in sorted(set(BLOCKS) - {(1, 1)}, key=lambda block: -block[0] * block[1]):
        try:
            # The first blocks refuse most masks, at a fraction of the cost.
            for part in (bits[: block[0]], bits):
                SparseLayout.from_mask(part, block)
        except ArgumentError:
            continue
        return block
    return (1, 1)


def indices_unless_all(live: Tensor) -> Tensor | None:
    """Where it is True, or None if it is True everywhere."""
    return None if bool(live.all()) else live.nonzero().reshape(-1)


class EffectiveWeight:
    """An effective weight, and what the routes derive from it.

    >>> found = EffectiveWeight(torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
    >>> found.multiply(torch.tensor([[9.0, 1.0, 1.0]]), None)
    tensor([[3., 0.]])

    The first call is dense: nothing is derived from a weight that changes between any two calls.

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
        self.parts: Parts | None = None
        self.sparse = DeferredLayout(_PATIENCE)
        self.semi_structured: Tensor | None = None
        self._is_used = False
        #: What decisions depend on beside the input: no more than the shape, before the weight was looked at.
        self._key: tuple[Any, ...] = (_OP, effective.shape, effective.dtype, effective.device, None)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product, by the route that is predicted to be the fastest."""
        out: Tensor = self.decide(x).run(self, x, bias)
        return out

    def decide(self, x: Tensor) -> Decision:
        """The route for this input, from the cache or decided now."""
        required = _is_any_forced() and _forced()
        if self.parts is None and (self._is_used or required):
            with torch.inference_mode(False), torch.no_grad():
                parts = Parts.of(self.weight, self.bits)
            shape = None if parts.small is None else parts.small.shape
            self._key = (*self._key[:4], (parts.kept, shape, None, self._pattern(parts)))
            self.parts = parts
        self._is_used = True
        has_layout = self.sparse.layout is not None
        of_x = (x.shape, x.dtype, x.is_contiguous(), x.requires_grad and torch.is_grad_enabled())
        decision: Decision | None = _cached((self._key, of_x, has_layout, required))
        if decision is None:
            decision = decide_product(self._facts(x, has_layout, required), _ROUTES)
            # Not by the key from before: `_facts` may have found the block of the mask.
            dispatch.cache[self._key, of_x, has_layout, required] = decision
        saving = decision.prepared
        if saving is not None and self.sparse.is_due(saving):
            self.build()
            return self.decide(x)
        return decision

    def _pattern(self, parts: Parts) -> bool:
        """Whether the sparse tensor cores of a GPU would take the weight; elsewhere, it is not looked at."""
        is_half = self.weight.dtype in (torch.float16, torch.bfloat16)
        return is_half and self.weight.device.type == "cuda" and parts.is_two_of_four

    def build(self) -> SparseLayout:
        """The layout of what is kept, and the values that go with it."""
        assert self.parts is not None
        return self.sparse.build(self.parts.live, self.parts.block, self.weight)

    def skipped(self, route: str) -> int:
        """How many weights a route does not multiply."""
        parts, total = self.parts, self.weight.numel()
        if parts is None or route == "plain":
            return 0
        if route == "semi_structured":
            return total // 2
        return total - (parts.small.numel() if route == "units" and parts.small is not None else parts.kept)

    def _facts(self, x: Tensor, has_layout: bool, required: object) -> Facts:
        parts, (outputs, inputs) = self.parts, self.weight.shape
        product = Product(prod(x.shape[:-1]), inputs, outputs, BLOCKS[-1], has_layout=has_layout)
        product = product._replace(is_new=parts is None, is_mixed=x.dtype != self.weight.dtype)
        grad = x.requires_grad and torch.is_grad_enabled()
        facts = Facts(
            _OP, (outputs, inputs), x.dtype, x.device.type, grad=grad, contiguous=x.is_contiguous(), detail=product
        )
        if parts is None:
            return facts
        product = product._replace(is_two_of_four=self._pattern(parts))
        if parts.small is not None:
            product = product._replace(live=(parts.small.shape[0], parts.small.shape[1]))
        facts = facts._replace(kept=parts.kept, detail=product)
        # Most masks are decided as if all were in the best of blocks: finding the block takes a look at the mask.
        if required in ("kernel", "sparse", "bsr", "csr") or is_sparse_promising(facts):
            self._key = (*self._key[:4], (*self._key[4][:2], parts.block, self._key[4][3]))
            facts = facts._replace(detail=product._replace(block=parts.block))
        return facts


# -- routes ------------------------------------------------------------------------------------------------------------
# Microseconds, on two AVX2 cores; only ratios matter. Moving one number by an index, and what more calls cost.
MOVE = 0.0012
CALLS = 20.0
# A prediction this much off must not make the layer slower than a dense one.
MARGIN = 1.25


def _serves_units(facts: Facts) -> str | None:
    return NOT_APPLICABLE if facts.detail.live is None else None


def _units_work(facts: Facts) -> Work:
    outputs, inputs = facts.detail.live or (0, 0)
    return Work(calls=3, streamed=facts.dtype.itemsize * outputs * inputs, flops=_flops(facts) * outputs * inputs)


def _units_cost(facts: Facts, work: Work, rates: Rates) -> float:
    product: Product = facts.detail
    outputs, inputs = product.live or (0, 0)
    moved = 0 if inputs == product.inputs else inputs
    moved += 0 if outputs == product.outputs else outputs + product.outputs
    if facts.device != "cpu":
        gathered = 2 * facts.dtype.itemsize * moved * product.batch / rates.gathered
        return gpu_cost(facts, inputs * outputs, rates) + MARGIN * (gathered + 3 * rates.plain_call)
    return dense_cost(product.batch, inputs, outputs, rates) + MARGIN * (moved * product.batch * MOVE + CALLS)


def _live_units(facts: Facts) -> str:
    product: Product = facts.detail
    outputs, inputs = product.live or (0, 0)
    return f"{outputs} of {product.outputs} outputs and {inputs} of {product.inputs} inputs are live"


def _flops(facts: Facts) -> int:
    return 2 * int(facts.detail.batch)


def _run_sparse(found: EffectiveWeight, x: Tensor, bias: Tensor | None, *, is_delegated: bool = False) -> Tensor:
    layout = found.sparse.layout or found.build()
    values = found.sparse.values
    assert values is not None
    if torch.is_autocast_enabled("cpu"):
        # As torch's own linear does under autocast: all in the lower precision.
        low = torch.get_autocast_dtype("cpu")
        x, values, bias = x.to(low), values.to(low), None if bias is None else bias.to(low)
    return multiply(x, values, bias, layout, is_delegated=is_delegated)


def _run_semi_structured(found: EffectiveWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    if found.semi_structured is None:
        with torch.inference_mode(False), torch.no_grad():
            found.semi_structured = semi_structured(found.weight)
    return F.linear(x, found.semi_structured, bias)


def _run_units(found: EffectiveWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    parts = found.parts
    assert parts is not None
    assert parts.small is not None
    if parts.inputs is not None:
        x = x.index_select(-1, parts.inputs)
    if parts.outputs is None:
        return F.linear(x, parts.small, bias)
    live = F.linear(x, parts.small)
    out = live.new_zeros((*live.shape[:-1], found.weight.shape[0])).index_copy(-1, parts.outputs, live)
    # What a dead output has is its bias.
    return out if bias is None else out + bias.to(out.dtype)


def _run_plain(found: EffectiveWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, found.weight, bias)


# All but the plain one work on copies without what they leave out.
_ROUTES = product_routes(
    _run_sparse,
    _run_plain,
    Route(
        "units",
        _run_units,
        _serves_units,
        _units_work,
        cost=_units_cost,
        reason=_live_units,
        skips=Skips.READING,
        flops=_flops,
    ),
    skips=Skips.READING,
    by_torch=partial(_run_sparse, is_delegated=True),
    semi_structured=_run_semi_structured,
)
