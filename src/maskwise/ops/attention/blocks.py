"""Attention on the CPU by blocks: ranges of queries, each with the keys that they keep.

Every block is one call of torch's own CPU kernel, forward and backward. Blocks are views, results are written where
they belong, and gradients are added there, so that neither pass makes tensors of the full size for each block. Which
blocks a mask keeps is found on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention import kernel, sdpa
from maskwise.ops.attention.arguments import Call, Sizes, bits_of, kept_of, lift
from maskwise.ops.primitives import where_kept
from maskwise.ops.torch_private import flash_attention_for_cpu, flash_attention_for_cpu_backward
from maskwise.plan.cost import Rates, Work
from maskwise.plan.dispatch import Facts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = [
    "Block",
    "BlockCount",
    "attend_blocks",
    "backward_kernel",
    "cost",
    "find",
    "forward_kernel",
    "pays",
    "reason",
    "run",
    "serves",
    "split",
    "takes",
    "work",
]

_forward: Any = flash_attention_for_cpu
_backward: Any = flash_attention_for_cpu_backward
forward_kernel, backward_kernel = _forward, _backward
_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Block(NamedTuple):
    """Queries of some batch entries, and the keys that they keep."""

    batch: tuple[int, int]
    rows: tuple[int, int]
    #: A range of keys; or their positions, where they have gaps: int64 (n,).
    keys: tuple[int, int] | Tensor
    #: Which of these keys each of these queries keeps: bool, broadcasts to (batch, H, rows, keys); None for all.
    bits: Tensor | None = None
    #: The same as the first key and the one after the last of each query: int64 (2, rows, 1).
    bounds: Tensor | None = None
    is_causal: bool = False

    @property
    def is_masked(self) -> bool:
        """Whether the kernel needs a mask for this block."""
        return self.bits is not None or self.bounds is not None

    @property
    def is_partial(self) -> bool:
        """Whether some query drops some key of this block."""
        return self.is_masked or self.is_causal

    def queries_of(self, x: Tensor) -> Tensor:
        """The part of q, of the result, or of their gradients that is this block's: a view."""
        (first, last), (start, end) = self.batch, self.rows
        return x[first:last, :, start:end]

    def keys_of(self, x: Tensor) -> Tensor:
        """The part of k or v that is this block's: a view, or a copy where the keys have gaps."""
        first, last = self.batch
        if isinstance(self.keys, Tensor):
            return x[first:last].index_select(2, self.keys)
        start, end = self.keys
        return x[first:last, :, start:end]

    def add_to_keys(self, gradient: Tensor, part: Tensor) -> None:
        """Add the gradient of this block's keys where they belong."""
        first, last = self.batch
        if isinstance(self.keys, Tensor):
            gradient[first:last].index_add_(2, self.keys, part)
        else:
            start, end = self.keys
            gradient[first:last, :, start:end] += part

    def kept(self) -> Tensor:
        """Which of its keys each of its queries keeps; made of bounds anew, since the bits of all blocks are many."""
        if self.bounds is None:
            assert self.bits is not None
            return self.bits
        assert not isinstance(self.keys, Tensor)
        places = torch.arange(*self.keys)
        return ((places >= self.bounds[0]) & (places < self.bounds[1]))[None, None]

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """What is kept as the kernel takes it: what is added to the scores."""
        return torch.where(self.kept(), 0.0, -math.inf).to(dtype) if self.is_masked else None

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key it computes for each head."""
        keys = self.keys.shape[0] if isinstance(self.keys, Tensor) else self.keys[1] - self.keys[0]
        return (self.batch[1] - self.batch[0]) * (self.rows[1] - self.rows[0]) * keys

    @property
    def gathered(self) -> int:
        """How many keys of each head it gathers, because they have gaps."""
        return (self.batch[1] - self.batch[0]) * self.keys.shape[0] if isinstance(self.keys, Tensor) else 0


class BlockCount(NamedTuple):
    """A call's blocks, as dispatch counts them."""

    blocks: int
    #: Pairs of a query and a key, of all heads.
    pairs: int
    #: Bytes of gathered keys, per feature.
    gathered: int


def find(mask: MaskLike | None, call: Call) -> tuple[tuple[Block, ...], BlockCount]:
    """The blocks of a call, and their count. A `Mask` caches them, for every layer of a model has the same."""
    sizes, is_causal = call.sizes, call.is_causal
    if not isinstance(mask, Mask):
        return _count(None if mask is None else lift(mask, call.mask_index, sizes), is_causal, sizes)
    name = f"attention {call.mask_index} {is_causal} {tuple(sizes)}"
    return mask._once(name, lambda: _count(lift(mask, call.mask_index, sizes), is_causal, sizes))


