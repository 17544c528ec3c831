"""The adapter of Hugging Face models that carry their own attention: their linear layers compute kept tokens only.

Everything else, attention included, runs in the padded layout, as the model's own code does. A linear layer that reads
one row for each token packs the kept ones, multiplies those, and gives 0 for the others. Which layers do, and of which
sequence (an encoder's or a decoder's), is seen in a small batch whose sequences have lengths that nothing else has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.adapter import (
    MARK,
    QuantizesBatch,
    QuantizesBatchError,
    ReadsDroppedError,
    UnsupportedModelError,
    adapters,
)
from maskwise.models.hugging_face.calls import COVERED, original
from maskwise.models.hugging_face.generation import fills_cache, padding_of, prefill_reason
from maskwise.models.hugging_face.layout import arguments, leaves, not_taken, takes, tokens_of
from maskwise.models.hugging_face.probe import (
    HALF_TOLERANCE,
    TOLERANCES,
    NoReference,
    add_decoder,
    batch_of_text,
    difference,
    kept,
    masks,
    shared_capacity,
    unchanged,
    with_random_weights,
)
from maskwise.models.hugging_face.tokens import (
    Reads,
    Tokens,
    computing,
    hold,
    is_computing,
    kept_tokens,
    release,
    rows_first,
    sequences_of,
    watch_padding,
)
from maskwise.models.quantized import QuantizedLayers, replace_quantized
from maskwise.models.routes import Padded, dispatch, routes, warn_once
from maskwise.nn.binding import bind, unbind
from maskwise.ops.torch_private import is_tracing, is_transformed
from maskwise.plan.dispatch import force

__all__ = ["TokenwiseAdapter"]

STATE = "_maskwise_tokenwise"
IGNORED = -100
BATCH_NORMS = (nn.BatchNorm1d, nn.SyncBatchNorm)
"""In training they count every row, dropped or not; the comparison is in evaluation."""
READS = "the model reads dropped tokens, so that what it returns depends on its padding"
REASON = "linear layers compute kept tokens only; the model's own attention runs padded"


@dataclass
class State:
    """What is left on a served model.

    Attributes:
        checked: whether it was compared with its padded self, which takes weights.
        sequences: the layers that read one row for each token, by path, with what they read.
        quantized: which layers were quantized when it was compared; with others it is compared again.
    """

    checked: bool = False
    sequences: dict[str, Reads] = field(default_factory=dict)
    quantized: QuantizedLayers = field(default_factory=QuantizedLayers)


class TokenwiseAdapter:
    """Serves a ``transformers.PreTrainedModel`` that reads text and a mask of it, whatever its attention is.

    That dropped tokens change nothing is checked on a small batch before the model is changed for good. It is tried
    where no other adapter serves a model or a part of it.
    """

    name = "transformers, token-wise"
    is_fallback = True

    def serves(self, module: nn.Module) -> tuple[bool, str]:
        """Any that takes input_ids and an attention_mask."""
        from maskwise.models.hugging_face.adapter import is_pretrained

        if not is_pretrained(module):
            return False, ""
        for argument in ("input_ids", "attention_mask"):
            if not takes(module, argument):
                return False, not_taken(module, argument)
        return True, ""

    def install(self, module: nn.Module) -> None:
        """Put the packing forwards in place, and compare."""
        vars(module)[STATE] = State()
        if (covered := vars(module).get("forward")) is not None:
            vars(module)[COVERED] = covered
        bind(module, "forward", model_forward)
        watch_padding(module)
        try:
            if any(isinstance(each, BATCH_NORMS) for each in module.modules()):
                raise ReadsDroppedError("a norm of a batch counts all tokens")
            if (reason := shared_capacity(module)) is not None:
                raise ReadsDroppedError(reason)
            if not _is_meta(module) and (reason := _check(module)) is not None:
                if isinstance(reason, QuantizesBatch):
                    raise QuantizesBatchError(reason)
                raise ReadsDroppedError(reason) if "changes when" in reason else UnsupportedModelError(reason)
        except BaseException:
            self.undo(module)
            raise

    def undo(self, module: nn.Module) -> None:
        """Take away what `install` put there."""
        if vars(module).pop(STATE, None) is not None:
            unbind(module, "forward")
            if (covered := vars(module).pop(COVERED, None)) is not None:
                module.forward = covered
            watch_padding(module, watch=False)
        release(module)


def _is_meta(module: nn.Module) -> bool:
    return any(each.device.type == "meta" for each in module.parameters())


# -- calls -------------------------------------------------------------------------------------------------------------
def model_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The model with the kept tokens of its call."""
    if torch.compiler.is_compiling() or is_computing():
        return original(module, *args, **kwargs)
    if not _check_once(module):
        return module.forward(*args, **kwargs)
    named = arguments(module, args, kwargs)
    if _is_decoder(module) and (keep := padding_of(module, named)) is not None:
        named["attention_mask"] = keep
    run = dispatch(module, ROUTES, tokens_of(named), named.get("attention_mask"), _padded(module, named))
    return run(module, named, args, kwargs)


