"""Whether a model gives the same packed as padded: compared on the model itself, before anyone relies on it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from maskwise.errors import caller_level
from maskwise.models.adapter import UnsupportedModelError
from maskwise.models.hugging_face.calls import (
    Frame,
    State,
    call,
    layout_for,
    original,
    packed_parts,
    recording,
    run_packed,
    state_of,
)
from maskwise.models.hugging_face.generation import cached, new_cache
from maskwise.models.hugging_face.layout import CROSS, OTHER, Layout, kind_of, leaves, takes, unpacked
from maskwise.models.hugging_face.tokens import hold, release, rows_first, sequences_of
from maskwise.models.quantized import replace_quantized, stands_in
from maskwise.models.routes import Padded
from maskwise.ops.torch_private import TorchDispatchMode
from maskwise.plan.dispatch import force

__all__ = [
    "NoReference",
    "add_decoder",
    "batch_of_text",
    "check",
    "difference",
    "kept",
    "masks",
    "mixing_module",
    "shared_capacity",
    "unchanged",
    "with_random_weights",
]

LENGTH = 13
"""Of the padded batch: a size that hardly anything else has, and so is the number of tokens that it keeps, 43."""
DECODER_LENGTH = 11
"""Of the other sequence of an encoder-decoder: another one."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Relative to the largest value of an output. Packing moves float32 sums by 1e-6; a wrong mask or position by 1e-2."""
HALF_TOLERANCE = 5e-2
SCALED_PARAMETERS = 400_000_000
"""Models of more parameters are compared with the weights that they have: others would take as much memory again."""
PROBE = Padded("a probe")


class NoReference(str):
    """Why the padded model itself cannot run a small batch of text with these weights."""

    __slots__ = ()


