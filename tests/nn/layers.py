"""The layers under test, each beside torch's own, with an input and a mask of kept positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

import maskwise as mw


@dataclass(frozen=True)
class Layer:
    """One layer: ours, torch's, an input shape, and the mask's shape with how it becomes one that broadcasts."""

    label: str
    ours: Callable[[], nn.Module]
    torchs: Callable[[], nn.Module] | None
    shape: tuple[int, ...]
    mask: tuple[int, ...]
    to_input: Callable[[torch.Tensor], torch.Tensor]
    #: Whether the output has the input's layout, so that dropped places can be looked at.
    same_layout: bool = True

    def __str__(self) -> str:
        return self.label

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """An input, and a mask of which the second batch entry keeps nothing if there is a place to lose."""
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64).mul(2).add(1).to(dtype)
        bits = torch.rand(self.mask, generator=generator) < 0.6
        bits[0] = True
        bits[1] = False
        return x, bits

    def make(self, seed: int = 0) -> nn.Module:
        """The layer with parameters that are not the neutral ones."""
        torch.manual_seed(seed)
        layer = self.ours()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(0.5, 1.5)
        return layer


def _norm(
    name: str, shape: tuple[int, ...], mask: tuple[int, ...], to_input: Any, groups: int | None = None, **kwargs: Any
) -> Layer:
    torchs = getattr(nn, name)
    ours = getattr(mw.nn, f"Masked{name}")
    more = "".join(f"-{key}={value}" for key, value in kwargs.items())
    sizes = (groups, shape[1]) if groups else (shape[-1] if name == "LayerNorm" else shape[1],)
    more += f"-groups={groups}" if groups else ""
    return Layer(
        f"{name}-{len(shape)}d{more}",
        lambda: ours(*sizes, **kwargs),
        lambda: torchs(*sizes, **kwargs),
        shape,
        mask,
        to_input,
    )


def channels(bits: torch.Tensor) -> torch.Tensor:
    return bits.unsqueeze(1)


def features(bits: torch.Tensor) -> torch.Tensor:
    return bits.unsqueeze(-1)


NORMS = [
    _norm("BatchNorm1d", (9, 3), (9,), channels),
    _norm("BatchNorm1d", (5, 3, 7), (5, 7), channels),
    _norm("BatchNorm1d", (5, 3, 7), (5, 7), channels, affine=False),
    _norm("BatchNorm1d", (5, 3, 7), (5, 7), channels, momentum=None),
    _norm("BatchNorm1d", (5, 3, 7), (5, 7), channels, track_running_stats=False),
    *(
        # An argument of newer torch.
        [_norm("BatchNorm1d", (5, 3, 7), (5, 7), channels, bias=False)]
        if "bias" in signature(nn.BatchNorm1d).parameters
        else []
    ),
    _norm("BatchNorm2d", (4, 3, 5, 6), (4, 5, 6), channels),
    _norm("BatchNorm2d", (4, 3, 5, 6), (4, 5, 6), channels, eps=1e-3, momentum=0.3),
    _norm("BatchNorm3d", (3, 3, 2, 4, 3), (3, 2, 4, 3), channels),
    _norm("GroupNorm", (5, 12), (5,), channels, groups=2),
    _norm("GroupNorm", (5, 6, 7), (5, 7), channels, groups=1),
    _norm("GroupNorm", (5, 6, 7), (5, 7), channels, groups=3),
    _norm("GroupNorm", (5, 6, 7), (5, 7), channels, groups=3, affine=False),
    _norm("GroupNorm", (4, 6, 3, 5), (4, 3, 5), channels, groups=2, eps=1e-3),
    _norm("InstanceNorm1d", (5, 3, 7), (5, 7), channels),
    _norm("InstanceNorm1d", (5, 3, 7), (5, 7), channels, affine=True, track_running_stats=True),
    _norm("LayerNorm", (5, 7, 6), (5, 7), features),
    _norm("LayerNorm", (5, 7, 6), (5, 7), features, elementwise_affine=False),
    _norm("LayerNorm", (5, 7, 6), (5, 7), features, bias=False),
]
POOLS = [
    Layer("MeanPool", mw.nn.MaskedMeanPool, None, (5, 7, 6), (5, 7), features, False),
    Layer("MeanPool-channels", lambda: mw.nn.MaskedMeanPool(-1), None, (5, 3, 7), (5, 7), channels, False),
    Layer("MaxPool", mw.nn.MaskedMaxPool, None, (5, 7, 6), (5, 7), features, False),
    Layer("AttentionPool", lambda: mw.nn.MaskedAttentionPool(6), None, (5, 7, 6), (5, 7), features, False),
    Layer(
        "AttentionPool-heads",
        lambda: mw.nn.MaskedAttentionPool(6, num_heads=3, hidden_dim=4),
        None,
        (5, 7, 6),
        (5, 7),
        features,
        False,
    ),
]
LAYERS = [*NORMS, *POOLS]


def state(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, copied."""
    return {name: value.detach().clone() for name, value in layer.state_dict().items()}


def step(layer: nn.Module, x: torch.Tensor, mask: Any) -> list[torch.Tensor]:
    """One training step: the output, the gradients of input and parameters, and the buffers after it."""
    x = x.detach().clone().requires_grad_()
    out = layer(x, mask)
    # Weights that differ by element, so that no two gradients cancel by chance.
    weights = torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape).to(out.dtype)
    wanted = [x, *layer.parameters()]
    gradients = torch.autograd.grad((out * weights).sum(), wanted)
    return [out.detach(), *gradients, *(buffer.clone() for buffer in layer.buffers())]