def _count(mask: MaskLike | None, is_causal: bool, sizes: Sizes) -> tuple[tuple[Block, ...], BlockCount]:
    blocks = tuple(split(mask, is_causal, sizes))
    pairs = sum(block.pairs for block in blocks) * sizes.heads
    return blocks, BlockCount(len(blocks), pairs, sum(block.gathered for block in blocks))


# -- when it is the route ----------------------------------------------------------------------------------------------
def serves(facts: Facts) -> str | None:
    """Why torch's CPU kernel cannot serve the blocks of a call, or None."""
    scores = facts.detail
    if scores.has_bias or scores.has_score_mod:
        return kernel.BIAS if scores.has_bias else kernel.SCORE_MOD
    if facts.device != "cpu":
        return f"the blocks are for the CPU, not for {facts.device}"
    if _forward is None or _backward is None:
        return "this torch has no CPU kernel of SDPA to call"
    if facts.dtype not in _DTYPES:
        return f"the CPU kernel does not take {facts.dtype}"
    if scores.features != scores.value_features:
        return f"the CPU kernel needs keys and values of one size, got {scores.features} and {scores.value_features}"
    if 0 in facts.shape or 0 in (scores.kv_heads, scores.features):
        return "there is nothing to compute"
    if facts.shape[1] != scores.kv_heads and _TORCH < (2, 13):
        return "the CPU kernel takes grouped-query heads from torch 2.13 on"
    if scores.has_dropout:
        return "the CPU kernel has no dropout"
    if facts.mask == "none" and not scores.is_causal:
        return "nothing is dropped"
    return None


def takes(dtype: torch.dtype, heads: int, kv_heads: int, features: int, value_features: int) -> bool:
    """Whether torch's CPU kernel takes tensors of this kind."""
    is_shared = heads != kv_heads and _TORCH < (2, 13)
    return (
        _forward is not None
        and _backward is not None
        and dtype in _DTYPES
        and features == value_features
        and not is_shared
    )


def pays(facts: Facts) -> str | None:
    """Why looking for blocks would not pay, or None."""
    if facts.detail.blocks is not None:
        return None
    has_kernel = kernel.serves(facts) is None
    if has_kernel and kernel.pays(facts) is not None:
        # Few queries with many keys: all that is left to save is in the blocks.
        return None
    if sdpa.is_small(facts):
        return "too small for blocks to pay"
    return kernel.REASON if has_kernel and not kernel.may_skip_blocks(facts) else None


def work(facts: Facts) -> Work:
    """What the blocks are; all pairs, as long as they were not looked for."""
    count, scores = facts.detail.blocks, facts.detail
    if count is None:
        return sdpa.dense_work(facts)
    gathered = count.gathered * scores.kv_heads * facts.dtype.itemsize
    return sdpa.work_of(count.blocks, count.pairs, scores.features, gathered)


def cost(facts: Facts, work: Work, rates: Rates) -> float:
    """Nothing, as long as the blocks were not looked for: that makes the call look for them."""
    return 0.0 if facts.detail.blocks is None else sdpa.cost(facts, work, rates)


def reason(facts: Facts) -> str:
    """How much of the pairs the blocks hold."""
    count = facts.detail.blocks
    if count is None:
        return "the mask may keep few blocks"
    verb = "block holds" if count.blocks == 1 else "blocks hold"
    return f"{count.blocks} {verb} {count.pairs:,} of {math.prod(facts.shape):,} pairs"


