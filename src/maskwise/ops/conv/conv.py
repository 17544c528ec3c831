"""mw.conv1d, mw.conv2d and their transposed forms: they read what is valid, and compute what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.ops.arguments import MaskLike
from maskwise.ops.backends import why_not_served
from maskwise.ops.conv import reference, rows, tiles
from maskwise.ops.conv.arguments import Geometry, Ints, Options, Pair, check, line_up, seen_through
from maskwise.ops.primitives import fill_dropped, number, number_for, sum_kept
from maskwise.ops.torch_private import has_dispatch_modes, is_tracing, is_transformed, untransformed_apply
from maskwise.plan import dispatch
from maskwise.plan.cost import Rates, Work, microseconds
from maskwise.plan.dispatch import Decision, Facts, Plan, Route, Skips, decide
from maskwise.plan.explain import record

__all__ = ["conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"]

# Bound here, because an attribute look-up takes a tiny call longer than the call itself.
_cached, _forced, _is_any_forced = dispatch.cache.get, dispatch.forced, dispatch.is_any_forced
_is_any_observing, _is_grad_enabled = dispatch.is_any_observing, torch.is_grad_enabled


def conv1d(
    x: Tensor,  # (B, C, L)
    weight: Tensor,  # (out, C / groups, kernel)
    bias: Tensor | None = None,  # (out,)
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    mask: MaskLike | None = None,
    outputs: MaskLike | None = None,
    other: float | Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.conv1d`` of what a mask keeps: nothing else is read into a result, or computed.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[[1.0, 2.0, float("nan")]]])
    >>> mw.conv1d(x, torch.ones(1, 1, 3), padding=1, mask=mw.Mask.from_lengths([2], max_len=3))
    tensor([[[3., 3., 0.]]])

    Args:
        x: (B, C, L), or (C, L).
        weight: (out, C / groups, kernel).
        bias: (out,), or None.
        stride: as in torch.
        padding: as in torch, ``"same"`` and ``"valid"`` included.
        dilation: as in torch.
        groups: as in torch.
        mask: a Mask or a bool tensor of (B, L), (B, 1, L) or (L,), which positions of x are valid; True means keep. The
            others count as zero. By default, all are valid.
        outputs: which positions of the result are wanted, in the same form. By default, those whose position under the
            central tap is valid; where that lies in the padding, the nearest one decides.
        other: a number, or a tensor that broadcasts to the result, for what is not wanted; 0 by default.

    Returns:
        (B, out, L_out), or without B. Gradients go to x where it is valid, and to weight, bias and ``other``; they are
        exactly 0 elsewhere, and depend on wanted positions only.

    Raises:
        ShapeError: shapes do not fit each other.
        DtypeError: dtypes differ, x is not floating, a mask is not bool, or ``other`` is no number or tensor.
        DeviceError: devices differ.
        ArgumentError: a number is invalid or does not fit the dtype, or a tensor is nested or sparse.
    """
    return _convolve(_options("conv1d", 1, stride, padding, dilation, groups), x, weight, bias, mask, outputs, other)


