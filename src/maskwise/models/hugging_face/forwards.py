"""The forwards that stand before a model's own: pack a call at its door, and unpack what comes out.

Not hooks, because SentenceTransformer calls ``model.forward`` itself; and with the signature of the model's own, which
tokenizers and trainers look at. They are plain objects, copied and pickled along with their module.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.models.hugging_face.frames import Frame, enter, leave, packing_of, running
from maskwise.models.hugging_face.inputs import arguments, pack_arguments, padded_reason
from maskwise.models.packing import Packing
from maskwise.models.report import tell

__all__ = ["Settings", "cover", "uncover"]

IGNORED = -100
"""The label that every loss of transformers skips."""


@dataclass(frozen=True)
class Settings:
    """What is known of a model when it is unpadded."""

    implementation: str
    causal: bool
    embeddings: str | None
    watches_first: bool
    """Whether a dropped first token, which heads read all the same, comes out packed as it does padded."""


class Forward:
    """A forward that covers a module's own, or one that something else (a device map, say) has put there before."""

    __name__ = "forward"

    def __init__(self, module: Any, settings: Settings) -> None:
        self.module, self.settings = module, settings
        self.covered = vars(module).get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def original(self) -> Any:
        """What is covered."""
        return self.covered if self.covered is not None else type(self.module).forward.__get__(self.module)


class BaseForward(Forward):
    """Of the model without its head: packs, if the call can run packed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, in the padded layout."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        module = self.module
        named = arguments(module, args, kwargs)
        reason = self._padded(named)
        tokens = named.get("input_ids")
        if tokens is None:
            tokens = named.get("inputs_embeds")
        if isinstance(tokens, Tensor):
            tell(module, tokens, named.get("attention_mask"), reason)
        packing = None
        if reason is None:
            packing = Packing.of(named["attention_mask"] != 0, watch_first=not self.settings.causal)
            args, kwargs = (), pack_arguments(module, named, packing, self.settings.embeddings)
        enter(Frame(module, packing))
        try:
            output = self.original(*args, **kwargs)
        finally:
            leave(module)
        return output if packing is None else unpacked(output, packing)

    def _padded(self, named: dict[str, Any]) -> str | None:
        outer = running()
        if outer is not None and outer.padded is not None:
            return outer.padded
        if self.module.config._attn_implementation != self.settings.implementation:
            return "the attention implementation was changed after unpad (repad and unpad again)"
        return padded_reason(
            self.module, named, causal=self.settings.causal, first_kept=not self.settings.watches_first
        )


class HeadForward(Forward):
    """Of a model with a head: a loss that reads padded positions must find there what it always found."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives; the base model runs padded where the loss says so."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        enter(Frame(self.module, padded=self._reason(arguments(self.module, args, kwargs))))
        try:
            return self.original(*args, **kwargs)
        finally:
            leave(self.module)

    def _reason(self, named: dict[str, Any]) -> str | None:
        if named.get("start_positions") is not None:
            return "the loss of question answering reads the logits of every position"
        mask, labels = named.get("attention_mask"), named.get("labels")
        if not isinstance(mask, Tensor) or not isinstance(labels, Tensor) or labels.shape != mask.shape:
            return None
        counted, dropped = labels != IGNORED, mask == 0
        if self.settings.causal:
            # A label is predicted from the token before it.
            counted, dropped = counted[:, 1:], dropped[:, :-1]
        if bool(torch.any(counted & dropped)):
            return f"the labels count padded positions ({IGNORED} there runs packed)"
        return None


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


def cover(model: Any, base: Any, settings: Settings) -> None:
    """Cover the forwards of a model and of what it has without its head."""
    base.forward = BaseForward(base, settings)
    if getattr(base, "pooler", None) is not None and isinstance(getattr(base, "encoder", None), nn.Module):
        base.encoder.register_forward_hook(UnpackEarly(), prepend=True)
    if model is not base:
        model.forward = HeadForward(model, settings)


def uncover(model: nn.Module) -> None:
    """Take them away, from the model and everything in it."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Forward):
            del module.forward
            if forward.covered is not None:
                module.forward = forward.covered
        for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, UnpackEarly)]:
            del module._forward_hooks[key]
