"""What a layer gives for a slice of which nothing is kept: 0, since parameters come next, or what ``empty=`` says.

A NaN there would reach every weight of the layer that follows: its gradient is a product with this output.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.ops.primitives import replace_empty

__all__ = ["GivesEmpty", "check_empty", "with_empty"]


def check_empty(op: str, empty: float) -> float:
    """The argument ``empty`` of a layer as a float, or raise.

    >>> check_empty("MaskedMeanPool", 1)
    1.0
    """
    if not isinstance(empty, (int, float)) or isinstance(empty, bool):
        hint = 'empty=0.0, or float("nan") for a value that must not go unseen'
        raise DtypeError(say(op, "empty", must="be a number", got=type(empty).__name__, hint=hint))
    return float(empty)


def with_empty(
    op: str,
    out: Tensor,  # x's shape, or that with ``dims`` reduced
    x: Tensor,
    bits: Tensor,  # broadcasts to x
    dims: list[int],
    keepdim: bool,
    empty: float,
) -> Tensor:
    """``out`` with ``empty`` where nothing along ``dims`` is kept; the gradient of such a slice is zero."""
    return replace_empty(op, x, bits, dims, keepdim, _fitting(op, empty, out.dtype))(out)


class GivesEmpty(nn.Module):
    """What the norms have in common: torch's arguments, and ``empty``."""

    #: What a slice of which nothing is kept gives; a class attribute too, for layers that were pickled without it.
    empty: float = 0.0

    def __init__(self, *args: Any, empty: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.empty = check_empty(type(self).__name__, empty)

    def extra_repr(self) -> str:
        """The arguments, for ``print(model)``."""
        return f"{super().extra_repr()}, empty={self.empty}"

    def _with_empty(self, out: Tensor, x: Tensor, bits: Tensor, dims: list[int]) -> Tensor:
        """The output, which is 0 where it is dropped, with ``empty`` where nothing along ``dims`` is kept."""
        return out if self.empty == 0.0 else with_empty(type(self).__name__, out, x, bits, dims, True, self.empty)


def _fitting(op: str, empty: float, dtype: torch.dtype) -> float:
    """A number that keeps the dtype of what it is put into, or raise."""
    if dtype.is_floating_point or dtype.is_complex:
        if not torch.finfo(dtype).max < abs(empty) < math.inf:
            return empty
    else:
        least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if empty.is_integer() and least <= empty <= most:
            return bool(empty) if dtype is torch.bool else int(empty)
    must, hint = f"fit the input's dtype {dtype}", f"{op}(..., empty=0.0), or an input of torch.float32"
    raise ArgumentError(say(op, "empty", must=must, got=empty, hint=hint))
