"""Prune a network to 5 % of its weights during training, and compress it.

    pip install 'maskwise[examples]'
    python examples/pruned_mlp.py

The digits are scikit-learn's. A cubic schedule lowers the density; `mw.compress` then replaces every layer by the
fastest equivalent on this machine.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import maskwise as mw
from maskwise.nn import gates, schedule

DENSITY, STEPS = 0.05, 200


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (n, 64) and classes (n,) of the training set, then of the test set."""
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    return x[:1300], y[:1300], x[1300:], y[1300:]


def train(model: nn.Module, x: Tensor, y: Tensor, scheduler: schedule.DensityScheduler | None = None) -> None:
    """Train on random batches; the scheduler, if given, lowers the density."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        chosen = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def right(network: nn.Module) -> str:
        """The accuracy on the test set."""
        return f"{(network(test_x).argmax(-1) == test_y).float().mean():.1%} right"

    train(model, x, y)
    print(f"dense:                {right(model)}")
    mw.nn.prune(model, lambda: gates.TopK(1.0, scope="global"), exclude="4")
    falling = schedule.cubic(end=DENSITY, steps=STEPS // 2)
    train(model, x, y, schedule.DensityScheduler(model, falling, every=10))
    found = mw.nn.report(model)
    print(f"{found.density:.0%} of the weights:    {right(model)}")

    small, report = mw.compress(model, test_x)
    print(f"compressed:           {right(small)}, largest difference {report.difference:.0e}")
    print(f"parameters:           {report.before.parameters:,} → {report.after.parameters:,}")
    for row in report:
        print(f"  layer {row.name}: {row.before.kind} → {row.after.kind}")
