"""``attn_implementation="maskwise"``: attention of Hugging Face models, padded and padding-free, with no mask of pairs.

transformers calls two functions by this name: one makes the mask of a forward pass, the other attends. The mask is a
`Pattern`: which keys are padding, causal or not, a window, which sequence each token belongs to. Masks of other kinds
are made by transformers as bools of pairs. In compiled graphs both functions end in one op, of which boundaries are
arguments: sequences of other lengths need no other graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from maskwise.errors import ArgumentError, say
from maskwise.mask import Mask
from maskwise.ops.attention import attend
from maskwise.ops.attention import attention as masked_attention
from maskwise.ops.attention.bias import ScoreMod
from maskwise.ops.operation import define, differentiate

__all__ = ["NAME", "Pattern", "attention_forward", "attention_mask", "register", "register_when_imported"]

NAME = "maskwise"
#: A window that ends nowhere.
OPEN = -1


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which keys each query attends to, without a tensor of pairs.

    Attributes:
        keep: which keys are no padding, bool (B, Lk); None for all.
        segments: which sequence each token belongs to, (B, L), where several lie in one row; None for one.
        is_causal: whether a query attends to no later key; None where the module says.
        left: how many keys before its own position a query attends to at most; -1 for all.
        right: the same of later keys.
        offset: the position of the first query less that of the first key, as after a cache.
    """

    keep: Tensor | None = None
    segments: Tensor | None = None
    is_causal: bool | None = None
    left: int = OPEN
    right: int = OPEN
    offset: int = 0
    #: What transformers reads of a mask that it hands on.
    ndim: ClassVar[int] = 4

    def contiguous(self) -> Pattern:
        """Itself: generation makes the mask of a step before the step, and expects a tensor."""
        return self


# -- the mask ----------------------------------------------------------------------------------------------------------
def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """The `Pattern` of a forward pass; bools of pairs where the mask is of another kind."""
    from transformers.masking_utils import prepare_padding_mask, sdpa_mask

    if isinstance(attention_mask, Pattern):
        return attention_mask
    keep = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if keep is not None:
        keep = keep[:, kv_offset : kv_offset + kv_length].bool()
    # With a cache of fixed size positions are data, and generation hands the mask of each step on as a tensor.
    is_other = options.get("use_vmap") or isinstance(q_offset, Tensor)
    found = None if is_other else _pattern(mask_function, options.get("config"))
    if found is None:
        options = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )
    return replace(found, keep=keep, offset=q_offset - kv_offset)


