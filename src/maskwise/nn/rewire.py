"""Sparse training: every few steps, the smallest weights are exchanged for others. RigL and SET."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.distributed.group import Group, all_reduce, broadcast, process_group, size
from maskwise.errors import ArgumentError, say
from maskwise.nn.sparse_linear import SparseLinear
from maskwise.nn.topology import fingerprint

__all__ = ["SET", "Rewire", "RigL"]


class Rewire:
    """What RigL and SET share, their arguments too: when, how many, and which go. Which come is their own."""

    def __init__(
        self,
        model: nn.Module | Iterable[SparseLinear],
        optimizer: torch.optim.Optimizer,
        *,
        fraction: float = 0.3,
        every: int = 100,
        until: int = 10_000,
        group: Group = None,
    ) -> None:
        op = type(self).__name__
        found = model.modules() if isinstance(model, nn.Module) else model
        self.layers = [layer for layer in found if isinstance(layer, SparseLinear)]
        if not self.layers:
            hint = "mw.nn.SparseLinear.from_linear(linear, mask)"
            raise ArgumentError(say(op, "model", must="hold a SparseLinear", got="none", hint=hint))
        if not 0.0 < fraction <= 1.0:
            raise ArgumentError(say(op, "fraction", must="be above 0 and at most 1", got=fraction, hint="fraction=0.3"))
        if every < 1 or until < 1:
            name, got = ("every", every) if every < 1 else ("until", until)
            raise ArgumentError(
                say(op, name, must="be at least 1", got=got, hint=f"{name}={100 if name == 'every' else 10_000}")
            )
        self.optimizer, self.fraction, self.every, self.until = optimizer, fraction, every, until
        self.group = process_group(op, group)
        self.steps = 0

    @property
    def current_fraction(self) -> float:
        """The share that an exchange after the coming step would move."""
        done = min(1.0, (self.steps + 1) / self.until)
        return 0.5 * self.fraction * (1.0 + math.cos(math.pi * done))

    @property
    def is_due(self) -> bool:
        """Whether the coming step ends with an exchange."""
        return (self.steps + 1) % self.every == 0 and self.steps + 1 < self.until

    def step(self) -> bool:
        """Count one step of training, and exchange weights if that is due; returns whether it was.

        Raises:
            ArgumentError: on all ranks, where a layer's weights live at other places on some of them.
        """
        due, fraction = self.is_due, self.current_fraction
        if due:
            self._check_ranks()
            for layer in self.layers:
                layer._exchange(fraction, self.optimizer, self.scores(layer), self.group)
        self.steps += 1
        return due

    def _check_ranks(self) -> None:
        """Raise, on every rank, where they do not hold the same weights: an exchange would never end."""
        if size(self.group) == 1:
            return
        marks = [mark for layer in self.layers for mark in _marks(layer)]
        found = torch.tensor(marks, device=self.layers[0].columns.device)
        is_same = (broadcast(found, self.group) == found).all()
        same = all_reduce(is_same.long(), self.group)
        if int(same) < size(self.group):
            must = "have weights at the same places on all ranks"
            hint = "the same torch.manual_seed before the layers are made, or load_state_dict"
            raise ArgumentError(say(type(self).__name__, "model", must=must, got="other places on some", hint=hint))

    def scores(self, layer: SparseLinear) -> Tensor | None:
        """The scores by which weights of the layer grow, the same on all ranks, or None for a random choice."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on later needs: the topology is in the model's own state_dict."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.steps = int(state["steps"])


def _marks(layer: SparseLinear) -> tuple[int, ...]:
    return fingerprint({"row_starts": layer.row_starts, "columns": layer.columns}) or (0, 0)


class SET(Rewire):
    """Sparse evolutionary training: the smallest weights are dropped, as many others grow at random.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.SparseLinear(20, 10, density=0.1)
    >>> optimizer = torch.optim.Adam(layer.parameters())
    >>> rewire = mw.nn.SET(layer, optimizer, every=2, until=100)
    >>> for _ in range(4):
    ...     layer(torch.randn(8, 20)).square().sum().backward()
    ...     optimizer.step(), optimizer.zero_grad(), rewire.step()
    (None, None, False)
    (None, None, True)
    (None, None, False)
    (None, None, True)
    >>> layer.density
    0.1

    Call `step` after each ``optimizer.step()``.

    Args:
        model: a module, of which every SparseLinear is rewired, or the layers themselves.
        optimizer: the one that trains them; its state follows the weights.
        fraction: the share of live weights that is exchanged the first time; it falls along a cosine.
        every: the number of steps between exchanges.
        until: the step after which nothing is exchanged any more.
        group: the ranks that train one model, a process group or a device mesh of one dim; by default all. They
            exchange the same weights: under DistributedDataParallel and ``fully_shard``, all must call `step`.

    Raises:
        ArgumentError: there is no SparseLinear, a number is out of range, or this process is not in the group.
        DtypeError: ``group`` is no process group.
    """


class RigL(Rewire):
    """Rigging the lottery: the smallest weights are dropped, and those with the largest gradient grow.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.SparseLinear(20, 10, density=0.1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    >>> rewire = mw.nn.RigL(layer, optimizer, every=1, until=100)
    >>> layer(torch.randn(8, 20)).square().sum().backward()
    >>> optimizer.step(); rewire.step()
    True

    The gradient of all weights, living or not, is computed only in steps that end with an exchange; `close`
    removes the hooks that do this. Call `step` after each ``optimizer.step()``.

    Args:
        model: a module, of which every SparseLinear is rewired, or the layers themselves.
        optimizer: the one that trains them; its state follows the weights.
        fraction: the share of live weights that is exchanged the first time; it falls along a cosine.
        every: the number of steps between exchanges.
        until: the step after which nothing is exchanged any more.
        group: the ranks that train one model, a process group or a device mesh of one dim; by default all. They
            exchange the same weights: under DistributedDataParallel and ``fully_shard``, all must call `step`.

    Raises:
        ArgumentError: there is no SparseLinear, a number is out of range, or this process is not in the group.
        DtypeError: ``group`` is no process group.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[SparseLinear],
        optimizer: torch.optim.Optimizer,
        *,
        fraction: float = 0.3,
        every: int = 100,
        until: int = 10_000,
        group: Group = None,
    ) -> None:
        super().__init__(model, optimizer, fraction=fraction, every=every, until=until, group=group)
        self._gradients: dict[SparseLinear, Tensor] = {}
        self._hooks = [layer.register_forward_hook(self._watch) for layer in self.layers]

    def _watch(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not self.is_due or not output.requires_grad:
            return
        assert isinstance(layer, SparseLinear)
        x = inputs[0].detach().reshape(-1, layer.in_features)

        def add(grad: Tensor) -> None:
            dense = grad.detach().reshape(-1, layer.out_features).mT @ x.to(grad.dtype)
            before = self._gradients.get(layer)
            self._gradients[layer] = dense if before is None else before + dense

        output.register_hook(add)  # type: ignore[no-untyped-call]

    def scores(self, layer: SparseLinear) -> Tensor | None:
        """The gradient of all weights of the layer, summed over ranks; None where there was no backward pass."""
        found = self._gradients.pop(layer, None)
        if size(self.group) == 1:
            return found
        here = torch.zeros(layer.out_features * layer.in_features + 1, device=layer.columns.device)
        if found is not None:
            here[:-1], here[-1] = found.reshape(-1), 1.0
        total = all_reduce(here, self.group)
        return total[:-1].reshape(layer.out_features, layer.in_features) if total[-1] else None

    def close(self) -> None:
        """Take the hooks off the layers."""
        for hook in self._hooks:
            hook.remove()
