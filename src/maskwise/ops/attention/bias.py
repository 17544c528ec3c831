"""What changes scores before their softmax: a soft cap, a bias that knows its structure, and sinks.

A structured bias is a function of the distance between a query and a key. It is made for a block of pairs at a time, so
that no tensor of all pairs exists.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.ops.torch_private import is_tracing

if TYPE_CHECKING:
    from maskwise.ops.attention.blocks import Block

__all__ = ["AlibiBias", "RelativeBias", "ScoreMod", "StructuredBias", "check_score_mod"]

OP = "attention"
Bias = TypeVar("Bias", bound="StructuredBias")


def _check_floats(op: str, name: str, x: Any, dims: int, must: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError(say(op, name, must="be a floating tensor", got=got, hint=f"torch.as_tensor({name}).float()"))
    if x.dim() != dims or 0 in x.shape:
        raise ShapeError(say(op, name, must=must, got=tuple(x.shape), hint=f"{name}.shape"))


@dataclass(frozen=True, eq=False)
class StructuredBias(ABC):
    """A bias of attention that depends on the distance between a query and a key, and on the head.

    Attributes:
        tensor: what it is made of; its gradient is that of the bias.
        offset: the position of the first query, where the first key has 0.
    """

    tensor: Tensor
    offset: int = 0

    @property
    def heads(self) -> int:
        """How many heads it is for."""
        return self.tensor.shape[-1]

    @abstractmethod
    def of_distances(self, distances: Tensor) -> Tensor:
        """The bias at integer distances (key position - query position) of any shape: (H, *shape)."""

    @abstractmethod
    def score_of(self, distance: Tensor, head: Tensor) -> Tensor:
        """The same for one pair and head: FlexAttention compiles it."""

    def largest(self, distance: int) -> float:
        """No value is further from 0 than this, up to a distance."""
        return float(self.tensor.detach().abs().amax())

    def between(
        self,
        queries: Tensor,  # integer positions, (Lq,)
        keys: Tensor,  # integer positions, (Lk,)
    ) -> Tensor:
        """The bias of each pair of a query and a key: (H, Lq, Lk)."""
        return self.of_distances(keys - queries[:, None] - self.offset)

    def between_ranges(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """The bias of consecutive queries and keys, of [start, end) each: (H, Lq, Lk).

        Each diagonal has one distance, so there are Lq + Lk - 1 values, and each row is a window of them.
        """
        (start, end), (first, last) = queries, keys
        if start == end or first == last:
            return self.tensor.new_zeros(self.heads, end - start, last - first)
        distances = torch.arange(first - end + 1, last - start, device=self.tensor.device) - self.offset
        return self.of_distances(distances).unfold(-1, last - first, 1).flip(-2)

    def to_tensor(self, queries: int, keys: int) -> Tensor:
        """The bias of all pairs, (H, queries, keys), as a tensor that other libraries take."""
        return self.between_ranges((0, queries), (0, keys))

    def _with(self: Bias, tensor: Tensor) -> Bias:
        return replace(self, tensor=tensor)


@dataclass(frozen=True, eq=False)
class AlibiBias(StructuredBias):
    """ALiBi: each head subtracts its slope times the distance between query and key.

    >>> import torch, maskwise as mw
    >>> mw.AlibiBias(torch.tensor([0.5])).to_tensor(2, 3)
    tensor([[[-0.0000, -0.5000, -1.0000],
             [-0.5000, -0.0000, -0.5000]]])
    >>> mw.AlibiBias.of_heads(4).tensor
    tensor([0.2500, 0.0625, 0.0156, 0.0039])

    Args:
        tensor: the slopes, (H,); they may require grad.
        offset: the position of the first query, where the first key has 0; ``Lk - Lq`` for queries that continue from
            a cache.

    Raises:
        DtypeError, ShapeError: the slopes are no floating tensor of one dim.
    """

    def __post_init__(self) -> None:
        _check_floats("AlibiBias", "slopes", self.tensor, 1, "be (heads,)")

    @classmethod
    def of_heads(cls, heads: int, *, device: torch.device | str | None = None) -> AlibiBias:
        """The slopes of the ALiBi paper: 2 ** (-8 / heads) and its powers; others in between where heads are no such.

        Args:
            heads: how many.
            device: where the slopes are.

        Raises:
            ArgumentError: there is no head.
        """
        if heads < 1:
            raise ArgumentError(say("AlibiBias.of_heads", "heads", must="be at least 1", got=heads, hint="heads=8"))
        base = 1 << (heads.bit_length() - 1)
        powers = [-8 * (head + 1) / base for head in range(base)]
        # Every second slope of twice as many heads.
        powers += [-4 * (2 * head + 1) / base for head in range(heads - base)]
        return cls(torch.tensor([2.0**power for power in powers], device=device))

    def of_distances(self, distances: Tensor) -> Tensor:
        """-slope * |distance|: (H, *shape)."""
        slopes = self.tensor.reshape(-1, *(1,) * distances.dim())
        return -slopes * distances.abs().to(slopes.dtype)

    def score_of(self, distance: Tensor, head: Tensor) -> Tensor:
        """The same for one pair and head."""
        return -self.tensor[head] * distance.abs()

    def largest(self, distance: int) -> float:
        """The steepest slope, at that distance."""
        return super().largest(distance) * distance


@dataclass(frozen=True, eq=False)
class RelativeBias(StructuredBias):
    """A learned bias for each bucket of distances and each head, such as T5's.

    >>> import torch, maskwise as mw
    >>> table = torch.tensor([[0.0], [1.0], [2.0], [3.0]])  # (buckets, heads)
    >>> mw.RelativeBias(table, bucket=lambda distance: distance.clamp(-1, 2) + 1).to_tensor(2, 3)
    tensor([[[1., 2., 3.],
             [0., 1., 2.]]])

    Args:
        tensor: the table, (buckets, H), as the weight of an ``nn.Embedding``; it may require grad.
        offset: the position of the first query, where the first key has 0.
        bidirectional: of T5's buckets: whether later keys have buckets of their own, as in encoders. Otherwise they
            share that of distance 0, as in decoders.
        max_distance: of T5's buckets: the distance from which on all share the last bucket.
        bucket: integer distances (key position - query position) to rows of the table; by default T5's.

    Raises:
        DtypeError, ShapeError: the table is no floating tensor of two dims.
    """

    bidirectional: bool = True
    max_distance: int = 128
    bucket: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        _check_floats("RelativeBias", "table", self.tensor, 2, "be (buckets, heads)")

    def buckets_of(self, distances: Tensor) -> Tensor:
        """The row of the table for each distance."""
        if self.bucket is not None:
            return self.bucket(distances)
        buckets, first = self.tensor.shape[0], torch.zeros_like(distances)
        if self.bidirectional:
            buckets //= 2
            first = (distances > 0).to(distances.dtype) * buckets
            distances = distances.abs()
        else:
            distances = (-distances).clamp(min=0)
        # Half of the buckets are for one distance each, the others grow with it, logarithmically.
        exact = buckets // 2
        steps = torch.log(distances.float() / exact) / math.log(self.max_distance / exact) * (buckets - exact)
        far = (exact + steps.clamp(min=0).to(distances.dtype)).clamp(max=buckets - 1)
        return first + torch.where(distances < exact, distances, far)

    def of_distances(self, distances: Tensor) -> Tensor:
        """The table's rows at the buckets of the distances: (H, *shape)."""
        if distances.numel() == 0:
            return self.tensor.new_zeros(self.heads, *distances.shape)
        if is_tracing():
            return self.tensor[self.buckets_of(distances)].movedim(-1, 0)
        # There are fewer distances than pairs, and a bucket is computed once for each.
        least, most = (int(each) for each in torch.aminmax(distances))
        rows = self.buckets_of(torch.arange(least, most + 1, device=distances.device))
        return self.tensor[rows].mT[:, distances - least]

    def score_of(self, distance: Tensor, head: Tensor) -> Tensor:
        """The same for one pair and head."""
        return self.tensor[self.buckets_of(distance), head]


