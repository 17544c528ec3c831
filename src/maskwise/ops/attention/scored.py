"""Attention on the CPU whose scores are capped, biased by distance, or shared with sinks: block by block.

A block is one call of torch's own CPU kernel, which adds the bias of that block, or plain operations, which are
computed again in the backward pass, for a soft cap. No tensor of all pairs is made. The kernel has no gradient of a
bias: that of a block's scores is computed beside it, from the log-sum-exps of the forward pass.

Sinks need no scores. With L the log-sum-exp of a query's scores, a sink of logit s leaves the part sigmoid(L - s) of
its result. The kernel's backward pass takes the log-sum-exp and the result of the forward pass: with those of the
softmax that has the sink, its gradients are those of attention with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention import blocks, reference, sdpa
from maskwise.ops.attention.arguments import Call, Sizes, bits_of, kept_of
from maskwise.ops.attention.bias import ScoreMod
from maskwise.ops.attention.blocks import Block
from maskwise.ops.primitives import where_kept
from maskwise.plan.dispatch import NOT_APPLICABLE, Facts

__all__ = ["REASON", "attend", "attend_sequences", "run", "serves"]

REASON = "scores are changed block by block"
#: How many queries a block has at most: as much of a bias is made for it.
_ROWS = 256

Places = tuple[Tensor, Tensor]


def serves(facts: Facts) -> str | None:
    """Why a call does not go by blocks of changed scores, or None."""
    if not facts.detail.has_score_mod:
        return NOT_APPLICABLE
    return None if facts.device == "cpu" else f"the blocks are for the CPU, not for {facts.device}"


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    call: Call,
    dropout_p: float,
    scale: float | None,
    mod: ScoreMod,
) -> Tensor:
    """Attention with changed scores; queries of no block give 0."""
    found, _ = blocks.find(mask, call)
    parts = tuple(_chunks(found))
    out = attend(q, k, v, parts, mod, dropout_p=dropout_p, scale=scale)
    return _repaired(q, k, v, mask, call, parts, mod, dropout_p, scale) if out is None else out


def attend_sequences(
    q: Tensor,  # (S, H, Lq, D)
    k: Tensor,  # (S, Hkv, Lk, D)
    v: Tensor,  # (S, Hkv, Lk, Dv)
    mod: ScoreMod,
    *,
    places: Places | None = None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Attention of sequences of one length that keep every key; ``places`` are the positions of their tokens."""
    sizes = Sizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    parts = tuple(_chunks(blocks.split(None, is_causal, sizes)))
    out = attend(q, k, v, parts, mod, places=places, dropout_p=dropout_p, scale=scale)
    return _plainly(q, k, v, parts, mod, places, dropout_p, scale) if out is None else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Sequence[Block],
    mod: ScoreMod,
    *,
    places: Places | None = None,
    dropout_p: float,
    scale: float | None,
) -> Tensor | None:
    """Attention block by block, or None where something that is not finite may have reached queries that drop it."""
    if not _fits_kernel(q, k, v, mod, dropout_p):
        return _plainly(q, k, v, parts, mod, places, dropout_p, scale)
    if not _is_small(mod, q, k):
        return None
    out = _Scored.run(q, k, v, parts, mod, places, scale, True)
    drops = any(block.is_partial for block in parts)
    recomputes = sdpa.requires_grad(q, k, v)
    return out if sdpa.is_sound(out, q, k, scale, drops=drops, recomputes=recomputes) else None


def _fits_kernel(q: Tensor, k: Tensor, v: Tensor, mod: ScoreMod, dropout_p: float) -> bool:
    """Whether torch's kernel computes the blocks: it has no soft cap and no dropout."""
    if mod.softcap is not None or dropout_p > 0.0:
        return False
    return blocks.takes(q.dtype, q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]) and 0 not in (*q.shape, *k.shape)


def _is_small(mod: ScoreMod, q: Tensor, k: Tensor) -> bool:
    """Whether weights are the same when they are computed again from rounded scores, of which the bias is a part."""
    eps = torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    sinks = mod.sinks is None or sdpa.is_finite(mod.sinks.detach())
    return sinks and mod.largest(q.shape[2], k.shape[2]) * eps <= 1e-3


