"""mw.linear: a linear map of which some weights are dropped."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from maskwise.errors import DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, input_hint, mask_hint
from maskwise.ops.linear import reference
from maskwise.ops.linear.layouts import SparseLayout
from maskwise.ops.linear.registered import sparse_linear
from maskwise.ops.linear.routes import Sizes, build_cost, choose, dense_cost, sparse_cost
from maskwise.plan import Plan, planner
from maskwise.plan.explain import listeners, record
from maskwise.plan.plan import Refusal

__all__ = ["linear"]

OP = "linear"
#: Weights that are picked in a microsecond, and weights that are zeroed.
_PICKED, _ZEROED = 600.0, 2400.0


def linear(
    x: Tensor,  # (..., inputs)
    weight: Tensor,  # (outputs, inputs)
    mask: MaskLike,  # (outputs, inputs)
    bias: Tensor | None = None,  # (outputs,)
) -> Tensor:
    """``torch.nn.functional.linear`` with the weights that a mask keeps; the others are never multiplied.

    >>> import torch, maskwise as mw
    >>> weight = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> mw.linear(torch.tensor([1.0, 10.0]), weight, mask)
    tensor([ 1., 32.])

    Args:
        x: any leading dims, then the inputs.
        weight: (outputs, inputs), as torch.nn.Linear has it.
        mask: a Mask or a bool tensor of the weight's shape; True means keep. What is made of it is remembered with it,
            so the second call with the same mask is cheaper than the first.
        bias: (outputs,), or None.

    Returns:
        (..., outputs). Gradients go to x, bias and kept weights; those of dropped weights are 0. Where the dense
        product is the faster one, which `mw.explain` tells, it is taken, and an input that is not finite then reaches
        all outputs, as in torch; elsewhere it reaches those with a kept weight for it.

    Raises:
        ShapeError: shapes do not fit each other. For a mask of (inputs, outputs) the hint is ``mask.T``.
        DtypeError: the mask is not bool, or dtypes differ.
        DeviceError: devices differ.
    """
    small = None if listeners or torch.compiler.is_compiling() else _facts(x, weight, mask, bias)
    if small in _small:
        return reference.linear(x, weight, mask.to_bool() if isinstance(mask, Mask) else mask, bias)
    bits = _checked(x, weight, mask, bias)
    device = x.device.type
    if device == "cpu" and torch.is_autocast_enabled(device):
        # As torch's own linear does under autocast: all in the lower precision.
        low = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(low), weight.to(low), None if bias is None else bias.to(low)
    if torch.compiler.is_compiling() or device != "cpu":
        return reference.linear(x, weight, bits, bias)
    if small is not None and _is_hopeless(x, weight):
        _remember_small(small)
        return reference.linear(x, weight, bits, bias)
    remembered = _mask_of(mask)
    plan, layout = _plan(x, weight, remembered)
    if listeners:
        record(plan, weight, remembered)
    if layout is None:
        return reference.linear(x, weight, bits, bias)
    return sparse_linear(x, layout.gather(weight), layout, bias)


#: Calls that were checked and are too small for any route but the dense one, by their static facts.
_small: set[tuple[Any, ...] | None] = set()
planner.on_forget(_small.clear)
_SMALL_KEPT = 4096


def _facts(x: Tensor, weight: Tensor, mask: MaskLike, bias: Tensor | None) -> tuple[Any, ...] | None:
    """All that the checks look at, or None where this is no plain call on the CPU."""
    try:
        on_cpu = x.is_cpu and weight.is_cpu and mask.device.type == "cpu" and (bias is None or bias.is_cpu)
        if not on_cpu or torch.is_autocast_enabled("cpu"):
            return None
        told = None if bias is None else (bias.shape, bias.dtype)
        kind = mask.dtype if isinstance(mask, Tensor) else Mask
        return (x.shape, x.dtype, weight.shape, weight.dtype, kind, mask.shape, told)
    except AttributeError:
        return None


def _is_hopeless(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel would not pay even if nothing at all were kept."""
    if planner.forced() is not None:
        return False
    outputs, inputs = weight.shape
    nothing = Sizes(x.numel() // max(inputs, 1), inputs, outputs, 0)
    return sparse_cost(nothing) >= dense_cost(nothing)


def _remember_small(facts: tuple[Any, ...]) -> None:
    if len(_small) >= _SMALL_KEPT:
        _small.clear()
    _small.add(facts)


@dataclass
class _Known:
    """What was made of a mask, and what would have been saved if more had been."""

    layout: SparseLayout | None = None
    forgone: float = 0.0


# By identity and weakly: a tensor that nobody holds any more takes its mask along.
_masks: MutableMapping[Tensor, tuple[int, Mask]] = WeakIdKeyDictionary()


def _mask_of(mask: MaskLike) -> Mask:
    """The mask as one that remembers; a tensor's is found again as long as the tensor lives unchanged."""
    if isinstance(mask, Mask):
        return mask
    found = _masks.get(mask)
    if found is not None and found[0] == mask._version:
        return found[1]
    # A Mask that held the tensor itself would keep it alive, and its entry with it.
    made = Mask(mask.detach())
    if not mask.is_inference():
        _masks[mask] = (mask._version, made)
    return made


def _plan(x: Tensor, weight: Tensor, mask: Mask) -> tuple[Plan, SparseLayout | None]:
    """The plan, and the layout where it is the sparse one."""
    outputs, inputs = weight.shape
    batch = x.numel() // max(inputs, 1)
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    if _is_hopeless(x, weight) and not transformed:
        # Nothing is counted where nothing could come of it.
        reason = "too small a product for a kernel to pay"
        return Plan(
            OP, "plain", reason, dense_cost(Sizes(batch, inputs, outputs, 0)), (Refusal("sparse", reason),)
        ), None
    kept = inputs * outputs if transformed else mask.count()
    sizes = Sizes(batch, inputs, outputs, kept)
    plan = choose(OP, sizes, x.dtype, x.device.type, transformed=transformed)
    if plan.route == "plain":
        return plan, None
    # Here the weight is a dense one: its kept values are picked for the kernel, or its dropped ones zeroed, every time.
    picked, zeroed = plan.microseconds + kept / _PICKED, dense_cost(sizes) + inputs * outputs / _ZEROED
    if picked >= zeroed and planner.forced() is None:
        reason = f"with picking the kept weights predicted {picked:.0f} µs against {zeroed:.0f} µs"
        return Plan(OP, "plain", reason, zeroed, (Refusal("sparse", reason),), plan.dense, plan.dense), None
    known = mask._once("linear", _Known)
    if known.layout is None:
        # A layout is made when what it would have saved so far pays for it: whoever calls once does not pay.
        saved, cost = dense_cost(sizes) - plan.microseconds, build_cost(sizes)
        known.forgone += saved
        if known.forgone < cost and planner.forced() is None:
            reason = f"a layout would cost {cost:.0f} µs, and has been worth {known.forgone:.0f} µs so far"
            return Plan(OP, "plain", reason, dense_cost(sizes), (Refusal("sparse", reason),)), None
        known.layout = SparseLayout.from_mask(mask.to_bool())
    return plan, known.layout


def _fits(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and (device.index is None or device.index == wanted.index)


def _checked(x: Tensor, weight: Tensor, mask: MaskLike, bias: Tensor | None) -> Tensor:
    """The bool tensor of the mask, after all that can be wrong was looked for."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, Tensor) and not (name == "bias" and tensor is None):
            raise DtypeError(
                say(OP, name, must="be a tensor", got=type(tensor).__name__, hint=f"torch.as_tensor({name})")
            )
    if isinstance(mask, Mask):
        shape: tuple[int, ...] = tuple(mask.shape)
    elif isinstance(mask, Tensor) and mask.dtype is torch.bool:
        shape = tuple(mask.shape)
    else:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DtypeError(say(OP, "mask", must=MUST, got=got, hint=mask_hint(mask, "weight.shape")))
    if weight.dim() != 2:
        must, hint = "have two dims, (outputs, inputs)", "weight[None]" if weight.dim() == 1 else "weight.flatten(1)"
        raise ShapeError(say(OP, "weight", must=must, got=tuple(weight.shape), hint=hint))
    if shape != tuple(weight.shape):
        hint = "mask.T" if shape == tuple(weight.shape[::-1]) else "a mask of the weight's own shape"
        raise ShapeError(say(OP, "mask", must=f"have the weight's shape {tuple(weight.shape)}", got=shape, hint=hint))
    if not x.dim() or x.shape[-1] != weight.shape[1]:
        must = f"end in the weight's {weight.shape[1]} inputs"
        turned = x.dim() and x.shape[-1] == weight.shape[0]
        hint = "weight.T and mask.T" if turned else input_hint(x, weight.shape[1], "x", "weight")
        raise ShapeError(say(OP, "x", must=must, got=tuple(x.shape), hint=hint))
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        must = f"have one value for each of the weight's {weight.shape[0]} outputs"
        hint = "bias.flatten()" if bias.numel() == weight.shape[0] else f"torch.zeros({weight.shape[0]})"
        raise ShapeError(say(OP, "bias", must=must, got=tuple(bias.shape), hint=hint))
    low = torch.is_autocast_enabled(x.device.type) if x.device.type in ("cpu", "cuda") else False
    others: tuple[tuple[str, Tensor | Mask | None], ...] = (("weight", weight), ("mask", mask), ("bias", bias))
    for name, value in others:
        # A mask for "cuda" is one for the current device of that kind.
        if value is not None and value.device != x.device and not (value is mask and _fits(value.device, x.device)):
            must, hint = f"be on x's device {x.device}", f"{name}.to(x.device)"
            raise DeviceError(say(OP, name, must=must, got=value.device, hint=hint))
        if isinstance(value, Tensor) and name != "mask" and value.dtype != x.dtype and not low:
            must, hint = f"have x's dtype {x.dtype}", f"{name}.to(x.dtype)"
            raise DtypeError(say(OP, name, must=must, got=value.dtype, hint=hint))
    return mask.to_bool() if isinstance(mask, Mask) else mask
