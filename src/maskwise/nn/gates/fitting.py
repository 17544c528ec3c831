"""Whether what a gate is given lines up with a weight, and what to write when it does not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from maskwise.errors import ArgumentError, DtypeError, ShapeError, say
from maskwise.ops.arguments import fits, shape_hint

__all__ = ["check_density", "expanded", "share"]


def expanded(
    op: str,
    argument: str,
    tensor: Tensor,  # broadcasts to weight
    weight: Tensor,  # any shape
) -> Tensor:
    """A copy of the tensor in weight's shape, or an error that says how it would fit."""
    if not fits(tensor.shape, weight.shape):
        must = f"broadcast to weight's shape {tuple(weight.shape)}"
        hint = _hint(tuple(tensor.shape), tuple(weight.shape)).replace("mask", argument).replace("x's", "weight's")
        raise ShapeError(say(op, argument, must=must, got=tuple(tensor.shape), hint=hint))
    return tensor.expand(weight.shape).clone()


def _hint(mask: tuple[int, ...], weight: tuple[int, ...]) -> str:
    """What to write instead: ``nn.Linear(10, 5)`` has a weight of (5, 10), and many expect (10, 5).

    >>> _hint((10, 5), (5, 10)), _hint((3, 8, 5, 5), (8, 3, 5, 5)), _hint((8,), (8, 3, 5, 5))
    ('mask.T', 'mask.transpose(0, 1)', 'mask[..., None, None, None]')
    """
    if len(mask) > 2 and fits((mask[1], mask[0], *mask[2:]), weight):
        return "mask.transpose(0, 1)"
    if len(mask) == len(weight) and fits(weight, mask):
        # An x can be expanded to its mask; a weight has the shape that it has.
        return "sizes line up from the right, and each is weight's size or 1"
    return shape_hint(mask, weight)


def check_density(op: str, density: object) -> float:
    """The density as a float between 0 and 1."""
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise DtypeError(say(op, "density", must="be a number", got=type(density).__name__, hint="density=0.1"))
    # Written so that NaN fails too.
    if not 0.0 <= density <= 1.0:
        hint = f"density={density / 100:g}" if 1.0 < density <= 100.0 else "density=0.1"
        raise ArgumentError(say(op, "density", must="be between 0 and 1", got=density, hint=hint))
    return float(density)


def share(density: float, shape: Sequence[int]) -> int:
    """How many of so many a density keeps.

    >>> share(0.1, (5, 10)), share(0.05, (3, 3))
    (5, 0)
    """
    count = 1
    for size in shape:
        count *= size
    return round(density * count)
