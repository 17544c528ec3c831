"""torch's functional losses: the properties of each, and a call of one with its operands lined up with its mask.

A loss that is not in `LOSSES`, such as one that a user wrote, is supported too: see `maskwise.ops.loss.reference`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from maskwise.errors import DeviceError, ShapeError, say
from maskwise.ops.arguments import fits, shape_hint
from maskwise.ops.primitives import where_kept
from maskwise.plan.dispatch import NOT_APPLICABLE, Facts, Route

__all__ = [
    "LOSSES",
    "REDUCTION_CODES",
    "REQUIRED",
    "AlignedLoss",
    "Fill",
    "LossFacts",
    "LossSpec",
    "Prepared",
    "align",
    "check_device",
    "check_mask",
    "kernel_route",
    "why_not_on_cpu",
]


# -- what is known of each ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LossSpec:
    """The properties of one loss."""

    #: How the unreduced loss lines up. "elements": all operands broadcast together, and so does the loss. "classes":
    #: the first operand has the classes in dim 1, which the loss has not. "rows": the first operand has a last dim that
    #: the loss has not.
    alignment: Literal["elements", "classes", "rows"]
    #: What replaces a dropped value, operand by operand; None for one that all elements share.
    fills: tuple[float | None, ...]
    #: The same for keyword arguments that may come with one value for each element of the loss.
    keyword_fills: Mapping[str, float] = field(default_factory=dict)
    #: What ``weight`` does to the mean: it divides by the weights of the classes, or of the elements, instead of by how
    #: many there are.
    divides_by: Literal["", "classes", "elements"] = ""
    #: Whether torch lets the operands broadcast.
    broadcasts: bool = True
    #: The class that is never counted, unless ``ignore_index`` says otherwise.
    ignore_index: int | None = None


_SPECS: dict[str, LossSpec] = {
    "mse_loss": LossSpec("elements", (0.0, 0.0), {"weight": 1.0}, divides_by="elements"),
    "l1_loss": LossSpec("elements", (0.0, 0.0), {"weight": 1.0}, divides_by="elements"),
    "huber_loss": LossSpec("elements", (0.0, 0.0), {"weight": 1.0}),
    "smooth_l1_loss": LossSpec("elements", (0.0, 0.0)),
    "binary_cross_entropy": LossSpec("elements", (0.5, 0.5), {"weight": 1.0}, broadcasts=False),
    "binary_cross_entropy_with_logits": LossSpec("elements", (0.0, 0.5), {"weight": 1.0}, broadcasts=False),
    "kl_div": LossSpec("elements", (0.0, 1.0)),
    "gaussian_nll_loss": LossSpec("elements", (0.0, 0.0, 1.0), {"var": 1.0}),
    "poisson_nll_loss": LossSpec("elements", (1.0, 1.0)),
    "hinge_embedding_loss": LossSpec("elements", (1.0, 1.0)),
    "soft_margin_loss": LossSpec("elements", (0.0, 1.0)),
    "margin_ranking_loss": LossSpec("elements", (0.0, 0.0, 1.0)),
    "cross_entropy": LossSpec("classes", (0.0, 0.0), divides_by="classes", ignore_index=-100),
    "nll_loss": LossSpec("classes", (0.0, 0.0), divides_by="classes", ignore_index=-100),
    "linear_cross_entropy": LossSpec("rows", (0.0, None, 0.0), divides_by="classes"),
    "multi_margin_loss": LossSpec("rows", (0.0, 0.0)),
    "multilabel_margin_loss": LossSpec("rows", (0.0, -1.0)),
    "multilabel_soft_margin_loss": LossSpec("rows", (0.0, 0.0)),
    "cosine_embedding_loss": LossSpec("rows", (1.0, 1.0, 1.0)),
    # Three different points, since the distance of a point to itself has no gradient.
    "triplet_margin_loss": LossSpec("rows", (0.0, 1.0, 2.0), {"negative": 2.0}),
    "triplet_margin_with_distance_loss": LossSpec("rows", (0.0, 1.0, 2.0), {"negative": 2.0}),
}

#: The losses of torch.nn.functional that this torch has.
LOSSES: dict[Callable[..., Any], LossSpec] = {
    getattr(F, name): spec for name, spec in _SPECS.items() if hasattr(F, name)
}

#: The arguments that each of them requires, by name. Read here, since a graph that is being compiled cannot look.
REQUIRED: dict[Callable[..., Any], tuple[str, ...]] = {
    fn: tuple(name for name, each in signature(fn).parameters.items() if each.default is each.empty) for fn in LOSSES
}

#: The reductions as the kernels know them. A kernel leaves any other unreduced.
REDUCTION_CODES = {"none": 0, "sum": 1, "mean": 2}


# -- dispatch ----------------------------------------------------------------------------------------------------------
class Prepared(NamedTuple):
    """What a decision keeps of a call: all but its tensors."""

    fn: Callable[..., Any]
    spec: LossSpec
    reduction: str
    #: What the kernel of the loss takes after its tensors.
    kernel: tuple[Any, ...] = ()
    #: Whether the route gets the mask as a `Mask` of intervals; otherwise as bits.
    intervals: bool = False


class LossFacts(NamedTuple):
    """What routes read besides x: `Facts.detail`."""

    fn: Callable[..., Any]
    #: Why plain torch operations alone can serve the call, or None.
    obstacle: str | None
    #: Why a kernel of its own, if it has one, does not compute the loss of such arguments, or None.
    no_kernel: str | None
    #: Whether single elements can be gathered: operands of one shape, no tensor beside them, a reduction of torch.
    gathers: bool
    #: How the call can be cut into chunks, if it can.
    chunks: Literal["rows", "cells"] | None
    #: Elements of the largest operand.
    largest: int


def why_not_on_cpu(facts: Facts) -> str | None:
    """Why a route of the CPU, which reads the mask on the host, cannot serve a call, or None."""
    obstacle: str | None = facts.detail.obstacle
    if obstacle is None and facts.device != "cpu":
        return f"what is kept cannot be gathered on {facts.device} without a host-device sync"
    return obstacle


def kernel_route(registered: Route, **changes: Any) -> Route:
    """A route of `mw.loss` by the kernel of a registered op, from the op's own route."""

    def serves(facts: Facts) -> str | None:
        if facts.grad != (registered.name == "fused"):
            return NOT_APPLICABLE
        return facts.detail.obstacle or facts.detail.no_kernel or registered.serves(facts)

    return replace(registered, serves=serves, reason="one pass over x and the mask", in_graph=None, **changes)


