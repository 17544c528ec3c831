"""A linear map and the cross entropy of its outputs, over kept rows in chunks: logits are never held whole.

A chunk is some kept rows with all classes. A product writes its logits into one buffer. The kernels of cross entropy
replace them by their gradient, few rows at a time, which stay in the cache. Two more products make the gradients of the
hidden states and of the weight of it. So the forward pass computes the gradients too, and the backward pass only scales
them. An unreduced loss, and a graph that is walked a second time, compute their chunks again instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskwise.errors import OutOfRangeError, say
from maskwise.ops.flops import count_kept
from maskwise.ops.loss import cross_entropy  # noqa: F401  # Defines the kernels.
from maskwise.ops.loss.denominator import wide_dtype
from maskwise.ops.operation import define, differentiate
from maskwise.ops.primitives import where_kept

__all__ = ["Settings", "check_classes", "reference", "run", "run_in_graph"]

#: Logits of a chunk. On the CPU 56 MB of float32: larger chunks multiply little faster, and their memory is the peak's.
_CHUNK, _CHUNK_ON_DEVICE = 7 << 21, 1 << 27
#: Logits that the kernels of cross entropy get at a time on the CPU, at least a row for each thread: 2 MB of float32,
#: which stay in the cache.
_BLOCK = 1 << 19
#: Logits that a product writes at a time on the CPU.
_PRODUCT = 1 << 19
#: Classes that are multiplied at a time on the CPU, at least: BLAS is a third slower on all of them, whose rows are far
#: apart. Of few rows more, so that a product writes about `_PRODUCT` logits.
_CLASSES = 1024
#: Rows up to which products on the CPU are computed by their transposes: faster at most sizes, not at all of them.
_FEW_ROWS = 128
#: Rows of a chunk are a multiple of this, where they can be, as BLAS's tiles are.
_ROWS = 16


class Settings(NamedTuple):
    """What the loss takes besides tensors."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    #: 0 for none.
    softcap: float = 0.0
    #: The dtype of autocast, or None.
    low: torch.dtype | None = None


# -- the reference -----------------------------------------------------------------------------------------------------
def reference(
    hidden: Tensor,  # (..., features)
    weight: Tensor,  # (classes, features)
    target: Tensor,  # (...), int64
    keep: Tensor,  # (...), bool
    bias: Tensor | None,  # (classes,)
    class_weight: Tensor | None,  # (classes,)
    settings: Settings,
) -> Tensor:
    """The unreduced loss in plain torch operations, with all logits; 0 where it is dropped."""
    hidden, classes = where_kept(hidden, keep.unsqueeze(-1), 0.0), where_kept(target, keep, 0)
    if settings.low is not None:
        # What autocast does, without it: the graph of a second derivative is made outside of the block.
        hidden, weight = hidden.to(settings.low), weight.to(settings.low)
        bias = None if bias is None else bias.to(settings.low)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(wide_dtype(logits.dtype)).reshape(-1, weight.shape[0])
    if settings.softcap:
        logits = (logits / settings.softcap).tanh() * settings.softcap
    weights = None if class_weight is None else class_weight.to(logits.dtype)
    flat = classes.reshape(-1)
    out = torch.nn.functional.cross_entropy(logits, flat, weights, reduction="none", label_smoothing=settings.smoothing)
    if settings.z_loss:
        squares = settings.z_loss * logits.logsumexp(-1).square()
        out = out + (squares if weights is None else squares * weights.index_select(0, flat))
    return where_kept(out.reshape(target.shape), keep, 0.0)


def check_classes(target: Tensor, keep: Tensor, classes: int) -> None:
    """Raise where a kept target is a class that does not exist. On the CPU only: elsewhere it is a host-device sync."""
    if not target.is_cpu:
        return
    stray = keep & ((target < 0) | (target >= classes))
    if stray.any():
        got = target[stray][0].item()
        hint = f"mask & (target >= 0) & (target < {classes}), or ignore_index={got}"
        must = f"name a class in [0, {classes - 1}] where it is kept"
        raise OutOfRangeError(say("linear_cross_entropy", "target", must=must, got=got, hint=hint))