class ScoreMod(NamedTuple):
    """What changes scores: ``softcap * tanh(score / softcap)``, then the bias; sinks take a part of each softmax."""

    bias: Tensor | StructuredBias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def tensor(self) -> Tensor | None:
        """What the bias is made of."""
        return self.bias.tensor if isinstance(self.bias, StructuredBias) else self.bias

    @property
    def requires_grad(self) -> bool:
        """Whether the bias or the sinks require grad."""
        return any(x is not None and x.requires_grad for x in (self.tensor, self.sinks))

    @property
    def key(self) -> tuple[Any, ...]:
        """What routes are decided by."""
        tensors = (None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in (self.tensor, self.sinks))
        return type(self.bias), self.softcap, *tensors

    def with_tensors(self, tensor: Tensor | None, sinks: Tensor | None) -> ScoreMod:
        """The same of other tensors: leaves of a graph of their own, for example."""
        bias = self.bias._with(tensor) if isinstance(self.bias, StructuredBias) and tensor is not None else tensor
        return ScoreMod(bias, self.softcap, sinks)

    def dense(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The bias of all pairs, for graphs and transforms: it broadcasts to (B, H, Lq, Lk)."""
        if not isinstance(self.bias, StructuredBias):
            return None if self.bias is None else self.bias.to(q.dtype)
        places = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        return self.bias.between(*places)[None].to(q.dtype)

    def of_block(self, block: Block, places: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> Tensor | None:
        """The bias of a block's pairs; it broadcasts to (batch, H, rows, keys).

        Args:
            block: the block.
            places: the positions of all queries and of all keys, where they are not 0, 1, 2, ...
            dtype: that of the scores.
        """
        if self.bias is None:
            return None
        if isinstance(self.bias, StructuredBias):
            if places is None and not isinstance(block.keys, Tensor):
                return self.bias.between_ranges(block.rows, block.keys)[None].to(dtype)
            device = self.bias.tensor.device
            rows = torch.arange(*block.rows, device=device)
            keys = block.keys if isinstance(block.keys, Tensor) else torch.arange(*block.keys, device=device)
            if places is not None:
                rows, keys = places[0][rows], places[1][keys]
            return self.bias.between(rows, keys)[None].to(dtype)
        part = self.bias[(None,) * (4 - self.bias.dim())]
        if part.shape[0] > 1:
            part = part[block.batch[0] : block.batch[1]]
        if part.shape[2] > 1:
            part = part[:, :, block.rows[0] : block.rows[1]]
        if part.shape[3] > 1:
            at = block.keys
            part = part[..., at] if isinstance(at, Tensor) else part[..., at[0] : at[1]]
        return part.to(dtype)

    def largest(self, queries: int, keys: int) -> float:
        """No bias is further from 0 than this; inf or NaN where one is."""
        tensor = self.tensor
        if tensor is None or 0 in tensor.shape:
            return 0.0
        if isinstance(self.bias, StructuredBias):
            return self.bias.largest(queries + keys + abs(self.bias.offset))
        return float(tensor.detach().abs().amax())


def check_score_mod(mod: ScoreMod, heads: int, device: torch.device) -> None:
    """Raise unless this fits a call of so many heads."""
    bias, softcap, sinks = mod
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap < math.inf):
        got = softcap if isinstance(softcap, (int, float)) else type(softcap).__name__
        raise ArgumentError(say(OP, "softcap", must="be a positive, finite number", got=got, hint="softcap=50.0"))
    if isinstance(bias, StructuredBias):
        if bias.heads != heads:
            must, hint = f"be for q's {heads} heads", "one slope, or column of the table, for each head"
            raise ShapeError(say(OP, "bias", must=must, got=bias.heads, hint=hint))
        _check_device("bias", bias.tensor, device)
    if sinks is not None:
        _check_floats(OP, "sinks", sinks, 1, f"be (heads,) = ({heads},)")
        if sinks.shape != (heads,):
            must, hint = f"be (heads,) = ({heads},)", "one logit for each head of q"
            raise ShapeError(say(OP, "sinks", must=must, got=tuple(sinks.shape), hint=hint))
        _check_device("sinks", sinks, device)


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        must, hint = f"be on q's device {device}", f"{name}.to(q.device)"
        raise DeviceError(say(OP, name, must=must, got=x.device, hint=hint))
