"""mw.attention: scaled dot product attention that does no work for what is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, overload

import torch
from torch import Tensor

from maskwise.errors import ArgumentError, say
from maskwise.mask import Mask
from maskwise.ops.arguments import MaskLike, need_dense
from maskwise.ops.attention import reference
from maskwise.ops.attention.arguments import check_options, lowered, recipe_for, without_queries
from maskwise.ops.attention.blocks import Piece, attend_blocks, is_finite, learns
from maskwise.ops.attention.large import attend_read, fitting_rows, scores_fit
from maskwise.ops.attention.packed import attend_packed
from maskwise.ops.attention.pieces import bits_of
from maskwise.ops.attention.recipes import remembered
from maskwise.ops.attention.registered import attend_fused
from maskwise.ops.attention.routes import Call, bits_from, choose, report
from maskwise.ops.attention.whole import attend_whole, end_gradients
from maskwise.ops.select.packed import Packed
from maskwise.plan.dispatch import is_observed

__all__ = ["attention"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None = None,
    *,
    query_mask: MaskLike | None = None,
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
    query_mask: MaskLike | None = None,
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
    query_mask: MaskLike | None = None,
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
        query_mask: a Mask or a bool tensor of the queries, (B, Lq) or (B, H, Lq), sizes of 1 included: a query that is
            dropped gives 0, has no gradient, and is not read. For tensors only: a Packed q has no other queries than
            those that are kept.
        is_causal: whether a query sees only the keys up to its own position, counted from the top left; together with
            a mask, both must keep a key.
        dropout_p: the probability with which a weight is dropped, also outside of training: pass 0.0 there.
        scale: what the scores are multiplied by; by default 1 / sqrt(D).

    Returns:
        (B, H, Lq, Dv), or a Packed of q's mask with rows (H, Dv). A query that keeps no key gives 0, and has no
        gradient. It can be differentiated once.

    Raises:
        ShapeError: shapes do not fit each other.
        ArgumentError: the mask is (n, Lk) where n is both B and Lq, so that it could mean either; or there is a
            query_mask with Packed tokens.
        DtypeError, DeviceError: dtypes or devices differ, or a mask is not bool.

    A key that no query keeps is not read, or has no influence: it may be NaN. What is not finite in a key that some
    queries keep reaches only those, on the CPU outside of compiled graphs. A query takes no part in the backward pass
    where the gradient of its result is all zero: padding of q may be NaN, too, if the loss does not read it, and on the
    CPU outside of compiled graphs any finite value. With ``query_mask`` the loss may read it, and its gradient may be
    anything.
    """
    check_options(dropout_p)
    for name, value in (("q", q), ("k", k), ("v", v), ("mask", mask)):
        need_dense("attention", name, value)
    if isinstance(q, Packed) or isinstance(k, Packed) or isinstance(v, Packed):
        if query_mask is not None:
            must, hint = "be None for Packed tokens, which are the queries that are kept", "mw.pack(q, query_mask)"
            raise ArgumentError(say("attention", "query_mask", must=must, got=type(query_mask).__name__, hint=hint))
        return attend_packed(q, k, v, mask, attention, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
    if query_mask is not None:
        mask = without_queries(q, k, v, mask, query_mask)
    if torch.compiler.is_compiling() or reference.is_tracing():
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
    if is_observed() and (planned := report(plan, q, k, v, mask, Call(index, is_causal, sizes))):
        return planned  # type: ignore[return-value]
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

    # Every attempt drops the same weights.
    state = torch.get_rng_state() if dropout_p > 0.0 else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if state is not None:
            torch.set_rng_state(state)
        if plan.route == "blocks":
            return attend_blocks(q, k, v, pieces, scale)
        return attend_whole(q, k, v, kept, is_causal, dropout_p, scale)

    drops = any(piece.is_partial for piece in pieces) if plan.route == "blocks" else kept is not None or is_causal
    # Only the kernel without dropout recomputes its weights in the backward pass.
    recomputes = dropout_p == 0.0 and learns(q, k, v)
    out = None if plan.route == "bare" else attend(q, k, v)
    if out is None or not _is_sound(out, q, k, scale, drops=drops, recomputes=recomputes):
        bits = bits_from(mask, index, sizes)
        finite = _attend_finite(attend, q, k, v, bits_of(bits, is_causal, sizes), scale, recomputes=recomputes)
        if finite is None:
            return reference.attention(q, k, v, bits, is_causal, dropout_p, scale)
        out = finite
    return end_gradients(out, kept, is_causal, q, k)


def _is_sound(out: Tensor, q: Tensor, k: Tensor, scale: float | None, *, drops: bool, recomputes: bool) -> bool:
    """Whether nothing that is not finite was met: in the result, and in scores, which only the gradient shows.

    Where nothing that is computed is dropped, the result has NaN only of what its query keeps, or of the query itself.
    """
    if out.requires_grad and not scores_fit(q.detach(), k.detach(), scale, recomputes=recomputes):
        return False
    return not drops or is_finite(out.detach())


def _attend_finite(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor | None,
    scale: float | None,
    *,
    recomputes: bool,
) -> Tensor | None:
    """The same route with zeros for what is masked out, and for queries that are NaN; None where that is not enough.

    Something that a query drops may have reached it as 0 * NaN. With zeros there the route gives what it gives for
    padding of zeros, bit for bit. What is left then is not finite in keys or values that a query keeps. Queries whose
    weights the backward pass would not reproduce are zeros, too, beside their own result with its own gradient.
    """
    kept = torch.ones((1, 1, 1, 1), dtype=torch.bool) if kept is None else kept
    q, k, v = reference.clean(q, k, v, kept)
    finite = reference.finite_rows(q)
    if not scores_fit(torch.where(finite, q.detach(), 0.0), k.detach(), scale, recomputes=False):
        # A query that is finite may have scores that are not.
        finite = finite & reference.finite_scores(q.detach(), k.detach(), kept, scale)
    q = torch.where(finite, q, 0.0)
    fit = fitting_rows(q.detach(), k.detach(), kept, scale) if recomputes else finite
    all_fit = not recomputes or bool(fit.all())
    out = attend(q if all_fit else torch.where(fit, q, 0.0), k, v)
    if not is_finite(out.detach()) or (out.requires_grad and not is_finite(k.detach())):
        return None
    if not all_fit:
        out = torch.where(fit, out, attend_read(attend, torch.where(fit, 0.0, q), k, v, kept, scale))
    return out if bool(finite.all()) else reference.with_nan(out, ~finite)
