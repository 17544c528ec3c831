"""``mw.compress`` of a feed-forward block of BERT-base's size, against the block with zeros in its weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import maskwise as mw
from benchmarks.case import Case, Side, at_least
from benchmarks.cases.sides import Call

__all__ = ["DENSE", "FEED_FORWARD", "cases"]

DENSE = "dense, with zeros"


@dataclass(frozen=True)
class Block:
    """A pruned feed-forward block in evaluation, and what goes in."""

    model: nn.Sequential
    x: Tensor  # (tokens, size)


def _pruned(case: Case) -> Block:
    tokens, size, hidden = case.shape
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    mw.nn.prune(model, lambda: mw.nn.gates.TopK(case.density or 1.0))
    return Block(model, torch.randn(tokens, size, generator=generator))


def _run(model: nn.Module, x: Tensor) -> Call:
    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = model(x)
        return out

    return run


def _dense(i: Block) -> Call:
    # Without its gates, which would be applied again in every call.
    model = copy.deepcopy(i.model)
    for module in model:
        if isinstance(module, nn.Linear):
            mw.nn.detach(module)
    return _run(model, i.x)


FEED_FORWARD = Case(
    "models",
    "compress",
    "BERT-base feed-forward, 512 tokens, keep=10%",
    _pruned,
    (Side("mw.compress", lambda i: _run(mw.compress(i.model, i.x)[0], i.x), "ours"), Side(DENSE, _dense)),
    (512, 768, 3072),
    0.1,
    targets=(at_least(4, DENSE),),
    # Outputs are near 1, and each is a sum of a few hundred products in another order.
    relative_tolerance=0.0,
    absolute_tolerance=1e-4,
)


def cases() -> tuple[Case, ...]:
    """Return the cases of compressed models."""
    return (FEED_FORWARD,)
