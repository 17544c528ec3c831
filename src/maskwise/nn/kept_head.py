"""mw.nn.kept_head: the loss of a language model of transformers on the rows that have a label.

While the model computes its loss, its last linear map does not multiply. It gets the labels from a hook of the model,
computes the loss of its input by `mw.linear_cross_entropy`, and returns logits of no classes; a second hook puts the
loss into the model's output. So the model's own code runs as it is, and nothing of transformers is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from maskwise.distributed.group import whole
from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.nn.binding import bind, is_bound, unbind
from maskwise.ops.loss import linear_cross_entropy

__all__ = ["full_head", "kept_head"]

M = TypeVar("M", bound=nn.Module)

IGNORED = -100
"""The label that every loss of transformers ignores."""
_STATE, _CALL = "_maskwise_kept_head", "_maskwise_kept_head_call"
#: Arguments with which the loss, or what the head gets, is another one: such a call takes the model's own way.
_UNUSUAL = ("shift_labels", "ignore_index", "logits_to_keep", "num_logits_to_keep", "next_sentence_label")
#: The names of a softcap in the configs of transformers.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "logit_softcapping")


def kept_head(model: M) -> M:
    """Train a language model of transformers without the full logits: the head computes labelled rows only.

    In training mode, a call with ``labels`` computes the loss from the hidden states by `mw.linear_cross_entropy`. Loss
    and gradients are the same to rounding, and the output has ``logits=None``. Every other call, such as evaluation or
    generation, is as before. Where no row has a label, the loss is 0 instead of NaN. The model is changed in place;
    `mw.nn.full_head` undoes it.

    >>> import torch, maskwise as mw
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    >>> model = mw.nn.kept_head(GPT2LMHeadModel(config).train())
    >>> tokens = torch.arange(12).reshape(2, 6)
    >>> labels = torch.where(tokens % 3 == 0, tokens, -100)
    >>> output = model(input_ids=tokens, labels=labels)
    >>> output.logits is None, output.loss.requires_grad
    (True, True)
    >>> model.eval()(input_ids=tokens).logits.shape
    torch.Size([2, 6, 99])

    Args:
        model: a ``...ForMaskedLM``, ``...ForCausalLM`` or ``...LMHeadModel``, whether its head is tied to the embedding
            or not. A few tokens are passed through it first, and the losses compared: that finds a shift of the labels,
            a softcap or a scale of the logits, and whether it divides by ``num_items_in_batch``.

    Returns:
        The model.

    Raises:
        DtypeError: the model is not an nn.Module.
        ArgumentError: the model has no linear map as its head, or computes another loss with it; the message has the
            reason.
    """
    if not isinstance(model, nn.Module):
        must, hint = "be an nn.Module", "AutoModelForCausalLM.from_pretrained(name)"
        raise DtypeError(say("kept_head", "model", must=must, got=type(model).__name__, hint=hint))
    if _STATE in vars(model):
        return model
    head = _head_of(model)
    state = _Probe(model, head).state()
    vars(model)[_STATE] = state
    state.handles = (
        # Last of the hooks before the call, and first of those after it.
        model.register_forward_pre_hook(_take_labels, with_kwargs=True),
        model.register_forward_hook(_give_loss, with_kwargs=True, prepend=True, always_call=True),
    )
    bind(head, "forward", _forward)
    return model


def full_head(model: M) -> M:
    """Undo `mw.nn.kept_head`.

    >>> import maskwise as mw
    >>> mw.nn.full_head(torch.nn.Linear(2, 2))                # Nothing to undo.
    Linear(in_features=2, out_features=2, bias=True)

    Args:
        model: changed in place.

    Returns:
        The model.

    Raises:
        DtypeError: the model is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        must, hint = "be an nn.Module", "the model that kept_head got"
        raise DtypeError(say("full_head", "model", must=must, got=type(model).__name__, hint=hint))
    state: _State | None = vars(model).pop(_STATE, None)
    if state is None:
        return model
    for handle in state.handles:
        handle.remove()
    head = _head_of(model)
    vars(head).pop(_CALL, None)
    unbind(head, "forward")
    return model


