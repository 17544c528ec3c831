"""One call of a loss that is known: its operands side by side, and the mask as each of them sees it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from maskwise.errors import DeviceError, ShapeError, say
from maskwise.ops.arguments import fits, shape_hint
from maskwise.ops.loss.kinds import Kind

__all__ = ["Call", "Fill", "check_device", "check_mask", "harmless", "prepare"]

#: (x, keep, value) -> x with the value where it is dropped.
Fill: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Call:
    """A loss with its operands: what is left to do is to fill, to run and to reduce."""

    fn: Callable[..., Any]
    kind: Kind
    #: The operands of ``fn``, the target last; then the keyword arguments that line up with the loss.
    tensors: tuple[Tensor, ...]
    #: The keyword of each tensor; None for an operand.
    names: tuple[str | None, ...]
    fills: tuple[float | None, ...]
    #: The other keyword arguments.
    rest: Mapping[str, Any]
    #: The shape of the unreduced loss.
    shape: tuple[int, ...]
    #: What counts: bool, broadcasts to ``shape``.
    keep: Tensor

    def run(self, tensors: Sequence[Tensor], reduction: str = "none") -> Tensor:
        """The loss of these operands in the place of the call's own."""
        pairs = list(zip(self.names, tensors, strict=True))
        named = {name: tensor for name, tensor in pairs if name is not None}
        out: Tensor = self.fn(
            *(tensor for name, tensor in pairs if name is None), reduction=reduction, **named, **self.rest
        )
        return out

    def keep_of(self, tensor: Tensor) -> Tensor:
        """The mask as it broadcasts to one of the operands."""
        missing = tensor.dim() - len(self.shape)
        if missing <= 0:
            return self.keep
        keep = self.keep.expand(self.shape)
        if self.kind.lines_up == "classes":
            return keep.unsqueeze(class_dim(tensor))
        return keep.reshape(*keep.shape, *[1] * missing)

    def filled(self, fill: Fill | None = None) -> list[Tensor]:
        """The operands without what is dropped; ``fill`` puts the stand-ins in."""
        fill = fill or harmless
        return [
            tensor if value is None else fill(tensor, self.keep_of(tensor), value)
            for tensor, value in zip(self.tensors, self.fills, strict=True)
        ]

    @property
    def shared_dims(self) -> int:
        """How many of the last dims of the loss must stay: a keyword argument broadcasts over the others."""
        if self.kind.lines_up != "elements":
            return 0
        return max((x.dim() for x in self.rest.values() if isinstance(x, Tensor) and x.numel() > 1), default=0)

    def divisors(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """By what each element counts in a mean, if not by 1; ``tensors`` are the operands without what is dropped."""
        weight = self.rest.get("weight") if self.kind.divides == "classes" else None
        if isinstance(weight, Tensor):
            target = tensors[self.names.count(None) - 1]
            if target.is_floating_point():
                return None
            return weight.index_select(0, target.reshape(-1)).reshape(target.shape)
        if self.kind.divides == "elements" and "weight" in self.names:
            return tensors[self.names.index("weight")]
        return None


def harmless(x: Tensor, keep: Tensor, fill: float) -> Tensor:
    """X with ``fill`` where it is dropped: no NaN comes through, and no gradient comes back."""
    # A Python scalar of x's own kind: any other would make torch promote, and copy, x.
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return torch.where(keep, x, float(fill))
    return torch.where(keep, x, bool(fill) if x.dtype is torch.bool else int(fill))


def class_dim(x: Tensor) -> int:
    """Where torch looks for the classes: in dim 1, or in the only dim of a single sample."""
    return 1 if x.dim() > 1 else 0


def prepare(
    fn: Callable[..., Any],
    kind: Kind,
    operands: tuple[Tensor, ...],
    bits: Tensor,
    kwargs: Mapping[str, Any],
) -> Call:
    """Line everything up with the unreduced loss, or raise.

    Raises:
        ShapeError: the mask does not broadcast to the unreduced loss.
        DeviceError: the mask is on another device.
    """
    x = operands[0]
    if kind.lines_up == "elements":
        shape = broadcast(operands) if kind.broadcasts else tuple(x.shape)
    elif kind.lines_up == "classes":
        dim = class_dim(x)
        shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    else:
        shape = tuple(x.shape[:-1])
    check_mask(bits, shape, x)
    names: list[str | None] = [None] * len(operands)
    tensors, rest = list(operands), dict(kwargs)
    fills = [*kind.fills, *[None] * len(operands)][: len(operands)]
    for name, fill in kind.named.items():
        value = rest.get(name)
        # A weight that is shared by many elements of the loss is not under the mask.
        if isinstance(value, Tensor) and (name != "weight" or value.shape == shape):
            tensors.append(rest.pop(name))
            names.append(name)
            fills.append(fill)
    if kind.lines_up == "elements" and kind.broadcasts:
        tensors = [spread(tensor, shape, name) for tensor, name in zip(tensors, names, strict=True)]
    keep, target = bits, operands[-1]
    ignored = rest.get("ignore_index", kind.ignores)
    if kind.divides == "classes" and ignored is not None and target.shape == shape and not target.is_floating_point():
        # What is ignored is dropped: it counts nowhere, and what it holds does no harm.
        keep = bits & (target != ignored)
    call = Call(fn, kind, tuple(tensors), tuple(names), tuple(fills), rest, shape, keep)
    # To fill an operand of a wrong shape could give it a right one: it is left as it is, for torch to complain of.
    safe = [fill if fits(call.keep_of(x).shape, x.shape) else None for x, fill in zip(tensors, fills, strict=True)]
    return replace(call, fills=tuple(safe))


def spread(x: Tensor, shape: tuple[int, ...], name: str | None) -> Tensor:
    """X as a view of the loss's shape, where it has one; torch is left to complain of any other."""
    # A variance may lack the last dim: one for each row, as in torch.
    if name == "var" and tuple(x.shape) == shape[:-1]:
        x = x.unsqueeze(-1)
    return x.expand(shape) if tuple(x.shape) != shape and fits(x.shape, shape) else x


def broadcast(operands: tuple[Tensor, ...]) -> tuple[int, ...]:
    """The shape that operands broadcast to, with torch's warning if they have to."""
    if all(x.shape == operands[0].shape for x in operands[1:]):
        return tuple(operands[0].shape)
    shapes = [tuple(x.shape) for x in operands]
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        must = f"have the shape of `input`, {shapes[0]}, or one that broadcasts with it"
        raise ShapeError(say("loss", "target", must=must, got=shapes[-1], hint="target.view_as(input)")) from None
    warnings.warn(
        f"loss: input and target have different shapes, {' and '.join(map(str, shapes))}, and broadcast to {shape}; "
        "that is seldom meant.",
        stacklevel=5,
    )
    return shape


def check_mask(bits: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """Raise unless the mask broadcasts to the unreduced loss, and is on its device."""
    if tuple(bits.shape) != shape and not fits(bits.shape, shape):
        hint = shape_hint(tuple(bits.shape), shape)
        if hint.startswith("x.expand"):
            hint = "the mask must not be larger than the loss"
        must = f"broadcast to the unreduced loss, whose shape is {shape}"
        raise ShapeError(say("loss", "mask", must=must, got=tuple(bits.shape), hint=hint))
    check_device(bits, x)


def check_device(bits: Tensor, x: Tensor) -> None:
    """Raise unless the mask is on the input's device."""
    if bits.device != x.device:
        must = f"be on input's device {x.device}"
        raise DeviceError(say("loss", "mask", must=must, got=bits.device, hint="mask.to(input.device)"))