# -- forward and backward ----------------------------------------------------------------------------------------------
def run(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, call: Call, dropout_p: float, scale: float | None
) -> Tensor:
    """Attention block by block; queries of no block give 0."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_blocks(q, k, v, call.blocks, scale)

    out = attend(q, k, v)
    drops = any(block.is_partial for block in call.blocks)
    if sdpa.is_sound(out, q, k, scale, drops=drops, recomputes=sdpa.requires_grad(q, k, v)):
        return out
    kept = kept_of(bits_of(mask, call.mask_index, call.sizes), call.is_causal, call.sizes)
    return sdpa.attend_finite(attend, q, k, v, kept, 0.0, scale)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float | None) -> Tensor:
    """Attention block by block; queries of no block give 0."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if sdpa.requires_grad(q, k, v):
        out: Tensor = _Blocks.apply(q, k, v, blocks, scale)  # type: ignore[no-untyped-call]
        return out
    return _attend(q, k, v, blocks, scale)[0]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float | None
) -> tuple[Tensor, list[Tensor]]:
    """The forward pass, and the log-sum-exps of each block, which the backward pass needs."""
    is_one = len(blocks) == 1 and blocks[0].rows == (0, q.shape[2]) and blocks[0].batch == (0, q.shape[0])
    # The result of a block that holds all queries needs no copy.
    out = q if is_one else torch.zeros_like(q)
    norms = []
    for block in blocks:
        part, norm = _forward(
            q if is_one else block.queries_of(q),
            block.keys_of(k),
            block.keys_of(v),
            0.0,
            block.is_causal,
            attn_mask=block.bias(q.dtype),
            scale=scale,
        )
        norms.append(norm)
        if is_one:
            return part, norms
        block.queries_of(out).copy_(part)
    return out, norms


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float | None) -> Tensor:
        out, norms = _attend(q, k, v, blocks, scale)
        ctx.save_for_backward(q, k, v, out, *norms)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, blocks = ctx.saved_tensors, ctx.blocks
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        gradients = _gradients(grad, saved, blocks, ctx.scale)
        if any(block.is_masked for block in blocks) and not (
            sdpa.is_finite(gradients[1]) and sdpa.is_finite(gradients[2])
        ):
            # The gradient of a query that keeps nothing may be anything, and takes no part.
            grad = grad.clone()
            for block in blocks:
                if block.is_masked:
                    part = block.queries_of(grad)
                    part.copy_(where_kept(part, block.kept().any(-1, keepdim=True), 0.0))
            gradients = _gradients(grad, saved, blocks, ctx.scale)
        return (*gradients, None, None)


