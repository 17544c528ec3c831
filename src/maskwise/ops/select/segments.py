"""Reductions over stretches of rows as registered ops: what a GPU runs for the sequences of a Packed.

On the CPU the plain operations of `maskwise.ops.select.sequences` are what they are; here the same is one kernel, which
adds in the same order every time, where torch's own would add atomically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.ops import backends
from maskwise.ops.backends import DEVICE, FLOATING
from maskwise.ops.operation import define, differentiate
from maskwise.ops.torch_private import is_tracing

__all__ = ["reduce_segments", "served"]


def plain(
    values: Tensor,  # (n, *rest)
    bounds: Tensor,  # (S + 1,): where each stretch begins, and the last ends
    op: str,
) -> Tensor:
    """A reduction of each stretch, (S, *rest), or its softmax, (n, *rest), in plain torch operations."""
    many = bounds.shape[0] - 1
    rows = torch.arange(values.shape[0], device=values.device)
    ids = torch.searchsorted(bounds[1:].long(), rows, right=True)
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    base = wide.new_zeros(many, *values.shape[1:])
    lengths = bounds.diff().reshape(-1, *[1] * (values.dim() - 1))
    if op in ("sum", "mean"):
        total = base.index_add(0, ids, wide)
        out = total if op == "sum" else torch.where(lengths > 0, total / lengths.clamp(min=1), torch.nan)
        return out.to(values.dtype)
    places = ids.reshape(-1, *[1] * (values.dim() - 1)).expand_as(wide)
    name = "amin" if op == "amin" else "amax"
    peak = torch.full_like(base, torch.inf if name == "amin" else -torch.inf)
    peak = peak.scatter_reduce(0, places, wide, reduce=name)
    if op in ("amax", "amin"):
        return peak.to(values.dtype)
    peak = torch.where(peak.isfinite(), peak, 0.0).detach()
    exponentials = (wide - peak.index_select(0, ids)).exp()
    total = base.index_add(0, ids, exponentials)
    if op == "softmax":
        return (exponentials / total.index_select(0, ids)).to(values.dtype)
    return torch.where(total > 0, torch.where(total > 0, total, 1.0).log() + peak, -torch.inf).to(values.dtype)


def plain_backward(grad: Tensor, known: Tensor, values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """The gradient in plain torch operations."""
    with torch.enable_grad():
        leaf = values.detach().requires_grad_()
        (of_values,) = torch.autograd.grad(plain(leaf, bounds, op), leaf, grad)
    return of_values.contiguous()


def fake(values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """The result without its data."""
    return values.new_empty(values.shape if op == "softmax" else (bounds.shape[0] - 1, *values.shape[1:]))


def fake_backward(grad: Tensor, known: Tensor, values: Tensor, bounds: Tensor, op: str) -> Tensor:
    """The gradient without its data."""
    return values.new_empty(values.shape)


def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradient needs."""
    values, bounds, ctx.op = inputs
    ctx.save_for_backward(output, values, bounds)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """The gradient: by its kernel, or where it is differentiated itself by torch."""
    known, values, bounds = ctx.saved_tensors
    if torch.is_grad_enabled():
        (of_values,) = torch.autograd.grad(plain(values, bounds, ctx.op), values, grad, create_graph=True)
        return of_values, None, None
    return torch.ops.maskwise.segments_backward(grad, known, values, bounds, ctx.op), None, None


GPU = "maskwise.ops.select.gpu"
define(
    "segments",
    "(Tensor values, Tensor bounds, str op) -> Tensor",
    reference=lambda *operands: plain(*operands).contiguous(),
    fake=fake,
    gpu=FLOATING,
    gpu_from=f"{GPU}:segments",
)
define(
    "segments_backward",
    "(Tensor grad, Tensor known, Tensor values, Tensor bounds, str op) -> Tensor",
    reference=plain_backward,
    fake=fake_backward,
    gpu=FLOATING,
    gpu_from=f"{GPU}:segment_backward",
)
differentiate("segments", backward, remember)
backends.provide("segments", DEVICE, FLOATING)

reduce_segments = torch.ops.maskwise.segments.default


def served(values: Tensor) -> bool:
    """Whether a kernel reduces these rows: never under torch.func transforms, which see plain operations only."""
    if backends.why_not_served("segments", values.device.type, values.dtype) is not None:
        return False
    return is_tracing() or torch._C._functorch.peek_interpreter_stack() is None
