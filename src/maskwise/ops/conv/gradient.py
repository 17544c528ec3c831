"""Gradients of convolutions that skip: convolutions with both masks exchanged, each by a route of its own."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from maskwise.ops.conv import reference, rows, tiles
from maskwise.ops.conv.routes import Found, Job, Region, decide_by_count, tile_size
from maskwise.ops.primitives import fill_dropped, sum_kept
from maskwise.ops.torch_private import untransformed_apply
from maskwise.plan.dispatch import Decision, Facts

__all__ = ["apply"]

#: Both masks of a `Job` on the host.
Host: TypeAlias = tuple[Tensor | None, Tensor | None] | None


def _dense_map(x: Tensor, weight: Tensor, job: Job) -> Tensor:
    """A gradient by torch's own convolution."""
    detail: Region = job.facts.detail
    g = detail.geometry
    x = x if job.valid is None else fill_dropped(x, job.valid[:, None])
    if detail.is_transposed:
        out = reference.input_gradient(x, weight, g)
    else:
        after = [
            max(0, (c - 1) * s + span + 1 - b - f)
            for c, s, span, b, f in zip(g.coarse, g.stride, g.span, g.before, g.fine, strict=True)
        ]
        padded = torch.nn.functional.pad(x, (g.before[1], after[1], g.before[0], after[0]))
        out = torch.nn.functional.conv2d(padded, weight, None, g.stride, 0, g.dilation, g.groups)
        out = out[:, :, : g.coarse[0], : g.coarse[1]]
    return out if job.wanted is None else fill_dropped(out, job.wanted[:, None])


