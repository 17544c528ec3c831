"""Mistakes with what computes only what is kept: apply, pack, attention, linear, batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import maskwise as mw
from maskwise import Mask, Packed, data
from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError
from maskwise.ops.attention import attend
from maskwise.ops.linear import SparseLayout
from tests.errors.row import Row

X = torch.arange(6.0).reshape(2, 3)
BITS = torch.tensor([[True, True, False], [True, True, True]])
PACKED = mw.pack(X, BITS)
EMPTY = mw.pack(X, torch.tensor([[True, True, False], [False, False, False]]))
ROOMY = mw.pack(X, BITS, capacity=6)
Q, K = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
SQUARE = torch.zeros(3, 4, 3, 8)
ROWS_OF = mw.pack(Q.transpose(1, 2), BITS)
TOKENS = torch.zeros(5, 4, 8)
MAP, KERNEL = torch.ones(2, 3, 6, 5), torch.zeros(4, 3, 3, 3)
WEIGHT, KEPT = torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.bool)


def mixing_with_a_generator() -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that mixes rows and draws from a generator of its own."""
    own = torch.Generator()
    return lambda rows: rows - rows.mean(0) + torch.rand(rows.shape, generator=own)


def apply_of(fn: Callable[..., Any], apply: Callable[..., Any] = mw.apply) -> Callable[[], Any]:
    """A call with six kept rows that differ."""
    return lambda: apply(fn, torch.arange(32.0).reshape(8, 4).square(), mask=torch.arange(8) < 6)


