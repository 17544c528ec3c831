"""The digits (1,797 images of 8 × 8, from scikit-learn), and one training run: a network, a recipe, and its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from digits.recipes import Recipe, weights

__all__ = ["Digits", "Run", "load", "missing", "train"]

BATCH = 64


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 values from 0 to 1, with their labels, in three parts that share none.

    Weights are learned from the first. What the recipes leave to choose (how strong a penalty, which layer keeps how
    much) was chosen by the second, which is therefore no measure of them. The third was never looked at for a choice.
    """

    train_x: Tensor  # (987, 64)
    train_y: Tensor  # (987,)
    validation_x: Tensor  # (450, 64)
    validation_y: Tensor  # (450,)
    test_x: Tensor  # (360, 64)
    test_y: Tensor  # (360,)


def missing() -> str | None:
    """What is needed and not installed, or None."""
    try:
        import sklearn.datasets  # noqa: F401
    except ImportError:
        return "Training on digits needs scikit-learn. Hint: pip install 'maskwise[examples]'."
    return None


def load() -> Digits:
    """The digits, shuffled the same way every time."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).div(16.0)[order]
    y = torch.tensor(labels, dtype=torch.int64)[order]
    return Digits(x[810:], y[810:], x[:450], y[:450], x[450:810], y[450:810])


@dataclass(frozen=True)
class Run:
    """What a recipe led to.

    Attributes:
        name: of the recipe.
        history: (step, density, accuracy on the validation images) along the way.
        accuracy: the share of test images that are recognised; they are looked at once, at the end.
    """

    name: str
    history: tuple[tuple[int, float, float], ...]
    accuracy: float

    @property
    def density(self) -> float:
        """The share of weights that are not 0 at the end."""
        return self.history[-1][1]

    @property
    def validation(self) -> float:
        """The share of validation images that are recognised at the end."""
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
    return Run(recipe.name, tuple(history), accuracy(model, digits.test_x, digits.test_y))


@torch.no_grad()
def measure(model: nn.Module, digits: Digits, step: int) -> tuple[int, float, float]:
    """The step, the share of weights that are not 0, and the accuracy on the validation images."""
    found = accuracy(model, digits.validation_x, digits.validation_y)
    model.eval()
    layers = weights(model)
    density = sum(int((weight != 0).sum()) for weight in layers) / sum(weight.numel() for weight in layers)
    model.train()
    return step, density, found


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that are recognised, in evaluation."""
    model.eval()
    share: float = (model(images).argmax(-1) == labels).float().mean().item()
    model.train()
    return share
