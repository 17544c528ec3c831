"""What a call of attention is made of: its checks, and how its mask lines up with the scores."""

from __future__ import annotations

from math import inf
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MUST, MaskLike, fits, mask_hint, need_dense
from maskwise.ops.attention.reference import causal
from maskwise.plan.dispatch import Facts

if TYPE_CHECKING:
    from maskwise.ops.attention.blocks import Block, BlockCount

__all__ = [
    "KEYS",
    "Call",
    "Index",
    "Scores",
    "Sizes",
    "as_mask_and_bias",
    "bits_of",
    "check",
    "check_bias",
    "drop_queries",
    "is_autocast",
    "kept_of",
    "lift",
    "line_up",
    "to_autocast",
]

OP = "attention"
MaskT = TypeVar("MaskT", Mask, Tensor)
Index = tuple[slice | EllipsisType | None, ...]

#: The index of a mask (B, keys).
KEYS: Index = (slice(None), None, None)


class Sizes(NamedTuple):
    """The sizes of an attention call: the shape of its scores."""

    batch: int
    heads: int
    queries: int
    keys: int


class Scores(NamedTuple):
    """What routes read besides sizes: the ``detail`` of the `Facts`."""

    kv_heads: int
    features: int
    value_features: int
    is_causal: bool
    has_dropout: bool
    #: Whether the mask is a `Mask`, which caches its blocks.
    is_structured: bool
    #: Whether the mask is one of pairs: queries of a head may keep different keys.
    has_pairs: bool
    #: Whether a bias is added to the scores.
    has_bias: bool = False
    #: Whether scores are capped, biased by distance, or shared with sinks.
    has_score_mod: bool = False
    #: The blocks that the mask keeps, once they were looked for.
    blocks: BlockCount | None = None
    #: Whether the mask is one run of keys for each batch entry, as it knows without reading data.
    has_key_runs: bool = False


class Call(NamedTuple):
    """A call that was checked: what its routes take beside tensors."""

    facts: Facts
    sizes: Sizes
    #: The index that gives the mask four dims.
    mask_index: Index
    #: Whether the mask is (B, keys).
    is_of_keys: bool
    is_causal: bool
    #: What the scores are multiplied by unless the caller says.
    scale: float
    #: Whether autocast lowers the dtype.
    is_autocast: bool
    #: What the route by blocks computes.
    blocks: tuple[Block, ...] = ()


def check(q: Any, k: Any, v: Any, mask: MaskLike | None) -> tuple[Sizes, Index]:
    """The sizes of a call, and the index that gives its mask four dims; or an error that says what does not fit."""
    sizes = _check_tensors(q, k, v)
    return sizes, () if mask is None else line_up(mask, q, sizes)


def _check_tensors(q: Any, k: Any, v: Any) -> Sizes:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            hint = "torch.as_tensor(x), or all three from mw.pack"
            raise DtypeError(
                say(OP, name, must="be a tensor, or all of q, k, v Packed", got=type(x).__name__, hint=hint)
            )
        need_dense(OP, name, x)
        if x.dim() != 4:
            hint = f"{name}[None]" if x.dim() == 3 else f"{name}.unflatten(-1, (heads, -1)).transpose(1, 2)"
            raise ShapeError(say(OP, name, must="be (B, heads, L, D)", got=tuple(x.shape), hint=hint))
        if not x.is_floating_point():
            raise DtypeError(say(OP, name, must="be floating", got=x.dtype, hint=f"{name}.float()"))
    (batch, heads, queries, size), (_, shared, keys, _) = q.shape, k.shape
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype and not is_autocast(q.device.type):
            raise DtypeError(say(OP, name, must=f"have q's dtype {q.dtype}", got=x.dtype, hint=f"{name}.to(q.dtype)"))
        if x.device != q.device:
            raise DeviceError(
                say(OP, name, must=f"be on q's device {q.device}", got=x.device, hint=f"{name}.to(q.device)")
            )
        if x.shape[0] != batch:
            must, got = f"have q's batch size {batch}", x.shape[0]
            raise ShapeError(say(OP, name, must=must, got=got, hint=f"{name}.expand({batch}, -1, -1, -1)"))
    if k.shape[-1] != size:
        raise ShapeError(
            say(OP, "k", must=f"have q's last dim {size}", got=k.shape[-1], hint="project q and k to one size")
        )
    if v.shape[1:3] != k.shape[1:3]:
        must = f"have k's heads and length {tuple(k.shape[1:3])}"
        raise ShapeError(say(OP, "v", must=must, got=tuple(v.shape[1:3]), hint="only the last dim of v is its own"))
    if shared == 0 or heads % shared:
        must = f"have a number of heads that divides q's {heads}"
        raise ShapeError(say(OP, "k", must=must, got=shared, hint="(B, heads, L, D), not (B, L, heads, D)"))
    return Sizes(batch, heads, queries, keys)


