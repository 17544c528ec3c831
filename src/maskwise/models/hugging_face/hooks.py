"""The hooks that pack a call at the model's door and unpack what comes out.

Hooks, and not a new ``forward``: the model's signature stays what tokenizers, trainers and SentenceTransformer look at.
Each is a plain object that names its module by nothing, so that it is copied and pickled along with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.hugging_face.frames import Frame, enter, leave, packing_of, running
from maskwise.models.hugging_face.inputs import arguments, pack_arguments, padded_reason
from maskwise.models.packing import Packing
from maskwise.models.report import tell

__all__ = ["add_hooks", "remove_hooks"]

IGNORED = -100
"""The label that every loss of transformers skips."""


@dataclass(frozen=True)
class Enter:
    """Before the base model: pack its inputs, if this call can run packed."""

    implementation: str
    causal: bool
    embeddings: str | None
    watches_first: bool
    """Whether a dropped first token, which heads read all the same, comes out packed as it does padded."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of the packed call, or None for those that came."""
        named = arguments(module, args, kwargs)
        outer = running()
        if outer is not None and outer.padded is not None:
            reason: str | None = outer.padded
        elif module.config._attn_implementation != self.implementation:
            reason = "the attention implementation was changed after unpad (repad and unpad again)"
        else:
            reason = padded_reason(module, named, causal=self.causal, first_kept=not self.watches_first)
        tokens = named.get("input_ids")
        if tokens is None:
            tokens = named.get("inputs_embeds")
        if isinstance(tokens, Tensor):
            tell(module, tokens, named.get("attention_mask"), reason)
        if reason is not None:
            enter(Frame(module))
            return None
        packing = Packing.of(named["attention_mask"] != 0, watch_first=not self.causal)
        packed = pack_arguments(module, named, packing, self.embeddings)
        enter(Frame(module, packing))
        return (), packed


@dataclass(frozen=True)
class Leave:
    """After the base model, whether it returned or raised: unpack every tensor that is laid out by token."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The output in the padded layout."""
        frame = leave(module)
        if frame is None or frame.packing is None or output is None:
            return None
        return unpacked(output, frame.packing)


@dataclass(frozen=True)
class UnpackEarly:
    """After the encoder of a model with a pooler: what reads the first token must find each row's."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The encoder's output in the padded layout."""
        packing = packing_of()
        return None if packing is None else unpacked(output, packing)


def unpacked(output: Any, packing: Packing) -> Any:
    """The output with each (1, N, D) in it as (B, L, D)."""
    if isinstance(output, Tensor):
        by_token = output.dim() == 3 and output.shape[:2] == (1, packing.tokens)
        return packing.unpack(output[0]) if by_token else output
    if isinstance(output, tuple):
        return tuple(unpacked(each, packing) for each in output)
    if isinstance(output, dict):
        for name in list(output):
            output[name] = unpacked(output[name], packing)
    return output


@dataclass(frozen=True)
class EnterHead:
    """Before a model with a head: a loss that reads padded positions must find there what it always found."""

    causal: bool

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the base model to run padded, where the loss says so."""
        enter(Frame(module, padded=self._reason(arguments(module, args, kwargs))))

    def _reason(self, named: dict[str, Any]) -> str | None:
        if named.get("start_positions") is not None:
            return "the loss of question answering reads the logits of every position"
        mask, labels = named.get("attention_mask"), named.get("labels")
        if not isinstance(mask, Tensor) or not isinstance(labels, Tensor) or labels.shape != mask.shape:
            return None
        counted, dropped = labels != IGNORED, mask == 0
        if self.causal:
            # A label is predicted from the token before it.
            counted, dropped = counted[:, 1:], dropped[:, :-1]
        if bool(torch.any(counted & dropped)):
            return f"the labels count padded positions ({IGNORED} there runs packed)"
        return None


@dataclass(frozen=True)
class LeaveHead:
    """After a model with a head."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget the call."""
        leave(module)


def add_hooks(model: nn.Module, base: Any, enter_base: Enter) -> None:
    """Add every hook that the model needs."""
    base.register_forward_pre_hook(enter_base, with_kwargs=True)
    # First of all, so that hooks which users have added before see the padded layout.
    base.register_forward_hook(Leave(), prepend=True, always_call=True)
    if getattr(base, "pooler", None) is not None and isinstance(getattr(base, "encoder", None), nn.Module):
        base.encoder.register_forward_hook(UnpackEarly(), prepend=True)
    if model is not base:
        model.register_forward_pre_hook(EnterHead(enter_base.causal), with_kwargs=True)
        model.register_forward_hook(LeaveHead(), prepend=True, always_call=True)


def remove_hooks(model: nn.Module) -> None:
    """Remove them from the model and everything in it."""
    ours = (Enter, Leave, UnpackEarly, EnterHead, LeaveHead)
    for module in model.modules():
        before, after = module._forward_pre_hooks, module._forward_hooks
        for hooks in (before, after):
            for key in [key for key, hook in hooks.items() if isinstance(hook, ours)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