def conv2d(
    x: Tensor,  # (B, C, H, W)
    weight: Tensor,  # (out, C / groups, *kernel)
    bias: Tensor | None = None,  # (out,)
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    mask: MaskLike | None = None,
    outputs: MaskLike | None = None,
    other: float | Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.conv2d`` of what a mask keeps: nothing else is read into a result, or computed.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[[[1.0, float("nan")], [2.0, 3.0]]]])
    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> mw.conv2d(x, torch.ones(1, 1, 3, 3), padding=1, mask=mask)
    tensor([[[[6., 0.],
              [6., 6.]]]])
    >>> mw.conv2d(x, torch.ones(1, 1, 3, 3), padding=1, mask=mask, outputs=~mask, other=-1.0)
    tensor([[[[-1.,  6.],
              [-1., -1.]]]])

    Args:
        x: (B, C, H, W), or (C, H, W).
        weight: (out, C / groups, *kernel).
        bias: (out,), or None.
        stride: as in torch.
        padding: as in torch, ``"same"`` and ``"valid"`` included.
        dilation: as in torch.
        groups: as in torch.
        mask: a Mask or a bool tensor of (B, H, W), (B, 1, H, W) or (H, W), which positions of x are valid; True means
            keep. The others count as zero. By default, all are valid.
        outputs: which positions of the result are wanted, in the same form. By default, those whose position under the
            central tap is valid; where that lies in the padding, the nearest one decides.
        other: a number, or a tensor that broadcasts to the result, for what is not wanted; 0 by default.

    Returns:
        (B, out, H_out, W_out), or without B. Gradients go to x where it is valid, and to weight, bias and ``other``;
        they are exactly 0 elsewhere, and depend on wanted positions only.

    Raises:
        ShapeError: shapes do not fit each other.
        DtypeError: dtypes differ, x is not floating, a mask is not bool, or ``other`` is no number or tensor.
        DeviceError: devices differ.
        ArgumentError: a number is invalid or does not fit the dtype, or a tensor is nested or sparse.
    """
    return _convolve(_options("conv2d", 2, stride, padding, dilation, groups), x, weight, bias, mask, outputs, other)


def conv_transpose1d(
    x: Tensor,  # (B, C, L)
    weight: Tensor,  # (C, out / groups, kernel)
    bias: Tensor | None = None,  # (out,)
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    mask: MaskLike | None = None,
    outputs: MaskLike | None = None,
    other: float | Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.conv_transpose1d`` of what a mask keeps: nothing else is read into a result, or computed.

    >>> import torch, maskwise as mw
    >>> x = torch.tensor([[[1.0, 2.0, float("nan")]]])
    >>> mw.conv_transpose1d(x, torch.ones(1, 1, 2), stride=2, mask=mw.Mask.from_lengths([2], max_len=3))
    tensor([[[1., 1., 2., 2., 0., 0.]]])

    Args:
        x: (B, C, L), or (C, L).
        weight: (C, out / groups, kernel).
        bias: (out,), or None.
        stride: as in torch.
        padding: as in torch.
        output_padding: as in torch.
        groups: as in torch.
        dilation: as in torch.
        mask: a Mask or a bool tensor of (B, L), (B, 1, L) or (L,), which positions of x are valid; True means keep. The
            others count as zero. By default, all are valid.
        outputs: which positions of the result are wanted. By default, those that valid positions are expanded to: each
            to as many as the stride says.
        other: a number, or a tensor that broadcasts to the result, for what is not wanted; 0 by default.

    Returns:
        (B, out, L_out), or without B; with gradients as those of `conv1d`.

    Raises:
        ShapeError: shapes do not fit each other.
        DtypeError: dtypes differ, x is not floating, a mask is not bool, or ``other`` is no number or tensor.
        DeviceError: devices differ.
        ArgumentError: a number is invalid or does not fit the dtype, or a tensor is nested or sparse.
    """
    options = _options("conv_transpose1d", 1, stride, padding, dilation, groups, output_padding)
    return _convolve(options, x, weight, bias, mask, outputs, other)