def is_autocast(device: str) -> bool:
    """Whether autocast is on for a device."""
    return torch.is_autocast_enabled(device) if device in ("cpu", "cuda") or is_autocast_available(device) else False


def to_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in autocast's dtype where that is on: kernels are called below the level at which it acts."""
    if not is_autocast(q.device.type) or q.dtype is torch.float64:
        return q, k, v
    lower = torch.get_autocast_dtype(q.device.type)
    return q.to(lower), k.to(lower), v.to(lower)


def line_up(mask: MaskLike, q: Tensor, sizes: Sizes) -> Index:
    """The index that gives the mask its four dims: (B, heads, queries, keys), each of that size or 1."""
    _check_mask("mask", mask, q)
    shape = tuple(mask.shape)
    broadcasts = fits(shape, sizes)
    if len(shape) == 2 and shape == (sizes.batch, sizes.keys):
        if not broadcasts or sizes.batch == 1:
            return KEYS
        # As many queries as batch entries: both readings fit, and only the caller knows which one is meant.
        raise ArgumentError(
            say(
                OP,
                "mask",
                must="be clear where B equals the number of queries: keys of each batch entry, or of each query",
                got=shape,
                hint="mask[:, None, None, :] for (B, keys), mask[None, None] for (queries, keys)",
            )
        )
    if broadcasts:
        return (None,) * (4 - len(shape))
    must = f"be (B, keys) = {(sizes.batch, sizes.keys)} or broadcast to (B, heads, queries, keys) = {tuple(sizes)}"
    raise ShapeError(say(OP, "mask", must=must, got=shape, hint=_hint(shape, sizes)))


def drop_queries(q: Any, k: Any, v: Any, mask: MaskLike | None, query_mask: MaskLike) -> MaskLike:
    """The mask of a call that keeps no key for the queries that are dropped: four dims, each the call's size or 1."""
    sizes, index = check(q, k, v, mask)
    _check_mask("query_mask", query_mask, q)
    shape = tuple(query_mask.shape)
    of_queries = (sizes.batch, sizes.queries) if len(shape) == 2 else sizes[:3]
    if not 1 <= len(shape) <= 3 or not fits(shape, of_queries):
        must = f"be (B, queries) = {(sizes.batch, sizes.queries)} or (B, heads, queries) = {tuple(sizes[:3])}"
        hint = "a mask of pairs, or of keys, is the argument `mask`"
        raise ShapeError(say(OP, "query_mask", must=must, got=shape, hint=hint))
    rows = query_mask[(slice(None), None, ..., None) if len(shape) == 2 else (..., None)]
    if mask is None:
        return rows[(None,) * (4 - rows.ndim)]
    kept = mask[index] if index else mask
    if isinstance(kept, Mask) or isinstance(rows, Mask):
        return (kept if isinstance(kept, Mask) else Mask(kept)) & (rows if isinstance(rows, Mask) else Mask(rows))
    return kept & rows


