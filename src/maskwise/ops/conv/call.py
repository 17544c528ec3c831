"""A call of a convolution: its checks, its facts, and the masks as its routes take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.conv import reference
from maskwise.ops.conv.arguments import Options, check, line_up, seen_through
from maskwise.ops.conv.gradient import apply
from maskwise.ops.conv.routes import ROUTES, Job, Region, decide_by_count, report
from maskwise.ops.primitives import number_for
from maskwise.ops.torch_private import has_dispatch_modes, is_tracing, is_transformed
from maskwise.plan import dispatch
from maskwise.plan.dispatch import Decision, Facts, decide

__all__ = ["convolve"]

# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_cached, _forced, _is_any_forced = dispatch.cache.get, dispatch.forced, dispatch.is_any_forced
_is_any_observing, _is_grad_enabled = dispatch.is_any_observing, torch.is_grad_enabled


class Call(NamedTuple):
    """A call that was checked: what is cached with its decision."""

    facts: Facts
    shape: tuple[int, ...]
    lower: torch.dtype | None


def convolve(
    options: Options,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: MaskLike | None,
    outputs: MaskLike | None,
    other: float | Tensor | None,
) -> Tensor:
    """Check a call, decide it by its facts and by what is wanted, and run it."""
    if is_tracing():
        return _in_graph(options, x, weight, bias, mask, outputs, other)
    key = None
    try:
        of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device, bias.layout, bias.requires_grad)
        # fmt: off
        of_other = (
            other.shape, other.dtype, other.device, other.layout, other.requires_grad,
        ) if isinstance(other, Tensor) else ()
        device = x.device.type
        key = (
            options, x.shape, weight.shape, of_bias, x.dtype, weight.dtype, x.device, weight.device, x.layout,
            weight.layout, mask is None, outputs is None, _is_known(device, mask, outputs), of_other,
            _is_last(x) or _is_last(weight), _is_grad_enabled() and (x.requires_grad or weight.requires_grad),
            _is_grad_enabled(),
            device in ("cpu", "cuda") and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            is_transformed() or has_dispatch_modes(), _is_any_forced() and _forced(),
        )
        # fmt: on
        decision: Decision | None = _cached(key)
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):
        # Not tensors, nested ones without a shape, or symbolic sizes: the checks report it, or the call is traced.
        decision, key = None, None
    if decision is None:
        call = _check(options, x, weight, bias, mask, outputs, other)
        decision = decide(call.facts, ROUTES, call)
        if key is not None:
            dispatch.cache[key] = decision
    call = decision.prepared
    if call.lower is not None:
        x, weight, bias = (None if t is None else t.to(call.lower) for t in (x, weight, bias))  # type: ignore[assignment]
    detail: Region = call.facts.detail
    valid = line_up(options.op, "mask", mask, x, tuple(x.shape[-options.dims :]), options.dims)
    if outputs is mask is not None and call.shape[-options.dims :] == x.shape[-options.dims :]:
        wanted = valid
    else:
        wanted = line_up(options.op, "outputs", outputs, x, call.shape[-options.dims :], options.dims)
    if wanted is None and valid is not None:
        wanted = seen_through(valid, detail.geometry, options.dims, options.is_transposed)
    if isinstance(other, float | int) and wanted is not None:
        other = number_for(x, float(other), options.op, "other")
    if decision.route.name == "plain":
        if _is_any_observing() and (planned := report(decision.plan, call.facts, options, x, wanted)):
            return planned  # type: ignore[return-value]
        return decision.run(x, weight, bias, valid, wanted, other, options)  # type: ignore[no-any-return]
    bits = _as_bits(valid, options, x)
    # One tensor where the masks are one: gradients share their tiles then.
    job = Job(call.facts, bits, bits if wanted is valid else _as_bits(wanted, options, x))
    if not x.is_cpu:
        job = job._replace(host=_on_host(options, x, call, mask, outputs))
    decision, found = decide_by_count(job)
    if _is_any_observing() and (planned := report(decision.plan, call.facts, options, x, wanted)):
        return planned  # type: ignore[return-value]
    if decision.route.name == "plain":
        return decision.run(x, weight, bias, valid, wanted, other, options)  # type: ignore[no-any-return]
    fill = other if isinstance(other, Tensor) else None
    if fill is not None and fill.dim():
        fill = _as_map(fill.expand(call.shape), options)
    out = apply(_as_map(x, options), _as_map(weight, options, batched=True), bias, fill, job, decision, found)
    out = out if options.dims == 2 else out.squeeze(2)
    return out if x.dim() == options.dims + 2 else out.squeeze(0)


def _in_graph(
    options: Options,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: MaskLike | None,
    outputs: MaskLike | None,
    other: float | Tensor | None,
) -> Tensor:
    """Make the call a part of a graph, by torch's own convolution."""
    call = _check(options, x, weight, bias, mask, outputs, other)
    valid = line_up(options.op, "mask", mask, x, tuple(x.shape[-options.dims :]), options.dims)
    wanted = line_up(options.op, "outputs", outputs, x, call.shape[-options.dims :], options.dims)
    if wanted is None and valid is not None:
        wanted = seen_through(valid, call.facts.detail.geometry, options.dims, options.is_transposed)
    return reference.dense(x, weight, bias, valid, wanted, other, options)