# -- the sweep ---------------------------------------------------------------------------------------------------------
@dataclass
class _Sums:
    """The gradients of the parameters as they are summed, in float32 or better; None where none is required."""

    hidden: Tensor | None  # (rows, features), in the dtype of the hidden states
    weight: Tensor | None
    bias: Tensor | None

    def to(self, weight: Tensor, bias: Tensor | None) -> list[Tensor | None]:
        """The gradients in the dtypes of their tensors."""
        of_weight = None if self.weight is None else self.weight.to(weight.dtype)
        of_bias = None if self.bias is None or bias is None else self.bias.to(bias.dtype)
        return [self.hidden, of_weight, of_bias]


@dataclass(frozen=True)
class _Sweep:
    """One pass over the chunks."""

    weight: Tensor
    bias: Tensor | None
    class_weight: Tensor | None  # float64
    settings: Settings
    sums: _Sums

    @property
    def is_differentiated(self) -> bool:
        return any(each is not None for each in (self.sums.hidden, self.sums.weight, self.sums.bias))

    def chunk(self, logits: Tensor, hidden: Tensor, target: Tensor, scale: Tensor, place: slice | Tensor) -> Tensor:
        """The losses of a chunk, float64. Its gradients are added to the sums; ``logits`` is the buffer for it."""
        self._multiply(hidden, logits)
        step = max(torch.get_num_threads(), _BLOCK // logits.shape[1]) if logits.is_cpu else logits.shape[0]
        losses = torch.empty(logits.shape[0], dtype=torch.float64, device=logits.device)
        for at in range(0, logits.shape[0], step):
            block = slice(at, at + step)
            losses[block] = self._differentiate(logits[block], target[block], scale[block])
        # From here on, the buffer holds the gradient of the logits, but for the scale of each row.
        scale = scale.unsqueeze(1)
        if self.sums.hidden is not None:
            # By its transpose of few rows, which then are the operand that BLAS keeps in the cache.
            product = torch.mm(self.weight.T, logits.T).T if _is_few(logits) else torch.mm(logits, self.weight)
            rows = product.to(scale.dtype).mul_(scale).to(self.sums.hidden.dtype)
            if isinstance(place, slice):
                self.sums.hidden[place] = rows
            else:
                self.sums.hidden.index_copy_(0, place, rows)
        if self.sums.weight is not None:
            _add_product(self.sums.weight, logits, hidden.to(scale.dtype) * scale)
        return losses

    def _multiply(self, hidden: Tensor, logits: Tensor) -> None:
        """The logits of a chunk, without softcap."""
        step, rows = _class_step(logits), logits.shape[0]
        buffer = logits.new_empty(step, rows) if _is_few(logits) else None
        for at in range(0, logits.shape[1], step):
            part, out = self.weight[at : at + step], logits[:, at : at + step]
            if buffer is not None:
                out.copy_(torch.mm(part, hidden.T, out=buffer[: part.shape[0]]).T)
                if self.bias is not None:
                    out.add_(self.bias[at : at + step])
            elif self.bias is None:
                torch.mm(hidden, part.T, out=out)
            else:
                torch.addmm(self.bias[at : at + step], hidden, part.T, out=out)

    def _differentiate(self, buffer: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        """The losses of some rows, float64; in the place of their logits then is the gradient, without the scale."""
        smoothing, z_loss, softcap, _ = self.settings
        # A copy for half precision alone, whose gradient is then rounded once.
        logits = buffer.to(scale.dtype)
        classes = logits.shape[1]
        if softcap:
            logits.div_(softcap).tanh_().mul_(softcap)
        op, every = torch.ops.maskwise, target.new_ones(1, dtype=torch.bool)
        # On a GPU a class that does not exist makes the loss NaN, as in `mw.loss`.
        inside = target if target.is_cpu else target.clamp(0, classes - 1)
        _, sums, facts = op.cross_entropy_fused_forward(logits, inside, every, None, _NO_CLASS, 0.0, 0)
        column = inside.unsqueeze(1)
        own = torch.ones_like(sums) if self.class_weight is None else self.class_weight[inside]
        own = own if target.is_cpu else torch.where(inside == target, own, torch.nan)
        losses: Tensor = (1.0 - smoothing) * own * (sums - logits.gather(1, column).squeeze(1))
        # What the softmax is multiplied by in the gradient.
        factor = (1.0 - smoothing) * own
        if smoothing:
            if self.class_weight is None:
                weights: Tensor | float = float(classes)
                weighed = logits.sum(1)
            else:
                weights = self.class_weight.sum()
                weighed = torch.mv(logits, self.class_weight.to(logits.dtype))
            losses += smoothing / classes * (weights * sums - weighed)
            factor = factor + smoothing / classes * weights
        if z_loss:
            losses += z_loss * own * sums.square()
            factor = factor + 2.0 * z_loss * own * sums
        if not self.is_differentiated:
            return losses
        gradient = op.cross_entropy_fused_backward(
            factor.to(logits.dtype), logits, inside, every, None, sums, facts, _NO_CLASS, 0.0, 0
        )
        if z_loss or smoothing:
            # The kernel has taken the factor off at the target, where only the class's own part of it belongs.
            rest = factor - (1.0 - smoothing) * own
            gradient.scatter_add_(1, column, rest.to(gradient.dtype).unsqueeze(1))
        if smoothing:
            if self.class_weight is None:
                gradient.sub_(smoothing / classes)
            else:
                gradient.sub_(self.class_weight.to(gradient.dtype), alpha=smoothing / classes)
        if softcap:
            # The derivative of the softcap: 1 - tanh².
            gradient.mul_(logits.div_(softcap).square_().neg_().add_(1.0))
        buffer.copy_(gradient)
        if self.sums.bias is not None:
            self.sums.bias.addmv_(gradient.T, scale)
        return losses


#: In the place of ``ignore_index``: rows that are dropped never reach the kernel.
_NO_CLASS = -(1 << 62)


def _class_step(logits: Tensor) -> int:
    """How many classes are multiplied at a time."""
    classes = logits.shape[1]
    return min(classes, max(_CLASSES, _PRODUCT // logits.shape[0])) if logits.is_cpu else classes


def _is_few(logits: Tensor) -> bool:
    return logits.is_cpu and logits.shape[0] <= _FEW_ROWS


def _add_product(total: Tensor, logits: Tensor, hidden: Tensor) -> None:
    """Add ``logits.T @ hidden`` to the total. In half precision in float32, some classes at a time."""
    if logits.dtype == total.dtype:
        total.addmm_(logits.T, hidden)
        return
    step = _class_step(logits)
    for at in range(0, logits.shape[1], step):
        part = logits[:, at : at + step].T
        if logits.is_cpu:
            total[at : at + step].addmm_(part.to(total.dtype), hidden)
        else:
            # Tensor cores sum in float32; what is rounded is the sum of a chunk.
            total[at : at + step].add_(torch.mm(part, hidden.to(logits.dtype)))


def _sweep(
    hidden: Tensor,  # (rows, features)
    weight: Tensor,  # (classes, features)
    target: Tensor,  # (rows,), int64
    keep: Tensor,  # (rows,), bool
    scale: Tensor,  # () or (rows,): by what each loss enters the result
    bias: Tensor | None,  # (classes,)
    class_weight: Tensor | None,  # (classes,)
    settings: Settings,
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The losses of all rows, 0 where dropped; and the gradients of hidden, weight and bias, where needed."""
    low = settings.low or hidden.dtype
    wide = wide_dtype(low)
    device = hidden.device
    out = torch.zeros(hidden.shape[0], dtype=torch.float64, device=device)
    sums = _Sums(
        torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needed[0] else None,
        torch.zeros(weight.shape, dtype=wide, device=device) if needed[1] else None,
        torch.zeros(weight.shape[:1], dtype=wide, device=device) if needed[2] else None,
    )
    check_classes(target, keep, weight.shape[0])
    index = keep.nonzero().squeeze(1)
    scale = where_kept(scale.to(wide), keep, 0.0) if scale.dim() else scale.to(wide)
    # Half precision has no room for 1 / rows: rows are scaled relative to the largest, and the results by that one.
    top = scale.abs().amax() if low != wide else None
    if top is not None:
        scale = scale / torch.where(top > 0, top, 1.0)
    with torch.no_grad(), _without_autocast(device.type):
        sweep = _Sweep(
            weight.to(low),
            None if bias is None else bias.to(low),
            None if class_weight is None else class_weight.double(),
            settings,
            sums,
        )
        logits: Tensor | None = None
        for part in _parts(index, weight.shape[0]):
            if logits is None:
                logits = torch.empty(part.shape[0], weight.shape[0], dtype=low, device=device)
            place = _place(part)
            rows, classes = (
                x[place] if isinstance(place, slice) else x.index_select(0, place) for x in (hidden, target)
            )
            each = scale.expand(part.shape[0]) if not scale.dim() else scale[place]
            out[place] = sweep.chunk(logits[: part.shape[0]], rows.to(low), classes, each, place)
        if top is not None:
            for total in (sums.hidden, sums.weight, sums.bias):
                if total is not None:
                    total.mul_(top)
    return out.to(wide), sums.to(weight, bias)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """A block in which products are in the dtypes of their operands."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _parts(index: Tensor, classes: int) -> Iterator[Tensor]:
    """The indices of kept rows, chunk by chunk, all but the last of one size."""
    limit = max(1, (_CHUNK if index.is_cpu else _CHUNK_ON_DEVICE) // max(classes, 1))
    limit = limit // _ROWS * _ROWS or limit
    rows = index.shape[0]
    count = max(1, -(-rows // limit))
    size = min(limit, -(-rows // (count * _ROWS)) * _ROWS)
    for at in range(0, rows, max(size, 1)):
        yield index[at : at + size]


def _place(index: Tensor) -> slice | Tensor:
    """The rows of a chunk: a slice where they are next to each other, which needs no copy."""
    if not index.is_cpu:
        return index
    first, end = int(index[0]), int(index[-1]) + 1
    return slice(first, end) if end - first == index.shape[0] else index


# -- autograd ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Call:
    """What a call has besides the tensors that may have gradients."""

    target: Tensor
    keep: Tensor
    #: By what each loss enters the result; None where the loss is not reduced.
    scale: Tensor | None
    class_weight: Tensor | None
    settings: Settings


class _KeptRows(torch.autograd.Function):
    """The loss in chunks, with the gradients of its tensors."""

    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.call, ctx.gradients = call, None
        ctx.save_for_backward(hidden, weight, bias)
        reduced = call.scale is not None
        needed = ctx.needs_input_grad[1:] if reduced else _NONE
        scale = call.scale if call.scale is not None else hidden.new_ones(())
        out, gradients = _sweep(
            hidden, weight, call.target, call.keep, scale, bias, call.class_weight, call.settings, needed
        )
        if not reduced:
            return out
        ctx.gradients = gradients
        return _total(out, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *_differentiable_gradients(call, ctx.saved_tensors, grad, needed)
        if ctx.gradients is None:
            hidden, weight, bias = ctx.saved_tensors
            scale = grad if call.scale is None else call.scale * grad
            return None, *_sweep(
                hidden, weight, call.target, call.keep, scale, bias, call.class_weight, call.settings, needed
            )[1]
        # They are given away: a second walk through the graph computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        # A look at the number is a host-device sync on a GPU.
        if not grad.is_cpu or grad.item() != 1.0:
            for each in gradients:
                if each is not None:
                    each.mul_(grad)
        return None, *gradients


_NONE = (False, False, False)


def _total(out: Tensor, scale: Tensor) -> Tensor:
    return (out.double() * scale).sum().to(out.dtype)


def _differentiable_gradients(
    call: _Call, tensors: Sequence[Tensor | None], grad: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients by plain torch operations, such that they can be differentiated again."""
    hidden, weight, bias = tensors
    assert hidden is not None
    assert weight is not None
    out = reference(hidden, weight, call.target, call.keep, bias, call.class_weight, call.settings)
    factor = grad if call.scale is None else call.scale.to(out.dtype) * grad
    learned = [x for x, need in zip(tensors, needed, strict=True) if need and x is not None]
    found = iter(torch.autograd.grad((out * factor).sum(), learned, create_graph=True))
    return [next(found) if need else None for need in needed]


def run(
    hidden: Tensor,  # (rows, features)
    weight: Tensor,  # (classes, features)
    target: Tensor,  # (rows,), int64
    keep: Tensor,  # (rows,), bool
    scale: Tensor | None,  # () or (rows,); None for the unreduced loss
    bias: Tensor | None,  # (classes,)
    class_weight: Tensor | None,  # (classes,)
    settings: Settings,
) -> Tensor:
    """The sum of the losses by their scale, or the losses, (rows,), with 0 where dropped."""
    call = _Call(target, keep, scale, class_weight, settings)
    out: Tensor = _KeptRows.apply(call, hidden, weight, bias)  # type: ignore[no-untyped-call]
    return out


# -- the op, for graphs ------------------------------------------------------------------------------------------------
def _op(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    keep: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    smoothing: float,
    z_loss: float,
    softcap: float,
    low: torch.dtype | None,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and the gradients of hidden, weight and bias; of no elements where not needed."""
    settings = Settings(smoothing, z_loss, softcap, low)
    by = hidden.new_ones(()) if scale is None else scale
    out, gradients = _sweep(hidden, weight, target, keep, by, bias, class_weight, settings, needed)
    result = out if scale is None else _total(out, scale)
    found = [hidden.new_empty(0) if each is None else each for each in gradients]
    return result, found[0], found[1], found[2]


def _fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    keep: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    smoothing: float,
    z_loss: float,
    softcap: float,
    low: torch.dtype | None,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = wide_dtype(low or hidden.dtype)
    found = [
        hidden.new_empty(0) if not need or x is None else x.new_empty(x.shape)
        for x, need in zip((hidden, weight, bias), needed, strict=True)
    ]
    return hidden.new_empty(hidden.shape[:1] if scale is None else (), dtype=wide), found[0], found[1], found[2]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, keep, scale, bias, class_weight, *ctx.settings, _ = inputs
    ctx.reduced = scale is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    if ctx.reduced:
        ctx.save_for_backward(*output[1:])
    else:
        ctx.save_for_backward(hidden, weight, target, keep, bias, class_weight)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    # Behind the tensors: four settings, and what is needed.
    needed, rest = (needs[0], needs[1], needs[5]), (None,) * 6
    if grad is None:
        return (None,) * 12
    if ctx.reduced:
        found = [saved * grad.to(saved.dtype) for saved in ctx.saved_tensors]
    else:
        hidden, weight, target, keep, bias, class_weight = ctx.saved_tensors
        op = torch.ops.maskwise.linear_cross_entropy
        found = op(hidden, weight, target, keep, grad, bias, class_weight, *ctx.settings, list(needed))[1:]
    of_hidden, of_weight, of_bias = (each if need else None for each, need in zip(found, needed, strict=True))
    return of_hidden, of_weight, None, None, None, of_bias, *rest


def _flops(
    hidden: Tensor, weight: Tensor, target: Tensor, keep: Tensor, scale: Tensor | None, bias: Tensor | None,
    class_weight: Tensor | None, smoothing: float, z_loss: float, softcap: float, low: Any, needed: Sequence[bool],
    **_: Any,
) -> int:  # fmt: skip
    """The logits of kept rows, and of the gradients those that are needed."""
    return 2 * count_kept(keep, keep.shape) * weight.numel() * (1 + sum(needed[:2]))


def _skipped_flops(hidden: Tensor, weight: Tensor, target: Tensor, keep: Tensor, *rest: Any, **_: Any) -> int:
    """The same of the rows that are dropped."""
    dropped = keep.numel() - count_kept(keep, keep.shape)
    needed: Sequence[bool] = rest[-1]
    return 2 * dropped * weight.numel() * (1 + sum(needed[:2]))


define(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor target, Tensor keep, Tensor? scale, Tensor? bias, Tensor? class_weight,"
    " float smoothing, float z_loss, float softcap, ScalarType? low, bool[] needed)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_op,
    fake=_fake,
    flops=_flops,
    skipped_flops=_skipped_flops,
)
differentiate("linear_cross_entropy", _backward, _setup_context)


def run_in_graph(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    keep: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    settings: Settings,
) -> Tensor:
    """`run` as a registered op, which torch.compile traces."""
    grad = torch.is_grad_enabled() and scale is not None
    needed = [grad and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    op = torch.ops.maskwise.linear_cross_entropy
    out: Tensor = op(hidden, weight, target, keep, scale, bias, class_weight, *settings, needed)[0]
    return out