def _run_tokenwise(module: Any, named: dict[str, Any], args: Any, kwargs: Any) -> Any:
    with computing(kept_tokens(named)):
        return original(module, *args, **kwargs)


def _run_padded(module: Any, named: dict[str, Any], args: Any, kwargs: Any) -> Any:
    # Nothing inside is another call.
    with computing(Tokens()):
        return original(module, *args, **kwargs)


ROUTES = routes(_run_tokenwise, _run_padded, name="tokenwise", reason=REASON)


def _padded(module: Any, named: dict[str, Any]) -> Padded | None:
    """Why the call must run padded, or None."""
    if is_tracing():
        return Padded("a graph that is being traced has no sizes that depend on data", "trace mw.models.repad(model)")
    if is_transformed():
        return Padded("a torch.func transform is active", "torch.autograd.grad, or mw.models.repad(model)")
    mask, tokens = named.get("attention_mask"), tokens_of(named)
    if mask is None:
        return Padded("no attention_mask was given")
    cache = named.get("past_key_values")
    if cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length()):
        return Padded("the call continues from a cache")
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or mask.shape != tokens.shape[:2]:
        change = "an attention_mask of (batch, length)"
        return Padded("attention_mask is not one flag for each token of the input", change)
    if named.get("encoder_hidden_states") is not None:
        change = "a call without encoder_hidden_states, or mw.models.repad(model)"
        return Padded("encoder_hidden_states is not known to have an entry for each token", change)
    if not kept_tokens(named).packings:
        return Padded("nothing is dropped")
    fills = _is_decoder(module) and fills_cache(module, named, labelled=named.get("labels") is not None)
    # The last column is computed, dropped or not; behind a window it may find no key, and then reads dropped ones.
    if fills and _has_windows(module) and (padded := prefill_reason(named, prefills=True)) is not None:
        return padded
    return _read_dropped(module, named)


def _is_decoder(module: Any) -> bool:
    return takes(module, "past_key_values") and not getattr(module.config, "is_encoder_decoder", False)


def _has_windows(module: Any) -> bool:
    config = module.config.get_text_config()
    return any(getattr(config, each, None) for each in ("sliding_window", "local_attention"))


def _read_dropped(module: Any, named: dict[str, Any]) -> Padded | None:
    """Why a loss or a head reads dropped tokens, or None."""
    if named.get("start_positions") is not None:
        return Padded("the loss of question answering reads the logits of every position", "a loss of the kept logits")
    is_pair = getattr(module.config, "is_encoder_decoder", False)
    mask = named.get("decoder_attention_mask") if is_pair else named.get("attention_mask")
    if not isinstance(mask, Tensor):
        return None
    if is_pair and any(kind.__name__.endswith("ForSequenceClassification") for kind in type(module).__mro__):
        change = "a call without decoder_attention_mask"
        return Padded("the head reads a token of the decoder that its mask may drop", change)
    dropped = mask == 0
    labels = named.get("labels")
    if isinstance(labels, Tensor) and labels.shape == mask.shape and not labels.is_floating_point():
        counted = labels != IGNORED
        read = counted & dropped
        read[:, 1:] |= counted[:, 1:] & dropped[:, :-1]
        if bool(read.any()):
            change = f"padding on the right, or labels of {IGNORED} where a token is predicted from a dropped one"
            return Padded("labels count predictions of dropped tokens", change)
    elif labels is not None and not is_pair and bool(dropped.any()):
        from maskwise.models.hugging_face.forwards import last_token

        if bool(dropped.gather(1, last_token(module, named, mask)).any()):
            return Padded(
                "the head may read a dropped token as the last one", "pad_token_id in dropped places, or left padding"
            )
    return None


def _check_once(module: nn.Module) -> bool:
    """Compare a model that has weights only now, or layers that were quantized since; whether it is still served."""
    state: State = vars(module)[STATE]
    if (state.checked and not state.quantized.is_changed(module)) or _is_meta(module):
        return True
    reason = _check(module)
    if reason is None:
        return True
    adapters()[vars(module).pop(MARK)].undo(module)
    warn_once(module, reason, "help(maskwise.models.Adapter) shows how to support it")
    return False


