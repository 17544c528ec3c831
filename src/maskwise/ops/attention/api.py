"""mw.attention: scaled dot product attention that does no work for what is dropped."""

from __future__ import annotations

from typing import cast, overload

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, need_dense
from maskwise.ops.attention import reference
from maskwise.ops.attention.arguments import check_options, lowered, recipe_for
from maskwise.ops.attention.blocks import Piece, attend_blocks, is_finite
from maskwise.ops.attention.packed import attend_packed
from maskwise.ops.attention.pieces import bits_of
from maskwise.ops.attention.recipes import remembered
from maskwise.ops.attention.registered import attend_fused
from maskwise.ops.attention.routes import bits_from, choose, counted
from maskwise.ops.attention.whole import attend_whole, end_gradients
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
        mask: a Mask or a bool tensor; True means keep. (B, Lk) for the keys of each batch entry, or anything that
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
    for name, value in (("q", q), ("k", k), ("v", v), ("mask", mask)):
        need_dense("attention", name, value)
    if isinstance(q, Packed) or isinstance(k, Packed) or isinstance(v, Packed):
        return attend_packed(q, k, v, mask, attention, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
    if torch.compiler.is_compiling():
        sizes, index = recipe_for(q, k, v, mask)
        q, k, v = lowered(q, k, v)
        return reference.attention_by_sdpa(q, k, v, bits_from(mask, index, sizes), is_causal, dropout_p, scale)
    recipe = remembered(q, k, v, mask, is_causal, dropout_p)
    sizes, index, plan = recipe.sizes, recipe.lifting, recipe.plan
    pieces: list[Piece] = []
    if recipe.is_lowered:
        q, k, v = lowered(q, k, v)
    if plan is None:
        plan, pieces = choose(q, k, v, mask, index, is_causal, dropout_p, sizes, grad=recipe.grad)
    if listeners:
        # What attention is made of is pairs of a query and a key, so those are what the log counts.
        pairs = q.new_empty(()).expand(sizes)
        if plan.route == "bare":
            plan = counted(plan, bits_from(mask, index, sizes), is_causal, q.shape[-1], sizes)
        record(plan, pairs, mask[index] if isinstance(mask, Mask) else mask)
    if plan.route == "bare":
        bits = mask.to_bool() if isinstance(mask, Mask) else mask
        scale = recipe.scale if scale is None else scale
        out, is_sound = attend_fused(q, k, v, bits, recipe.is_of_keys, is_causal, scale)
        if is_sound:
            return cast("Tensor", out)
    elif plan.route == "sdpa":
        return reference.attention_by_sdpa(q, k, v, bits_from(mask, index, sizes), is_causal, dropout_p, scale)
    kept = bits_from(mask, index, sizes) if plan.route != "blocks" else None
    if plan.route == "plain":
        return reference.attention(q, k, v, kept, is_causal, dropout_p, scale)
    if plan.route == "blocks":
        out = attend_blocks(q, k, v, pieces, scale)
        if not any(piece.is_partial for piece in pieces):
            return out
    else:
        out = attend_whole(q, k, v, kept, is_causal, dropout_p, scale)
        if kept is None and not is_causal:
            return out
    if _is_sound(out, k):
        return end_gradients(out, kept, is_causal, q, k)
    # Something that a query drops may have reached it as 0 * NaN. Without what is masked out the same route gives bit
    # for bit what it gives with zeros there; what is left then is not finite for queries that keep it.
    bits = bits_from(mask, index, sizes)
    everything = bits_of(bits, is_causal, sizes)
    assert everything is not None
    cleaned = reference.clean(q, k, v, everything)
    if plan.route == "blocks":
        out = attend_blocks(*cleaned, pieces, scale)
    else:
        out = attend_whole(*cleaned, kept, is_causal, dropout_p, scale)
    if _is_sound(out, cleaned[1]):
        return end_gradients(out, kept, is_causal, q, k)
    return reference.attention(q, k, v, bits, is_causal, dropout_p, scale)


def _is_sound(out: Tensor, k: Tensor) -> bool:
    """Whether nothing that is not finite was met: NaN shows in the result, a score of -inf only in the gradient."""
    return is_finite(out.detach()) and (not out.requires_grad or is_finite(k.detach()))
