"""Sparse products in plain torch operations: the ground truth of the tests, and the route where no kernel serves.

They make the dense weight, with exact zeros where nothing is kept, and are differentiable by torch itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.ops.linear.layouts import SparseLayout

__all__ = ["linear", "product", "sampled"]


def layout_of(starts: Tensor, columns: Tensor, outputs: int, inputs: int, rows: int, width: int) -> SparseLayout:
    """The layout that crossed the op border as tensors and numbers."""
    return SparseLayout((outputs, inputs), (rows, width), starts, columns)


def product(
    x: Tensor,  # (batch, inputs)
    values: Tensor,  # (count,)
    starts: Tensor,
    columns: Tensor,
    bias: Tensor | None,  # (outputs,)
    outputs: int,
    rows: int,
    width: int,
) -> Tensor:
    """X times the transposed weight: (batch, outputs)."""
    layout = layout_of(starts, columns, outputs, x.shape[1], rows, width)
    return torch.nn.functional.linear(x, layout.dense(values), bias)


def sampled(
    grad: Tensor,  # (batch, outputs)
    x: Tensor,  # (batch, inputs)
    starts: Tensor,
    columns: Tensor,
    rows: int,
    width: int,
) -> Tensor:
    """The gradient of the kept weights: (count,)."""
    layout = layout_of(starts, columns, grad.shape[1], x.shape[1], rows, width)
    return layout.gather(grad.mT @ x)


def linear(
    x: Tensor,  # (..., inputs)
    weight: Tensor,  # (outputs, inputs)
    mask: Tensor,  # bool, (outputs, inputs)
    bias: Tensor | None,  # (outputs,)
) -> Tensor:
    """The dense product with what is kept of a weight: (..., outputs). A NaN that is dropped reaches nothing."""
    return torch.nn.functional.linear(x, torch.where(mask, weight, 0.0), bias)
