"""mw.linear: a linear map of which some weights are dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.errors import DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, input_hint, mask_hint, need_dense
from maskwise.ops.linear import reference
from maskwise.ops.linear.known import OP, mask_of, plan_for, settled
from maskwise.ops.linear.layouts import SparseLayout
from maskwise.ops.linear.registered import sparse_linear
from maskwise.ops.linear.routes import hopeless
from maskwise.ops.primitives import fill_dropped
from maskwise.ops.small import REFUSED, is_ordinary
from maskwise.ops.torch_private import is_tracing, is_transformed
from maskwise.plan import planner
from maskwise.plan.dispatch import is_observed
from maskwise.plan.explain import record

__all__ = ["linear"]


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
        ArgumentError: a tensor is nested or sparse.
    """
    for name, value in (("x", x), ("weight", weight), ("mask", mask), ("bias", bias)):
        need_dense(OP, name, value)
    if is_ordinary():
        done = _small(x, weight, mask, bias)
        if done is not None:
            return done
        found = settled(x, weight, mask, bias)
        if found is not None:
            return _run(x, weight, found.mask.to_bool(), bias, found.layout)
    bits = _checked(x, weight, mask, bias)
    device = x.device.type
    if device == "cpu" and torch.is_autocast_enabled(device):
        # As torch's own linear does under autocast: all in the lower precision.
        low = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(low), weight.to(low), None if bias is None else bias.to(low)
    if is_tracing() or device != "cpu":
        return reference.linear(x, weight, bits, bias)
    remembered = mask_of(mask)
    transformed = is_transformed()
    plan, layout = plan_for(x, weight, remembered, bias, transformed=transformed)
    if is_observed() and (planned := record(plan, weight, remembered)):
        return planned  # type: ignore[return-value]
    if transformed:
        return reference.linear(x, weight, bits, bias)
    return _run(x, weight, bits, bias, layout)


def _run(x: Tensor, weight: Tensor, bits: Tensor, bias: Tensor | None, layout: SparseLayout | None) -> Tensor:
    """The product with kept weights alone where there is a layout of them, else with the others at 0."""
    if layout is not None:
        return sparse_linear(x, layout.gather(weight), layout, bias)
    # torch.where takes as long as the product itself where what is kept alternates at random.
    return torch.nn.functional.linear(x, fill_dropped(weight, bits), bias)


def _small(x: Tensor, weight: Tensor, mask: MaskLike, bias: Tensor | None) -> Tensor | None:
    """A product too small for any way but the dense one, by torch; None where it is not, or more must be asked."""
    try:
        a_product, a_weight, most = hopeless(planner.forced())
        outputs, inputs = weight.shape
        if outputs * (x.numel() * a_product + inputs * a_weight) > most or not (x.is_cpu and weight.is_cpu):
            return None
        bits = mask.to_bool() if isinstance(mask, Mask) else mask
        if bits.dtype is not torch.bool or bits.shape != weight.shape:
            return None
        if bias is not None and bias.shape != (outputs,):
            return None
        return torch.nn.functional.linear(x, fill_dropped(weight, bits), bias)
    except (AttributeError, *REFUSED):
        return None


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