class _Convolution(torch.autograd.Function):
    """A route that skips, with its gradient: the transposed convolution with both masks exchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        other: Tensor | None,
        job: Job,
        decision: Decision,
        found: Found,
    ) -> Tensor:
        ctx.job, ctx.route, ctx.tiles = job, decision.route.name, found.tiles
        ctx.other = None if other is None else other.shape
        # The masks too: autograd raises if they are modified before the backward pass.
        ctx.save_for_backward(x, weight, *_versioned(job.valid, job.wanted))
        out: Tensor = decision.run(x, weight, bias, other, job, found)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, *_ = ctx.saved_tensors
        job: Job = ctx.job
        detail: Region = job.facts.detail
        needs = ctx.needs_input_grad
        dx = dw = db = dother = None
        if needs[0] and needs[1] and ctx.route == "tiles" and _is_shared(job) and not torch.is_grad_enabled():
            assert job.wanted is not None
            dx, dw, db = tiles.gradients(
                x, weight, grad, job.wanted, detail.geometry, tile_size(detail), ctx.tiles, detail.channels_last
            )
            needs = (False, False, needs[2], needs[3])
        if needs[0]:
            step = _step(
                job.facts,
                detail.outputs,
                detail.inputs,
                job.wanted,
                job.valid,
                is_transposed=not detail.is_transposed,
                host=_exchanged(job.host),
            )
            dx = _differentiable(grad, weight, step)
        if needs[1] or (needs[2] and db is None and not detail.is_transposed):
            fine, coarse = (grad, x) if detail.is_transposed else (x, grad)
            bits = (job.wanted, job.valid) if detail.is_transposed else (job.valid, job.wanted)
            host = _exchanged(job.host) if detail.is_transposed else job.host
            same = ctx.tiles if ctx.route == "tiles" and not detail.is_transposed and not job.is_gradient else None
            dw, db = _weight_gradient(fine, coarse, _Weight(*bits, job.facts, ctx.route, host, same))
        if needs[2] and detail.is_transposed:
            db = grad.sum((0, 2, 3)) if job.wanted is None else sum_kept(grad, job.wanted[:, None], (0, 2, 3))
        if needs[3]:
            dropped = torch.zeros_like(grad) if job.wanted is None else torch.where(job.wanted[:, None], 0.0, grad)
            dother = dropped.sum_to_size(ctx.other)
        return dx, dw, db if needs[2] else None, dother, None, None, None


def _versioned(*masks: Tensor | None) -> tuple[Tensor | None, ...]:
    """Masks that autograd can save: those of inference mode have no version."""
    return tuple(None if bits is None or bits.is_inference() else bits for bits in masks)


def _is_shared(job: Job) -> bool:
    """Whether both masks are one, so that a tile of the result is one of the input, and a gradient of either."""
    detail: Region = job.facts.detail
    g = detail.geometry
    return (
        job.valid is job.wanted is not None
        and not (detail.is_transposed or job.is_gradient)
        and g.stride == (1, 1)
        and g.fine == g.coarse
    )


class _Weight(NamedTuple):
    """What a gradient of a weight is made of: what is kept of both sides, and the route of the convolution."""

    fine_bits: Tensor | None
    coarse_bits: Tensor | None
    facts: Facts
    route: str
    #: Both bits on the host, where x is on a device.
    host: Host = None
    #: Of the coarse positions, where they are known.
    tiles: Tensor | None = None


class _WeightGradient(torch.autograd.Function):
    """The gradient of a weight and of a bias; its own gradients are convolutions with the gradient of a gradient."""

    @staticmethod
    def forward(ctx: Any, fine: Tensor, coarse: Tensor, of: _Weight) -> tuple[Tensor, Tensor]:
        ctx.of = of
        ctx.save_for_backward(fine, coarse, *_versioned(of.fine_bits, of.coarse_bits))
        detail: Region = of.facts.detail
        if of.route == "rows":
            return rows.weight_gradient(
                fine, coarse, of.fine_bits, of.coarse_bits, detail.geometry, detail.channels_last
            )
        size = (1, 1) if of.route == "pixels" else tile_size(detail)
        found = of.tiles
        if found is None:
            bits = of.coarse_bits if of.host is None else of.host[1]
            tiling = tiles.tiling_of(detail.geometry, size, False)
            found, _ = tiles.find(bits, None, fine.shape[0], detail.geometry, tiling, False)
        found = found.to(fine.device, non_blocking=True)
        return tiles.weight_gradient(fine, coarse, of.fine_bits, of.coarse_bits, detail.geometry, size, found)

    @staticmethod
    def backward(ctx: Any, dw: Tensor, db: Tensor) -> tuple[Any, ...]:
        fine, coarse, *_ = ctx.saved_tensors
        of: _Weight = ctx.of
        channels, bits = (fine.shape[1], coarse.shape[1]), (of.fine_bits, of.coarse_bits)
        dfine = dcoarse = None
        if ctx.needs_input_grad[0]:
            step = _step(of.facts, *channels[::-1], *bits[::-1], is_transposed=True, host=_exchanged(of.host))
            dfine = _differentiable(coarse, dw, step)
        if ctx.needs_input_grad[1]:
            step = _step(of.facts, *channels, *bits, is_transposed=False, host=of.host)
            dcoarse = _differentiable(fine, dw, step)
            spread = db[:, None, None]
            dcoarse = dcoarse + (
                spread if of.coarse_bits is None else torch.where(of.coarse_bits[:, None], spread, 0.0)
            )
        return dfine, dcoarse, None


_apply_convolution = untransformed_apply(_Convolution)
_weight_gradient_apply = untransformed_apply(_WeightGradient)


def apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, job: Job, decision: Decision, found: Found
) -> Tensor:
    """Run a route, with a gradient where one is required."""
    if job.facts.grad:
        return _apply_convolution(x, weight, bias, other, job, decision, found)  # type: ignore[no-any-return]
    return decision.run(x, weight, bias, other, job, found)  # type: ignore[no-any-return]


def _weight_gradient(fine: Tensor, coarse: Tensor, of: _Weight) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _weight_gradient_apply(fine, coarse, of)
    return found


def _step(
    facts: Facts,
    inputs: int,
    outputs: int,
    valid: Tensor | None,
    wanted: Tensor | None,
    *,
    is_transposed: bool,
    host: Host = None,
) -> Job:
    """A step of a gradient: a convolution without bias."""
    detail: Region = facts.detail._replace(
        inputs=inputs,
        outputs=outputs,
        is_transposed=is_transposed,
        has_valid=valid is not None,
        has_wanted=wanted is not None,
        wanted=None,
        tiles=None,
    )
    kind: Any = "none" if valid is None and wanted is None else "bits"
    facts = facts._replace(grad=torch.is_grad_enabled(), mask=kind, detail=detail)
    # Without masks, there is nothing to find.
    return Job(facts, valid, wanted, is_gradient=True, host=None if kind == "none" else host)


def _exchanged(host: Host) -> Host:
    return None if host is None else host[::-1]


def _differentiable(x: Tensor, weight: Tensor, job: Job) -> Tensor:
    """A step of a gradient, by the route that is predicted to be the fastest."""
    decision, found = decide_by_count(job)
    if decision.route.name == "plain":
        return _dense_map(x, weight, job)
    return apply(x, weight, None, None, job, decision, found)
