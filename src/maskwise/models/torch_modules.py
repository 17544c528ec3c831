"""The adapters of torch's own modules: ``nn.TransformerEncoder``, its layers and ``nn.MultiheadAttention``.

Each is served by a forward in front of its own, with its signature. It dispatches a call as packed or padded. What it
calls with packed tokens is called as torch calls it, in the same order, so that hooks fire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from maskwise.models.adapter import MixesTokens
from maskwise.models.linear import fast_linear
from maskwise.models.packing import PackedMask, Packing, on_kept_tokens
from maskwise.models.routes import Padded, dispatch, routes
from maskwise.nn.binding import bind, is_bound, unbind
from maskwise.ops.torch_private import has_output_hooks, is_tracing, is_transformed

__all__ = ["ADAPTERS"]

Parts: TypeAlias = Iterable[tuple[nn.Module, Callable[..., Any]]]


@dataclass(frozen=True)
class ForwardAdapter:
    """Serves one kind of module.

    Attributes:
        kind: the class in torch.nn.
        reason: why a module of that kind cannot run packed, or nothing.
        forward: the wrapper around the module's own forward; it gets the module before its arguments.
        parts: the modules that it calls with packed tokens, each with the wrapper around its own forward.
    """

    kind: type[nn.Module]
    reason: Callable[[Any], str]
    forward: Callable[..., Any]
    parts: Callable[[Any], Parts]

    @property
    def name(self) -> str:
        """As one writes it."""
        return f"nn.{self.kind.__name__}"

    def serves(self, module: nn.Module) -> tuple[bool, str]:
        """Any of the kind for which there is no reason why not."""
        if not isinstance(module, self.kind):
            return False, ""
        reason = self.reason(module)
        return not reason, reason

    def install(self, module: nn.Module) -> None:
        """Put the packed forward in front."""
        bind(module, "forward", self.forward)
        for part, forward in self.parts(module):
            bind(part, "forward", forward)

    def undo(self, module: nn.Module) -> None:
        """Uncover torch's own."""
        unbind(module, "forward")
        for part, _ in self.parts(module):
            unbind(part, "forward")


def _not_torchs_own(module: nn.Module, kind: type[nn.Module]) -> str:
    """Why a module of this kind does not do what torch's does, or nothing."""
    if type(module).forward is not kind.forward:
        return f"{type(module).__name__} has a forward of its own"
    return "something else has replaced its forward already" if "forward" in vars(module) else ""


# -- masks: True or -inf = drop ----------------------------------------------------------------------------------------
def packed_mask(
    x: Tensor,  # (B, L, D) or (L, B, D)
    batch_first: bool,
    key_padding: Tensor | None,  # (B, L), True or -inf = drop
    attn_mask: Tensor | None,  # (L, L) or (B * H, L, L), True or -inf = drop
    is_causal: bool | None,
) -> PackedMask | Padded:
    """The masks of a call for packed tokens; or why the call must run padded."""
    if key_padding is None:
        return Padded("no padding mask was given")
    if not isinstance(x, Tensor) or x.is_nested or not isinstance(key_padding, Tensor):
        return Padded("the input is not a padded batch")
    if is_tracing():
        reason = "a graph that is being compiled, traced or exported has no sizes that depend on data"
        return Padded(reason, "torch.compiler.disable keeps the module out of a graph, maskwise.models.repad pads it")
    if is_transformed():
        reason = "torch.func transforms and forward-mode AD allow no sizes that depend on data"
        return Padded(reason, "call it outside of the transform, or maskwise.models.repad it")
    if x.dim() != 3:
        return Padded("the input is one sequence and no batch", "give it a batch of one, x[None]")
    sizes = tuple(x.shape[:2]) if batch_first else (x.shape[1], x.shape[0])
    if key_padding.shape != sizes:
        return Padded(f"the padding mask is {tuple(key_padding.shape)}, not {sizes}")
    if key_padding.dtype is torch.bool:
        keep = ~key_padding
    else:
        keep = key_padding == 0
        if not bool((keep | (key_padding == -torch.inf)).all()):
            return Padded("the padding mask adds numbers other than 0 and -inf", "a bool padding mask, True = ignore")
    if bool(keep.all()):
        return Padded("nothing is dropped")
    if not bool(keep.any()):
        return Padded("nothing is kept")
    packing = Packing.of(keep)
    if attn_mask is None:
        return PackedMask(packing, is_causal=bool(is_causal))
    if attn_mask.dim() == 2 and _is_causal(attn_mask):
        return PackedMask(packing, is_causal=True)
    batch, length = sizes
    heads = attn_mask.shape[:-2]
    if attn_mask.shape[-2:] != (length, length) or len(heads) > 1 or any(size % batch for size in heads):
        # Torch's own forward raises what is wrong with it.
        return Padded(f"the attention mask is {tuple(attn_mask.shape)}")
    return PackedMask(packing, seen=_seen(packing, attn_mask))


