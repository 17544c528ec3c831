"""The straight-through estimator, without a leak: zeros go forward where the mask drops, the whole gradient comes back.

The usual spelling, ``weight + (masked - weight).detach()``, lets a NaN in a dropped weight through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.ops.fill import fill
from maskwise.ops.torch_private import is_tracing

__all__ = ["kept_only", "straight_through"]

#: Below this, torch's own where is done, gradient included, before a kernel of ours would have been called.
SMALL = 1 << 16


def kept_only(
    weight: Tensor,  # any shape
    bits: Tensor,  # bool, weight's shape
) -> Tensor:
    """The weight where it is kept and 0 elsewhere, with a gradient where it is kept.

    >>> weight = torch.tensor([1.0, float("nan")], requires_grad=True)
    >>> out = kept_only(weight, torch.tensor([True, False]))
    >>> out.tolist(), torch.autograd.grad(out.sum(), weight)[0].tolist()
    ([1.0, 0.0], [1.0, 0.0])
    """
    return torch.where(bits, weight, 0.0) if weight.numel() < SMALL else fill(weight, bits, 0.0)


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, bits: Tensor) -> Tensor:
        return torch.where(bits, weight, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _WithForwardMode(_StraightThrough):
    """The same with forward-mode AD, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].clone()


def straight_through(
    weight: Tensor,  # any shape
    bits: Tensor,  # bool, weight's shape
) -> Tensor:
    """The weight where it is kept and 0 elsewhere, with the gradient of the weight itself.

    >>> weight = torch.tensor([1.0, float("nan")], requires_grad=True)
    >>> out = straight_through(weight, torch.tensor([True, False]))
    >>> out.tolist(), torch.autograd.grad(out.sum(), weight)[0].tolist()
    ([1.0, 0.0], [1.0, 1.0])
    """
    function = _StraightThrough if is_tracing() else _WithForwardMode
    # Torch's own apply carries no types.
    out: Tensor = function.apply(weight, bits)  # type: ignore[no-untyped-call]
    return out