def _pattern(function: Any, config: Any) -> Pattern | None:
    """What a mask function of transformers means, or None where it is of another kind."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function:
        return Pattern(is_causal=True)
    if function is bidirectional_mask_function:
        return Pattern(is_causal=False)
    if torch.compiler.is_compiling():
        # A graph cannot look into a closure. What is joined is a window and sequences, which the layer names too.
        is_joined = function.__qualname__.startswith("and_masks.")
        return Pattern() if is_joined and getattr(config, "attention_chunk_size", None) is None else None
    return _joined(function)


def _joined(function: Any) -> Pattern | None:
    """The pattern of functions that transformers has joined: all of them must hold."""
    home, _, _ = function.__qualname__.partition(".")
    if function.__module__ != "transformers.masking_utils" or function.__closure__ is None:
        return None
    (value, *_) = (cell.cell_contents for cell in function.__closure__)
    if home == "and_masks":
        parts = [_pattern(each, None) for each in value]
        return None if any(part is None for part in parts) else _all(parts)  # type: ignore[arg-type]
    if home == "sliding_window_overlay":
        return Pattern(is_causal=False, left=int(value) - 1)
    if home == "sliding_window_bidirectional_overlay":
        return Pattern(is_causal=False, left=int(value), right=int(value))
    if home == "packed_sequence_mask_function":
        return Pattern(is_causal=False, segments=value)
    return None


def _all(parts: Sequence[Pattern]) -> Pattern | None:
    """What all patterns keep."""
    segments = [part.segments for part in parts if part.segments is not None]
    if len(segments) > 1:
        return None
    bounds = ([each for each in side if each != OPEN] for side in zip(*((p.left, p.right) for p in parts), strict=True))
    left, right = (min(side, default=OPEN) for side in bounds)
    is_causal = any(part.is_causal for part in parts)
    return Pattern(segments=segments[0] if segments else None, is_causal=is_causal, left=left, right=right)


# -- attention ---------------------------------------------------------------------------------------------------------
def attention_forward(
    module: nn.Module,
    query: Tensor,  # (B, H, Lq, D)
    key: Tensor,  # (B, Hkv, Lk, D)
    value: Tensor,  # (B, Hkv, Lk, Dv)
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: (B, Lq, H, Dv), and no weights."""
    bias, kept = kwargs.get("position_bias"), None
    pattern = attention_mask if isinstance(attention_mask, Pattern) else Pattern(offset=key.shape[2] - query.shape[2])
    if isinstance(attention_mask, Tensor):
        # Made by transformers, or by a caller: bools, or floats that are added.
        if attention_mask.dim() == 2:
            pattern = replace(pattern, keep=attention_mask[:, -key.shape[2] :] != 0)
        elif attention_mask.dtype is torch.bool:
            kept = attention_mask
        else:
            kept = attention_mask > torch.finfo(attention_mask.dtype).min
            added = torch.where(kept, attention_mask, 0.0)
            bias = added if bias is None else bias + added
        if kept is not None:
            kept = kept[..., : key.shape[2]]
    if pattern.is_causal is None:
        by_module = getattr(module, "is_causal", True) if is_causal is None else is_causal
        pattern = replace(pattern, is_causal=kept is None and by_module and query.shape[2] > 1)
        window = kwargs.get("sliding_window")
        if kept is None and window is not None and pattern.left == OPEN:
            pattern = _windowed(pattern, window)
    ends = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if pattern.segments is None and kept is None and ends[0] is None:
        pattern = replace(pattern, segments=_segments(query, key, pattern, kwargs))
    mod = kwargs.get("softcap"), kwargs.get("s_aux")
    given = _Given(pattern, ends, kept, bias, *mod, scaling, dropout)
    compute = _in_graph if torch.compiler.is_compiling() else _compute
    return compute(query, key, value, given).transpose(1, 2), None


def _windowed(pattern: Pattern, window: Any) -> Pattern:
    """The window that a layer names, as FlashAttention reads it: a number, or one for each side."""
    if isinstance(window, (tuple, list)):
        return replace(pattern, left=int(window[0]), right=int(window[1]))
    return replace(
        pattern, left=window - 1 if pattern.is_causal else window, right=OPEN if pattern.is_causal else window
    )


def _segments(query: Tensor, key: Tensor, pattern: Pattern, kwargs: dict[str, Any]) -> Tensor | None:
    """Which sequence each token belongs to, from what collators of packed sequences give; None for one in a row."""
    tokens = query.shape[2]
    index = kwargs.get("seq_idx")
    if isinstance(index, Tensor) and index.shape[-1] == tokens == key.shape[2]:
        return index.reshape(-1, tokens)
    position_ids = kwargs.get("position_ids")
    is_alone = pattern.keep is None and pattern.offset == 0
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or not is_alone:
        return None
    if position_ids.shape[1] != tokens or key.shape[2] != tokens:
        return None
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    if not torch.compiler.is_compiling() and not bool(steps.any()):
        return None
    return steps.cumsum(-1)


@dataclass(frozen=True, eq=False)
class _Given:
    """What a call is made of beside its tensors."""

    pattern: Pattern
    ends: tuple[Tensor | None, Tensor | None]
    kept: Tensor | None
    bias: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    scale: float | None
    dropout_p: float

    @property
    def mod(self) -> ScoreMod | None:
        """What changes scores, or None."""
        if self.softcap is None and self.sinks is None:
            return None
        return ScoreMod(None, self.softcap, self.sinks)


