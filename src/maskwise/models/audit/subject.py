"""The model under audit: a copy of it, run again and again from the same state, so that the model itself keeps its."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from maskwise.errors import ArgumentError, say
from maskwise.models.audit.batch import Batch
from maskwise.models.audit.positions import Positions
from maskwise.models.compress.example import tensors_of
from maskwise.models.compress.surgery import clone_model, without_nested_tensors

__all__ = ["Loss", "Mode", "Result", "Subject", "preserved", "same_random_state"]

OP = "audit"
Loss: TypeAlias = Callable[..., Tensor]
"""``loss(output, batch)``, or ``loss(output, batch, denominator)`` for one that takes a window of `mw.accumulate`."""
SEED = 2_718
Mode: TypeAlias = bool | Literal["norms"]
"""Training or not; or batch norms in training and the rest not, so that no dropout hides what they do."""


@dataclass(frozen=True)
class Result:
    """One run: what must not depend on what is dropped."""

    #: The compared positions of each output, in every reading of its dims.
    outputs: list[list[Tensor]]
    loss: Tensor | None
    #: By the name of the parameter.
    gradients: dict[str, Tensor]


class Subject:
    """A model to run in both modes, from the same parameters, buffers and random numbers each time."""

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self.model = model
        self._loss = loss
        # Attributes, which a forward may set, and buffers, which it may replace.
        self._attributes = {module: (dict(vars(module)), dict(module._buffers)) for module in model.modules()}
        self._buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        self._is_changed = False
        #: Whether a run had something that must not depend on what is dropped.
        self.is_compared = False
        self._gradients = {parameter: parameter.grad for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.grad = None

    @property
    def takes_denominator(self) -> bool:
        """Whether the loss takes a window."""
        return self._loss is not None and "denominator" in inspect.signature(self._loss).parameters

    def of(self, model: nn.Module) -> Subject:
        """Another model with the same loss."""
        return Subject(model, self._loss)

    @property
    def has_batch_norms(self) -> bool:
        """Whether a module has statistics of its batch."""
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules())

    @property
    def stride(self) -> int:
        """How many positions of the input make one of the output, by the strides of convolutions over time."""
        found = 1
        for module in self.model.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d):
                found *= int(module.stride[0])
        return found

    def prepare(self, training: Mode) -> None:
        """The mode, the buffers as they were, and the seed of every run."""
        self.model.train(training is True)
        if training == "norms":
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.train()
        if self._is_changed:
            self._restore_buffers()
        # Statistics change in training alone; a sparse layer's indices are buffers, and slow to copy.
        self._is_changed = training is not False
        torch.manual_seed(SEED)

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        for name, buffer in self.model.named_buffers():
            saved = self._buffers.get(name)
            if saved is not None and buffer.shape == saved.shape and not torch.equal(buffer, saved):
                buffer.copy_(saved)

    def forward(self, batch: Batch, *, training: Mode, grad: bool = False) -> Any:
        """The output of a call."""
        self.prepare(training)
        with nullcontext() if grad else torch.no_grad(), without_nested_tensors(self.model):
            return batch.call(self.model)

    def loss_of(self, output: Any, batch: Batch, denominator: Any = None) -> Tensor | None:
        """The loss of a call: the one that was passed, or the output's own; None where there is neither."""
        found: Any
        if self._loss is not None:
            named = {"denominator": denominator} if self.takes_denominator else {}
            found = self._loss(output, batch.as_passed(), **named)
        elif isinstance(output, Mapping):
            found = output.get("loss")
        else:
            # A model may return its loss alone, or first.
            first = output[0] if isinstance(output, tuple) and output else output
            found = getattr(output, "loss", first if _is_loss(first) else None)
        if found is None:
            return None
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            hint = "loss=lambda output, batch: F.cross_entropy(output, batch['labels'])"
            raise ArgumentError(say(OP, "loss", must="give a tensor of one element", got=got, hint=hint))
        return found.reshape(())

    def run(self, batch: Batch, positions: Positions, *, training: Mode, grad: bool) -> Result:
        """A call, and its gradients if they are wanted."""
        handles = [module.register_forward_hook(_follow(positions)) for module in self.model.modules()]
        try:
            output = self.forward(batch, training=training, grad=grad)
        finally:
            for handle in handles:
                handle.remove()
        tensors = [each for each in tensors_of(output) if each.numel() != 1 or each.dim()]
        rows = [positions.rows(each) for each in tensors]
        loss = self.loss_of(output, batch)
        self.is_compared = self.is_compared or loss is not None or any(rows)
        gradients: dict[str, Tensor] = {}
        if grad:
            gradients = self.differentiate(self.objective(tensors, positions) if loss is None else loss)
        return Result(
            [[each.detach() for each in found] for found in rows], None if loss is None else loss.detach(), gradients
        )

    def objective(self, tensors: list[Tensor], positions: Positions) -> Tensor | None:
        """A value of what is compared, each element with a weight of its own: it has the gradients of a loss."""
        total = None
        for x in tensors:
            if not x.is_floating_point() or not x.requires_grad:
                continue
            for rows in positions.readings(x)[:1]:
                generator = torch.Generator().manual_seed(SEED)
                weights = torch.randn(rows.shape, generator=generator).to(rows.device, rows.dtype)
                value = (rows * weights).sum() / max(rows.numel(), 1) ** 0.5
                total = value if total is None else total + value
        return total

    def differentiate(self, value: Tensor | None) -> dict[str, Tensor]:
        """The gradients of all parameters that the value depends on."""
        if value is None or not value.requires_grad:
            return {}
        named = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
        found = torch.autograd.grad(value, [each for _, each in named], allow_unused=True)
        return {name: grad.detach() for (name, _), grad in zip(named, found, strict=True) if grad is not None}

    def restore(self) -> None:
        """Everything as it was before, for a model that could not be copied."""
        for module, (attributes, buffers) in self._attributes.items():
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        self._restore_buffers()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim() and value.is_floating_point()


def _follow(positions: Positions) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        positions.through(module, args[0] if args else None, output)

    return hook


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restores every random number generator after the block: also one that a DataLoader seeds its workers from."""
    python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)


@contextmanager
def preserved(model: nn.Module, loss: Loss | None) -> Iterator[Subject]:
    """A subject that leaves no trace on the model, nor on any random number generator, also where it fails.

    What `torch.compile` made runs eagerly: compiled code calls no hooks.
    """
    with same_random_state(), torch.compiler.set_stance("force_eager"):
        try:
            subject, is_copy = Subject(clone_model(model), loss), True
        except Exception:
            # Some models cannot be copied; their state is put back instead.
            subject, is_copy = Subject(model, loss), False
        try:
            yield subject
        finally:
            if not is_copy:
                subject.restore()
