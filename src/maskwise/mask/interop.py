"""Where torch meets a Mask: its functions, its pytrees and its DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from maskwise.errors import ShapeError, say
from maskwise.mask.structures import Dense
from maskwise.mask.structures.base import Skeleton, assemble, take_apart

if TYPE_CHECKING:
    from maskwise.mask.mask import Mask

__all__ = ["call", "register"]


def call(cls: type[Mask], func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that was given a Mask: the set algebra and joins stay masks, all else sees a bool tensor."""
    if func in _ALGEBRA and not kwargs and len(args) == 2:
        return _ALGEBRA[func](cls, *args)
    if func in (torch.cat, torch.stack) and all(isinstance(m, cls) for m in args[0]):
        return (cls.cat if func is torch.cat else cls.stack)(*args, **kwargs)
    return func(*(_plain(cls, a) for a in args), **{k: _plain(cls, v) for k, v in kwargs.items()})


# `tensor & mask` reaches torch first, which hands it here; `tensor - mask` comes as Tensor.sub.
_ALGEBRA: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__and__: lambda cls, left, right: cls._coerce(left, "&") & right,
    Tensor.__or__: lambda cls, left, right: cls._coerce(left, "|") | right,
    Tensor.__xor__: lambda cls, left, right: cls._coerce(left, "^") ^ right,
    Tensor.sub: lambda cls, left, right: cls._coerce(left, "-") - right,
}


def _plain(cls: type[Mask], value: Any) -> Any:
    if isinstance(value, cls):
        return value.to_bool()
    if type(value) in (tuple, list):
        return type(value)(_plain(cls, v) for v in value)
    return value


class _Context(NamedTuple):
    """What a pytree keeps of a mask besides its tensors."""

    skeleton: Skeleton
    ndims: tuple[int, ...]
    on_host: bool


def _flatten(mask: Mask) -> tuple[list[Tensor], _Context]:
    tensors, skeleton = take_apart(mask._structure)
    plain = [t for t in tensors if isinstance(t, Tensor)]
    ndims = tuple(t.ndim for t in plain)
    return tensors, _Context(skeleton, ndims, all(t.device.type == "cpu" for t in plain))


def _flatten_with_keys(mask: Mask) -> tuple[list[tuple[Any, Tensor]], _Context]:
    tensors, context = _flatten(mask)
    return [(_pytree.SequenceKey(i), t) for i, t in enumerate(tensors)], context


def _unflattener(cls: type[Mask]) -> Callable[[Iterable[Any], _Context], Mask]:
    def unflatten(leaves: Iterable[Any], context: _Context) -> Mask:
        tensors = list(leaves)
        skeleton = context.skeleton
        if skeleton.cls is not Dense:
            for leaf, ndim in zip(tensors, context.ndims, strict=False):
                if isinstance(leaf, Tensor) and leaf.ndim != ndim:
                    must, hint = f"keep the {ndim} dims that the mask's structure has", "pass mask.to_bool() to vmap"
                    raise ShapeError(say("Mask", "leaf", must=must, got=leaf.ndim, hint=hint))
            moved = {t.device for t in tensors if isinstance(t, Tensor)}
            # Leaves that were sent to another device take the mask along; host data for a device is left as it is.
            if len(moved) == 1 and (not context.on_host or next(iter(moved)).type != "cpu"):
                skeleton = skeleton.on(moved.pop())
        return cls._wrap(assemble(skeleton, tensors))

    return unflatten


def register(cls: type[Mask]) -> None:
    """Make a Mask a pytree node, and let the DataLoader stack masks."""
    _pytree.register_pytree_node(cls, _flatten, _unflattener(cls), flatten_with_keys_fn=_flatten_with_keys)

    def collate(batch: Sequence[Mask], *, collate_fn_map: object = None) -> Mask:
        return cls.stack(batch)

    default_collate_fn_map[cls] = collate