# -- a call ------------------------------------------------------------------------------------------------------------
#: (x, keep, value) -> x with the value where it is dropped.
Fill: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class AlignedLoss:
    """A loss with its operands: what is left to do is to fill, to run and to reduce."""

    fn: Callable[..., Any]
    spec: LossSpec
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
        if self.spec.alignment == "classes":
            return keep.unsqueeze(_class_dim(tensor))
        return keep.reshape(*keep.shape, *[1] * missing)

    def filled(self, fill: Fill = where_kept) -> list[Tensor]:
        """The operands with other values in the place of dropped ones."""
        return [
            tensor if value is None else fill(tensor, self.keep_of(tensor), value)
            for tensor, value in zip(self.tensors, self.fills, strict=True)
        ]

    @property
    def shared_dims(self) -> int:
        """How many of the last dims of the loss must stay: a keyword argument broadcasts over the others."""
        if self.spec.alignment != "elements":
            return 0
        return max((x.dim() for x in self.rest.values() if isinstance(x, Tensor) and x.numel() > 1), default=0)

    def divisors(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """By what each element counts in a mean, if not by 1; ``tensors`` are the operands, filled."""
        weight = self.rest.get("weight") if self.spec.divides_by == "classes" else None
        if isinstance(weight, Tensor):
            target = tensors[self.names.count(None) - 1]
            if target.is_floating_point():
                return None
            return weight.index_select(0, target.reshape(-1)).reshape(target.shape)
        if self.spec.divides_by == "elements" and "weight" in self.names:
            return tensors[self.names.index("weight")]
        return None


def align(
    fn: Callable[..., Any],
    spec: LossSpec,
    operands: tuple[Tensor, ...],
    bits: Tensor,
    kwargs: Mapping[str, Any],
    *,
    warns: bool = True,
) -> AlignedLoss:
    """Line everything up with the unreduced loss, or raise; ``warns`` where operands broadcast, as torch does.

    Raises:
        ShapeError: the mask does not broadcast to the unreduced loss.
        DeviceError: the mask is on another device.
    """
    x = operands[0]
    if spec.alignment == "elements":
        shape = _broadcast(operands, warns) if spec.broadcasts else tuple(x.shape)
    elif spec.alignment == "classes":
        dim = _class_dim(x)
        shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    else:
        shape = tuple(x.shape[:-1])
    check_mask(bits, shape, x)
    names: list[str | None] = [None] * len(operands)
    tensors, rest = list(operands), dict(kwargs)
    fills = [*spec.fills, *[None] * len(operands)][: len(operands)]
    for name, fill in spec.keyword_fills.items():
        value = rest.get(name)
        # A weight that is shared by many elements of the loss is not under the mask.
        if isinstance(value, Tensor) and (name != "weight" or value.shape == shape):
            tensors.append(rest.pop(name))
            names.append(name)
            fills.append(fill)
    if spec.alignment == "elements" and spec.broadcasts:
        tensors = [_expand(tensor, shape, name) for tensor, name in zip(tensors, names, strict=True)]
    keep, target, ignored = bits, operands[-1], rest.get("ignore_index", spec.ignore_index)
    by_class = spec.divides_by == "classes" and target.shape == shape and not target.is_floating_point()
    if by_class and ignored is not None:
        # What is ignored is dropped: it counts nowhere, and may hold anything.
        keep = bits & (target != ignored)
    aligned = AlignedLoss(fn, spec, tuple(tensors), tuple(names), tuple(fills), rest, shape, keep)
    # To fill an operand of a wrong shape could give it a right one: it is left as it is, for torch to refuse.
    safe = [fill if fits(aligned.keep_of(x).shape, x.shape) else None for x, fill in zip(tensors, fills, strict=True)]
    return replace(aligned, fills=tuple(safe))


def _class_dim(x: Tensor) -> int:
    """Where torch looks for the classes: in dim 1, or in the only dim of a single sample."""
    return 1 if x.dim() > 1 else 0


def _expand(x: Tensor, shape: tuple[int, ...], name: str | None) -> Tensor:
    """X as a view of the loss's shape, where it has one; torch refuses any other."""
    # A variance may lack the last dim: one for each row, as in torch.
    if name == "var" and tuple(x.shape) == shape[:-1]:
        x = x.unsqueeze(-1)
    return x.expand(shape) if tuple(x.shape) != shape and fits(x.shape, shape) else x


def _broadcast(operands: tuple[Tensor, ...], warns: bool) -> tuple[int, ...]:
    """The shape that operands broadcast to, with torch's warning if they have to."""
    if all(x.shape == operands[0].shape for x in operands[1:]):
        return tuple(operands[0].shape)
    shapes = [tuple(x.shape) for x in operands]
    try:
        shape = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        must = f"have the shape of `input`, {shapes[0]}, or one that broadcasts with it"
        raise ShapeError(say("loss", "target", must=must, got=shapes[-1], hint="target.view_as(input)")) from None
    if warns:
        # A constant level, since a graph that is traced cannot look at frames: align, the route, mw.loss, its caller.
        warnings.warn(
            f"loss: input and target have different shapes, {' and '.join(map(str, shapes))}, and broadcast to {shape};"
            " that is seldom meant.",
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
