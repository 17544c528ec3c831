"""mw.attention: scaled dot product attention that does no work for what is dropped."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike
from maskwise.ops.attention import reference
from maskwise.ops.attention.arguments import Index, check_options, check_tensors, line_up, lowers
from maskwise.ops.attention.blocks import attend_blocks, is_finite
from maskwise.ops.attention.packed import attend_packed
from maskwise.ops.attention.pieces import bits_of
from maskwise.ops.attention.routes import bits_from, choose
from maskwise.ops.select.packed import Packed
from maskwise.plan.explain import listeners, record

__all__ = ["attention"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None = None,
    *,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor: ...
@overload
def attention(
    q: Packed,
    k: Packed,
    v: Packed,
    mask: MaskLike | None = None,
    *,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Packed: ...
def attention(
    q: Tensor | Packed,  # (B, H, Lq, D)
    k: Tensor | Packed,  # (B, Hkv, Lk, D)
    v: Tensor | Packed,  # (B, Hkv, Lk, Dv)
    mask: MaskLike | None = None,
    *,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor | Packed:
    """Scaled dot product attention over the keys that are kept, and no work for the others.

    >>> import torch, maskwise as mw
    >>> q, k = torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 3, 1)
    >>> v = torch.tensor([[1.0, torch.nan, torch.nan], [1.0, 3.0, torch.nan]])[:, None, :, None]
    >>> mw.attention(q, k, v, mw.Mask.from_lengths([1, 2], max_len=3)).flatten()
    tensor([1., 2.])

    Args:
        q: the queries, (B, H, Lq, D); or a Packed of rows (H, D), that is `mw.pack` of (B, Lq, H, D).
        k: the keys, (B, Hkv, Lk, D), H being a multiple of Hkv; Packed where q is.
        v: the values, (B, Hkv, Lk, Dv); packed by k's mask where k is Packed.
        mask: a Mask or a bool tensor, True meaning keep: (B, Lk) for the keys of each batch entry, or anything that
            broadcasts to (B, H, Lq, Lk). What is known of its structure (lengths, causal, window, segments) is used.
        is_causal: whether a query sees only the keys up to its own position, counted from the top left; together with
            a mask, both must keep a key.
        dropout_p: the probability with which a weight is dropped, also outside of training: pass 0.0 there.
        scale: what the scores are multiplied by; by default 1 / sqrt(D).

    Returns:
        (B, H, Lq, Dv), or a Packed of q's mask with rows (H, Dv). A query that keeps no key gives 0, and has no
        gradient. It can be differentiated once.

    Raises:
        ShapeError: shapes do not fit each other.
        ArgumentError: the mask is (n, Lk) where n is both B and Lq, so that it could mean either.
        DtypeError, DeviceError: dtypes or devices differ, or the mask is not bool.

    A key that no query keeps is not read, or has no influence: it may be NaN. What is not finite in a key that some
    queries keep reaches only those, on the CPU outside of compiled graphs.
    """
    check_options(dropout_p)
    if isinstance(q, Packed) or isinstance(k, Packed) or isinstance(v, Packed):
        return attend_packed(q, k, v, mask, attention, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
    sizes = check_tensors(q, k, v)
    index: Index = () if mask is None else line_up(mask, q, sizes)
    if lowers(q.device.type) and q.dtype is not torch.float64:
        # The kernels are called below the level at which autocast would see them.
        lower = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(lower), k.to(lower), v.to(lower)
    if torch.compiler.is_compiling():
        return reference.attention_by_sdpa(q, k, v, bits_from(mask, index, sizes), is_causal, dropout_p, scale)
    plan, pieces = choose(q, k, v, mask, index, is_causal, dropout_p, sizes)
    if listeners:
        # What attention is made of is pairs of a query and a key, so those are what the log counts.
        pairs = q.new_empty(()).expand(sizes)
        record(plan, pairs, mask[index] if isinstance(mask, Mask) else mask)
    if plan.route in ("blocks", "whole"):
        out = attend_blocks(q, k, v, pieces, scale)
        if not any(piece.is_partial for piece in pieces) or is_finite(out):
            return out
        # Something that a query drops may have reached it as 0 * NaN. Without what is masked out the same pieces give
        # bit for bit what they give with zeros there; what is left then is not finite for queries that keep it.
        kept = bits_of(bits_from(mask, index, sizes), is_causal, sizes)
        assert kept is not None
        out = attend_blocks(*reference.clean(q, k, v, kept), pieces, scale)
        if is_finite(out):
            return out
    elif plan.route == "sdpa":
        kept = bits_from(mask, index, sizes)
        out = reference.attention_by_sdpa(q, k, v, kept, is_causal, dropout_p, scale)
        if q.device.type != "cpu" or (mask is None and not is_causal) or is_finite(out):
            return out
    kept = bits_from(mask, index, sizes)
    return reference.attention(q, k, v, kept, is_causal, dropout_p, scale)
