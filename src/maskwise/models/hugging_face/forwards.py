"""Wrappers around a model's forward: pack a call's inputs, and unpack its outputs.

Not hooks, because SentenceTransformer calls ``model.forward`` itself; and with the signature of the model's own, which
tokenizers and trainers inspect.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.adapter import MARK, adapters
from maskwise.models.hugging_face.calls import (
    COVERED,
    STATE,
    Frame,
    State,
    call,
    calls,
    is_recorded,
    layout_for,
    layout_of,
    original,
    packed_parts,
    run_packed,
    running,
    state_of,
)
from maskwise.models.hugging_face.generation import fills_cache, padding_of, prefill_reason
from maskwise.models.hugging_face.layout import (
    BY_TOKEN,
    CROSS,
    arguments,
    mask_of,
    padded_reason,
    takes,
    tokens_of,
    unpacked,
)
from maskwise.models.hugging_face.probe import check
from maskwise.models.hugging_face.tokens import computing, kept_tokens, release
from maskwise.models.routes import Padded, dispatch, routes, warn_once
from maskwise.nn.binding import bind, unbind
from maskwise.ops.torch_private import is_tracing, is_transformed

__all__ = ["cover", "last_token", "uncover"]

IGNORED = -100
"""The label that every loss of transformers skips."""
COMPILED = "a graph that is being compiled has no sizes that depend on data"
TOKENWISE_LOSSES = ("ForMaskedLM", "ForTokenClassification", "ForPreTraining")
"""Heads whose loss reads the logits at the label's own position, as those of encoder-decoders do, whose decoder reads
shifted labels. Any other may predict a token from the one before."""


def base_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The model without its head: packs, if the call can run packed, and gives its outputs in the padded layout."""
    if torch.compiler.is_compiling():
        warn_once(module, COMPILED, "call the model itself, not what torch.compile makes of it")
        return original(module, *args, **kwargs)
    if not check_once(module):
        return module.forward(*args, **kwargs)
    named, state = arguments(module, args, kwargs), state_of(module)
    if state.causal and (keep := padding_of(module, named)) is not None:
        named["attention_mask"] = keep
    padded = _padded(module, state, named)
    if is_recorded():
        run = _run_packed if padded is None else _run_padded
    else:
        run = dispatch(module, ROUTES, tokens_of(named), mask_of(named), padded)
    return run(module, named, args, kwargs)


def _run_packed(module: Any, named: dict[str, Any], args: Any, kwargs: Any) -> Any:
    by_name = named.get("return_dict")
    as_tuple = not (module.config.return_dict if by_name is None else by_name)
    if as_tuple:
        named["return_dict"] = True
    state = state_of(module)
    layout = layout_for(state, named)
    output = unpacked(run_packed(module, named, layout, fill=_fills(module, state, named)), layout, state.kinds)
    return output.to_tuple() if as_tuple and hasattr(output, "to_tuple") else output


def _run_padded(module: Any, named: dict[str, Any], args: Any, kwargs: Any) -> Any:
    with call(Frame()):
        return original(module, *args, **kwargs)


ROUTES = routes(_run_packed, _run_padded)


def _padded(module: Any, state: State, named: dict[str, Any]) -> Padded | None:
    """Why the call must run padded, or None."""
    outer = running()
    if outer is not None and outer.padded is not None:
        return outer.padded
    if module.config._attn_implementation != state.implementation:
        return Padded("its attention implementation was changed after unpad", "mw.unpad(mw.models.repad(model))")
    if (padded := padded_reason(module, named, cross=state.cross)) is not None:
        return padded
    if _fills(module, state, named) and (padded := prefill_reason(named, prefills=state.prefills)) is not None:
        return padded
    read = [named.get(CROSS[1]), None if state.causal else named.get("attention_mask")]
    if state.eager and not all(mask is None or bool((mask != 0).any(1).all()) for mask in read):
        return Padded(
            "a row keeps nothing, and eager attention then reads what is dropped", "a batch without such rows"
        )
    if not state.causal and not state.computes_first and not bool(mask_of(named)[:, 0].all()):
        return Padded(
            "a row drops its first token, which heads read, and computes it from dropped ones", "padding on the right"
        )
    return _routers(module, state, named)


def _fills(module: Any, state: State, named: dict[str, Any]) -> bool:
    """Whether the call fills a cache."""
    outer = running()
    if outer is None or not state.causal:
        return state.causal and fills_cache(module, named, labelled=False)
    return fills_cache(module, named, labelled=outer.labelled, by_caller=outer.caches is not None)


def _routers(module: Any, state: State, named: dict[str, Any]) -> Padded | None:
    """Why router logits that are requested need a padded call, or None."""
    requested = named.get("output_router_logits")
    if requested is None:
        requested = getattr(module.config.get_text_config(), "output_router_logits", False)
    if requested and not state.routers:
        return Padded("its router logits have no padded form", "output_router_logits=False")
    return None


