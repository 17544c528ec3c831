"""Products with a weight of kept 16 x 16 blocks on a GPU: each is one launch.

``starts`` is where each row of blocks begins, ``columns`` the column of each block, both counted in blocks; the 256
values of a block lie together, row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskwise.ops.gpu.launch import launch
from maskwise.ops.linear import reference
from maskwise.ops.linear.triton import product_kernel, sampled_kernel

__all__ = ["DTYPES", "SIDE", "is_wide", "product", "sampled"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The side of a block: the smallest that the tensor cores multiply.
SIDE = 16
#: Items of the batch in a tile.
BATCH = 64
#: Starts that are compared in one step.
LOOK = 1024
#: Elements from which on their places do not fit in 32 bits.
MANY = 2**31


def is_wide(*tensors: Tensor) -> bool:
    """Whether one of the tensors has places beyond 32 bits: of values there are 256 to a block."""
    return max(tensor.numel() for tensor in tensors) >= MANY


def product(
    x: Tensor,  # (batch, inputs), contiguous
    values: Tensor,  # (256 * blocks,)
    starts: Tensor,  # (rows of blocks + 1,), int32
    columns: Tensor,  # (blocks,), int32
    bias: Tensor | None,  # (outputs,)
    outputs: int,
    rows: int,
    width: int,
) -> Tensor:
    """X times the transposed weight, plus the bias: (batch, outputs)."""
    if (rows, width) != (SIDE, SIDE):
        # The tensor cores have no use for single weights.
        return reference.product(x, values, starts, columns, bias, outputs, rows, width)
    batch, inputs = x.shape
    out = x.new_empty(batch, outputs)
    heights, tiles = starts.shape[0] - 1, -(-batch // BATCH)
    launch(
        product_kernel,
        tiles * heights,
        {
            **dict(x=x.contiguous(), values=values.contiguous(), starts=starts, columns=columns, bias=bias, out=out),
            **dict(batch=batch, inputs=inputs, outputs=outputs, tiles=tiles, heights=heights, BATCH=BATCH, SIDE=SIDE),
            **dict(WIDE=is_wide(x, out, values)),
        },
        warps=4,
        reads={"x": 1, "values": 1, "columns": 1},
        writes=("out",),
    )
    return out


def sampled(
    grad: Tensor,  # (batch, outputs)
    x: Tensor,  # (batch, inputs)
    starts: Tensor,
    columns: Tensor,
    rows: int,
    width: int,
) -> Tensor:
    """The gradient of the values of kept blocks: (256 * blocks,)."""
    if (rows, width) != (SIDE, SIDE):
        return reference.sampled(grad, x, starts, columns, rows, width)
    (batch, inputs), outputs = x.shape, grad.shape[1]
    blocks = columns.shape[0]
    of_values = x.new_empty(blocks * SIDE * SIDE)
    launch(
        sampled_kernel,
        blocks,
        {
            **dict(grad=grad.contiguous(), x=x.contiguous(), starts=starts, columns=columns, of_values=of_values),
            **dict(batch=batch, inputs=inputs, outputs=outputs, blocks=blocks, heights=starts.shape[0] - 1),
            **dict(WIDE=is_wide(x, grad, of_values), BATCH=BATCH, SIDE=SIDE, LOOK=LOOK),
        },
        warps=4,
        reads={"grad": 1, "x": 1, "columns": 1},
        writes=("of_values",),
    )
    return of_values