def attention(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: mw.attention(*arguments, **options)


def linear(*arguments: Any) -> Callable[[], Any]:
    return lambda: mw.linear(*arguments)


def conv(x: Any, *, weight: Any = KERNEL, **options: Any) -> Callable[[], Any]:
    return lambda: mw.conv2d(x, weight, **options)


def pack_into(out: Any, x: torch.Tensor = X) -> Callable[[], Any]:
    return lambda: mw.pack(x, BITS, out=out)


def sampler(lengths: Any = (3, 4), budget: Any = 9, **options: Any) -> Callable[[], Any]:
    return lambda: mw.TokenBudgetSampler(lengths, budget, **options)


ROWS = [
    Row("mw.pack", lambda: mw.pack(X.to("meta"), BITS.to("meta")), ArgumentError, "capacity=mask.numel()"),
    Row("mw.pack", lambda: mw.pack(X.to_sparse(), BITS), ArgumentError, "x.to_dense()"),
    Row("mw.apply", lambda: mw.apply(torch.neg, X.to_sparse(), mask=BITS), ArgumentError, "x.to_dense()"),
    # -- apply
    Row("mw.apply", lambda: mw.apply(torch.neg, [1.0], mask=BITS), DtypeError, "torch.as_tensor(x)"),
    Row("mw.apply", lambda: mw.apply(torch.neg, X, mask=X), DtypeError, "Mask.from_attention_mask(mask) for 0 and 1"),
    Row("mw.apply", lambda: mw.apply(torch.neg, X, mask=BITS.to("meta")), DeviceError, "mask.to(x.device)"),
    Row("mw.apply", lambda: mw.apply(torch.neg, X, mask=BITS.T), ShapeError, "mask.T"),
    Row("mw.apply", lambda: mw.apply(torch.neg, X, mask=torch.ones(3) > 0), ShapeError, "mask[None, ...]"),
    Row("mw.apply", lambda: mw.apply(torch.add, X, X[:, :2], mask=BITS), ShapeError, "functools.partial(fn, value)"),
    Row("mw.apply", lambda: mw.apply(torch.add, X[..., None], X, mask=BITS), ShapeError, "value[..., None]"),
    Row("mw.apply", lambda: mw.apply(list, X, mask=BITS), DtypeError, "lambda rows: tuple(fn(rows))"),
    Row("mw.apply", lambda: mw.apply(torch.sum, X, mask=BITS), ShapeError, "fn must be row-wise"),
    Row("mw.apply", lambda: mw.apply(lambda rows: (), X, mask=BITS), ArgumentError, "lambda rows: rows"),
    Row("mw.apply", apply_of(lambda rows: rows - rows.mean(0)), ArgumentError, "mw.pack(x, mask).map(fn)"),
    Row("mw.apply", apply_of(lambda rows: F.dropout(rows - rows.mean(0))), ArgumentError, "mw.pack(x, mask).map(fn)"),
    Row("mw.apply", apply_of(mixing_with_a_generator()), ArgumentError, "mw.pack(x, mask).map(fn)"),
    Row("mw.apply", apply_of(lambda rows: rows[: max(3, len(rows) - 1)]), ShapeError, "fn must be row-wise"),
    Row("mw.apply", apply_of(lambda rows: rows if len(rows) > 5 else rows[:1]), ArgumentError, "mw.pack(x, mask)"),
    Row("mw.apply", apply_of(nn.Conv1d(4, 4, 1)), ArgumentError, "mw.conv1d(x, fn.weight, fn.bias"),
    Row("mw.apply", apply_of(nn.Conv1d(6, 6, 1)), ArgumentError, "mw.conv1d(x, fn.weight, fn.bias"),
    Row("mw.apply", apply_of(nn.BatchNorm1d(4)), ArgumentError, "fn.eval()"),
    Row("mw.apply_", apply_of(lambda rows: rows - rows.mean(0), mw.apply_), ArgumentError, "mw.pack(x, mask).map(fn)"),
    Row("mw.apply_", lambda: mw.apply_(torch.Tensor.long, X, mask=BITS), ShapeError, "mw.apply, which returns a new"),
    Row("mw.apply_", lambda: mw.apply_(torch.neg, X, mask=None), DtypeError, "Mask.full(x.shape)"),
    Row("mw.apply_", lambda: mw.apply_(torch.neg, X, mask=BITS.to("meta")), DeviceError, "mask.to(x.device)"),
    Row("mw.apply_", lambda: mw.apply_(lambda rows: (), X, mask=BITS), ArgumentError, "lambda rows: rows"),
    # -- pack
    Row("mw.pack", lambda: mw.pack(X, None), DtypeError, "Mask.full(x.shape)"),
    Row("mw.pack", lambda: mw.pack([1.0], BITS), DtypeError, "torch.as_tensor(x)"),
    Row("mw.pack", lambda: mw.pack(X, BITS.T), ShapeError, "mask.T"),
    Row("mw.pack", lambda: mw.pack(X, BITS.to("meta")), DeviceError, "mask.to(x.device)"),
    Row("mw.pack", lambda: mw.pack(X, BITS, capacity="6"), DtypeError, "capacity=mask.numel()"),
    Row("mw.pack", lambda: mw.pack(X, BITS, capacity=2), ArgumentError, "capacity=5"),
    Row("mw.pack", lambda: torch.func.vmap(lambda x: mw.pack(x, BITS).values)(X[None]), ArgumentError, "mask.numel()"),
    Row("mw.pack", pack_into([1.0]), DtypeError, "torch.empty((5,))"),
    Row(
        "mw.pack", pack_into(torch.empty(5, dtype=torch.float64)), DtypeError, "torch.empty((5,), dtype=torch.float32)"
    ),
    Row("mw.pack", pack_into(torch.empty(5, device="meta")), DeviceError, "out.to('cpu')"),
    Row("mw.pack", pack_into(torch.empty(9)), ShapeError, "buffer[:5]"),
    Row("mw.pack", pack_into(torch.empty(10)[::2]), ShapeError, "out.contiguous()"),
    Row("mw.pack", pack_into(torch.empty(5, requires_grad=True)), ArgumentError, "with torch.no_grad():"),
    Row("mw.pack", pack_into(X.view(-1)[:5]), ArgumentError, "torch.empty_like(out)"),
    Row("Packed.unpack", lambda: PACKED.unpack(out=torch.empty(3)), ShapeError, "torch.empty((2, 3))"),
    Row("Packed.unpack", lambda: PACKED.unpack(out=[]), DtypeError, "torch.empty((2, 3))"),
    Row("Packed.unpack", lambda: PACKED.unpack(out=X.to("meta")), DeviceError, "out.to('cpu')"),
    Row("Packed.unpack", lambda: PACKED.unpack(X, out=X), ArgumentError, "torch.empty_like(out)"),
    Row("Packed.map", lambda: PACKED.map(torch.sum), ShapeError, "a row-wise function keeps the first dim"),
    Row("Packed.__add__", lambda: PACKED + EMPTY, ArgumentError, "pack both with one mask"),
    Row("Packed.__add__", lambda: PACKED + ROOMY, ArgumentError, "pack(x, mask, capacity=None)"),
    Row("Packed.__add__", lambda: PACKED + torch.ones(4), ShapeError, "t[:, None] adds a dim"),
    *[
        Row(
            f"Packed.{name}",
            lambda name=name: getattr(ROOMY, name)(),
            ArgumentError,
            "packed.unpack() and the function",
        )
        for name in ("sum", "mean", "amax", "amin", "logsumexp", "softmax")
    ],
    Row("Packed.to_packed_sequence", EMPTY.to_packed_sequence, ArgumentError, "pack(x[mask.lengths > 0]"),
    Row(
        "Packed.to_packed_sequence",
        mw.pack(X, BITS[:, 0]).to_packed_sequence,
        ShapeError,
        "(sequences, positions) mask",
    ),
    Row("Packed.to_nested", mw.pack(X, BITS[:, 0]).to_nested, ShapeError, "pack with a (sequences, positions) mask"),
    Row("Packed.to_sparse_csr", mw.pack(X, BITS[:, 0]).to_sparse_csr, ShapeError, "(sequences, positions) mask"),
    Row("Packed.from_list", lambda: Packed.from_list(X), DtypeError, "[t1, t2]"),
    Row("Packed.from_list", lambda: Packed.from_list([]), ArgumentError, "torch.empty(0, 8)"),
    Row("Packed.from_list", lambda: Packed.from_list([1]), DtypeError, "torch.as_tensor(t)"),
    Row("Packed.from_list", lambda: Packed.from_list([X.to_sparse()]), ArgumentError, "tensors.to_dense()"),
    Row("Packed.from_list", lambda: Packed.from_list([torch.tensor(1.0)]), ShapeError, "t[None]"),
    Row("Packed.from_list", lambda: Packed.from_list([X, X[..., None]]), ShapeError, "(length, features) each"),
    Row("Packed.from_list", lambda: Packed.from_list([X, X.double()]), DtypeError, "t.to(torch.float32)"),
    Row("Packed.from_list", lambda: Packed.from_list([X, X.to("meta")]), DeviceError, 't.to("cpu")'),
    Row("Packed.from_list", lambda: Packed.from_list([X, X], max_len=1), OutOfRangeError, "max_len=max(lengths)"),
    Row("Packed.from_sparse", lambda: Packed.from_sparse(X), DtypeError, "sparse.to_sparse()"),
    Row("Packed.from_nested", lambda: Packed.from_nested([X]), DtypeError, "layout=torch.jagged"),
    Row("Packed.from_packed_sequence", lambda: Packed.from_packed_sequence(X), DtypeError, "rnn.pack_sequence(parts"),
    # -- attention
    Row("mw.attention", attention([1.0], K, K), DtypeError, "all three from mw.pack"),
    Row("mw.attention", attention(Q[0], K, K), ShapeError, "q[None]"),
    Row("mw.attention", attention(Q.long(), K, K), DtypeError, "q.float()"),
    Row("mw.attention", attention(Q, K.double(), K), DtypeError, "k.to(q.dtype)"),
    Row("mw.attention", attention(Q, K.to("meta"), K), DeviceError, "k.to(q.device)"),
    Row("mw.attention", attention(Q, K[:1], K), ShapeError, "k.expand(2, -1, -1, -1)"),
    Row("mw.attention", attention(Q, K[..., :4], K), ShapeError, "project q and k to one size"),
    Row("mw.attention", attention(Q, K, K[:, :, :4]), ShapeError, "only the last dim of v is its own"),
    Row("mw.attention", attention(Q[:, :3], K, K), ShapeError, "(B, heads, L, D), not (B, L, heads, D)"),
    Row("mw.attention", attention(Q, K, K, dropout_p=2.0), ArgumentError, "dropout_p=0.1"),
    Row("mw.attention", attention(Q, K, K, bias=[0.0]), DtypeError, "torch.as_tensor(bias).float()"),
    Row("mw.attention", attention(Q, K, K, bias=torch.ones(3, 5).bool()), DtypeError, "mask=bias"),
    Row("mw.attention", attention(Q, K, K, bias=torch.zeros(2, 3, 5)), ShapeError, "bias[:, None] for (B, queries"),
    Row("mw.attention", attention(Q, K, K, bias=torch.zeros(5, device="meta")), DeviceError, "bias.to(q.device)"),
    Row("mw.attention", attention(Q, K, K, bias=torch.zeros(3, 5).to_sparse()), ArgumentError, "bias.to_dense()"),
    Row("mw.attention", attention(ROWS_OF, ROWS_OF, ROWS_OF, bias=X), ArgumentError, "q.unpack().transpose(1, 2)"),
    Row("mw.attention", attention(Q, K, K, softcap=0.0), ArgumentError, "softcap=50.0"),
    Row("mw.attention", attention(Q, K, K, softcap="50"), ArgumentError, "softcap=50.0"),
    Row("mw.attention", attention(Q, K, K, sinks=[0.0]), DtypeError, "torch.as_tensor(sinks).float()"),
    Row("mw.attention", attention(Q, K, K, sinks=torch.zeros(3)), ShapeError, "one logit for each head of q"),
    Row("mw.attention", attention(Q, K, K, sinks=torch.zeros(2, 2)), ShapeError, "sinks.shape"),
    Row(
        "mw.attention",
        attention(Q, K, K, sinks=torch.zeros(Q.shape[1], device="meta")),
        DeviceError,
        "sinks.to(q.device)",
    ),
    Row("mw.attention", attention(Q, K, K, bias=mw.AlibiBias(torch.ones(3))), ShapeError, "for each head"),
    Row(
        "mw.attention",
        attention(Q, K, K, bias=mw.AlibiBias(torch.ones(Q.shape[1], device="meta"))),
        DeviceError,
        "bias.to(q.device)",
    ),
    Row("mw.AlibiBias", lambda: mw.AlibiBias([0.5]), DtypeError, "torch.as_tensor(slopes).float()"),
    Row("mw.AlibiBias", lambda: mw.AlibiBias(torch.ones(2, 2)), ShapeError, "slopes.shape"),
    Row("mw.AlibiBias.of_heads", lambda: mw.AlibiBias.of_heads(0), ArgumentError, "heads=8"),
    Row("mw.RelativeBias", lambda: mw.RelativeBias(torch.ones(2).long()), DtypeError, "torch.as_tensor(table).float()"),
    Row("mw.RelativeBias", lambda: mw.RelativeBias(torch.ones(2)), ShapeError, "table.shape"),
    Row("mw.attention", attention(Q, K, K, attn_mask=[True]), DtypeError, "Mask(torch.as_tensor(mask))"),
    Row(
        "mw.attention",
        attention(Q, K, K, attn_mask=torch.ones(2, 5).bool()),
        ShapeError,
        "mask=attn_mask for (B, keys)",
    ),
    Row("mw.attention", attention(Q, K, K, attn_mask=torch.ones(3, 5).long()), DtypeError, "Mask.from_attention_mask"),
    Row("mw.attention", attention(Q, K, K, BITS, attn_mask=BITS), ArgumentError, "mask=mask, bias=bias"),
    Row("mw.attention", attention(Q, K, K, torch.ones(2, 5)), DtypeError, "Mask.from_additive(mask) for 0 and -inf"),
    Row("mw.attention", attention(Q, K, K, [True]), DtypeError, "Mask(torch.as_tensor(mask))"),
    Row("mw.attention", attention(Q, K, K, Mask.full((2, 5), device="meta")), DeviceError, "mask.to(q.device)"),
    Row("mw.attention", attention(SQUARE, SQUARE, SQUARE, Mask.full((3, 3))), ArgumentError, "mask[:, None, None, :]"),
    Row("mw.attention", attention(Q, K, K, Mask.full((2, 3, 5))), ShapeError, "mask[:, None] for (B, queries, keys)"),
    Row("mw.attention", attention(Q, K, K, query_mask=torch.ones(2, 3)), DtypeError, "Mask.from_attention_mask(mask)"),
    Row("mw.attention", attention(Q, K, K, query_mask=Mask.full((2, 5))), ShapeError, "is the argument `mask`"),
    Row("mw.attention", attention(Q, K, K, query_mask=Mask.full((2, 1, 3, 5))), ShapeError, "is the argument `mask`"),
    Row("mw.attention", attention(*[ROWS_OF] * 3, query_mask=BITS), ArgumentError, "mw.pack(q, query_mask)"),
    Row("mw.attention", attention(ROWS_OF, K, K), DtypeError, "mw.pack(k.transpose(1, 2), mask)"),
    Row("mw.attention", attention(PACKED, PACKED, PACKED), ShapeError, "mw.pack(x.transpose(1, 2), mask)"),
    Row(
        "mw.attention",
        attention(ROWS_OF, ROWS_OF, mw.pack(Q.transpose(1, 2), ~BITS)),
        ArgumentError,
        "mw.pack(v, k.mask)",
    ),
    Row(
        "mw.attention",
        attention(ROWS_OF, *[mw.pack(Q[:1].transpose(1, 2), BITS[:1])] * 2),
        ShapeError,
        "from one batch",
    ),
    Row("attend", lambda: attend(Q, Q, Q, [3, 3]), ShapeError, "mw.attention for (B, H, L, D)"),
    Row("attend", lambda: attend(TOKENS, TOKENS, TOKENS[:4], [5]), ShapeError, "only the last dim of v is its own"),
    Row("attend", lambda: attend(TOKENS, TOKENS[:, :3], TOKENS[:, :3], [5]), ShapeError, "(N, heads, D), not"),
    Row(
        "attend",
        lambda: attend(TOKENS, TOKENS, TOKENS, [5], key_lengths=[2, 3]),
        ArgumentError,
        "0 for a sequence of no keys",
    ),
    Row("attend", lambda: attend(TOKENS, TOKENS, TOKENS, [4]), ShapeError, "mask.lengths.tolist()"),
    Row(
        "mw.apply", lambda: mw.apply(nn.Conv2d(3, 4, 3), MAP, mask=MAP[:, 0] > 0), ShapeError, "mw.conv2d(x, fn.weight"
    ),
    # -- convolutions
    Row("mw.conv2d", conv([1.0]), DtypeError, "torch.as_tensor(x)"),
    Row("mw.conv2d", conv(MAP, weight=None), DtypeError, "torch.as_tensor(weight)"),
    Row("mw.conv2d", conv(MAP, weight=torch.zeros(0, 3, 3, 3)), ShapeError, "torch.zeros(channels, channels, 3, 3)"),
    Row("mw.conv2d", conv(MAP.to_sparse()), ArgumentError, "x.to_dense()"),
    Row("mw.conv2d", conv(MAP.long()), DtypeError, "x.float()"),
    Row("mw.conv2d", conv(MAP, weight=KERNEL.double()), DtypeError, "weight.to(x.dtype)"),
    Row("mw.conv2d", conv(MAP, weight=KERNEL.to("meta")), DeviceError, "weight.to(x.device)"),
    Row("mw.conv2d", conv(MAP[0, 0]), ShapeError, "x[None] for one channel"),
    Row("mw.conv2d", conv(MAP[None]), ShapeError, "x.flatten(0, 1)"),
    Row("mw.conv2d", conv(MAP, weight=KERNEL[0]), ShapeError, "weight.reshape(-1, 3, ...)"),
    Row("mw.conv2d", conv(MAP.movedim(1, -1)), ShapeError, "x.movedim(-1, 1)"),
    Row("mw.conv2d", conv(MAP[:, :2]), ShapeError, "a weight of shape (4, 2, 3, 3)"),
    Row("mw.conv2d", conv(MAP, groups=3), ArgumentError, "groups=1"),
    Row("mw.conv2d", conv(MAP, bias=torch.zeros(2, 2)), ShapeError, "bias.flatten()"),
    Row("mw.conv2d", conv(MAP, stride=0), ArgumentError, "stride=(1, 1)"),
    Row("mw.conv2d", conv(MAP, dilation=(1, 1, 1)), ArgumentError, "dilation=(1, 1)"),
    Row("mw.conv2d", conv(MAP, padding="reflect"), ArgumentError, "padding=(0, 0)"),
    Row("mw.conv2d", conv(MAP, padding="same", stride=2), ArgumentError, "padding=kernel_size // 2"),
    Row("mw.conv2d", conv(MAP[..., :2]), ShapeError, "padding=kernel_size // 2"),
    Row("mw.conv2d", conv(MAP, mask=MAP[:, 0]), DtypeError, "Mask.from_additive(mask) for 0 and -inf"),
    Row("mw.conv2d", conv(MAP, mask=MAP > 0), ShapeError, "mask.any(1), since all channels share it"),
    Row("mw.conv2d", conv(MAP, outputs=MAP[:, 0] > 0), ShapeError, "outputs of (2, 4, 3)"),
    Row("mw.conv2d", conv(MAP, mask=(MAP[:, 0] > 0).to("meta")), DeviceError, "mask.to(x.device)"),
    Row("mw.conv2d", conv(MAP, other="0"), DtypeError, "other=0.0"),
    Row("mw.conv2d", conv(MAP, other=torch.zeros(1, dtype=torch.complex64)), DtypeError, "other.real"),
    Row("mw.conv2d", conv(MAP, other=torch.zeros(3)[:2]), ShapeError, "the result of an earlier call"),
    Row("mw.conv2d", conv(MAP, other=torch.zeros(3, device="meta")), DeviceError, "other.to(x.device)"),
    Row(
        "mw.conv2d", conv(MAP, mask=MAP[:, 0] > 0, other=1e300), ArgumentError, "a value in the range of torch.float32"
    ),
    Row(
        "mw.conv_transpose2d",
        lambda: mw.conv_transpose2d(MAP, KERNEL[:3], output_padding=1),
        ArgumentError,
        "output_padding=stride - 1 at most",
    ),
    Row("mw.conv1d", lambda: mw.conv1d(MAP, KERNEL[..., 0]), ShapeError, "mw.conv2d"),
    *(
        Row(f"mw.{name}", lambda name=name, given=given: getattr(mw, name)(*given), error, hint)
        for name, x, w in [
            ("conv1d", MAP[0].mT, torch.zeros(4, 5, 3)),
            ("conv_transpose1d", MAP[0].mT, torch.zeros(5, 4, 3)),
            ("conv_transpose2d", MAP, torch.zeros(3, 4, 3, 3)),
        ]
        for given, error, hint in [
            ((x[:, :2], w), ShapeError, "a weight of shape"),
            ((x, w, None, 0), ArgumentError, "stride="),
            ((x.long(), w), DtypeError, "x.float()"),
            ((x, w.to("meta")), DeviceError, "weight.to(x.device)"),
        ]
    ),
    # -- linear
    Row("mw.linear", linear([1.0], WEIGHT, KEPT), DtypeError, "torch.as_tensor(x)"),
    Row("mw.linear", linear(X, WEIGHT, KEPT, [1.0]), DtypeError, "torch.as_tensor(bias)"),
    Row("mw.linear", linear(X, WEIGHT, None), DtypeError, "Mask.full(weight.shape)"),
    Row("mw.linear", linear(X, WEIGHT[0], KEPT[0]), ShapeError, "weight[None]"),
    Row("mw.linear", linear(X, WEIGHT, KEPT.T), ShapeError, "mask.T"),
    Row("mw.linear", linear(torch.ones(2, 4), WEIGHT, KEPT), ShapeError, "weight.T and mask.T"),
    Row("mw.linear", linear(torch.ones(2, 3, 1), WEIGHT, KEPT), ShapeError, "x.flatten(1)"),
    Row("mw.linear", linear(torch.ones(3, 5), WEIGHT, KEPT), ShapeError, "x.T"),
    Row("mw.linear", linear(torch.ones(2, 7), WEIGHT, KEPT), ShapeError, "a weight of 7 inputs"),
    Row("mw.linear", linear(torch.ones(()), WEIGHT, KEPT), ShapeError, "x[None]"),
    Row("mw.linear", linear(X, WEIGHT, KEPT, torch.ones(4, 1)), ShapeError, "bias.flatten()"),
    Row("mw.linear", linear(X, WEIGHT, KEPT, torch.ones(3)), ShapeError, "torch.zeros(4)"),
    Row("mw.linear", linear(X, WEIGHT.to("meta"), KEPT), DeviceError, "weight.to(x.device)"),
    Row("mw.linear", linear(X, WEIGHT.double(), KEPT), DtypeError, "weight.to(x.dtype)"),
    Row("SparseLayout.from_mask", lambda: SparseLayout.from_mask(KEPT[0]), ShapeError, "bits[None]"),
    Row("SparseLayout.from_mask", lambda: SparseLayout.from_mask(KEPT, (2, 2)), ArgumentError, "block=(1, 1)"),
    Row(
        "SparseLayout.from_mask",
        lambda: SparseLayout.from_mask(torch.eye(16) > 0, (4, 1)),
        ArgumentError,
        "from_mask(mask)",
    ),
    # -- batches
    Row("mw.TokenBudgetSampler", sampler(budget=1.5), DtypeError, "budget=int(budget)"),
    Row("mw.TokenBudgetSampler", sampler(pool=0), ArgumentError, "pool=1"),
    Row("mw.TokenBudgetSampler", sampler(method="best"), ArgumentError, 'method="first_fit" for packed batches'),
    Row("mw.TokenBudgetSampler", sampler(balance="rows"), ArgumentError, 'balance="tokens"'),
    Row("mw.TokenBudgetSampler", sampler(rank=2, num_replicas=2), ArgumentError, "num_replicas=3"),
    Row("mw.TokenBudgetSampler", sampler(num_replicas=2), ArgumentError, "rank=torch.distributed.get_rank()"),
    Row("mw.TokenBudgetSampler", sampler(["three"]), DtypeError, "[len(tokens) for tokens in dataset]"),
    Row("mw.TokenBudgetSampler", sampler([[3], [4]]), ShapeError, "lengths.flatten()"),
    Row("mw.TokenBudgetSampler", sampler([3.0]), DtypeError, "[len(tokens) for tokens in dataset]"),
    Row("mw.TokenBudgetSampler", sampler([12]), ArgumentError, "budget=12"),
    Row("mw.TokenBudgetSampler", sampler([-1]), ArgumentError, "lengths.clamp(min=0)"),
    Row("data.context_shares", lambda: data.context_shares([3.5], 2), DtypeError, "[len(tokens) for tokens in batch]"),
    Row("data.context_shares", lambda: data.context_shares([3], 0), ArgumentError, "ranks=1"),
    Row("mw.TokenBudgetSampler.state_dict", lambda: sampler([3])().state_dict(9), ArgumentError, "len(sampler)"),
    Row(
        "mw.TokenBudgetSampler.load_state_dict",
        lambda: sampler([3])().load_state_dict({}),
        DtypeError,
        "sampler.load_state_dict(other.state_dict())",
    ),
    Row(
        "mw.TokenBudgetSampler.load_state_dict",
        lambda: sampler([3])().load_state_dict(sampler([4])().state_dict()),
        ArgumentError,
        "num_replicas and rank may differ",
    ),
]