def _gradients(
    grad: Tensor, saved: tuple[Tensor, ...], blocks: Sequence[Block], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, *norms = saved
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    for block, norm in zip(blocks, norms, strict=True):
        dq, dk, dv = _backward(
            block.queries_of(grad),
            block.queries_of(q),
            block.keys_of(k),
            block.keys_of(v),
            block.queries_of(out),
            norm,
            0.0,
            block.is_causal,
            attn_mask=block.bias(q.dtype),
            scale=scale,
        )
        block.queries_of(grad_q).copy_(dq)
        block.add_to_keys(grad_k, dk)
        block.add_to_keys(grad_v, dv)
    return grad_q, grad_k, grad_v


# -- from a mask to its blocks -----------------------------------------------------------------------------------------
#: How many queries a block has whose rows keep different keys.
_BLOCK = 128
#: From this many queries with the same keys on, they are a block of their own, which needs no mask.
_RUN = 16


def split(mask: Mask | Tensor | None, is_causal: bool, sizes: Sizes) -> list[Block]:
    """The blocks that hold everything kept, and as little else as blocks allow.

    >>> mask = Mask.from_lengths([2, 4])[:, None, None, :]
    >>> [(block.batch, block.rows, block.keys) for block in split(mask, False, Sizes(2, 8, 4, 4))]
    [((0, 1), (0, 4), (0, 2)), ((1, 2), (0, 4), (0, 4))]

    Args:
        mask: with four dims, each of size 1 or the call's, the keys always of the call's.
        is_causal: whether a query also attends only to keys up to its own position.
        sizes: the call's.
    """
    bounds = _bounds(mask, is_causal, sizes)
    if bounds is not None:
        return list(_from_bounds(*bounds, sizes))
    bits = kept_of(mask, is_causal, sizes)
    assert bits is not None
    if bits.shape[1] == bits.shape[2] == 1:
        return list(_from_keys(bits[:, 0, 0].numpy(), sizes))
    return list(_from_bits(bits, sizes))


# -- one range of keys per query ---------------------------------------------------------------------------------------


def _bounds(mask: Mask | Tensor | None, is_causal: bool, sizes: Sizes) -> tuple[Ints, Ints] | None:
    """The first key and the one after the last that each query keeps, (batch or 1, queries or 1); None without such."""
    starts, ends = np.zeros((1, 1), np.int64), np.full((1, 1), sizes.keys, np.int64)
    if mask is not None:
        if not isinstance(mask, Mask) or mask._along != -1:
            return None
        bounds = mask._bounds()
        if bounds.shape[2] > 1:
            # Heads keep different keys.
            return None
        starts, ends = bounds[:, :, 0, :, 0].numpy()
    if is_causal:
        ends = np.minimum(ends, np.arange(1, sizes.queries + 1)[None])
    starts, ends = np.broadcast_arrays(np.clip(starts, 0, sizes.keys), np.clip(ends, 0, sizes.keys))
    return starts, np.maximum(starts, ends)


def _from_bounds(starts: Ints, ends: Ints, sizes: Sizes) -> Iterator[Block]:
    for first, last, row in _equal_batches(np.stack([starts, ends], -1), sizes):
        lo, hi = starts[row], ends[row]
        batch = (first, last)
        if len(lo) == 1:
            if lo[0] < hi[0]:
                yield Block(batch, (0, sizes.queries), (int(lo[0]), int(hi[0])))
            continue
        for start, end in _cuts(lo, hi):
            yield from _chunk(batch, start, end, lo[start:end], hi[start:end])


def _equal_batches(rows: NDArray[Any], sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Consecutive batch entries with the same rows: the first, the one after the last, and the index of their rows."""
    if len(rows) == 1:
        yield 0, sizes.batch, 0
        return
    flat = rows.reshape(len(rows), -1)
    changes = [0, *((flat[1:] != flat[:-1]).any(1).nonzero()[0] + 1).tolist(), len(rows)]
    for first, last in pairwise(changes):
        yield first, last, first


def _cuts(lo: Ints, hi: Ints) -> list[tuple[int, int]]:
    """Ranges of queries that are best looked at together."""
    count = len(lo)
    changed = (lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1])
    edges = np.concatenate([[0], changed.nonzero()[0] + 1, [count]])
    long = np.diff(edges) >= _RUN
    cut = np.zeros(count + 1, bool)
    cut[edges[:-1]] = long
    cut[edges[1:]] |= long
    # Nothing is in common with the query before: another segment.
    cut[1:count] |= lo[1:] >= hi[:-1]
    cut[[0, count]] = True
    places = cut.nonzero()[0].tolist()
    return list(pairwise(places))


def _chunk(batch: tuple[int, int], start: int, end: int, lo: Ints, hi: Ints) -> Iterator[Block]:
    """The blocks of queries start to end, whose keys are given."""
    same_start = bool((lo == lo[0]).all())
    if same_start and bool((hi == hi[0]).all()):
        if lo[0] < hi[0]:
            yield Block(batch, (start, end), (int(lo[0]), int(hi[0])))
        return
    triangle = same_start and bool((hi - lo == np.arange(1, len(lo) + 1)).all())
    for first in range(0, len(lo), _BLOCK):
        last = min(first + _BLOCK, len(lo))
        low, high = lo[first:last], hi[first:last]
        keys = int(low.min()), int(high.max())
        rows = (start + first, start + last)
        if keys[0] >= keys[1]:
            continue
        if triangle and first == 0:
            yield Block(batch, rows, keys, is_causal=True)
            continue
        yield Block(batch, rows, keys, bounds=torch.from_numpy(np.stack([low, high])[..., None]))


# -- any keys ----------------------------------------------------------------------------------------------------------


def _from_keys(rows: NDArray[np.bool_], sizes: Sizes) -> Iterator[Block]:
    """Every query of a batch entry keeps the same keys: (batch or 1, keys)."""
    for first, last, row in _equal_batches(rows, sizes):
        places = rows[row].nonzero()[0]
        if not len(places):
            continue
        start, end = int(places[0]), int(places[-1]) + 1
        keys = (start, end) if end - start == len(places) else torch.from_numpy(places)
        yield Block((first, last), (0, sizes.queries), keys)


def _from_bits(bits: Tensor, sizes: Sizes) -> Iterator[Block]:
    """Queries of a batch entry keep different keys: blocks of queries, each with the range that they keep."""
    batches = [(b, b + 1) for b in range(sizes.batch)] if bits.shape[0] > 1 else [(0, sizes.batch)]
    step = _BLOCK if bits.shape[2] > 1 else sizes.queries
    for start in range(0, sizes.queries, step):
        rows = (start, min(start + step, sizes.queries))
        strip = bits[:, :, rows[0] : rows[1]] if bits.shape[2] > 1 else bits
        some = strip.any(2).any(1).numpy()
        every = strip.all(2).all(1).numpy()
        for b, batch in enumerate(batches):
            places = some[b].nonzero()[0]
            if not len(places):
                continue
            first, last = int(places[0]), int(places[-1]) + 1
            full = bool(every[b, first:last].all())
            yield Block(batch, rows, (first, last), None if full else strip[b : b + 1, :, :, first:last])
