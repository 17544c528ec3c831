"""Process groups: sums with a gradient, choices of one rank for all, and sharded tensors as whole ones."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

from maskwise.errors import ArgumentError, DtypeError, say

__all__ = [
    "Group",
    "all_reduce",
    "broadcast",
    "is_sharded",
    "place_like",
    "process_group",
    "size",
    "whole",
    "write_whole",
]

#: A ``torch.distributed.ProcessGroup`` or a ``DeviceMesh`` of one dim, or None for all ranks. Torch may have neither.
Group: TypeAlias = Any


def size(group: Group = None) -> int:
    """The number of ranks in a group; 1 where torch.distributed is not initialized.

    >>> size()
    1
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size(group)


def process_group(op: str, group: Group) -> Group:
    """The process group of one or of a device mesh, or None for all ranks; raise where this process is not in it.

    >>> process_group("RigL", None)
    """
    if group is None:
        return None
    has_groups = distributed.is_available()
    # `torch.distributed.new_group` gives processes that are not in it an object of no class.
    outside = has_groups and group is distributed.GroupMember.NON_GROUP_MEMBER
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            must, hint = "be a mesh of one dim", "mesh['dp'], or mesh['dp', 'cp']._flatten() for both"
            raise ArgumentError(say(op, "group", must=must, got=f"{group.ndim} dims", hint=hint))
        outside = group.get_coordinate() is None
        group = group if outside else group.get_group()
    elif not outside and not (has_groups and isinstance(group, distributed.ProcessGroup)):
        must, hint = "be a process group or a device mesh", "group=torch.distributed.new_group(ranks)"
        raise DtypeError(say(op, "group", must=must, got=type(group).__name__, hint=hint))
    if outside or distributed.get_rank(group) < 0:
        must, hint = "be a group that this process is in", "group=None, or a mesh's own dim: mesh['dp']"
        raise ArgumentError(say(op, "group", must=must, got="one of other ranks", hint=hint))
    return group


# -- collectives -------------------------------------------------------------------------------------------------------
class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        out = x.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every rank's output has a part of every rank's input.
        return all_reduce(gradients[0], ctx.group), None


def all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """The sum over the ranks of a group, of x's shape, with a gradient that can be differentiated itself.

    >>> all_reduce(torch.ones(2))
    tensor([1., 1.])
    """
    if size(group) == 1:
        return x
    out: Tensor = _AllReduce.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def broadcast(x: Tensor, group: Group = None) -> Tensor:
    """What x is on the first rank of a group; it must have the same shape and dtype on all of them.

    >>> broadcast(torch.ones(2))
    tensor([1., 1.])
    """
    if size(group) == 1:
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    distributed.broadcast(out, group=group, group_src=0)
    return out


# -- DTensor: parameters of FSDP2 and of tensor parallelism ------------------------------------------------------------
def is_sharded(x: Tensor) -> bool:
    """Whether it is a DTensor, of which this rank may hold a part.

    >>> is_sharded(torch.ones(2))
    False
    """
    # Without that import there is no DTensor, and it takes longer than all of ours.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def whole(x: Tensor) -> Tensor:
    """The full tensor of a DTensor, which all its ranks must call for; any other as it is.

    >>> whole(torch.ones(2))
    tensor([1., 1.])
    """
    return x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]


@torch.no_grad()
def write_whole(x: Tensor, full: Tensor) -> None:
    """Write a full tensor of x's shape, the same on all ranks, into x: of a DTensor, the part that is here.

    >>> x = torch.zeros(2)
    >>> write_whole(x, torch.ones(2))
    >>> x
    tensor([1., 1.])
    """
    if not is_sharded(x):
        x.copy_(full)
        return
    held, parts = x, place_like(full, x)
    held.to_local().copy_(parts.to_local())  # type: ignore[attr-defined]


def place_like(full: Tensor, x: Tensor) -> Tensor:
    """A full tensor of x's shape, the same on all ranks, as a DTensor that lies as x does, if x is one.

    >>> place_like(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    if not is_sharded(x) or is_sharded(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    like: Any = x
    # Every rank has all of it: nothing is sent.
    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