def _repaired(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    call: Call,
    parts: Sequence[Block],
    mod: ScoreMod,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """The same from zeros for what is dropped and for queries that are not finite; plain operations for what is left.

    With zeros there the kernel gives what it gives for padding of zeros, bit for bit.
    """
    kept = kept_of(bits_of(mask, call.mask_index, call.sizes), call.is_causal, call.sizes)
    kept = torch.ones((1, 1, 1, 1), dtype=torch.bool) if kept is None else kept
    given = q, k, v
    q, k, v = reference.fill_dropped_inputs(q, k, v, kept)
    finite = reference.finite_rows(q)
    q = where_kept(q, finite, 0.0)
    if not (_is_small(mod, q, k) and sdpa.is_finite(k.detach()) and sdpa.is_finite(v.detach())):
        return _plainly(*given, parts, mod, None, dropout_p, scale)
    fit = sdpa.fitting_rows(q.detach(), k.detach(), kept, scale)
    out = _Scored.run(where_kept(q, fit, 0.0), k, v, parts, mod, None, scale, True)
    if not bool(fit.all()):
        large = _plainly(where_kept(q, ~fit, 0.0), k, v, parts, mod, None, dropout_p, scale)
        out = torch.where(fit, out, large)
    return reference.with_nan(out, ~finite & kept.any(-1, keepdim=True))


def _plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Sequence[Block],
    mod: ScoreMod,
    places: Places | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    if dropout_p == 0.0:
        return _Scored.run(q, k, v, parts, mod, places, scale, False)
    # What is dropped at random is dropped once: nothing is computed again.
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for block in parts:
        block.queries_of(out).copy_(_plain_block(q, k, v, block, mod, places, scale, dropout_p))
    return out


def _chunks(found: Sequence[Block]) -> Iterator[Block]:
    """Blocks of so few queries that their bias is small; those with a mask are."""
    for block in found:
        if block.is_partial:
            yield block
            continue
        start, end = block.rows
        for first in range(start, end, _ROWS):
            yield block._replace(rows=(first, min(first + _ROWS, end)))


# -- one block ---------------------------------------------------------------------------------------------------------
def _kept(block: Block) -> Tensor | None:
    """What a block keeps: bool, broadcasts to (batch, H, rows, keys); None for all."""
    if block.is_masked:
        return block.kept()
    if not block.is_causal:
        return None
    assert not isinstance(block.keys, Tensor)
    return reference.causal(block.rows[1] - block.rows[0], block.keys[1] - block.keys[0], torch.device("cpu"))


def _plain_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    mod: ScoreMod,
    places: Places | None,
    scale: float | None,
    dropout_p: float = 0.0,
) -> Tensor:
    parts = block.queries_of(q), block.keys_of(k), block.keys_of(v)
    return _changed(parts, block, mod, places, scale, dropout_p)