def _compute(q: Tensor, k: Tensor, v: Tensor, given: _Given) -> Tensor:
    """Attention, eagerly: (B, H, Lq, Dv)."""
    pattern = given.pattern
    if given.ends[0] is not None or pattern.segments is not None:
        return _by_sequences(q, k, v, given)
    options: dict[str, Any] = {
        "softcap": given.softcap,
        "sinks": given.sinks,
        "bias": given.bias,
        "scale": given.scale,
        "dropout_p": given.dropout_p,
    }
    if given.kept is not None:
        four = given.kept[(None,) * (4 - given.kept.dim())]
        return masked_attention(q, k, v, four, **options)
    offset = pattern.offset
    queries, keys = q.shape[2], k.shape[2]
    is_causal = bool(pattern.is_causal)
    mask: Mask | None = None
    if pattern.keep is not None and not bool(pattern.keep.all()):
        mask = Mask.from_attention_mask(pattern.keep.long())[:, None, None, :]
    if is_causal and offset and (queries > 1 or offset + 1 < keys):
        mask = _and(mask, Mask.causal(queries, keys, offset=offset, device=q.device))
    if is_causal and offset:
        # With as many keys as positions, a single query attends to all of them.
        is_causal = False
    if (window := _window(pattern, queries, keys, offset, q.device)) is not None:
        mask = _and(mask, window)
    return masked_attention(q, k, v, mask, is_causal=is_causal, **options)


def _and(mask: Mask | None, other: Mask) -> Mask:
    other = other[None, None]
    return other if mask is None else mask & other


def _window(pattern: Pattern, queries: int, keys: int, offset: int, device: torch.device) -> Mask | None:
    """The window of a pattern, (queries, keys), or None where it drops nothing."""
    far = queries + keys + abs(offset)
    left, right = (far if each == OPEN else each for each in (pattern.left, pattern.right))
    if left >= queries + offset - 1 and (right >= keys - offset - 1 or pattern.is_causal):
        return None
    # Positions of queries begin at the offset, where those of the constructor begin at 0.
    left, right = left - offset, right + offset
    if left < 0:
        earlier = Mask.causal(queries, keys, offset=-left - 1, device=device)
        return Mask.causal(queries, keys, offset=right, device=device) & ~earlier
    return Mask.window(queries, left, right, k=keys, device=device)


def _by_sequences(q: Tensor, k: Tensor, v: Tensor, given: _Given) -> Tensor:
    """Attention of sequences that lie one after the other, in one row or in several."""
    pattern, batch = given.pattern, q.shape[0]
    lengths, key_lengths = _lengths(given, q, k)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    if given.bias is not None:
        must, hint = "be None for sequences that are packed", "an attention_mask, and padding"
        raise ArgumentError(say("attention", "position_bias", must=must, got="a tensor", hint=hint))
    longest = max(lengths, default=0)
    options: dict[str, Any] = {"is_causal": bool(pattern.is_causal), "dropout_p": given.dropout_p, "scale": given.scale}
    if _window(pattern, longest, longest, 0, q.device) is None:
        one, keys, values = rows
        out = attend(one, keys, values, lengths, key_lengths=key_lengths, mod=given.mod, **options)
    else:
        parts = zip(
            *(x.split_with_sizes(n) for x, n in zip(rows, (lengths, key_lengths, key_lengths), strict=True)),
            strict=True,
        )
        outs = []
        for each in parts:
            one, keys, values = (x.transpose(0, 1)[None] for x in each)
            seen = _window(pattern, one.shape[2], keys.shape[2], 0, q.device)
            mask = None if seen is None else seen[None, None]
            part = masked_attention(one, keys, values, mask, softcap=given.softcap, sinks=given.sinks, **options)
            outs.append(part[0].transpose(0, 1))
        out = torch.cat(outs)
    return out.reshape(batch, -1, *out.shape[1:]).transpose(1, 2)


