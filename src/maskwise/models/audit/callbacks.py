"""Callbacks that log how many tokens of a training run are useful, and its first leak. No framework is imported."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from maskwise.errors import DtypeError, MaskwiseError, say
from maskwise.models.audit.batch import Batch, find_tokens
from maskwise.models.audit.leaks import Leak, find_leaks
from maskwise.models.audit.subject import preserved

__all__ = ["LightningAudit", "TrainerAudit"]

PREFIX = "maskwise/"


class _Meter:
    """Counts tokens and those that are kept, from the arguments of the model's calls."""

    def __init__(self, check_leaks: bool) -> None:
        self.check_leaks = check_leaks
        #: The first leak of the first batch that drops something; None before, and where there is none.
        self.leak: Leak | None = None
        self._tokens = self._kept = 0
        self._since = time.perf_counter()
        self._handle: Any = None
        self._is_checked = not check_leaks

    def attach(self, model: nn.Module) -> None:
        self.detach()
        self._since = time.perf_counter()
        self._handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not module.training:
            return
        try:
            batch = Batch.of(module, {**dict(kwargs)} if not args else (*args, *kwargs.values()))
            tokens = find_tokens(batch, None)
        except MaskwiseError:
            return
        for each in tokens[:1]:
            self._tokens += each.keep.numel()
            self._kept += int(each.keep.sum())
        if not self._is_checked and any(not bool(each.keep.all()) or each.segments is not None for each in tokens):
            self._is_checked = True
            self._test(module, batch)

    def _test(self, module: nn.Module, batch: Batch) -> None:
        handle, self._handle = self._handle, None
        hooks = module._forward_pre_hooks.pop(handle.id, None)
        try:
            with torch.enable_grad(), preserved(module, None) as subject:
                found = find_leaks(subject, batch, find_tokens(batch, None))
        finally:
            if hooks is not None:
                module._forward_pre_hooks[handle.id] = hooks
            self._handle = handle
        self.leak = next((leak for leak in found if not leak.only_nan), None)

    def take(self) -> dict[str, float]:
        """What was counted since the last time, per second; empty where nothing was."""
        now = time.perf_counter()
        seconds, self._since = max(now - self._since, 1e-9), now
        if not self._tokens:
            return {}
        found = {
            f"{PREFIX}tokens_per_second": self._tokens / seconds,
            f"{PREFIX}useful_tokens_per_second": self._kept / seconds,
            f"{PREFIX}padding": 1.0 - self._kept / self._tokens,
        }
        if self.check_leaks and self._is_checked:
            found[f"{PREFIX}leaks"] = float(self.leak is not None)
        self._tokens = self._kept = 0
        return found


class _Silent:
    """Every event that a framework calls and a callback does not use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "teardown"):
            return lambda *args, **kwargs: None
        raise AttributeError(
            f"{type(self).__name__}: there is no attribute {name!r}. Hint: an event, such as on_log, or leak."
        )


class TrainerAudit(_Silent):
    """A callback for Hugging Face's Trainer that logs useful tokens per second, padding, and the first leak.

    >>> import maskwise as mw
    >>> callback = mw.models.TrainerAudit()              # Trainer(..., callbacks=[callback])
    >>> callback.leak is None
    True

    With every log of the Trainer come ``maskwise/tokens_per_second``, ``maskwise/useful_tokens_per_second``,
    ``maskwise/padding``, the share of positions that is padding, and ``maskwise/leaks``, 1 if kept positions depend on
    dropped ones. The first batch with padding is tested, on a copy of the model; ``callback.leak`` has the `Leak`.

    The Trainer calls its reporters (TensorBoard, Weights & Biases, ...) before the callbacks of a user, so they do not
    see these values; ``TrainerAudit().attach(trainer)`` puts the callback before them.

    Args:
        check_leaks: whether to test the model.
    """

    def __init__(self, *, check_leaks: bool = True) -> None:
        self._meter = _Meter(check_leaks)

    @property
    def leak(self) -> Leak | None:
        """The first leak, or None."""
        return self._meter.leak

    def attach(self, trainer: Any) -> Self:
        """Add it to a Trainer, before its reporters.

        Args:
            trainer: a ``transformers.Trainer``.

        Returns:
            The callback.

        Raises:
            DtypeError: ``trainer`` has no callbacks.
        """
        handler = getattr(trainer, "callback_handler", None)
        if handler is None:
            must, hint = "be a transformers.Trainer", "LightningAudit for Lightning"
            raise DtypeError(say("TrainerAudit", "trainer", must=must, got=type(trainer).__name__, hint=hint))
        handler.callbacks = [self, *(each for each in handler.callbacks if each is not self)]
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Count the tokens of the model's calls from here on."""
        self._meter.attach(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add what was counted to the logs, and to the history, whose entry is a copy made before."""
        found = {} if logs is None else self._meter.take()
        if logs is not None:
            logs.update(found)
        if history := getattr(state, "log_history", None):
            history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop counting."""
        self._meter.detach()


class LightningAudit(_Silent):
    """The same for Lightning: a callback that logs useful tokens per second, padding, and the first leak.

    >>> import maskwise as mw
    >>> callback = mw.models.LightningAudit(lambda module: module.model)    # lightning.Trainer(callbacks=[callback])
    >>> callback.leak is None
    True

    Args:
        model: the module whose calls have a mask, from the LightningModule; itself by default.
        every: log every so many batches.
        check_leaks: whether to test the model.
    """

    state_key = "maskwise.LightningAudit"

    def __init__(self, model: Any = None, *, every: int = 10, check_leaks: bool = True) -> None:
        self._meter, self._model, self._every = _Meter(check_leaks), model, every

    @property
    def leak(self) -> Leak | None:
        """The first leak, or None."""
        return self._meter.leak

    @property
    def _legacy_state_key(self) -> type[LightningAudit]:
        """Lightning looks for the state of old checkpoints by it, whenever it resumes."""
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is loaded."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the tokens of the model's calls from here on."""
        self._meter.attach(pl_module if self._model is None else self._model(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what was counted."""
        if (batch_idx + 1) % self._every == 0:
            for name, value in self._meter.take().items():
                pl_module.log(name, value)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop counting."""
        self._meter.detach()
