"""The masked loss piece by piece, for large inputs on the CPU: only what is kept, and no temporary outside the cache.

Where a gradient is asked for and the loss is reduced, it is computed with the loss, while the piece is in the cache;
the backward pass then only scales it. An unreduced loss, and a graph that is walked a second time, compute their pieces
again instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.loss.call import Call, harmless
from maskwise.ops.loss.filled import fill, total
from maskwise.ops.loss.forms import Form, Piece, Place, cells_of, part, rows_of
from maskwise.ops.loss.reference import UNDIVIDED, scales

__all__ = ["form_of", "loss"]


def form_of(call: Call, reduction: str) -> Form | None:
    """How the call can be cut, or None."""
    if any(fill is None for fill in call.fills) or any(
        isinstance(value, Tensor) and value.requires_grad for value in call.rest.values()
    ):
        return None
    return rows_of(call) or cells_of(call, by_rows=reduction == "sequence")


def loss(call: Call, form: Form, reduction: str) -> Tensor:
    """The loss of what is kept."""
    divisors = None if reduction in UNDIVIDED else call.divisors(divisible(call))
    scale = scales(call, reduction, divisors)
    if scale.dim():
        scale = scale.repeat_interleave(form.repeats) if form.repeats > 1 else scale
    unreduced = reduction == "none"
    stripped = replace(form, call=replace(form.call, tensors=()))
    out: Tensor = _Pieces.apply(stripped, scale, unreduced, *form.call.tensors)  # type: ignore[no-untyped-call]
    return out.reshape(call.shape) if unreduced else out


def divisible(call: Call) -> Sequence[Tensor]:
    """The operands as `Call.divisors` wants them: only the target and the weights, which are small, are filled."""
    if call.kind.divides != "classes" or "weight" not in call.rest:
        return call.tensors
    pairs = zip(call.tensors, call.fills, strict=True)
    return replace(call, fills=tuple(None if x.is_floating_point() else value for x, value in pairs)).filled()


class _Pieces(torch.autograd.Function):
    """The loss of a form, with the gradients of its tensors."""

    @staticmethod
    def forward(ctx: Any, form: Form, scale: Tensor, unreduced: bool, *tensors: Tensor) -> Tensor:
        ctx.form, ctx.scale, ctx.unreduced = form, scale, unreduced
        ctx.save_for_backward(*tensors)
        wanted = ctx.needs_input_grad[3:]
        whole = replace(form, call=replace(form.call, tensors=tensors))
        if unreduced:
            return unreduced_loss(whole)
        total, ctx.gradients = reduced_loss(whole, scale, wanted)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[3:]
        whole = replace(ctx.form, call=replace(ctx.form.call, tensors=tensors))
        if torch.is_grad_enabled():
            gradients = differentiable_gradients(whole, ctx.scale, ctx.unreduced, grad, wanted)
        elif ctx.unreduced or ctx.gradients is None:
            gradients = recomputed(whole, ctx.scale, grad, wanted)
        else:
            # They are given away: a second walk through the graph computes them again.
            gradients, ctx.gradients = ctx.gradients, None
            factor = grad.item()
            if factor != 1.0:
                gradients = [None if g is None else g.mul_(factor) for g in gradients]
        return None, None, None, *gradients


def unreduced_loss(form: Form) -> Tensor:
    """The loss of each element."""
    out: Tensor | None = None
    for piece in form.pieces(fill=fill):
        values = form.call.run(piece.tensors)
        if out is None:
            out = values.new_zeros(form.call.shape)
        put(out, piece.place, values if piece.keep is None else fill(values, piece.keep, 0.0))
    return form.call.tensors[0].new_zeros(form.call.shape) if out is None else out


def reduced_loss(form: Form, scale: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and the gradients of the tensors that want one."""
    totals: list[Tensor] = []
    gradients = room(form, wanted)
    dtype = form.call.tensors[0].dtype
    for piece in form.pieces(fill=fill):
        leaves = leaves_of(piece, wanted)
        with torch.set_grad_enabled(any(wanted)):
            out = form.call.run(leaves)
        factor = part_of_scale(scale, piece.place, out)
        if any(wanted):
            pull_back(gradients, piece, leaves, out, factor)
        out = out.detach()
        dtype = out.dtype
        totals.append(total_of(out * factor if scale.dim() else out, piece.keep))
    if not totals:
        return torch.zeros((), dtype=dtype), gradients
    total = torch.stack(totals).sum(dtype=torch.float64)
    return (total if scale.dim() else total * scale).to(dtype), gradients


