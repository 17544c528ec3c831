"""mw.linear: a linear map of which some weights are dropped."""

from __future__ import annotations

from collections.abc import MutableMapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from maskwise.errors import DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, input_hint, mask_hint, need_dense
from maskwise.ops.linear import reference
from maskwise.ops.linear.cost import Product
from maskwise.ops.linear.sparse import (
    DeferredLayout,
    decide_product,
    is_sparse_promising,
    multiply,
    product_routes,
)
from maskwise.ops.primitives import fill_dropped
from maskwise.ops.torch_private import has_dispatch_modes, is_tracing, is_transformed
from maskwise.plan import dispatch
from maskwise.plan.dispatch import Decision, Facts, Plan, Skips
from maskwise.plan.explain import record

__all__ = ["linear"]

_OP = "linear"
# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_cached, _forced, _is_any_forced = dispatch.cache.get, dispatch.forced, dispatch.is_any_forced
_is_any_observing, _is_autocast_enabled = dispatch.is_any_observing, torch.is_autocast_enabled
_dense_linear = torch.nn.functional.linear


def linear(
    x: Tensor,  # (..., inputs)
    weight: Tensor,  # (outputs, inputs)
    mask: MaskLike,  # (outputs, inputs)
    bias: Tensor | None = None,  # (outputs,)
) -> Tensor:
    """``torch.nn.functional.linear`` with kept weights only; NaN in dropped weights has no effect.

    >>> import torch, maskwise as mw
    >>> weight = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> mw.linear(torch.tensor([1.0, 10.0]), weight, mask)
    tensor([ 1., 32.])

    Args:
        x: any leading dims, then the inputs.
        weight: (outputs, inputs), as torch.nn.Linear has it.
        mask: a Mask or a bool tensor of the weight's shape; True means keep. What is computed from it is cached with
            it, so the second call with the same mask is cheaper than the first.
        bias: (outputs,), or None.

    Returns:
        (..., outputs). Gradients go to x, bias and kept weights; those of dropped weights are 0. Where the dense
        product is the faster one, which `mw.explain` reports, it is taken, and an input that is not finite then reaches
        all outputs, as in torch; elsewhere it reaches those with a kept weight for it.

    Raises:
        ShapeError: shapes do not fit each other. For a mask of (inputs, outputs) the hint is ``mask.T``.
        DtypeError: the mask is not bool, or dtypes differ.
        DeviceError: devices differ.
        ArgumentError: a tensor is nested or sparse.
    """
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    if is_tracing():
        return _in_graph(x, weight, mask, bits, bias)
    try:
        # Of what torch itself refuses, such as dtypes that differ, nothing is in the key: a tiny call would notice.
        key = (
            _OP, x.shape, weight.shape, bits.shape, x.dtype, x.device, x.layout, weight.is_cpu,
            None if bias is None else bias.shape, is_transformed(), _is_any_forced() and _forced(),
        )  # fmt: skip
        decision = _cached(key)
        if decision is None:
            decision = _decide(key, x, weight, mask, bias)
        state = None
        if decision is _BY_COUNT:
            if _is_autocast_enabled("cpu"):
                _check(x, weight, mask, bias)
                x, weight, bias = _lower(x, weight, bias)
            state, decision = _decide_by_count(key, x, weight, mask, bits, bias)
        if _is_any_observing() and (planned := record(decision.plan, weight, _mask_of(mask))):
            return planned  # type: ignore[return-value]
        return decision.run(x, weight, bits, bias, state)  # type: ignore[no-any-return]
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        refused = error
    # Not tensors, nested ones without a shape, or tensors that do not fit each other: the checks report it in full.
    _check(x, weight, mask, bias)
    if isinstance(refused, TypeError) and has_dispatch_modes():
        # Sizes that are symbols, and no key: a graph is made of the call, as by make_fx.
        return _in_graph(x, weight, mask, bits, bias)
    raise refused