def head_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A model around others that are packed: what it reads of dropped tokens must be there, or they run padded."""
    if is_tracing() or is_transformed():
        return original(module, *args, **kwargs)
    if not check_once(module):
        return module.forward(*args, **kwargs)
    named, outer = arguments(module, args, kwargs), running()
    padded = outer.padded if outer is not None and outer.padded is not None else _read_dropped(module, named)
    labelled = named.get("labels") is not None or (outer is not None and outer.labelled)
    # A model inside of another gets what the outer one has read from its config.
    caches = named.get("use_cache") if outer is None else outer.caches
    # The head's own linear layers compute kept tokens, too.
    is_kept = padded is None and bool(state_of(module).layers)
    kept = computing(kept_tokens(named)) if is_kept else nullcontext()
    with call(Frame(padded=padded, labelled=labelled, caches=caches)), kept:
        begun = calls()
        output = original(module, *args, **kwargs)
    if calls() == begun and named.get("attention_mask") is not None and not is_recorded():
        warn_once(module, "it does not call the models in it, only parts of them", "mw.models.repad(model)")
    return output


def _read_dropped(module: Any, named: dict[str, Any]) -> Padded | None:
    """Why the head reads the outputs of dropped tokens, or None."""
    if (padded := _routers(module, state_of(module), named)) is not None:
        return padded
    is_pair = takes(module, "decoder_input_ids")
    mask = named.get("decoder_attention_mask" if is_pair else "attention_mask")
    if named.get("start_positions") is not None and not (is_pair and mask is None):
        return Padded("the loss of question answering reads the logits of every position", "a loss of the kept logits")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    dropped = mask == 0
    if isinstance(last := named.get("logits_to_keep"), int) and last and bool(dropped[:, -last:].any()):
        return Padded("the logits of dropped tokens are requested", "padding on the left, or no logits_to_keep")
    if is_pair and _is_named(module, "ForSequenceClassification"):
        change = "a call without decoder_attention_mask"
        return Padded("the head reads a token of the decoder that its mask may drop", change)
    if _is_named(module, "ForSequenceClassification"):
        causal = any(state_of(each).causal for each in packed_parts(module))
        if causal and bool(dropped.gather(1, last_token(module, named, mask)).any()):
            return Padded(
                "the head reads a dropped token as the last one", "pad_token_id in dropped places, or left padding"
            )
        return None
    for name, labels in named.items():
        # Whatever its name: integers for each token that are not its inputs are what its output is compared with.
        if name in BY_TOKEN or name.endswith(("mask", "ids")) or not _counts_tokens(labels, mask):
            continue
        counted = labels != IGNORED
        read = counted & dropped
        if name != "shift_labels" and not is_pair and not _is_named(module, *TOKENWISE_LOSSES):
            read[:, 1:] |= counted[:, 1:] & dropped[:, :-1]
        if bool(read.any()):
            change = f"padding on the right, or {name} of {IGNORED} where a token is predicted from a dropped one"
            return Padded(f"{name} count predictions of dropped tokens", change)
    return None


def _counts_tokens(labels: Any, mask: Tensor) -> bool:
    return isinstance(labels, Tensor) and labels.shape == mask.shape and not labels.is_floating_point()


def last_token(module: Any, named: dict[str, Any], mask: Tensor) -> Tensor:
    """The column that a decoder's classifier reads, (B, 1): the last that is not the padding token, masked or not."""
    ids, padding = named.get("input_ids"), getattr(module.config.get_text_config(), "pad_token_id", None)
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    if isinstance(ids, Tensor) and padding is not None:
        columns = torch.where(ids != padding, columns, 0)
    return columns.amax(1, keepdim=True)


def _is_named(module: nn.Module, *endings: str) -> bool:
    """Whether a module is, or extends, a model of transformers with this head."""
    return any(kind.__name__.endswith(endings) for kind in type(module).__mro__)


def check_once(module: nn.Module) -> bool:
    """Compare a model with its padded self that has weights only now, or layers that were quantized after `unpad`.

    Returns:
        Whether it can be packed. If not, it is as it was before `unpad`, and its caller is warned.
    """
    state = state_of(module)
    if running() is not None or (state.checked and not state.quantized.is_changed(module)):
        return True
    if any(each.device.type == "meta" for each in module.parameters()):
        return True
    for part in packed_parts(module):
        state_of(part).checked = False
    reason = check(module)
    if reason is None:
        return True
    adapters()[vars(module)[MARK]].undo(module)
    warn_once(module, reason, "help(maskwise.models.Adapter) shows how to support it")
    return False


class UnpackOutput:
    """After the encoder of a model with a pooler: what reads the first token must find each row's."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The encoder's output in the padded layout."""
        layout = layout_of()
        return None if layout is None else unpacked(output, layout, {})


class UnpackInput:
    """Before a pooler without an encoder before it: it must find each row's first token."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The pooler's arguments in the padded layout."""
        layout = layout_of()
        return None if layout is None else (unpacked(args, layout, {}), unpacked(dict(kwargs), layout, {}))


def cover(module: Any, state: State) -> None:
    """Put a packing forward in front of a model without its head, or a forward that watches what a head reads."""
    vars(module)[STATE], vars(module)[MARK] = state, "transformers"
    if (covered := vars(module).get("forward")) is not None:
        vars(module)[COVERED] = covered
    bind(module, "forward", base_forward if state.base else head_forward)
    if state.base and isinstance(pooler := getattr(module, "pooler", None), nn.Module):
        if isinstance(encoder := getattr(module, "encoder", None), nn.Module):
            encoder.register_forward_hook(UnpackOutput(), prepend=True)
        else:
            pooler.register_forward_pre_hook(UnpackInput(), with_kwargs=True)


def uncover(module: nn.Module) -> None:
    """Take away what `cover` put on a module; nothing where it put nothing."""
    if (state := vars(module).pop(STATE, None)) is not None:
        vars(module).pop(MARK, None)
        if not state.base:
            release(module)
        unbind(module, "forward")
        if (covered := vars(module).pop(COVERED, None)) is not None:
            module.forward = covered
    _remove(module._forward_hooks, UnpackOutput)
    for key in _remove(module._forward_pre_hooks, UnpackInput):
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _remove(hooks: Any, kind: type) -> list[int]:
    found = [key for key, hook in hooks.items() if isinstance(hook, kind)]
    for key in found:
        del hooks[key]
    return found
