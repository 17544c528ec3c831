"""Sparse products as registered ops: schemas, fakes, gradients.

``linear_product`` is x times a sparse weight; ``linear_sampled`` the gradient of the kept weights; ``linear_sparse``
the product with its gradients, for which it takes the layout of the transposed weight along.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from maskwise.ops import backends
from maskwise.ops.linear import reference
from maskwise.ops.linear.layouts import Block, SparseLayout
from maskwise.ops.operation import define, differentiate, eager_function
from maskwise.ops.torch_private import is_tracing
from maskwise.plan import planner

__all__ = ["Indices", "product", "sampled", "sparse_linear", "with_indices"]

DTYPES = (torch.float32, torch.bfloat16)
#: On a GPU kernels serve blocks of 16 x 16; other blocks are made dense.
ON_GPU = (*DTYPES, torch.float16)
_SPARSE = (
    "(Tensor x, Tensor values, Tensor? bias, Tensor starts, Tensor columns, Tensor t_starts, Tensor t_columns, "
    "Tensor t_order, int outputs, int rows, int width) -> Tensor"
)


def fake_product(
    x: Tensor,
    values: Tensor,
    starts: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    outputs: int,
    rows: int,
    width: int,
) -> Tensor:
    """The result without its data."""
    return x.new_empty(x.shape[0], outputs)


def fake_sampled(grad: Tensor, x: Tensor, starts: Tensor, columns: Tensor, rows: int, width: int) -> Tensor:
    """One number for each value."""
    return x.new_empty(columns.shape[0] * rows * width)


def fake_sparse(x: Tensor, values: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The result without its data."""
    return x.new_empty(x.shape[0], rest[5])


define(
    "linear_product",
    "(Tensor x, Tensor values, Tensor starts, Tensor columns, Tensor? bias, int outputs, int rows, int width)"
    " -> Tensor",
    reference=reference.product,
    fake=fake_product,
    gpu=ON_GPU,
    gpu_from="maskwise.ops.linear.gpu:product",
)
define(
    "linear_sampled",
    "(Tensor grad, Tensor x, Tensor starts, Tensor columns, int rows, int width) -> Tensor",
    reference=reference.sampled,
    fake=fake_sampled,
    gpu=ON_GPU,
    gpu_from="maskwise.ops.linear.gpu:sampled",
)
product = torch.ops.maskwise.linear_product.default
sampled = torch.ops.maskwise.linear_sampled.default


#: Starts and columns; starts, columns and order of the transposed layout.
Indices: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def run_sparse(x: Tensor, values: Tensor, bias: Tensor | None, starts: Tensor, columns: Tensor, *rest: Any) -> Tensor:
    """The product, by the kernel where there is one."""
    outputs, rows, width = rest[3:]
    out: Tensor = product(x, values, starts, columns, bias, outputs, rows, width)
    return out


def remember_sparse(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradients need."""
    x, values, _, *layout = inputs
    ctx.save_for_backward(x, values, *layout[:5])
    ctx.sizes = layout[5:]


def sparse_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """To x by the transposed product, to the values by the sampled one, to the bias by a sum."""
    x, values, starts, columns, t_starts, t_columns, t_order = ctx.saved_tensors
    outputs, rows, width = ctx.sizes
    of_x = of_values = of_bias = None
    # Where a second derivative is asked for, plain operations: torch differentiates them again.
    again = torch.is_grad_enabled() and not is_tracing()
    grad = grad.contiguous()
    if ctx.needs_input_grad[0]:
        if again:
            layout = reference.layout_of(starts, columns, outputs, x.shape[1], rows, width)
            of_x = grad @ layout.dense(values)
        else:
            square = 16 if rows == 16 else 1
            of_x = product(grad, values.index_select(0, t_order), t_starts, t_columns, None, x.shape[1], square, square)
    if ctx.needs_input_grad[1]:
        of_values = (reference.sampled if again else sampled)(grad, x, starts, columns, rows, width)
    if ctx.needs_input_grad[2]:
        of_bias = grad.sum(0)
    return of_x, of_values, of_bias, *[None] * 8


define("linear_sparse", _SPARSE, reference=run_sparse, fake=fake_sparse)
differentiate("linear_sparse", sparse_backward, remember_sparse)
backends.provide("linear", "cpu", DTYPES)
backends.provide("linear", "cuda", ON_GPU)

_taped = eager_function("linear_sparse", _SPARSE, run_sparse, remember_sparse, sparse_backward)
_fused = torch.ops.maskwise.linear_sparse.default


def sparse_linear(
    x: Tensor,  # (..., inputs)
    values: Tensor,  # (count,)
    layout: SparseLayout,
    bias: Tensor | None = None,  # (outputs,)
) -> Tensor:
    """X times the transposed weight that has these values at the places of a layout, plus the bias: (..., outputs).

    Gradients go to x, values and bias. All dtypes are one dtype, and the sizes were checked.

    >>> import torch
    >>> layout = SparseLayout.from_mask(torch.tensor([[True, False], [True, True]]))
    >>> sparse_linear(torch.tensor([[1.0, 10.0]]), torch.tensor([1.0, 2.0, 3.0]), layout)
    tensor([[ 1., 32.]])
    """
    tensors = (x, values) if bias is None else (x, values, bias)
    forward = (layout.starts, layout.columns)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        # The layout of the transposed weight is not made for those who ask for no gradient.
        return with_indices(x, values, bias, (*forward, *forward, layout.columns), layout.shape[0], layout.block)
    back = layout.transposed
    return with_indices(
        x, values, bias, (*forward, back.starts, back.columns, back.order), layout.shape[0], layout.block
    )


def with_indices(
    x: Tensor,  # (..., inputs)
    values: Tensor,  # (count,)
    bias: Tensor | None,  # (outputs,)
    indices: Indices,
    outputs: int,
    block: Block,
) -> Tensor:
    """As `sparse_linear`, from the tensors that a layout and its transposed one are made of."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    tensors = (x, values) if bias is None else (x, values, bias)
    if not planner.has_kernel("linear", x.dtype, x.device.type):
        out = reference.product(flat, values, *indices[:2], bias, outputs, *block)
    elif is_tracing():
        out = _fused(flat, values, bias, *indices, outputs, *block)
    elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        out = _taped(flat, values, bias, *indices, outputs, *block)
    else:
        out = product(flat, values, *indices[:2], bias, outputs, *block)
    result: Tensor = out if x.dim() == 2 else out.reshape(*x.shape[:-1], outputs)
    return result