def _is_causal(mask: Tensor) -> bool:
    drop = mask if mask.dtype is torch.bool else mask == -torch.inf
    future = torch.ones_like(drop).triu(1)
    return bool((drop == future).all()) and (mask.dtype is torch.bool or bool((mask[~future] == 0).all()))


def _seen(packing: Packing, mask: Tensor) -> list[Tensor | None]:
    """The part of the mask that each row needs, (H, n, n) or (n, n), in the convention of torch's attention."""
    batch, length = packing.keep.shape
    seen = ~mask if mask.dtype is torch.bool else mask
    # One mask for all rows, or H for each.
    rows = seen.expand(batch, length, length) if seen.dim() == 2 else seen.view(batch, -1, length, length)
    columns = [packing.columns[row.start : row.stop] for row in packing.rows]
    return [rows[index][..., each, :][..., each] for index, each in enumerate(columns)]


def _run(self: nn.Module, kind: Any, mask: PackedMask | Padded, x: Tensor, padding: Tensor | None, *args: Any) -> Any:
    """Dispatch one call; ``args`` are those of the module's forward."""
    padded = mask if isinstance(mask, Padded) else None
    return dispatch(self, kind, x, padding, padded)(self, mask, *args)


def _torchs_own(kind: type[nn.Module]) -> Callable[..., Any]:
    return lambda self, mask, *args: kind.forward(self, *args)


# -- nn.MultiheadAttention ---------------------------------------------------------------------------------------------
def _attention_reason(module: nn.MultiheadAttention) -> str:
    """Why an attention module cannot run packed, or nothing."""
    if reason := _not_torchs_own(module, nn.MultiheadAttention):
        return reason
    if not module._qkv_same_embed_dim:
        return "its keys or values have a size of their own"
    if module.bias_k is not None or module.add_zero_attn:
        return "it appends a key to each sequence (add_bias_kv or add_zero_attn)"
    return ""


def _self_attention(
    module: nn.MultiheadAttention,
    query: Tensor,  # (N, D)
    key: Tensor,  # (N, D), the same values
    value: Tensor,  # (N, D), the same values
    mask: PackedMask,
) -> Tensor:
    """The attention block on packed tokens, projections included: (N, D)."""
    weight, bias = module.in_proj_weight, module.in_proj_bias
    if query is key and key is value:
        projected = functional.linear(query, weight, bias).chunk(3, -1)
    else:
        # A backward hook needs the gradient of each.
        biases = (None, None, None) if bias is None else bias.chunk(3)
        each = zip((query, key, value), weight.chunk(3), biases, strict=True)
        projected = tuple(functional.linear(x, rows, shift) for x, rows, shift in each)
    q, k, v = (x.view(-1, module.num_heads, module.head_dim) for x in projected)
    out = mask.attend(q, k, v, dropout_p=module.dropout if module.training else 0.0)
    # As torch does, whose attention reads these parameters and does not call the module.
    return functional.linear(out.flatten(1), module.out_proj.weight, module.out_proj.bias)