# -- a call ------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class _State:
    """What is known of a model: on the module, and copied with it."""

    #: Whether the hidden state of a token predicts the next one.
    shifts: bool
    #: Whether its loss divides by ``num_items_in_batch``, where that is given.
    counts_items: bool
    #: What happens to logits after the head.
    softcap: float | None
    scale: float
    handles: tuple[RemovableHandle, ...] = ()


@dataclasses.dataclass
class _Call:
    """A call of the model that is under way: on the head."""

    labels: Tensor
    items: Any
    state: _State
    loss: Tensor | None = None


def _take_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before the model: take the labels out of the call, for the head."""
    labels = kwargs.get("labels")
    if labels is None or not model.training or _is_unusual(model, kwargs):
        return None
    head, state = _head_of(model), vars(model)[_STATE]
    if not is_bound(head, "forward", _forward):
        # It was replaced, by an adapter for one.
        return None
    vars(head)[_CALL] = _Call(labels, kwargs.get("num_items_in_batch") if state.counts_items else None, state)
    return args, {**kwargs, "labels": None}


def _give_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """After the model: put the loss into its output."""
    call: _Call | None = vars(_head_of(model)).pop(_CALL, None)
    if call is None or output is None:
        return None
    values = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    loss = call.loss
    if loss is not None and isinstance(values["logits"], Tensor):
        # Through what the head returned, a sum of no elements: fully_shard gathers the head's weight once its gradient
        # arrives, before that of the loss is computed.
        loss = loss + values["logits"].sum().to(loss)
    return type(output)(**{**values, "loss": loss, "logits": None})


def _forward(head: Any, hidden: Tensor) -> Tensor:
    """The head: the loss of a call that has labels, and logits of no classes; else the linear map."""
    call: _Call | None = vars(head).get(_CALL)
    if call is None:
        return F.linear(hidden, head.weight, head.bias)
    call.loss = _loss(head, hidden, call.labels, call.items, call.state)
    # A node of the graph after the loss.
    return hidden.new_empty((*hidden.shape[:-1], 0)) + call.loss.to(hidden.dtype)


def _loss(head: Any, hidden: Tensor, labels: Tensor, items: Any, state: _State) -> Tensor:
    if state.shifts:
        labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    if state.scale != 1.0:
        hidden = hidden * state.scale
    bias = head.bias if head.bias is None or state.scale == 1.0 else head.bias * state.scale
    return linear_cross_entropy(
        hidden, head.weight, labels.to(hidden.device), None, bias, softcap=state.softcap, denominator=items
    )


def _is_unusual(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call takes another loss, reads logits, or returns a tuple."""
    by_name, config = kwargs.get("return_dict"), model.config
    if not (config.return_dict if by_name is None else by_name):
        return True
    routers = kwargs.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if routers is None else routers:
        # Their loss is added to that of the labels.
        return True
    return any(kwargs.get(name) is not None for name in _UNUSUAL)


def _head_of(model: Any) -> nn.Linear:
    """The linear map that makes the logits, or raise."""
    find: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        got = f"{type(model).__name__}, whose head is {'missing' if head is None else type(head).__name__}"
        raise _unsupported("have an nn.Linear as its output embeddings", got)
    return head


def _unsupported(must: str, got: str) -> ArgumentError:
    hint = "mw.linear_cross_entropy(hidden, head.weight, labels, mask) in a loss of your own"
    return ArgumentError(say("kept_head", "model", must=must, got=got, hint=hint))


# -- what a model does with its logits ---------------------------------------------------------------------------------
#: Rows and tokens of a probe.
_SIZE = (2, 6)


