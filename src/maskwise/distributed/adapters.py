"""Windows in other people's training loops. Nothing of them is imported: they are met by what they call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from maskwise.distributed.accumulate import Window
from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.ops.loss import loss

__all__ = ["LightningMixin", "trainer_loss"]


def trainer_loss(
    fn: Callable[..., Tensor] = F.cross_entropy, *, shift: bool = False, ignore_index: int = -100, **kwargs: Any
) -> Callable[..., Tensor]:
    """A ``compute_loss_func`` for Hugging Face's Trainer: the mean over the labels of all micro-batches and ranks.

    The Trainer counts labels over micro-batches and, with ``average_tokens_across_devices``, over ranks, and passes the
    count as ``num_items_in_batch``. It also undoes the division of DistributedDataParallel.

    >>> import torch, maskwise as mw
    >>> from types import SimpleNamespace
    >>> compute = mw.distributed.trainer_loss(shift=True)           # Trainer(..., compute_loss_func=compute)
    >>> outputs = SimpleNamespace(logits=torch.zeros(1, 3, 4))      # as a model returns them
    >>> compute(outputs, torch.tensor([[1, 2, -100]]), num_items_in_batch=torch.tensor(5))
    tensor(0.2773)

    Args:
        fn: the loss, called as by `mw.loss`, on logits (tokens, classes) and labels (tokens,).
        shift: whether position i predicts label i + 1, as for ...ForCausalLM. The Trainer counts accordingly.
        ignore_index: the label that is not kept. The Trainer counts those that are not -100.
        **kwargs: go to ``fn``, such as ``label_smoothing``.

    Returns:
        ``compute(outputs, labels, num_items_in_batch=None)``. Without a count, it is the mean of its call.

    Raises:
        DtypeError: ``fn`` is not a function. When it is called: there are no labels.
    """
    if not callable(fn):
        hint = "trainer_loss(F.cross_entropy)"
        raise DtypeError(say("trainer_loss", "fn", must="be a function", got=type(fn).__name__, hint=hint))

    def compute(outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        if not isinstance(labels, Tensor):
            hint = 'batches with the key "labels"'
            raise DtypeError(say("trainer_loss", "labels", must="be a tensor", got=type(labels).__name__, hint=hint))
        if shift:
            # The labels move, not the logits, which are far larger.
            labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        # As rows, since of logits (N, L, C) with C = L the classes could be either dim.
        rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        return loss(fn, rows, targets, targets != ignore_index, denominator=num_items_in_batch, **kwargs)

    return compute


class LightningMixin:
    """Mixin for a LightningModule that trains on windows of micro-batches instead of single batches.

    The module derives from it and from LightningModule, in this order, and has ``micro_step(batch, window)`` in the
    place of ``training_step``. Its dataloader is a `Windows`, so that a step of the Trainer is a window, and
    ``accumulate_grad_batches`` stays 1.

    >>> import torch, torch.nn.functional as F, maskwise as mw
    >>> class Model(mw.distributed.LightningMixin):                 # and lightning.LightningModule
    ...     def micro_step(self, batch, window):
    ...         x, y, mask = batch
    ...         return mw.loss(F.mse_loss, self.net(x), y, mask, denominator=window)
    ...     def train_dataloader(self):
    ...         return mw.distributed.Windows(self.loader, 4, lambda batch: batch[2])

    Gradients are synchronised in the last micro-batch of a window alone. ``train_loss`` is logged: the value that was
    optimised, over all ranks. Schedulers are stepped by the module, as always without automatic optimization.

    Attributes:
        max_norm: the norm that gradients are clipped to, after the window, or None.
    """

    automatic_optimization = False
    max_norm: float | None = None

    def micro_step(self, batch: Any, window: Window) -> Tensor:
        """The loss of a micro-batch, scaled by its window. The module defines it.

        >>> import maskwise as mw
        >>> mw.distributed.LightningMixin().micro_step(None, mw.accumulate([1]))
        Traceback (most recent call last):
        ...
        maskwise.errors.ArgumentError: LightningMixin: `micro_step` must be defined by the module, got none. ...

        Args:
            batch: what the loader yields, on the module's device.
            window: for ``denominator=``.

        Raises:
            ArgumentError: the module does not define it.
        """
        hint = "def micro_step(self, batch, window): return mw.loss(..., denominator=window)"
        raise ArgumentError(say("LightningMixin", "micro_step", must="be defined by the module", got="none", hint=hint))

    def training_step(self, batch: tuple[Window, list[Any]], batch_idx: int) -> None:
        """A window of micro-batches, and a step of the optimizer: called by Lightning's Trainer.

        Args:
            batch: an element of `Windows`.
            batch_idx: the number of the window.
        """
        module: Any = self
        window, batches = batch
        optimizer = module.optimizers()
        optimizer.zero_grad()
        # A strategy of a single device has nothing to block.
        blocked = getattr(module.trainer.strategy, "block_backward_sync", nullcontext)
        with window:
            for index, each in enumerate(batches):
                with nullcontext() if index == len(batches) - 1 else blocked():
                    module.manual_backward(self.micro_step(each, window))
        if self.max_norm is not None:
            module.clip_gradients(optimizer, gradient_clip_val=self.max_norm, gradient_clip_algorithm="norm")
        optimizer.step()
        module.log("train_loss", window.value().float(), prog_bar=True)