def _lengths(given: _Given, q: Tensor, k: Tensor) -> tuple[list[int], list[int]]:
    """How many queries and keys each sequence has."""
    segments = given.pattern.segments
    if given.ends[0] is not None:
        ends, key_ends = given.ends[0], given.ends[0] if given.ends[1] is None else given.ends[1]
        found: tuple[list[int], list[int]] = ends.diff().tolist(), key_ends.diff().tolist()
        for lengths, x, name in ((found[0], q, "cu_seq_lens_q"), (found[1], k, "cu_seq_lens_k")):
            if sum(lengths) != x.shape[0] * x.shape[2]:
                must, hint = f"end at the {x.shape[0] * x.shape[2]} tokens of the batch", "[0, *lengths.cumsum()]"
                raise ArgumentError(say("attention", name, must=must, got=sum(lengths), hint=hint))
        return found
    assert segments is not None
    starts = torch.ones_like(segments.expand(q.shape[0], -1), dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    places = starts.reshape(-1).nonzero()[:, 0]
    lengths = torch.diff(places, append=places.new_full((1,), starts.numel())).tolist()
    return lengths, lengths


# -- in compiled graphs ------------------------------------------------------------------------------------------------
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? bias, Tensor? keep, Tensor? kept, Tensor? segments, "
    "Tensor? ends, Tensor? key_ends, Tensor? seed, SymInt offset, bool is_causal, SymInt left, SymInt right, "
    "float softcap, float scale, float dropout_p"
)
_TENSORS, _LEAVES = 11, 5


def _given(
    sinks: Any, bias: Any, keep: Any, kept: Any, segments: Any, ends: Any, key_ends: Any, seed: Any, *scalars: Any
) -> _Given:
    offset, is_causal, left, right, softcap, scale, dropout_p = scalars
    pattern = Pattern(keep, segments, is_causal, left, right, offset)
    return _Given(pattern, (ends, key_ends), kept, bias, softcap or None, sinks, scale, dropout_p)


def _run(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    """The op: what is computed eagerly. Its dropout comes from a seed, so that the backward pass draws the same."""
    given, seed = _given(*others), others[7]
    if seed is None:
        return _compute(q, k, v, given).contiguous()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(seed))
        return _compute(q, k, v, given).contiguous()


def _run_backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, sinks and bias, of a forward pass that is computed again."""
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs[:_LEAVES]]
        out = _run(*leaves, *inputs[_LEAVES:])  # type: ignore[arg-type]
        wanted = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
    empty = grad.new_empty(0)
    parts = [None if x is None else next(found) for x in leaves]
    return tuple(  # type: ignore[return-value]
        empty.clone() if x is None else torch.zeros_like(x) if g is None else g.contiguous()
        for x, g in zip(leaves, parts, strict=True)
    )


def _fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


def _fake_backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(
        grad.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in inputs[:_LEAVES]
    )


define("model_attention", f"({_SCHEMA}) -> Tensor", reference=_run, fake=_fake)
define(
    "model_attention_backward",
    f"(Tensor grad, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_run_backward,
    fake=_fake_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.scalars = inputs[_TENSORS:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    found = torch.ops.maskwise.model_attention_backward(grad, *saved, *ctx.scalars)
    leaves = [None if x is None else g for x, g in zip(saved[:_LEAVES], found, strict=True)]
    return (*leaves, *(None,) * (len(saved) - _LEAVES + len(ctx.scalars)))


differentiate("model_attention", _backward, _setup)


def _in_graph(q: Tensor, k: Tensor, v: Tensor, given: _Given) -> Tensor:
    pattern = given.pattern
    seed = torch.randint(1 << 62, (), device=q.device) if given.dropout_p > 0.0 else None
    out: Tensor = torch.ops.maskwise.model_attention(
        q,
        k,
        v,
        given.sinks,
        given.bias,
        pattern.keep,
        given.kept,
        pattern.segments,
        *given.ends,
        seed,
        pattern.offset,
        bool(pattern.is_causal),
        pattern.left,
        pattern.right,
        given.softcap or 0.0,
        q.shape[-1] ** -0.5 if given.scale is None else given.scale,
        given.dropout_p,
    )
    return out


# -- registering -------------------------------------------------------------------------------------------------------
HOME = "transformers.modeling_utils"
"""The module that has both interfaces, by its own imports."""


def register() -> None:
    """Make ``attn_implementation="maskwise"`` known to transformers, which this imports."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


class _Finder(MetaPathFinder):
    """Waits for transformers to be imported: nothing here imports it."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != HOME:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """Loads a module, and registers the attention afterwards."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self.loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader
        module.AttentionInterface.register(NAME, attention_forward)
        import_module("transformers.masking_utils").AttentionMaskInterface.register(NAME, attention_mask)


def register_when_imported() -> None:
    """Register now where transformers is imported, else as soon as it is."""
    if HOME in sys.modules:
        register()
    elif not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