class _Probe:
    """Passes over a few tokens, which find out what the model's own loss is, or that it is none of the head."""

    def __init__(self, model: Any, head: nn.Linear) -> None:
        self.model, self.head, self.name = model, head, type(model).__name__
        if getattr(model.config, "is_encoder_decoder", False):
            raise _unsupported("compute its loss from one sequence", f"{self.name}, an encoder-decoder")
        if head.weight.device.type == "meta":
            raise _unsupported("have its weights", f"{self.name} on the meta device")
        classes, device = head.out_features, head.weight.device
        ids = torch.arange(_SIZE[0] * _SIZE[1], device=device).reshape(_SIZE)
        self.ids = ids % min(classes, 50)
        # No two tokens next to each other have the same label, nor does one of them have its own.
        self.labels = torch.where(ids % 3 == 0, IGNORED, (ids * 7 + 5) % classes)

    def state(self) -> _State:
        """What the model does, or raise where that is something else than what the head can compute."""
        with _evaluated(self.model):
            # Outside of its call, a head of fully_shard has a part of its weight alone.
            head = SimpleNamespace(
                weight=whole(self.head.weight), bias=None if self.head.bias is None else whole(self.head.bias)
            )
            softcap, scale = self._after_head()
            hidden, own = self._hidden(), self._own_loss()
            if own is None:
                raise _unsupported("return a loss for labels", f"{self.name}, which returns none")
            losses = {
                shifts: _loss(head, hidden, self.labels, None, _State(shifts, False, softcap, scale))
                for shifts in (False, True)
            }
            shifts = min(losses, key=lambda each: float((losses[each] - own).abs()))
            if not _is_close(losses[shifts], own):
                must = "have the cross entropy of its labels as its loss"
                raise _unsupported(must, f"{self.name}, whose loss is another")
            state = _State(shifts, False, softcap, scale)
            items = 5
            try:
                counted = self._own_loss(num_items_in_batch=items)
            except TypeError:
                return state
            if counted is None or _is_close(own, counted):
                return state
            state.counts_items = True
            if not _is_close(_loss(head, hidden, self.labels, items, state), counted):
                raise _unsupported("divide its summed loss by num_items_in_batch", f"{self.name}, which does not")
            return state

    def _own_loss(self, **options: Any) -> Tensor | None:
        loss: Tensor | None = self.model(input_ids=self.ids, labels=self.labels, return_dict=True, **options).loss
        return loss

    def _hidden(self) -> Tensor:
        """What the head gets."""
        seen: list[Tensor] = []
        handle = self.head.register_forward_hook(lambda head, args, out: seen.append(args[0]))
        try:
            self.model(input_ids=self.ids, return_dict=True)
        finally:
            handle.remove()
        if len(seen) != 1 or seen[0].shape[:-1] != self.ids.shape:
            got = f"{self.name}, which gives it {[tuple(each.shape) for each in seen]}"
            raise _unsupported("give its head every token once", got)
        return seen[0]

    def _after_head(self) -> tuple[float | None, float]:
        """The softcap and the scale of logits: what becomes of large ones that the head seems to return."""
        classes = self.head.out_features
        logits = torch.linspace(-60.0, 60.0, classes, device=self.ids.device).to(self.head.weight.dtype)
        logits = logits.expand(*_SIZE, classes)
        handle = self.head.register_forward_hook(lambda head, args, out: logits[:, : out.shape[1]].clone())
        try:
            found = self.model(input_ids=self.ids, return_dict=True).logits
        finally:
            handle.remove()
        if isinstance(found, Tensor) and found.shape == logits.shape:
            config = self.model.config.get_text_config()
            if _is_close(found, logits):
                return None, 1.0
            for name in _SOFTCAPS:
                cap = getattr(config, name, None)
                if cap and _is_close(found, cap * torch.tanh(logits / cap)):
                    return float(cap), 1.0
            scale = float(found[0, 0, -1]) / float(logits[0, 0, -1])
            if _is_close(found, logits * scale):
                return None, scale
        raise _unsupported("leave the logits of its head, or scale or softcap them", f"{self.name}, which does not")


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same to the rounding of their dtypes."""
    tolerance = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps) ** 0.5
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """A block in which the model drops nothing at random, and no gradient is recorded."""
    modes = {each: each.training for each in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each, training in modes.items():
            each.training = training
