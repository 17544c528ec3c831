"""The digits: 1,797 images of 8 × 8, which scikit-learn carries (``pip install 'maskwise[examples]'``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Digits", "load", "missing"]


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