def attention_in_layer(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | PackedMask | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward inside of a layer: on packed tokens where the layer has packed them, else torch's."""
    if isinstance(attn_mask, PackedMask):
        return _self_attention(self, query, key, value, attn_mask), None
    return nn.MultiheadAttention.forward(
        self,
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
    )


def attention_forward(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What torch's forward does, on kept tokens where it can."""
    if not _is_one(query, key, value):
        mask: PackedMask | Padded = Padded("query, key and value are not one tensor: this is not self-attention")
    else:
        mask = packed_mask(query, self.batch_first, key_padding_mask, attn_mask, is_causal)
        if need_weights and isinstance(mask, PackedMask):
            mask = Padded("the attention weights are requested", "need_weights=False")
    out: tuple[Tensor, Tensor | None] = _run(
        self, ATTENTION, mask, query, key_padding_mask,
        query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal,
    )  # fmt: skip
    return out


def _packed_attention(
    self: nn.MultiheadAttention, mask: PackedMask, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, None]:
    packing = mask.packing
    given = {id(x): x if self.batch_first else x.transpose(0, 1) for x in (query, key, value)}
    packed = {place: packing.pack(x) for place, x in given.items()}
    out = packing.unpack(_self_attention(self, packed[id(query)], packed[id(key)], packed[id(value)], mask))
    return (out if self.batch_first else out.transpose(0, 1)), None


def _is_one(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all three are one tensor, also after a backward hook, which makes three views of one."""
    if query is key and key is value:
        return True
    given = (query, key, value)
    if is_tracing() or is_transformed() or any(type(x) is not Tensor or x.is_nested for x in given):
        return False
    places = {(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in given}
    return len(places) == 1


# -- nn.TransformerEncoderLayer ----------------------------------------------------------------------------------------
TOKENWISE = (nn.LayerNorm, nn.RMSNorm, nn.Identity)
PLAIN = (nn.Linear, nn.Dropout)


def _layer_reason(module: nn.TransformerEncoderLayer) -> str:
    """Why a layer cannot run packed, or nothing."""
    if reason := _not_torchs_own(module, nn.TransformerEncoderLayer):
        return reason
    if type(module)._sa_block is not nn.TransformerEncoderLayer._sa_block:
        return f"{type(module).__name__} has an attention block of its own"
    for norm in (module.norm1, module.norm2):
        if reason := _norm_reason(norm):
            return reason
    if reason := _attention_reason(module.self_attn):
        return reason
    plain = all(
        type(getattr(module, name)) in PLAIN for name in ("linear1", "linear2", "dropout", "dropout1", "dropout2")
    )
    if plain and module.activation in (functional.relu, functional.gelu):
        return ""
    return _mixing_reason(module, "its feed-forward block", module._ff_block) or _mixing_reason(
        module, "dropout1", module.dropout1
    )


def _norm_reason(norm: nn.Module) -> str:
    """Why a norm cannot run packed, or nothing."""
    kind = next((each for each in TOKENWISE if type(norm).forward is each.forward), None)
    if kind is None:
        names = ", ".join(each.__name__ for each in TOKENWISE)
        return MixesTokens(f"{type(norm).__name__} may mix tokens; {names} do not")
    if kind is not nn.Identity and len(norm.normalized_shape) > 1:  # type: ignore[arg-type]
        shape = list(norm.normalized_shape)  # type: ignore[arg-type]
        return MixesTokens(f"{type(norm).__name__}({shape}) normalizes more than a token")
    return ""


def _mixing_reason(module: nn.TransformerEncoderLayer, name: str, part: Callable[[Tensor], Tensor]) -> str:
    """Why a part that is not torch's own cannot run packed, from what it makes of tokens beside others; or nothing."""
    weight = module.self_attn.out_proj.weight
    if weight.is_meta:
        return f"{name} is not torch's own, and there are no weights to try it with"
    x = torch.linspace(-2, 2, 3 * 7 * weight.shape[0], dtype=weight.dtype, device=weight.device).cos().view(3, 7, -1)
    other = x.clone()
    other[:, 1:] += 1
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            alone, among, beside = part(x.flatten(0, 1)), part(x).flatten(0, 1), part(other)
    except RuntimeError as error:
        return f"{name} raised {error}"
    finally:
        for each, training in modes.items():
            each.training = training
    close = torch.allclose(alone, among, 1e-4, 1e-5) and torch.allclose(
        among.view_as(beside)[:, 0], beside[:, 0], 1e-4, 1e-5
    )
    return "" if close else MixesTokens(f"{name} reads more than one token")


def _run_layer(
    layer: nn.TransformerEncoderLayer,
    x: Tensor,  # (N, D)
    mask: PackedMask,
) -> Tensor:
    """One layer on packed tokens."""
    if layer.norm_first:
        x = x + _attention_block(layer, layer.norm1(x), mask)
        return x + _feed_forward(layer, layer.norm2(x))
    x = layer.norm1(x + _attention_block(layer, x, mask))
    out: Tensor = layer.norm2(x + _feed_forward(layer, x))
    return out


def _attention_block(layer: nn.TransformerEncoderLayer, x: Tensor, mask: PackedMask) -> Tensor:
    mixed = layer.self_attn(
        x, x, x, attn_mask=mask, key_padding_mask=None, need_weights=False, is_causal=mask.is_causal
    )[0]
    out: Tensor = layer.dropout1(mixed)
    return out


def _feed_forward(layer: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    if type(layer)._ff_block is not nn.TransformerEncoderLayer._ff_block:
        # A subclass has its own, as a layer that mw.compress has left units out of.
        return layer._ff_block(x)
    hidden = layer.linear1(x)
    if layer.activation is functional.relu and not torch.is_grad_enabled() and not has_output_hooks(layer.linear1):
        # In place: the largest tensor of the layer, to which nothing else refers.
        hidden = layer.dropout(hidden.relu_())
    else:
        hidden = layer.dropout(layer.activation(hidden))
    out: Tensor = layer.dropout2(layer.linear2(hidden))
    return out


def layer_in_encoder(
    self: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | PackedMask | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The forward inside of an encoder: on packed tokens where the encoder has packed them, else torch's."""
    if isinstance(src_mask, PackedMask):
        return _run_layer(self, src, src_mask)
    return nn.TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal)


def layer_forward(
    self: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """What torch's forward does, on kept tokens where it can."""
    mask = packed_mask(src, self.self_attn.batch_first, src_key_padding_mask, src_mask, is_causal)
    out: Tensor = _run(self, LAYER, mask, src, src_key_padding_mask, src, src_mask, src_key_padding_mask, is_causal)
    return out


def _packed_layer(self: nn.TransformerEncoderLayer, mask: PackedMask, src: Tensor, *rest: Any) -> Tensor:
    batch_first, packing = self.self_attn.batch_first, mask.packing
    with on_kept_tokens(packing), fast_linear(tokens=packing.tokens):
        out = packing.unpack(_run_layer(self, packing.pack(src if batch_first else src.transpose(0, 1)), mask))
    return out if batch_first else out.transpose(0, 1)


def _layer_parts(layer: nn.TransformerEncoderLayer) -> Parts:
    """What a layer calls with packed tokens and a packed mask."""
    yield layer.self_attn, attention_in_layer


# -- nn.TransformerEncoder: packed once, run through every layer, unpacked once ----------------------------------------
def _encoder_reason(module: nn.TransformerEncoder) -> str:
    """Why an encoder cannot run packed, or nothing."""
    if reason := _not_torchs_own(module, nn.TransformerEncoder):
        return reason
    if module.norm is not None and (reason := _norm_reason(module.norm)):
        return type(reason)(f"norm: {reason}")
    for index, layer in enumerate(module.layers):
        if not isinstance(layer, nn.TransformerEncoderLayer):
            return f"layers.{index} is a {type(layer).__name__}, not a nn.TransformerEncoderLayer"
        if reason := _layer_reason(layer):
            return type(reason)(f"layers.{index}: {reason}")
    return "" if len(module.layers) else "it has no layers"


def encoder_forward(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """What torch's forward does, on kept tokens where it can."""
    packed = packed_mask(src, self.layers[0].self_attn.batch_first, src_key_padding_mask, mask, is_causal)
    if isinstance(packed, PackedMask) and not all(is_bound(part, "forward", own) for part, own in _encoder_parts(self)):
        packed = Padded("its layers have changed since mw.unpad", "mw.unpad(maskwise.models.repad(model))")
    out: Tensor = _run(self, ENCODER, packed, src, src_key_padding_mask, src, mask, src_key_padding_mask, is_causal)
    return out


def _packed_encoder(self: nn.TransformerEncoder, mask: PackedMask, src: Tensor, *rest: Any) -> Tensor:
    batch_first = self.layers[0].self_attn.batch_first
    x = mask.packing.pack(src if batch_first else src.transpose(0, 1))
    with on_kept_tokens(mask.packing), fast_linear(tokens=len(x)):
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=mask.is_causal, src_key_padding_mask=None)
    if self.norm is not None:
        x = self.norm(x)
    out = mask.packing.unpack(x)
    return out if batch_first else out.transpose(0, 1)


def _encoder_parts(encoder: nn.TransformerEncoder) -> Parts:
    """What an encoder calls with packed tokens and a packed mask."""
    for layer in encoder.layers:
        yield layer, layer_in_encoder
        yield from _layer_parts(layer)


ATTENTION = routes(_packed_attention, _torchs_own(nn.MultiheadAttention))
LAYER = routes(_packed_layer, _torchs_own(nn.TransformerEncoderLayer))
ENCODER = routes(_packed_encoder, _torchs_own(nn.TransformerEncoder))
ADAPTERS = (
    ForwardAdapter(nn.MultiheadAttention, _attention_reason, attention_forward, lambda module: ()),
    ForwardAdapter(nn.TransformerEncoderLayer, _layer_reason, layer_forward, _layer_parts),
    ForwardAdapter(nn.TransformerEncoder, _encoder_reason, encoder_forward, _encoder_parts),
)
"""In the order of registration: the outermost, which is tried first, comes last."""
