"""One training run: a network, a recipe, and what happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from maskwise.cli.digits.data import Digits
from maskwise.cli.digits.recipes import Recipe, weights

__all__ = ["Run", "train"]

BATCH = 64


@dataclass(frozen=True)
class Run:
    """What a recipe led to: (step, density, accuracy) along the way, and at the end."""

    name: str
    history: tuple[tuple[int, float, float], ...]

    @property
    def density(self) -> float:
        """The share of weights that are not 0 at the end."""
        return self.history[-1][1]

    @property
    def accuracy(self) -> float:
        """The share of test images that are recognised at the end."""
        return self.history[-1][2]


def train(recipe: Recipe, digits: Digits, steps: int, hidden: int, on_step: Callable[[], None]) -> Run:
    """Train a network of two hidden layers by a recipe, from the same start as all others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    plan = recipe(model, steps)
    gates = [parameter for name, parameter in model.named_parameters() if name.endswith("logits")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("logits")]
    # Gates start far from where they go, and have the same steps to get there.
    groups = [{"params": others, "lr": 2e-3}, *([{"params": gates, "lr": 2e-2}] if gates else [])]
    optimizer = torch.optim.Adam(groups)
    plan.begin(optimizer)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    history = [measure(model, digits, 0)]
    for step in range(1, steps + 1):
        batch = torch.randint(len(digits.train_y), (BATCH,))
        loss = F.cross_entropy(model(digits.train_x[batch]), digits.train_y[batch]) + plan.loss()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        decay.step()
        plan.after(step)
        if step % max(1, steps // 40) == 0 or step == steps:
            history.append(measure(model, digits, step))
        on_step()
    return Run(recipe.name, tuple(history))


@torch.no_grad()
def measure(model: nn.Module, digits: Digits, step: int) -> tuple[int, float, float]:
    """The step, the share of weights that are not 0, and the accuracy on the test images."""
    model.eval()
    layers = weights(model)
    density = sum(int((weight != 0).sum()) for weight in layers) / sum(weight.numel() for weight in layers)
    accuracy = (model(digits.test_x).argmax(-1) == digits.test_y).float().mean().item()
    model.train()
    return step, density, accuracy
