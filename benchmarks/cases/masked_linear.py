"""A linear layer with a gate: ``mw.nn.MaskedLinear``, in evaluation and in training."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskwise as mw
from benchmarks.case import Case, Side, never_slower
from benchmarks.cases.sides import Call

__all__ = ["Inputs", "cases", "frozen", "inputs", "times_mask"]

WARM = 60
"""How often the layer is called before it is timed: it makes a layout when that has paid for itself."""


@dataclass(frozen=True)
class Inputs:
    """A batch, a dense layer, what is kept of its weight, and the gradient that comes back."""

    x: Tensor
    dense: nn.Linear
    kept: Tensor
    above: Tensor


def inputs(case: Case) -> Inputs:
    """Build a batch (case.shape[0]), and a layer of case.shape[1] inputs and case.shape[2] outputs."""
    batch, features, outputs = case.shape
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dense = nn.Linear(features, outputs)
    kept = torch.rand(outputs, features, generator=generator) < (case.density or 0.0)
    x = torch.randn(batch, features, generator=generator)
    return Inputs(x, dense, kept, torch.randn(batch, outputs, generator=generator))


def _masked(i: Inputs) -> mw.nn.MaskedLinear:
    return mw.nn.MaskedLinear.from_linear(i.dense, i.kept)


def frozen(i: Inputs, layer: nn.Module, calls: int = WARM) -> Call:
    """Return the layer in evaluation, after so many calls."""
    layer.requires_grad_(False)
    for _ in range(calls):
        layer(i.x)
    return lambda: layer(i.x)


def _ours(i: Inputs) -> Call:
    return frozen(i, _masked(i))


def _written_zeros(i: Inputs) -> Call:
    # What people do to be as fast as dense: write the zeros into the weight, once.
    layer = nn.Linear(i.dense.in_features, i.dense.out_features, device=i.x.device)
    with torch.no_grad():
        layer.weight.copy_(torch.where(i.kept, i.dense.weight, 0.0))
        layer.bias.copy_(i.dense.bias)
    return frozen(i, layer)


def times_mask(i: Inputs) -> Call:
    """Return the idiom that multiplies the weight by the mask in every call."""
    layer, kept = i.dense.requires_grad_(False), i.kept
    return lambda: F.linear(i.x, layer.weight * kept, layer.bias)


def _train_ours(i: Inputs) -> Call:
    layer, x = _masked(i).requires_grad_(True), i.x.clone().requires_grad_()
    wanted = [x, layer.weight, layer.bias]

    def step() -> object:
        return torch.autograd.grad(layer(x), wanted, i.above)

    for _ in range(WARM // 6):
        step()
    return step


def _train_where(i: Inputs) -> Call:
    weight, bias = (p.detach().clone().requires_grad_() for p in (i.dense.weight, i.dense.bias))
    x, kept = i.x.clone().requires_grad_(), i.kept
    return lambda: torch.autograd.grad(F.linear(x, torch.where(kept, weight, 0.0), bias), [x, weight, bias], i.above)


EVALUATION = (
    Side("mw.nn.MaskedLinear", _ours, kind="ours"),
    Side("Linear of zeros", _written_zeros),
    Side("weight * mask", times_mask),
)
TRAINING = (Side("mw.nn.MaskedLinear", _train_ours, kind="ours"), Side("where", _train_where))


def cases() -> tuple[Case, ...]:
    """Return the cases of MaskedLinear."""
    large = Case(
        "masked_linear",
        "MaskedLinear",
        "",
        inputs,
        EVALUATION,
        (512, 768, 3072),
        0.1,
        targets=(never_slower(),),
        # Sums of thousands of products of both signs, in another order.
        absolute_tolerance=1e-3,
    )
    return (
        *(replace(large, variant=f"512x768->3072 keep={round(100 * d)}%", density=d) for d in (0.05, 0.1, 0.5, 0.9)),
        replace(large, variant="1x1024->4096 keep=10%", shape=(1, 1024, 4096)),
        replace(large, variant="4x32->32 keep=50%", shape=(4, 32, 32), density=0.5),
        *(
            replace(large, variant=f"512x768->3072 keep={round(100 * d)}% training step", density=d, sides=TRAINING)
            for d in (0.1, 0.5)
        ),
    )