def _check(
    options: Options,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: MaskLike | None,
    outputs: MaskLike | None,
    other: float | Tensor | None,
) -> Call:
    """Check a call that was not made before, and collect its facts."""
    device = x.device.type if isinstance(x, Tensor) else "cpu"
    lowers = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    geometry, shape = check(options, x, weight, bias, other, lowers)
    lower = torch.get_autocast_dtype(device) if lowers and x.dtype is not torch.float64 else None
    dims = options.dims
    detail = Region(
        geometry,
        x.shape[0] if x.dim() == dims + 2 else 1,
        x.shape[-dims - 1],
        shape[-dims - 1],
        options.is_transposed,
        _is_last(x) or _is_last(weight),
        mask is not None,
        outputs is not None or mask is not None,
        _is_known(device, mask, outputs),
    )
    given = (x, weight, bias, other)
    grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
    facts = Facts(
        options.op,
        tuple(x.shape),
        lower or x.dtype,
        device,
        grad=grad,
        transformed=not is_tracing() and (is_transformed() or has_dispatch_modes()),
        mask="bits" if detail.has_wanted else "none",
        detail=detail,
    )
    return Call(facts, shape, lower)


def _is_known(device: str, *masks: MaskLike | None) -> bool:
    """Whether the bits of masks are known without a host-device sync: on the CPU, or where they lie on the host."""
    return device == "cpu" or all(each is None or (isinstance(each, Mask) and each.facts.on_host) for each in masks)


def _on_host(
    options: Options, x: Tensor, call: Call, mask: MaskLike | None, outputs: MaskLike | None
) -> tuple[Tensor | None, Tensor | None]:
    """What is valid and what is wanted, on the host."""
    detail: Region = call.facts.detail
    like = torch.empty(()).expand(x.shape)
    masks = [each.to("cpu") if isinstance(each, Mask) else each for each in (mask, outputs)]
    valid = line_up(options.op, "mask", masks[0], like, tuple(x.shape[-options.dims :]), options.dims)
    wanted = line_up(options.op, "outputs", masks[1], like, call.shape[-options.dims :], options.dims)
    if wanted is None and valid is not None:
        wanted = seen_through(valid, detail.geometry, options.dims, options.is_transposed)
    return _as_bits(valid, options, x), _as_bits(wanted, options, x)


def _is_last(x: Tensor) -> bool:
    """Whether torch gives results of x in channels-last order."""
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _as_map(x: Tensor, options: Options, *, batched: bool = False) -> Tensor:
    """As (batch, channels, height, width)."""
    x = x if batched or x.dim() == options.dims + 2 else x[None]
    return x if options.dims == 2 else x.unsqueeze(2)


def _as_bits(bits: Tensor | None, options: Options, x: Tensor) -> Tensor | None:
    """As (batch, height, width)."""
    if bits is None:
        return None
    bits = bits if x.dim() == options.dims + 2 else bits[None]
    return bits if options.dims == 2 else bits.unsqueeze(1)
