"""Models to compress, and what is dropped of them."""

import torch
from torch import nn


class FeedForward(nn.Module):
    """A block whose forward can be traced."""

    def __init__(self, size=16, hidden=32):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(size, hidden), nn.Linear(hidden, size), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.down(self.dropout(torch.nn.functional.gelu(self.up(x))))


class ReadsWeight(nn.Module):
    """A block that looks at the weight of its layer."""

    def __init__(self, size=256):
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        return self.inner(x.to(self.inner.weight.dtype))


def drop(module, density, seed=0):
    """Set weights to 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        module.weight.mul_(torch.rand(module.weight.shape, generator=generator) < density)
    return module


def feed_forward(density=0.1, size=256, hidden=512):
    return nn.Sequential(
        drop(nn.Linear(size, hidden), density), nn.GELU(), drop(nn.Linear(hidden, size), density, seed=1)
    ).eval()