def as_mask_and_bias(q: Any, k: Any, v: Any, attn_mask: Any) -> tuple[MaskLike, Tensor | None]:
    """The mask, and the bias, of what torch's SDPA takes as ``attn_mask``: a mask of pairs, or floats that it adds."""
    sizes = _check_tensors(q, k, v)
    if not isinstance(attn_mask, (Mask, Tensor)):
        must, hint = "be a Mask, a bool tensor, or a floating one that is added", mask_hint(attn_mask)
        raise DtypeError(say(OP, "attn_mask", must=must, got=type(attn_mask).__name__, hint=hint))
    shape = tuple(attn_mask.shape)
    if not fits(shape, sizes):
        must = f"broadcast to (B, heads, queries, keys) = {tuple(sizes)}, as in torch"
        hint = "mask=attn_mask for (B, keys)" if shape == (sizes.batch, sizes.keys) else _hint(shape, sizes)
        raise ShapeError(say(OP, "attn_mask", must=must, got=shape, hint=hint))
    # Two dims are queries and keys, whatever the batch size is.
    four = attn_mask[(None,) * (4 - len(shape))]
    if isinstance(four, Tensor) and four.is_floating_point():
        check_bias(four, q, sizes, "attn_mask")
        # What -inf drops may be NaN in the keys and values, too.
        return four.detach() != -inf, four
    return four, None


def check_bias(bias: Any, q: Tensor, sizes: Sizes, name: str = "bias") -> None:
    """Raise unless this can be added to the scores."""
    need_dense(OP, name, bias)
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        is_mask = isinstance(bias, Mask) or (isinstance(bias, Tensor) and bias.dtype is torch.bool)
        hint = f"mask={name}" if is_mask else f"torch.as_tensor({name}).float()"
        raise DtypeError(say(OP, name, must="be a floating tensor", got=got, hint=hint))
    shape = tuple(bias.shape)
    if not fits(shape, sizes):
        must = f"broadcast to (B, heads, queries, keys) = {tuple(sizes)}"
        hint = _hint(shape, sizes).replace("mask", name)
        raise ShapeError(say(OP, name, must=must, got=shape, hint=hint))
    if bias.device != q.device:
        must, hint = f"be on q's device {q.device}", f"{name}.to(q.device)"
        raise DeviceError(say(OP, name, must=must, got=bias.device, hint=hint))


def _check_mask(name: str, mask: MaskLike, q: Tensor) -> None:
    """Raise unless this is a mask, on q's device."""
    need_dense(OP, name, mask)
    if not isinstance(mask, Mask) and not (isinstance(mask, Tensor) and mask.dtype is torch.bool):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DtypeError(say(OP, name, must=MUST, got=got, hint=mask_hint(mask)))
    # A mask for "cuda" is for any CUDA device.
    if mask.device not in (q.device, torch.device(q.device.type)):
        raise DeviceError(
            say(OP, name, must=f"be on q's device {q.device}", got=mask.device, hint=f"{name}.to(q.device)")
        )


def lift(mask: MaskT, index: Index, sizes: Sizes) -> MaskT:
    """The mask with its four dims, of which only the keys always have their full size."""
    four = mask[index] if index else mask
    return four if four.shape[-1] == sizes.keys else four.expand(-1, -1, -1, sizes.keys)


def bits_of(mask: MaskLike | None, index: Index, sizes: Sizes) -> Tensor | None:
    """The mask as a bool tensor of four dims. A `Mask` caches its bits, so those are viewed and not the mask."""
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    return None if bits is None else lift(bits, index, sizes)


def kept_of(mask: MaskLike | None, is_causal: bool, sizes: Sizes) -> Tensor | None:
    """What a mask of four dims and ``is_causal`` keep, as such a bool tensor; None for everything."""
    bits = mask.to_bool() if isinstance(mask, Mask) else mask
    if not is_causal:
        return bits
    below = causal(sizes.queries, sizes.keys, torch.device("cpu") if bits is None else bits.device)[None, None]
    return below if bits is None else bits & below


def _hint(shape: tuple[int, ...], sizes: Sizes) -> str:
    if len(shape) == 3 and fits((shape[0], 1, *shape[1:]), sizes):
        return "mask[:, None] for (B, queries, keys)"
    if shape[-1:] != (1,) and shape[-1:] == (sizes.queries,) and sizes.queries != sizes.keys:
        return "the last dim of a mask is the keys; a mask of queries is mask[:, None, :, None]"
    return "sizes line up from the right, and each is the score's size or 1"