def recomputed(form: Form, scale: Tensor, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the tensors from the gradient of the result, piece by piece."""
    gradients = room(form, wanted)
    for piece in form.pieces(fill=fill):
        leaves = leaves_of(piece, wanted)
        with torch.enable_grad():
            out = form.call.run(leaves)
        factor = part(grad, piece.place) if grad.dim() else part_of_scale(scale, piece.place, out) * grad
        pull_back(gradients, piece, leaves, out, factor)
    return gradients


def differentiable_gradients(
    form: Form, scale: Tensor, unreduced: bool, grad: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the tensors in one piece, such that they can be differentiated again."""
    tensors = form.call.tensors
    learned = [x for x, want in zip(tensors, wanted, strict=True) if want]
    for piece in form.pieces(size=2**62):
        out = form.call.run(piece.tensors)
        out = out if piece.keep is None else harmless(out, piece.keep, 0.0)
        factor = part(grad, piece.place) if unreduced else part_of_scale(scale, piece.place, out) * grad
        found = iter(torch.autograd.grad((out * factor).sum(), learned, create_graph=True))
        return [next(found) if want else None for want in wanted]
    return [torch.zeros_like(x) if want else None for x, want in zip(tensors, wanted, strict=True)]


def leaves_of(piece: Piece, wanted: Sequence[bool]) -> list[Tensor]:
    """The tensors of a piece, apart from every graph, those that want a gradient ready for one."""
    return [x.detach().requires_grad_(want) for x, want in zip(piece.tensors, wanted, strict=True)]


def pull_back(gradients: list[Tensor | None], piece: Piece, leaves: list[Tensor], out: Tensor, factor: Tensor) -> None:
    """Compute the gradients of one piece and put them in their place."""
    learned = [x for x in leaves if x.requires_grad]
    factor = factor.to(out.dtype).expand_as(out)
    seed = factor if piece.keep is None else fill(factor, piece.keep, 0.0)
    found = iter(torch.autograd.grad(out, learned, seed))
    for whole, leaf in zip(gradients, leaves, strict=True):
        if whole is not None and leaf.requires_grad:
            put(whole, piece.place, next(found))


def total_of(out: Tensor, keep: Tensor | None) -> Tensor:
    """The sum of what is kept, in float32 or better."""
    wide = torch.promote_types(out.dtype, torch.float32)
    if keep is None:
        return out.sum(dtype=wide)
    return total(out, keep) if out.dtype == wide else harmless(out, keep, 0.0).sum(dtype=wide)


def part_of_scale(scale: Tensor, place: Place, out: Tensor) -> Tensor:
    """By what each element of a piece enters the result."""
    if not scale.dim():
        return scale.to(out.dtype)
    each = part(scale, place if isinstance(place, Tensor) else place[:1]).to(out.dtype)
    return each.reshape(-1, *[1] * (out.dim() - 1))


def room(form: Form, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Room for the gradients of the tensors that want one."""
    pairs = zip(form.call.tensors, wanted, strict=True)
    return [torch.zeros(x.shape, dtype=x.dtype) if want else None for x, want in pairs]


def put(whole: Tensor, place: Place, values: Tensor) -> None:
    """Write a part of ``whole``."""
    if isinstance(place, Tensor):
        whole.index_copy_(0, place, values)
    else:
        part(whole, place).copy_(values)