# -- the comparison ----------------------------------------------------------------------------------------------------
def _check(module: Any) -> str | None:
    """Why the model cannot be served, or None: every output, right-padded, left-padded, with holes and full."""
    state: State = vars(module)[STATE]
    state.checked = True
    try:
        with unchanged(module), force(None), torch.autocast(module.device.type, enabled=False):
            module.eval()
            with torch.no_grad():
                found = replace_quantized(module, partial(_run_text, module))
            if found is None:
                found = with_random_weights(module, _compare)
            if isinstance(found, NoReference):
                found = _compare(module)
    except BaseException:
        state.checked = False
        raise
    if isinstance(found, NoReference):
        found = f"a small batch of text, padded, raised {found}"
    state.checked = found is None
    state.quantized.record(module)
    if found is None:
        # Here, since the comparison leaves modules as they were.
        hold(module, state.sequences)
    return found


def _run_text(module: Any) -> None:
    """Call a model, padded, with the batch of the comparison."""
    keep = masks(module.device)
    if (named := batch_of_text(module, keep)) is not None:
        add_decoder(module, named, keep)
        with computing(Tokens()):
            original(module, **named)


def _compare(module: Any) -> str | None:
    keep = masks(module.device)
    named = batch_of_text(module, keep)
    if named is None:
        return "it has no vocabulary, so that no text could be tried"
    decoder = add_decoder(module, named, keep)
    try:
        wanted = _with_gradients(module, named, (keep, decoder), Tokens())
        if not all(bool(each.isfinite().all()) for path, each in wanted[0].items() if "hidden" in path):
            return NoReference("values that are not finite")
        state: State = vars(module)[STATE]
        # An earlier comparison may have ended between.
        release(module)
        every = sequences_of(module, named, (keep, decoder))
        if not every:
            return "no linear layer of it reads one row for each token"
        # XLNet hands on the states of its layers, (L, B, D), dropped tokens included; its head can be served.
        fewer = rows_first(every)
        why = None
        for layers in (every, fewer) if 0 < len(fewer) < len(every) else (every,):
            state.sequences = layers
            hold(module, layers)
            why = _different(wanted, _with_gradients(module, named, (keep, decoder), kept_tokens(named)))
            if why is None:
                break
    except Exception as error:
        return NoReference(f"{type(error).__name__}: {error}")
    return why


def _with_gradients(
    module: Any, named: dict[str, Any], keeps: tuple[Tensor, Tensor], tokens: Tokens
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is kept of every output, and the gradient of each parameter."""
    with torch.enable_grad(), computing(tokens):
        output = original(module, **named)
        rows = {path: kept(value, *keeps) for path, value in leaves(output) if path.split(".")[0] != "attentions"}
        total = sum(
            (each * torch.sin(torch.arange(each.numel(), device=each.device).to(each.dtype)).view_as(each)).sum()
            for each in rows.values()
            if each.is_floating_point() and each.requires_grad
        )
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not isinstance(total, Tensor):
            return {path: each.detach() for path, each in rows.items()}, {}
        found = torch.autograd.grad(total, [p for _, p in parameters], allow_unused=True)
    gradients = {name: g for (name, _), g in zip(parameters, found, strict=True) if g is not None}
    return {path: each.detach() for path, each in rows.items()}, gradients


def _different(wanted: Any, found: Any) -> str | None:
    (outputs, gradients), (others, theirs) = wanted, found
    for path, value in outputs.items():
        if path not in others or value.shape != others[path].shape:
            return f"its {path or 'output'} has another shape where only kept tokens are computed"
        apart = difference(value, others[path])
        if apart > TOLERANCES.get(value.dtype, HALF_TOLERANCE):
            return (
                f"its {path or 'output'} changes when only kept tokens are computed, by {apart:.0e} of the largest: "
                f"{READS}"
            )
    scale = max((float(g.abs().max()) for g in gradients.values()), default=0.0) or 1.0
    for name in gradients.keys() | theirs.keys():
        some = gradients[name] if name in gradients else theirs[name]
        nothing = torch.zeros_like(some)
        apart = float((gradients.get(name, nothing) - theirs.get(name, nothing)).abs().nan_to_num(torch.inf).max())
        if apart / scale > 10 * TOLERANCES.get(some.dtype, HALF_TOLERANCE):
            return f"the gradient of its {name} changes when only kept tokens are computed: {READS}"
    return None
