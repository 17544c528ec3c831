"""The registered ops of selection: pack_rows and unpack_rows, each the gradient of the other.

Their ``mask`` is a bool tensor; or, on the CPU, the bounds of intervals along its last dim: see `mask_of_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskwise.mask import Mask
from maskwise.ops.backends import FLOATING, INTEGRAL, INTERPRETED
from maskwise.ops.operation import define, differentiate
from maskwise.ops.select import reference
from maskwise.ops.torch_private import is_tracing

__all__ = [
    "mask_of_rows", "pack_capacity", "pack_rows", "pack_rows_forward", "pack_rows_out",
    "unpack_capacity", "unpack_rows", "unpack_rows_forward", "unpack_rows_out",
]  # fmt: skip

#: The module of the Triton kernels, and their dtypes.
GPU = "maskwise.ops.select.gpu"
MOVED = (*FLOATING, *INTEGRAL, torch.bool)


def mask_of_rows(mask: Mask) -> Tensor:
    """The mask as the ops take it: where it has one run in each line of its last dim, the starts and ends of these.

    They are int64 with a dim of 2 in front, expanded to the mask's shape. Any other mask is a bool tensor.

    >>> mask_of_rows(Mask.from_lengths([1, 2]))[..., 0].tolist()
    [[0, 0], [1, 2]]
    """
    if mask.device.type != "cpu" or INTERPRETED or is_tracing() or mask._along != -1:
        return mask.to_bool()
    return mask._bounds().expand(2, *mask.shape)


def fake_pack_rows(x: Tensor, mask: Tensor) -> Tensor:
    """The fake of pack_rows: an unbacked number of rows."""
    kept = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty([kept, *x.shape[mask.dim() :]])


def fake_unpack_rows(values: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    """The fake of unpack_rows: the mask's shape, then a row's."""
    return values.new_empty([*mask.shape, *values.shape[1:]])


def save_pack(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    """Save the mask for the gradient."""
    ctx.save_for_backward(inputs[1])


def pack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Scatter the gradient of the rows; zero elsewhere."""
    (mask,) = ctx.saved_tensors
    return unpack_rows(grad.contiguous(), mask, grad.new_zeros(())), None


def save_unpack(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    """Save the mask, and the shape of ``other``."""
    values, mask, other = inputs
    ctx.other, ctx.row_dims, ctx.rows = other.shape, values.dim() - 1, values.shape[0]
    ctx.save_for_backward(mask)


def unpack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    """Gather the gradient of the rows; the rest is the gradient of ``other``."""
    (mask,) = ctx.saved_tensors
    values = other = None
    if ctx.needs_input_grad[0]:
        values = pack_rows(grad, mask)
    if ctx.needs_input_grad[2]:
        kept = reference.bits_of(mask)[(..., *[None] * ctx.row_dims)]
        other = torch.where(kept, 0.0, grad).sum_to_size(ctx.other)
    return values, None, other


# Each with and without autograd, whose bookkeeping doubles the time of a small call even where no gradient is required.
for _suffix in ("", "_forward"):
    define(
        f"pack_rows{_suffix}",
        "(Tensor x, Tensor mask) -> Tensor",
        reference=reference.pack_rows,
        fake=fake_pack_rows,
        gpu=MOVED,
        gpu_from=f"{GPU}:pack_rows",
    )
    define(
        f"unpack_rows{_suffix}",
        "(Tensor values, Tensor mask, Tensor other) -> Tensor",
        reference=reference.unpack_rows,
        fake=fake_unpack_rows,
        gpu=MOVED,
        gpu_from=f"{GPU}:unpack_capacity",
    )
for _name, _arguments in (
    ("pack_rows", "Tensor x, Tensor mask"),
    ("unpack_rows", "Tensor values, Tensor mask, Tensor other"),
):
    define(
        f"{_name}_out",
        f"({_arguments}, Tensor(a!) out) -> ()",
        reference=getattr(reference, f"{_name}_out"),
        fake=lambda *_: None,
    )
differentiate("pack_rows", pack_backward, save_pack)
differentiate("unpack_rows", unpack_backward, save_unpack)


# -- with a capacity: shapes that do not depend on data ----------------------------------------------------------------
def fake_pack_capacity(x: Tensor, mask: Tensor, capacity: int) -> Tensor:
    """The fake of pack_capacity."""
    return x.new_empty([capacity, *x.shape[mask.dim() :]])


def pack_capacity_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """Scatter the gradient of the rows; zero elsewhere."""
    (mask,) = ctx.saved_tensors
    return unpack_capacity(grad, mask, grad.new_zeros(())), None, None


def unpack_capacity_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    """Gather the gradient of the rows; the rest is the gradient of ``other``."""
    (mask,) = ctx.saved_tensors
    values = other = None
    if ctx.needs_input_grad[0]:
        values = pack_capacity(grad, mask, ctx.rows)
    if ctx.needs_input_grad[2]:
        kept = mask.reshape(*mask.shape, *[1] * ctx.row_dims)
        other = torch.where(kept, 0.0, grad).sum_to_size(ctx.other)
    return values, None, other


define(
    "pack_capacity",
    "(Tensor x, Tensor mask, SymInt capacity) -> Tensor",
    reference=reference.pack_static,
    fake=fake_pack_capacity,
    gpu=MOVED,
    gpu_from=f"{GPU}:pack_capacity",
    traces=True,
)
define(
    "unpack_capacity",
    "(Tensor values, Tensor mask, Tensor other) -> Tensor",
    reference=lambda *operands: reference.unpack_static(*operands).contiguous(),
    fake=fake_unpack_rows,
    gpu=MOVED,
    gpu_from=f"{GPU}:unpack_capacity",
    traces=True,
)
differentiate("pack_capacity", pack_capacity_backward, save_pack)
differentiate("unpack_capacity", unpack_capacity_backward, save_unpack)

pack_capacity = torch.ops.maskwise.pack_capacity.default
unpack_capacity = torch.ops.maskwise.unpack_capacity.default
pack_rows = torch.ops.maskwise.pack_rows.default
pack_rows_forward = torch.ops.maskwise.pack_rows_forward.default
pack_rows_out = torch.ops.maskwise.pack_rows_out.default
unpack_rows = torch.ops.maskwise.unpack_rows.default
unpack_rows_forward = torch.ops.maskwise.unpack_rows_forward.default
unpack_rows_out = torch.ops.maskwise.unpack_rows_out.default