def _changed(
    parts: tuple[Tensor, Tensor, Tensor],
    block: Block,
    mod: ScoreMod,
    places: Places | None,
    scale: float | None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The queries, keys and values of a block, in plain operations; in float32 at least, as the kernel does."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    one, keys, values = (x.to(wide) for x in parts)
    bias = mod.of_block(block, places, wide)
    out = reference.attention(
        one, keys, values, _kept(block), False, dropout_p, scale, bias, softcap=mod.softcap, sinks=mod.sinks
    )
    return out.to(parts[0].dtype)


def _added(block: Block, mod: ScoreMod, places: Places | None, dtype: torch.dtype) -> Tensor | None:
    """The bias of a block with -inf for what it drops, as the kernel takes it."""
    bias = mod.of_block(block, places, dtype)
    if bias is None:
        return block.bias(dtype)
    kept = _kept(block)
    bias = bias.detach()
    added = bias if kept is None else torch.where(kept, bias, -torch.inf)
    # The kernel takes sizes of 1 for batch and heads only.
    rows = block.rows[1] - block.rows[0]
    keys = block.keys.shape[0] if isinstance(block.keys, Tensor) else block.keys[1] - block.keys[0]
    return added.expand(*added.shape[:2], rows, keys)


# -- all blocks --------------------------------------------------------------------------------------------------------
class _Scored(torch.autograd.Function):
    """All blocks: by torch's kernel, or in plain operations that the backward pass runs again."""

    @classmethod
    def run(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: Sequence[Block],
        mod: ScoreMod,
        places: Places | None,
        scale: float | None,
        is_fused: bool,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out: Tensor = cls.apply(q, k, v, mod.tensor, mod.sinks, parts, mod, places, scale, is_fused)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensor: Tensor | None,
        sinks: Tensor | None,
        parts: Sequence[Block],
        mod: ScoreMod,
        places: Places | None,
        scale: float | None,
        is_fused: bool,
    ) -> Tensor:
        out, norms = q.new_zeros(*q.shape[:3], v.shape[-1]), []
        for block in parts:
            if is_fused:
                part, norm = _fused_block(q, k, v, block, mod, places, scale)
                norms.append(norm)
            else:
                part = _plain_block(q, k, v, block, mod, places, scale)
            block.queries_of(out).copy_(part)
        ctx.save_for_backward(q, k, v, tensor, sinks, out if is_fused else None, *norms)
        ctx.given = parts, mod, places, scale, is_fused
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, tensor, sinks, out, *norms = ctx.saved_tensors
        parts, mod, places, scale, is_fused = ctx.given
        leaves = [None if x is None else torch.zeros_like(x) for x in (q, k, v, tensor, sinks)]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        mod = mod.with_tensors(tensor, sinks)
        for index, block in enumerate(parts):
            above = block.queries_of(grad)
            if block.is_masked:
                # The gradient of a query that keeps nothing may be anything, and takes no part.
                above = where_kept(above, block.kept().any(-1, keepdim=True), 0.0)
            if is_fused:
                saved = q, k, v, out, norms[index]
                found = _fused_gradients(above, saved, block, mod, places, scale)
                if ctx.needs_input_grad[3]:
                    of_bias = _gradient_of_bias(above, saved, block, mod, places, scale)
                    found = (*found[:3], of_bias, found[4])
            else:
                found = _plain_gradients(above, (q, k, v), block, mod, places, scale, ctx.needs_input_grad[:5])
            _add(leaves, block, found)
        return (*leaves, None, None, None, None, None)


def _add(leaves: Sequence[Tensor | None], block: Block, found: Sequence[Tensor | None]) -> None:
    """Add the gradients of a block where they belong."""
    grad_q, grad_k, grad_v, *others = leaves
    dq, dk, dv, *rest = found
    assert grad_q is not None
    assert grad_k is not None
    assert grad_v is not None
    if dq is not None:
        block.queries_of(grad_q).add_(dq)
    for total, part in ((grad_k, dk), (grad_v, dv)):
        if part is not None:
            block.add_to_keys(total, part)
    for whole, piece in zip(others, rest, strict=True):
        if whole is not None and piece is not None:
            whole.add_(piece)


def _fused_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block, mod: ScoreMod, places: Places | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The result of a block, and the log-sum-exps of its scores and sinks."""
    added = _added(block, mod, places, q.dtype)
    is_causal = block.is_causal and mod.bias is None
    part, norm = blocks.forward_kernel(
        block.queries_of(q), block.keys_of(k), block.keys_of(v), 0.0, is_causal, attn_mask=added, scale=scale
    )
    if mod.sinks is None:
        return part, norm
    # (B, H, Lq), as a query without keys has it: no part of its softmax is theirs.
    norm = norm.nan_to_num(nan=-torch.inf)
    sinks = mod.sinks.detach().to(norm.dtype)[:, None]
    part = part * torch.sigmoid(norm - sinks)[..., None].to(part.dtype)
    return part, torch.logaddexp(norm, sinks.expand_as(norm))


def _fused_gradients(
    above: Tensor,
    saved: tuple[Tensor, ...],
    block: Block,
    mod: ScoreMod,
    places: Places | None,
    scale: float | None,
) -> tuple[Tensor | None, ...]:
    q, k, v, out, norm = saved
    part = block.queries_of(out)
    dq, dk, dv = blocks.backward_kernel(
        above,
        block.queries_of(q),
        block.keys_of(k),
        block.keys_of(v),
        part,
        norm,
        0.0,
        block.is_causal and mod.bias is None,
        attn_mask=_added(block, mod, places, q.dtype),
        scale=scale,
    )
    if mod.sinks is None:
        return dq, dk, dv, None, None
    # A softmax's gradient is weight * (gradient of the weight - their mean), and a sink has no value.
    mean = (above.to(norm.dtype) * part.to(norm.dtype)).sum(-1)
    weight = torch.exp(mod.sinks.to(norm.dtype)[:, None] - norm)
    return dq, dk, dv, None, -(weight * mean).sum((0, 2)).to(mod.sinks.dtype)


def _gradient_of_bias(
    above: Tensor,
    saved: tuple[Tensor, ...],
    block: Block,
    mod: ScoreMod,
    places: Places | None,
    scale: float | None,
) -> Tensor:
    """The gradient of what the bias is made of: that of a block's scores, summed where the bias is the same."""
    q, k, v, out, norm = saved
    one, keys, values, part = block.queries_of(q), block.keys_of(k), block.keys_of(v), block.queries_of(out)
    wide, shared = norm.dtype, one.shape[1] // keys.shape[1]
    one, keys, values, part, above = (x.to(wide) for x in (one, keys, values, part, above))
    if shared > 1:
        keys, values = (x.repeat_interleave(shared, 1) for x in (keys, values))
    scores = one @ keys.mT
    scores.mul_(one.shape[-1] ** -0.5 if scale is None else scale)
    assert mod.tensor is not None
    with torch.enable_grad():
        tensor = mod.tensor.detach().requires_grad_()
        bias = mod.with_tensors(tensor, None).of_block(block, places, wide)
    assert bias is not None
    weights = scores.add_(bias.detach()).sub_(norm[..., None]).exp_()
    found = (above @ values.mT).sub_((above * part).sum(-1, keepdim=True)).mul_(weights)
    if (kept := _kept(block)) is not None:
        found = where_kept(found, kept, 0.0)
    (gradient,) = torch.autograd.grad(bias, tensor, found.sum_to_size(bias.shape))
    return gradient


def _plain_gradients(
    above: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    block: Block,
    mod: ScoreMod,
    places: Places | None,
    scale: float | None,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of a block that is computed again."""
    q, k, v = inputs
    given = block.queries_of(q), block.keys_of(k), block.keys_of(v), mod.tensor, mod.sinks
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(need) for x, need in zip(given, needed, strict=True)]
        one, keys, values, tensor, sinks = leaves
        assert one is not None
        assert keys is not None
        assert values is not None
        out = _changed((one, keys, values), block, mod.with_tensors(tensor, sinks), places, scale)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, above, allow_unused=True))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in leaves)