def check(module: Any) -> str | None:
    """Compare a covered model, packed and padded: every output, right-padded, left-padded, with holes and full.

    What the comparison finds (output layouts, whether first tokens and router logits agree) goes into the
    model's state. The weights are random ones, of a size at which mixed tokens show, unless the model is large.

    Returns:
        Why the model cannot be served, or None. It depends on the model and its weights alone: inputs and random
        weights have a seed of their own.
    """
    state = state_of(module)
    for each in packed_parts(module):
        if each is not module and not state_of(each).checked and (reason := check(each)) is not None:
            return reason
    compare = _compare_base if state.base else _compare_around
    state.checked = True
    try:
        with (
            torch.no_grad(),
            unchanged(module),
            recording(),
            force(None),
            torch.autocast(module.device.type, enabled=False),
        ):
            module.eval()
            found = replace_quantized(module, partial(_run_text, module))
            if found is None:
                found = with_random_weights(module, compare)
            if isinstance(found, NoReference):
                found = compare(module)
    except BaseException:
        state.checked = False
        raise
    if isinstance(found, NoReference) and state.base:
        found = f"a small batch of text, padded, raised {found}"
    elif isinstance(found, NoReference):
        if not type(module).__module__.startswith("transformers."):
            warnings.warn(
                f"unpad: this {type(module).__name__} could not be compared with its padded self, because a small "
                f"batch of text raised {found}. Where a token is dropped, it finds 0. Hint: compare a batch of yours.",
                stacklevel=caller_level(),
            )
        found = None
    state.checked = found is None
    state.quantized.record(module)
    if found is None and not state.base:
        # Here, since the comparison leaves modules as they were.
        hold(module, state.layers)
    return found


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore what a call leaves on modules: their mode, cached frequencies, hooks that capture outputs."""
    modules = list(model.modules())
    before = [[dict(each) for each in _attributes(module)] for module in modules]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, copy in buffers:
            buffer.copy_(copy)
        for module, snapshots in zip(modules, before, strict=True):
            for attributes, snapshot in zip(_attributes(module), snapshots, strict=True):
                attributes.clear()
                attributes.update(snapshot)


def _attributes(module: nn.Module) -> list[dict[Any, Any]]:
    return [module._buffers, module._forward_hooks, module._forward_pre_hooks, vars(module)]


# -- what is compared: each returns why not, a `NoReference`, or None --------------------------------------------------
def _compare_base(base: Any) -> str | None:
    """A model without its head; what its calls need to know of its outputs goes into its state."""
    state, keep = state_of(base), masks(base.device)
    named = batch_of_text(base, keep)
    if named is None:
        return _NO_VOCABULARY
    # Cross attention is compared where there is some: sequences that are given to it change the output.
    state.cross = False
    alone = _reference(base, named, keep)
    if not (takes(base, CROSS[0]) and takes(base, CROSS[1])):
        return _compare_stack(base, named, alone, keep)
    given = {**named, **_other_sequences(base)}
    both = _reference(base, given, keep)
    if isinstance(both, NoReference):
        return both if isinstance(alone, NoReference) else _compare_stack(base, named, alone, keep)
    if not isinstance(alone, NoReference) and _difference_of(alone, both, keep) is None:
        return _compare_stack(base, named, alone, keep)
    state.cross = True
    why = _compare_stack(base, given, both, keep)
    if why is None or isinstance(alone, NoReference) or base.config.is_encoder_decoder:
        return why
    state.cross = False
    return _compare_stack(base, named, alone, keep)


def _other_sequences(base: Any) -> dict[str, Any]:
    """What cross attention reads: sequences of other lengths, with padding of their own."""
    config, keep = base.config, masks(base.device)[:, :DECODER_LENGTH].flip(0)
    size = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
    states = torch.randn(*keep.shape, size, generator=torch.Generator().manual_seed(1))
    return {CROSS[0]: states.to(base.device, base.dtype), CROSS[1]: keep.long()}


def _compare_stack(base: Any, named: dict[str, Any], padded: Any, keep: Tensor) -> str | None:
    """A call of a model without its head; ``padded`` is what it gives padded."""
    state = state_of(base)
    if isinstance(padded, NoReference):
        return padded
    layout = layout_for(state, named)
    narrow = replace(layout, rows=5, width=-(-layout.tokens // 5))
    packed = None
    for each in (layout, narrow):
        # In one row, the size of the tokens' dim is one that nothing else has.
        packed, why = _packed(partial(run_packed, base, named, each), layout.width if each is layout else None)
        if why is not None:
            return why
        kinds = _kinds(padded, packed, each)
        if isinstance(kinds, str):
            return kinds
        state.kinds = kinds
        packed = unpacked(packed, each, kinds)
        if (why := _difference_of(padded, packed, keep)) is not None:
            return why
    state.computes_first = not state.causal and _is_first_same(padded, packed, state)
    if _accepts(base, "output_router_logits") and hasattr(base.config, "output_router_logits"):
        state.routers = _are_routers_same(base, {**named, "output_router_logits": True}, layout, keep)
    if state.causal and "use_cache" in named:
        state.prefills = _is_cache_same(base, {**named, "use_cache": True}, layout, keep)
    return None


def _is_first_same(padded: Any, packed: Any, state: State) -> bool:
    """Whether dropped first tokens come out the same, as those do that find a key in their window."""
    first = torch.zeros(4, LENGTH, dtype=torch.bool)
    first[:, 0] = True
    return _difference_of(padded, packed, first) is None and not state.empty_windows


def _is_cache_same(base: Any, named: dict[str, Any], layout: Layout, keep: Tensor) -> bool:
    """Whether a packed call fills a cache with the keys and values of a padded one."""
    padded = _reference(base, named, keep)
    if isinstance(padded, NoReference) or type(getattr(padded, "past_key_values", None)) is not type(new_cache(base)):
        return False
    packed, why = _packed(partial(run_packed, base, named, layout, fill=True))
    if why is not None:
        return False
    wanted, found = (cached(each.past_key_values, keep) for each in (padded, packed))
    return bool(wanted) and wanted.keys() == found.keys() and _difference_of(wanted, found, keep) is None


def _are_routers_same(base: Any, named: dict[str, Any], layout: Layout, keep: Tensor) -> bool:
    """Whether router logits are the same; stores their layout."""
    state, padded = state_of(base), _reference(base, named, keep)
    if isinstance(padded, NoReference):
        return False
    packed, why = _packed(partial(run_packed, base, named, layout))
    kinds = _kinds(padded, packed, layout) if why is None else why
    if isinstance(kinds, str) or _difference_of(padded, unpacked(packed, layout, kinds), keep) is not None:
        return False
    state.kinds = {**kinds, **state.kinds}
    return True


def _compare_around(model: Any) -> str | None:
    """A model around others that are packed: its head, or a composite of which only the language model is."""
    keep = masks(model.device)
    if not all(state_of(each).causal or state_of(each).computes_first for each in packed_parts(model)):
        keep[1] = keep[0]
    named = batch_of_text(model, keep)
    if named is None:
        return _NO_VOCABULARY
    keeps = keep, add_decoder(model, named, keep)
    state_of(model).layers = {}
    # An earlier comparison may have held some.
    release(model)
    try:
        with call(Frame(padded=PROBE)):
            state_of(model).layers = rows_first(sequences_of(model, named, keeps, tuple(packed_parts(model))))
    except Exception as error:
        return NoReference(f"{type(error).__name__}: {error}")
    hold(model, state_of(model).layers)
    if (why := _compare_call(model, named, keeps)) is not None:
        return why
    if takes(model, "output_router_logits"):
        state_of(model).routers = _compare_call(model, {**named, "output_router_logits": True}, keeps) is None
    return None


def _compare_call(model: Any, named: dict[str, Any], keeps: tuple[Tensor, Tensor]) -> str | None:
    padded = _reference(model, named, *keeps)
    if isinstance(padded, NoReference):
        return padded
    with recording() as frames:
        packed, why = _packed(partial(model.forward, **named))
    if why is not None:
        return why
    if all(frame.layout is None for frame in frames):
        return "a batch of padded text runs padded: its parts get masks that are made elsewhere"
    kinds = _kinds(padded, packed, None)
    return kinds if isinstance(kinds, str) else _difference_of(padded, packed, *keeps)


def _run_text(model: Any) -> None:
    """Call a model, padded, with the batch of the comparison."""
    keep = masks(model.device)
    if (named := batch_of_text(model, keep)) is not None:
        add_decoder(model, named, keep)
        with call(Frame(padded=PROBE)):
            original(model, **named)


# -- running ----------------------------------------------------------------------------------------------------------
def _reference(model: Any, named: dict[str, Any], *keeps: Tensor) -> Any:
    """What the padded model gives, or a `NoReference`; what it gives for dropped tokens does not matter."""
    try:
        with call(Frame(padded=PROBE)):
            padded = original(model, **named)
    except Exception as error:
        return NoReference(f"{type(error).__name__}: {error}")
    hidden = (kept(each, *keeps) for path, each in leaves(padded) if each.is_floating_point() and "hidden" in path)
    return padded if all(bool(each.isfinite().all()) for each in hidden) else NoReference("values that are not finite")


def _packed(run: Callable[[], Any], width: int | None = None) -> tuple[Any, str | None]:
    """The output of a packed call, or why there is none: any error of a model is a reason to refuse it.

    Args:
        run: the call.
        width: the size of the tokens' dim, where operations along it are looked for.
    """
    watch, why, output = MixingWatch(width), None, None
    try:
        with nullcontext() if width is None else watch:
            output = run()
    except UnsupportedModelError as error:
        why = error.reason
    except Exception as error:
        why = f"a small batch of text, packed, raised {type(error).__name__}: {error}"
        if "PackedMask" in str(error):
            why = "it reads its attention mask itself, outside of transformers' interface"
    return output, why if watch.found is None else f"{watch.found}, across the sequences of a batch"


class _Caller(nn.Module):
    """Runs a function of a module, so that ``functional_call`` can lend the module other weights for that time."""

    def __init__(self, module: nn.Module, function: Callable[[nn.Module], str | None]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self) -> str | None:
        return self.function(self.module)


def with_random_weights(module: nn.Module, compare: Callable[[Any], str | None]) -> str | None:
    """Compare with random weights, whose products are about as large as what they multiply, where that is possible."""
    unused = set(stands_in(module))
    parameters = {name: each for name, each in module.named_parameters() if name not in unused}
    plain = all(type(each) is nn.Parameter and each.is_floating_point() for each in parameters.values())
    if not plain or sum(each.numel() for each in parameters.values()) > SCALED_PARAMETERS:
        return NoReference("no random weights")
    generator = torch.Generator().manual_seed(0)
    weights = {f"module.{name}": _random(each, generator) for name, each in parameters.items()}
    found: str | None = functional_call(_Caller(module, compare), weights, ())
    return found


def _random(parameter: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    noise = torch.randn(parameter.shape, generator=generator, dtype=dtype).to(parameter.device)
    if parameter.dim() < 2:
        return parameter.detach().to(dtype) + 0.1 * noise
    return noise / math.sqrt(math.sqrt(max(1, parameter.shape[-1] * parameter.shape[-2])))


# -- inputs and outputs ------------------------------------------------------------------------------------------------
_NO_VOCABULARY = "it has no vocabulary, so that no text could be tried"


def masks(device: torch.device) -> Tensor:
    """What the probe keeps, (4, LENGTH): padded on the right, on the left, with a hole, and nothing dropped."""
    keep = torch.ones(4, LENGTH, dtype=torch.bool, device=device)
    keep[0, 9:] = False
    keep[1, :3] = False
    keep[2, 4:6] = False
    return keep


def batch_of_text(model: Any, keep: Tensor) -> dict[str, Any] | None:
    """A batch of text: ordinary tokens where they are kept, the padding token elsewhere; None without a vocabulary."""
    config = model.config.get_text_config()
    try:
        tokens = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        # Ids that are code points find their embeddings by hashes.
        tokens = getattr(config, "vocab_size", getattr(config, "num_hash_buckets", 0))
    special = _token_ids(model.config.to_dict())
    ordinary = torch.tensor([each for each in range(min(tokens, 5000)) if each not in special])
    if not len(ordinary):
        return None
    generator = torch.Generator().manual_seed(0)
    ids = ordinary[torch.randint(len(ordinary), keep.shape, generator=generator)].to(keep.device)
    if isinstance(mask_token := getattr(config, "mask_token_id", None), int) and 0 <= mask_token < tokens:
        # Some models weigh a row by how many of its tokens are masked for training.
        ids[0, 2] = mask_token
    if isinstance(padding := getattr(config, "pad_token_id", None), int) and 0 <= padding < tokens:
        ids[~keep] = padding
    named: dict[str, Any] = {"input_ids": ids, "attention_mask": keep.long()}
    if _accepts(model, "return_dict"):
        named["return_dict"] = True
    if _accepts(model, "use_cache") and hasattr(config, "use_cache"):
        named["use_cache"] = False
    if _accepts(model, "output_hidden_states"):
        named["output_hidden_states"] = True
    if takes(model, "token_type_ids") and getattr(config, "type_vocab_size", 0) > 1:
        named["token_type_ids"] = torch.randint(2, keep.shape, generator=generator).to(keep.device)
    if takes(model, "global_attention_mask"):
        # As heads make it of ids: the first token attends to all.
        named["global_attention_mask"] = torch.zeros_like(ids).index_fill_(1, ids.new_zeros(1), 1)
    if takes(model, "bbox"):
        corner = torch.randint(4, (*keep.shape, 2), generator=generator)
        box = torch.cat([corner, corner + torch.randint(1, 4, corner.shape, generator=generator)], -1)
        named["bbox"] = box.to(keep.device)
    return named


def add_decoder(model: Any, named: dict[str, Any], keep: Tensor) -> Tensor:
    """Give an encoder-decoder tokens of its decoder, and return which of them are kept; for others, `keep`."""
    if not takes(model, "decoder_input_ids"):
        return keep
    named["decoder_input_ids"] = named["input_ids"][:, :DECODER_LENGTH].clone()
    decoder = keep[:, :DECODER_LENGTH].clone()
    if not takes(model, "decoder_attention_mask"):
        return torch.ones_like(decoder)
    named["decoder_attention_mask"] = decoder.long()
    return decoder


def _token_ids(config: dict[str, Any]) -> set[int]:
    """Every token that a config gives a meaning."""
    found: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _token_ids(value)
        elif str(name).endswith(("token_id", "token_index")):
            found |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
    return found


def _accepts(model: nn.Module, name: str) -> bool:
    return takes(model, name) or takes(model, "kwargs")


def _kinds(padded: Any, packed: Any, layout: Layout | None) -> dict[str, str] | str:
    """The layout of each output, by its path; or why they cannot be unpacked."""
    wanted, found = dict(leaves(padded)), dict(leaves(packed))
    if wanted.keys() != found.keys():
        names = ", ".join(sorted(wanted.keys() ^ found.keys()))
        return f"it has other outputs when tokens are packed: {names}"
    kinds = {}
    for path, value in wanted.items():
        same = OTHER if value.shape == found[path].shape else None
        kind = same if layout is None else kind_of(value, found[path], layout)
        if kind is None:
            shapes = f"{tuple(found[path].shape)} packed and {tuple(value.shape)} padded"
            return f"its {path} is computed from all tokens of a batch: {shapes}"
        kinds[path] = kind
    return kinds


def _difference_of(padded: Any, packed: Any, *keeps: Tensor) -> str | None:
    """The reason to refuse a model for the first output that differs, or None.

    Not of the one that differs most: rounding would choose between two that are alike.
    """
    for (path, wanted), (_, value) in zip(leaves(padded), leaves(packed), strict=True):
        apart = difference(kept(wanted, *keeps), kept(value, *keeps))
        if apart > TOLERANCES.get(wanted.dtype, HALF_TOLERANCE):
            return (
                f"its {path or 'output'} changes when tokens are packed, by {apart:.0e} of the largest: "
                "something other than attention reads more than one token"
            )
    return None


def kept(value: Tensor, *keeps: Tensor) -> Tensor:
    """The part of an output that must be the same: of the sequence that it has the length of."""
    for keep in keeps:
        if value.shape[:2] == keep.shape:
            return value[keep]
        if value.shape[:1] == (keep.numel(),):
            return value[keep.flatten()]
    return value


def difference(padded: Tensor, packed: Tensor) -> float:
    """The largest difference, as a part of the largest value; not finite values must be the same."""
    if not padded.numel():
        return 0.0
    padded, packed = padded.double(), packed.double()
    apart = torch.where(padded == packed, 0.0, (padded - packed).abs()).nan_to_num(torch.inf)
    size = padded.abs().nan_to_num(0.0, posinf=0.0).max().clamp_min(1e-12)
    return float(apart.max() / size)


# -- what mixes tokens besides attention: convolutions, recurrences, norms over time, running sums ---------------------
aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten._convolution.default, aten.mkldnn_convolution.default}
NORMS = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_group_norm.default,
}
SCANS = {aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default}


class MixingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the first operation of a packed call that mixes along its tokens.

    The tokens are found by the size of their dim, which should be a size that nothing else has.

    Attributes:
        found: what that operation does, or None.
    """

    def __init__(self, width: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width = width
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is None:
            self.found = self._mixing(func, args)
        return func(*args, **(kwargs or {}))

    def _mixing(self, func: Any, args: Any) -> str | None:
        if func in CONVOLUTIONS and self._is_along_tokens(*args[:2]):
            return "a convolution reads neighbouring tokens"
        if func in NORMS and self.width in (args[0].shape[2:] if args[0].dim() > 2 else args[0].shape[:1]):
            return "a norm counts all tokens of a batch"
        if func in SCANS and args[0].is_floating_point() and args[0].shape[args[1]] == self.width:
            return "a running sum goes over the tokens"
        return None

    def _is_along_tokens(self, x: Tensor, weight: Tensor) -> bool:
        width: int = self.width  # type: ignore[assignment]
        # Some are padded beforehand, on one side or on both.
        return any(
            kernel > 1 and width <= size <= width + 2 * (kernel - 1)
            for size, kernel in zip(x.shape[2:], weight.shape[2:], strict=False)
        )


def mixing_module(model: nn.Module, inner: tuple[str, ...] = ()) -> str | None:
    """The module that mixes tokens in a model that has no weights to run with; None without one.

    Args:
        model: the model without its head.
        inner: the paths of models in it, such as those of images and sounds, which have no tokens of text to mix.
    """
    for path, module in model.named_modules():
        if path.startswith(inner):
            continue
        wide = isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)) and module.kernel_size != (1,)
        if wide or isinstance(module, (nn.RNNBase, nn.BatchNorm1d, nn.InstanceNorm1d)):
            return f"{path}, a {type(module).__name__}, mixes tokens"
    return None


def shared_capacity(model: nn.Module) -> str | None:
    """The router whose experts compute so many tokens of a batch and no more, dropped ones included; None without one.

    The comparison does not show it: its batch is smaller than any capacity.
    """
    for path, module in model.named_modules():
        if hasattr(module, "expert_capacity"):
            return f"{path}, a {type(module).__name__}, gives experts a capacity, which all tokens of a batch share"
    return None