def conv_transpose2d(
    x: Tensor,  # (B, C, H, W)
    weight: Tensor,  # (C, out / groups, *kernel)
    bias: Tensor | None = None,  # (out,)
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    mask: MaskLike | None = None,
    outputs: MaskLike | None = None,
    other: float | Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.conv_transpose2d`` of what a mask keeps: nothing else is read into a result, or computed.

    >>> import torch, maskwise as mw
    >>> x, mask = torch.tensor([[[[1.0, float("nan")]]]]), torch.tensor([[True, False]])
    >>> mw.conv_transpose2d(x, torch.ones(1, 1, 2, 2), stride=2, mask=mask)
    tensor([[[[1., 1., 0., 0.],
              [1., 1., 0., 0.]]]])

    Args:
        x: (B, C, H, W), or (C, H, W).
        weight: (C, out / groups, *kernel).
        bias: (out,), or None.
        stride: as in torch.
        padding: as in torch.
        output_padding: as in torch.
        groups: as in torch.
        dilation: as in torch.
        mask: a Mask or a bool tensor of (B, H, W), (B, 1, H, W) or (H, W), which positions of x are valid; True means
            keep. The others count as zero. By default, all are valid.
        outputs: which positions of the result are wanted. By default, those that valid positions are expanded to: each
            to as many as the stride says.
        other: a number, or a tensor that broadcasts to the result, for what is not wanted; 0 by default.

    Returns:
        (B, out, H_out, W_out), or without B; with gradients as those of `conv2d`.

    Raises:
        ShapeError: shapes do not fit each other.
        DtypeError: dtypes differ, x is not floating, a mask is not bool, or ``other`` is no number or tensor.
        DeviceError: devices differ.
        ArgumentError: a number is invalid or does not fit the dtype, or a tensor is nested or sparse.
    """
    options = _options("conv_transpose2d", 2, stride, padding, dilation, groups, output_padding)
    return _convolve(options, x, weight, bias, mask, outputs, other)


def _options(
    op: str, dims: int, stride: Any, padding: Any, dilation: Any, groups: int, output_padding: Any = None
) -> Options:
    """The arguments, hashable."""
    stride, padding, dilation, output_padding = (
        tuple(v) if type(v) is list else v for v in (stride, padding, dilation, output_padding)
    )
    return Options(op, dims, stride, padding, dilation, groups, output_padding)


# -- a call ------------------------------------------------------------------------------------------------------------
class Region(NamedTuple):
    """Facts of the family."""

    geometry: Geometry
    batch: int
    #: Channels.
    inputs: int
    outputs: int
    is_transposed: bool
    channels_last: bool
    #: Whether there is a mask of the input, and one of the result.
    has_valid: bool
    has_wanted: bool
    #: Wanted positions, and the tiles that have some, once they are counted.
    wanted: int | None = None
    tiles: int | None = None

    @property
    def result(self) -> Pair:
        """The positions of the result."""
        return self.geometry.fine if self.is_transposed else self.geometry.coarse

    @property
    def flops(self) -> int:
        """FLOPs per coarse position."""
        coarse, fine = (self.inputs, self.outputs) if self.is_transposed else (self.outputs, self.inputs)
        return 2 * self.geometry.taps * (fine // self.geometry.groups) * coarse


class Call(NamedTuple):
    """A call that was checked: what is cached with its decision."""

    facts: Facts
    shape: tuple[int, ...]
    lower: torch.dtype | None


def _convolve(
    options: Options,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: MaskLike | None,
    outputs: MaskLike | None,
    other: float | Tensor | None,
) -> Tensor:
    if is_tracing():
        return _in_graph(options, x, weight, bias, mask, outputs, other)
    key = None
    try:
        of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device, bias.layout, bias.requires_grad)
        of_other = (other.shape, other.device, other.layout, other.requires_grad) if isinstance(other, Tensor) else ()
        device = x.device.type
        # fmt: off
        key = (
            options, x.shape, weight.shape, of_bias, x.dtype, weight.dtype, x.device, weight.device, x.layout,
            weight.layout, mask is None, outputs is None, of_other, _is_last(x) or _is_last(weight),
            _is_grad_enabled() and (x.requires_grad or weight.requires_grad), _is_grad_enabled(),
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
        decision = decide(call.facts, _ROUTES, call)
        if key is not None:
            dispatch.cache[key] = decision
    call = decision.prepared
    if call.lower is not None:
        x, weight, bias = (None if t is None else t.to(call.lower) for t in (x, weight, bias))  # type: ignore[assignment]
    detail: Region = call.facts.detail
    valid = line_up(options.op, "mask", mask, x, tuple(x.shape[-options.dims :]), options.dims)
    wanted = line_up(options.op, "outputs", outputs, x, call.shape[-options.dims :], options.dims)
    if wanted is None and valid is not None:
        wanted = seen_through(valid, detail.geometry, options.dims, options.is_transposed)
    if isinstance(other, float | int) and wanted is not None:
        other = number_for(x, float(other), options.op, "other")
    if decision.route.name == "plain":
        if _is_any_observing() and (planned := _report(decision.plan, call, options, x, wanted)):
            return planned  # type: ignore[return-value]
        return decision.run(x, weight, bias, valid, wanted, other, options)  # type: ignore[no-any-return]
    job = Job(call.facts, _as_bits(valid, options, x), _as_bits(wanted, options, x))
    decision, found = _decide_by_count(job)
    if _is_any_observing() and (planned := _report(decision.plan, call, options, x, wanted)):
        return planned  # type: ignore[return-value]
    if decision.route.name == "plain":
        return decision.run(x, weight, bias, valid, wanted, other, options)  # type: ignore[no-any-return]
    fill = other if isinstance(other, Tensor) else None
    if fill is not None and fill.dim():
        fill = _as_map(fill.expand(call.shape), options)
    out = _apply(_as_map(x, options), _as_map(weight, options, batched=True), bias, fill, job, decision, found)
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


# -- routes that skip --------------------------------------------------------------------------------------------------
class Job(NamedTuple):
    """What to convolve: the facts, what is valid of the input, and what is wanted of the result."""

    facts: Facts
    valid: Tensor | None
    wanted: Tensor | None
    #: Whether results that read nothing valid are 0, as in a gradient, which has no bias.
    is_gradient: bool = False


def _tile_size(detail: Region) -> Pair:
    """Coarse positions of a tile: larger for kernels whose halo is wide."""
    height, width = detail.geometry.span
    if detail.geometry.coarse[0] == 1:
        return 1, 64
    return (8, 8) if max(height, width) <= 4 else (16, 16)


class Found(NamedTuple):
    """The tiles to compute, and how many positions of them are wanted."""

    tiling: tiles.Tiling
    tiles: Tensor
    wanted: int


def _find(job: Job, size: Pair) -> Found:
    detail: Region = job.facts.detail
    tiling = tiles.tiling_of(detail.geometry, size, detail.is_transposed)
    source = job.valid if job.is_gradient else None
    found = tiles.find(job.wanted, source, detail.batch, detail.geometry, tiling, detail.is_transposed)
    return Found(tiling, *found)


def _decide_by_count(job: Job) -> tuple[Decision, Found]:
    """Decide a call from the tiles that are active and the positions that are wanted."""
    detail: Region = job.facts.detail
    found = _find(job, _tile_size(detail))
    facts = job.facts._replace(detail=detail._replace(wanted=found.wanted, tiles=found.tiles.shape[0]))
    key = (facts, _is_any_forced() and _forced())
    decision: Decision | None = _cached(key)
    if decision is None:
        decision = dispatch.cache[key] = decide(facts, _ROUTES)
    return decision, found


def _run_tiles(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, job: Job, found: Found) -> Tensor:
    """The route ``tiles`` without autograd."""
    detail: Region = job.facts.detail
    fill = number(0.0, x.dtype, x.device) if other is None else other.to(x.dtype)
    return tiles.convolve(
        x, weight, bias, job.valid, job.wanted, fill, detail.geometry, found.tiling, found.tiles,
        detail.is_transposed, detail.channels_last,
    )  # fmt: skip


def _run_pixels(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, job: Job, found: Found) -> Tensor:
    """The route ``pixels`` without autograd: tiles of one position."""
    return _run_tiles(x, weight, bias, other, job, _find(job, (1, 1)))


def _run_rows(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, job: Job, found: Found) -> Tensor:
    """The route ``rows`` without autograd."""
    detail: Region = job.facts.detail
    fill = number(0.0, x.dtype, x.device) if other is None else other.to(x.dtype)
    return rows.convolve(
        x, weight, bias, job.valid, job.wanted, fill, detail.geometry, detail.is_transposed, detail.channels_last
    )


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
        ctx.job, ctx.route = job, decision.route.name
        ctx.other = None if other is None else other.shape
        ctx.save_for_backward(x, weight)
        out: Tensor = decision.run(x, weight, bias, other, job, found)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        job: Job = ctx.job
        detail: Region = job.facts.detail
        needs = ctx.needs_input_grad
        dx = dw = db = dother = None
        if needs[0]:
            step = _step(
                job.facts, detail.outputs, detail.inputs, job.wanted, job.valid, is_transposed=not detail.is_transposed
            )
            dx = _differentiable(grad, weight, step)
        if needs[1] or (needs[2] and not detail.is_transposed):
            fine, coarse = (grad, x) if detail.is_transposed else (x, grad)
            bits = (job.wanted, job.valid) if detail.is_transposed else (job.valid, job.wanted)
            dw, db = _weight_gradient(fine, coarse, _Weight(*bits, job.facts, ctx.route))
        if needs[2] and detail.is_transposed:
            db = grad.sum((0, 2, 3)) if job.wanted is None else sum_kept(grad, job.wanted[:, None], (0, 2, 3))
        if needs[3]:
            dropped = torch.zeros_like(grad) if job.wanted is None else torch.where(job.wanted[:, None], 0.0, grad)
            dother = dropped.sum_to_size(ctx.other)
        return dx, dw, db if needs[2] else None, dother, None, None, None


class _Weight(NamedTuple):
    """What a gradient of a weight is made of: what is kept of both sides, and the route of the convolution."""

    fine_bits: Tensor | None
    coarse_bits: Tensor | None
    facts: Facts
    route: str


class _WeightGradient(torch.autograd.Function):
    """The gradient of a weight and of a bias; its own gradients are convolutions with the gradient of a gradient."""

    @staticmethod
    def forward(ctx: Any, fine: Tensor, coarse: Tensor, of: _Weight) -> tuple[Tensor, Tensor]:
        ctx.of = of
        ctx.save_for_backward(fine, coarse)
        detail: Region = of.facts.detail
        if of.route == "rows":
            return rows.weight_gradient(
                fine, coarse, of.fine_bits, of.coarse_bits, detail.geometry, detail.channels_last
            )
        size = (1, 1) if of.route == "pixels" else _tile_size(detail)
        return tiles.weight_gradient(fine, coarse, of.fine_bits, of.coarse_bits, detail.geometry, size)

    @staticmethod
    def backward(ctx: Any, dw: Tensor, db: Tensor) -> tuple[Any, ...]:
        fine, coarse = ctx.saved_tensors
        of: _Weight = ctx.of
        channels, bits = (fine.shape[1], coarse.shape[1]), (of.fine_bits, of.coarse_bits)
        dfine = dcoarse = None
        if ctx.needs_input_grad[0]:
            dfine = _differentiable(coarse, dw, _step(of.facts, *channels[::-1], *bits[::-1], is_transposed=True))
        if ctx.needs_input_grad[1]:
            dcoarse = _differentiable(fine, dw, _step(of.facts, *channels, *bits, is_transposed=False))
            spread = db[:, None, None]
            dcoarse = dcoarse + (
                spread if of.coarse_bits is None else torch.where(of.coarse_bits[:, None], spread, 0.0)
            )
        return dfine, dcoarse, None


_apply_convolution = untransformed_apply(_Convolution)
_weight_gradient_apply = untransformed_apply(_WeightGradient)


def _apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, job: Job, decision: Decision, found: Found
) -> Tensor:
    if job.facts.grad:
        return _apply_convolution(x, weight, bias, other, job, decision, found)  # type: ignore[no-any-return]
    return decision.run(x, weight, bias, other, job, found)  # type: ignore[no-any-return]


def _weight_gradient(fine: Tensor, coarse: Tensor, of: _Weight) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _weight_gradient_apply(fine, coarse, of)
    return found


def _step(
    facts: Facts, inputs: int, outputs: int, valid: Tensor | None, wanted: Tensor | None, *, is_transposed: bool
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
    return Job(facts._replace(grad=torch.is_grad_enabled(), mask=kind, detail=detail), valid, wanted, is_gradient=True)


def _differentiable(x: Tensor, weight: Tensor, job: Job) -> Tensor:
    """A step of a gradient, by the route that is predicted to be the fastest."""
    decision, found = _decide_by_count(job)
    if decision.route.name == "plain":
        return _dense_map(x, weight, job)
    return _apply(x, weight, None, None, job, decision, found)


# -- which route -------------------------------------------------------------------------------------------------------
#: Of the rate of a matrix product: torch's convolution of a whole map, of a batch of tiles, a product of gathered rows.
_DENSE, _TILES, _PIXELS = 0.9, 0.8, 0.9
#: The same of depthwise convolutions: torch's, torch's of a batch of tiles, and by rows.
_DEPTHWISE, _DEPTHWISE_TILES, _ROWS = 0.3, 0.1, 0.3
#: FLOPs of a dense convolution below which the mask is not looked at; of a depthwise one, which takes longer for them.
_FEW_FLOPS, _FEW_DEPTHWISE = 20_000_000, 2_000_000
#: Single positions of planes are gathered an element at a time, which takes that many times as long.
_STRIDED = 4


def _serves(facts: Facts) -> str | None:
    if facts.mask == "none":
        return "nothing is dropped"
    return why_not_served("conv_tiles", facts.device, facts.dtype)


def _serves_rows(facts: Facts) -> str | None:
    d: Region = facts.detail
    why = rows.serves(d.geometry, d.inputs, d.outputs, d.is_transposed, d.channels_last)
    return why or (_serves(facts) if facts.mask == "none" else why_not_served("conv_rows", facts.device, facts.dtype))


def _serves_pixels(facts: Facts) -> str | None:
    g: Geometry = facts.detail.geometry
    if g.groups != 1 or g.dilation != (1, 1) or (facts.detail.is_transposed and g.stride != (1, 1)):
        return "single positions are gathered without groups, dilation and transposed strides"
    return _serves(facts)


def _pays(facts: Facts) -> str | None:
    few = _FEW_DEPTHWISE if _is_depthwise(facts.detail) else _FEW_FLOPS
    return "too little to look at the mask for" if _dense_flops(facts.detail) < few else None


def _is_depthwise(detail: Region) -> bool:
    return detail.geometry.groups > 1 and detail.geometry.groups == detail.inputs


def _dense_flops(detail: Region) -> int:
    return detail.batch * prod(detail.geometry.coarse) * detail.flops


def _moved(facts: Facts) -> tuple[int, int]:
    """The bytes of the input and of the result."""
    detail: Region = facts.detail
    fine, coarse = prod(detail.geometry.fine), prod(detail.geometry.coarse)
    read, written = (coarse, fine) if detail.is_transposed else (fine, coarse)
    size = facts.dtype.itemsize * detail.batch
    return read * detail.inputs * size, written * detail.outputs * size


def _plain_work(facts: Facts) -> Work:
    detail: Region = facts.detail
    read, written = _moved(facts)
    # The fills before and after read and write everything.
    streamed = read + written + 2 * read * detail.has_valid + 2 * written * detail.has_wanted
    return Work(calls=1 + detail.has_valid + detail.has_wanted, streamed=streamed, flops=_dense_flops(detail))


def _tiles_work(facts: Facts) -> Work:
    detail: Region = facts.detail
    return _gathered(facts, _tile_size(detail), 0 if detail.tiles is None else detail.tiles)


def _rows_work(facts: Facts) -> Work:
    detail: Region = facts.detail
    read, written = _moved(facts)
    kept = (detail.wanted or 0) / max(1, detail.batch * prod(detail.result))
    return Work(calls=2, streamed=round(kept * read) + written, flops=(detail.wanted or 0) * detail.flops)


def _pixels_work(facts: Facts) -> Work:
    work = _gathered(facts, (1, 1), facts.detail.wanted or 0)
    return work if facts.detail.channels_last else work._replace(gathered=_STRIDED * work.gathered)


def _gathered(facts: Facts, size: Pair, count: int) -> Work:
    detail: Region = facts.detail
    tiling = tiles.tiling_of(detail.geometry, size, detail.is_transposed)
    windows, written = count * prod(tiling.window), count * prod(tiling.size)
    # A transposed convolution with a stride has its taps for each position that is read.
    flops = detail.flops * (windows if detail.is_transposed and detail.geometry.stride != (1, 1) else written)
    moved = 2 * facts.dtype.itemsize * (windows * detail.inputs + written * detail.outputs)
    # A product or a convolution between three kernels, all of which Python prepares.
    return Work(calls=12, streamed=_moved(facts)[1] + moved, gathered=moved, flops=flops)


def _cost(efficiency: float, depthwise: float) -> Callable[[Facts, Work, Rates], float]:
    def cost(facts: Facts, work: Work, rates: Rates) -> float:
        share = depthwise if _is_depthwise(facts.detail) else efficiency
        return microseconds(work._replace(flops=round(work.flops / share)), rates.plain_call, rates)

    return cost


def _flops(facts: Facts) -> int:
    detail: Region = facts.detail
    return _dense_flops(detail) // max(1, detail.batch * prod(detail.result))


_ROUTES = (
    Route(
        "rows",
        _run_rows,
        _serves_rows,
        _rows_work,
        _pays,
        _cost(_ROWS, _ROWS),
        skips=Skips.READING,
        flops=_flops,
        is_kernel=True,
    ),
    Route(
        "tiles",
        _run_tiles,
        _serves,
        _tiles_work,
        _pays,
        _cost(_TILES, _DEPTHWISE_TILES),
        skips=Skips.COMPUTING,
        flops=_flops,
        is_kernel=True,
    ),
    Route(
        "pixels",
        _run_pixels,
        _serves_pixels,
        _pixels_work,
        _pays,
        _cost(_PIXELS, _PIXELS),
        skips=Skips.COMPUTING,
        flops=_flops,
    ),
    Route("plain", reference.dense, work=_plain_work, cost=_cost(_DENSE, _DEPTHWISE), flops=_flops, transforms=True),
)


def _report(plan: Plan, call: Call, options: Options, x: Tensor, wanted: Tensor | None) -> Plan | None:
    """Record a call: what counts is the positions of the result."""
    detail: Region = call.facts.detail
    total = detail.batch * prod(detail.result)
    skipped = 0
    if plan.work is not None and plan.route != "plain":
        skipped = total - plan.work.flops // max(1, _flops(call.facts))
        plan = replace(plan, reason=_why(plan, detail, total - skipped, total))
    positions = x.new_empty(()).expand(detail.batch, *detail.result[-options.dims :])
    return record(plan, positions, wanted, skipped=skipped)


def _why(plan: Plan, detail: Region, computed: int, total: int) -> str:
    if plan.route == "rows":
        return f"{plan.reason}: {computed:,} of {total:,} positions"
    size = (1, 1) if plan.route == "pixels" else _tile_size(detail)
    tiling = tiles.tiling_of(detail.geometry, size, detail.is_transposed)
    count = computed // max(1, prod(tiling.size))
    of = -(-detail.result[0] // tiling.size[0]) * -(-detail.result[1] // tiling.size[1]) * detail.batch
    halo = prod(tiling.window) / max(1, prod(tiling.step))
    shape = " x ".join(map(str, tiling.size))
    return f"{plan.reason}: {count:,} of {of:,} tiles of {shape}, whose halo reads {halo:.2f} x their positions"