def _in_graph(x: Tensor, weight: Tensor, mask: MaskLike, bits: Tensor, bias: Tensor | None) -> Tensor:
    """Make the call a part of a graph, of which a layout is no part: the mask may be an input of it."""
    _check(x, weight, mask, bias)
    if x.is_cpu and _is_autocast_enabled("cpu"):
        x, weight, bias = _lower(x, weight, bias)
    return reference.linear(x, weight, bits, bias)


def _lower(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """All in the lower precision, as torch's own linear does under autocast."""
    low = torch.get_autocast_dtype("cpu")
    return x.to(low), weight.to(low), None if bias is None else bias.to(low)


# -- routes ------------------------------------------------------------------------------------------------------------
def _run_sparse(x: Tensor, weight: Tensor, bits: Tensor, bias: Tensor | None, state: _MaskState) -> Tensor:
    layout = state.layout or state.build(bits)
    return multiply(x, layout.gather(weight), bias, layout)


def _run_plain(x: Tensor, weight: Tensor, bits: Tensor, bias: Tensor | None, state: _MaskState | None) -> Tensor:
    # torch.where takes as long as the product itself where what is kept alternates at random.
    return _dense_linear(x, fill_dropped(weight, bits), bias)


# The kernel multiplies kept weights only; gathering them may read others.
_ROUTES = product_routes(_run_sparse, _run_plain, skips=Skips.COMPUTING)
#: In the cache in the place of a decision that depends on how many weights the mask keeps.
_BY_COUNT = Decision(_run_plain, None, Plan(_OP, "plain", "the kept weights are not counted", 0.0), _ROUTES[-1])


class _MaskState(DeferredLayout):
    """What is cached with a mask: how many weights it keeps, and its layout."""

    __slots__ = ("kept",)

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept


def _facts(x: Tensor, weight: Tensor, transformed: bool, state: _MaskState | None = None) -> Facts:
    outputs, inputs = weight.shape
    has_layout = state is not None and state.layout is not None
    return Facts(
        _OP,
        (outputs, inputs),
        x.dtype,
        x.device.type,
        transformed=transformed,
        kept=None if state is None else state.kept,
        # The best case, before a mask is looked at.
        contiguous=state is None or x.is_contiguous(),
        detail=Product(prod(x.shape[:-1]), inputs, outputs, is_dense=True, has_layout=has_layout),
    )


def _decide(key: tuple[Any, ...], x: Tensor, weight: Tensor, mask: MaskLike, bias: Tensor | None) -> Decision:
    """Check a call that was not made before, and decide it where that takes no count of the mask."""
    _check(x, weight, mask, bias)
    transformed, required = key[-2:]
    facts = _facts(x, weight, transformed)
    counts = required != "plain" and _ROUTES[0].refuses(facts) is None and (required or is_sparse_promising(facts))
    decision = dispatch.cache[key] = _BY_COUNT if counts else decide_product(facts, _ROUTES)
    return decision


def _decide_by_count(
    key: tuple[Any, ...], x: Tensor, weight: Tensor, mask: MaskLike, bits: Tensor, bias: Tensor | None
) -> tuple[_MaskState, Decision]:
    """The decision for a mask of which the kept weights are counted, and what is cached with that mask."""
    holder = _mask_of(mask)
    # Not `_once`: `to_bool` has looked for changes of the mask.
    hit = holder._cache.get(_OP)
    state: _MaskState = hit[0] if hit is not None else holder._once(_OP, lambda: _MaskState(int(holder.count())))
    # Kernels refuse less than torch does, so here the key holds all that is checked.
    full_key = (
        key, x.dtype, weight.dtype, weight.layout, None if bias is None else (bias.dtype, bias.device, bias.layout),
        x.is_contiguous(), state.kept, state.layout is not None,
    )  # fmt: skip
    decision: Decision | None = _cached(full_key)
    if decision is None:
        _check(x, weight, mask, bias)
        decision = dispatch.cache[full_key] = decide_product(_facts(x, weight, key[-2], state), _ROUTES)
    saving = decision.prepared
    if saving is not None and state.is_due(saving):
        state.build(bits)
        return _decide_by_count(key, x, weight, mask, bits, bias)
    return state, decision


# By identity and weakly: a tensor that is freed takes its Mask along.
_masks: MutableMapping[Tensor, tuple[int, Mask]] = WeakIdKeyDictionary()


def _mask_of(mask: MaskLike) -> Mask:
    """The Mask that caches; a tensor's is found again as long as the tensor lives unchanged."""
    if isinstance(mask, Mask):
        return mask
    version, found = _masks.get(mask, (None, None))
    if found is not None and version == mask._version:
        return found
    # A Mask that held the tensor itself would keep it alive, and its entry with it.
    made = Mask(mask.detach())
    if not mask.is_inference():
        _masks[mask] = (mask._version, made)
    return made


# -- checks ------------------------------------------------------------------------------------------------------------
def _check(x: Tensor, weight: Tensor, mask: MaskLike, bias: Tensor | None) -> None:
    """Raise unless shapes, dtypes and devices fit each other."""
    for name, value in (("x", x), ("weight", weight), ("mask", mask), ("bias", bias)):
        need_dense(_OP, name, value)
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
            raise DtypeError(
                say(_OP, name, must="be a tensor", got=type(tensor).__name__, hint=f"torch.as_tensor({name})")
            )
    if not isinstance(mask, Mask) and not (isinstance(mask, Tensor) and mask.dtype is torch.bool):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DtypeError(say(_OP, "mask", must=MUST, got=got, hint=mask_hint(mask, "weight.shape")))
    shape = tuple(mask.shape)
    if weight.dim() != 2:
        must, hint = "have two dims, (outputs, inputs)", "weight[None]" if weight.dim() == 1 else "weight.flatten(1)"
        raise ShapeError(say(_OP, "weight", must=must, got=tuple(weight.shape), hint=hint))
    if shape != tuple(weight.shape):
        hint = "mask.T" if shape == tuple(weight.shape[::-1]) else "a mask of the weight's own shape"
        raise ShapeError(say(_OP, "mask", must=f"have the weight's shape {tuple(weight.shape)}", got=shape, hint=hint))
    if not x.dim() or x.shape[-1] != weight.shape[1]:
        must = f"end in the weight's {weight.shape[1]} inputs"
        is_transposed = x.dim() and x.shape[-1] == weight.shape[0]
        hint = "weight.T and mask.T" if is_transposed else input_hint(x, weight.shape[1], "x", "weight")
        raise ShapeError(say(_OP, "x", must=must, got=tuple(x.shape), hint=hint))
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        must = f"have one value for each of the weight's {weight.shape[0]} outputs"
        hint = "bias.flatten()" if bias.numel() == weight.shape[0] else f"torch.zeros({weight.shape[0]})"
        raise ShapeError(say(_OP, "bias", must=must, got=tuple(bias.shape), hint=hint))
    low = torch.is_autocast_enabled(x.device.type) if x.device.type in ("cpu", "cuda") else False
    others: tuple[tuple[str, Tensor | Mask | None], ...] = (("weight", weight), ("mask", mask), ("bias", bias))
    for name, value in others:
        # A mask for "cuda" is one for the current device of that kind.
        if value is not None and value.device != x.device and not (value is mask and _fits(value.device, x.device)):
            must, hint = f"be on x's device {x.device}", f"{name}.to(x.device)"
            raise DeviceError(say(_OP, name, must=must, got=value.device, hint=hint))
        if isinstance(value, Tensor) and name != "mask" and value.dtype != x.dtype and not low:
            must, hint = f"have x's dtype {x.dtype}", f"{name}.to(x.dtype)"
            raise DtypeError(say(_OP, name, must=must, got=value.dtype, hint=hint))


def _fits(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and (device.index is None or device.index == wanted.index)
