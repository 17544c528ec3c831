"""What is known of torch's functional losses: how the unreduced loss lines up, and which values do no harm.

A loss that is not in the table, such as one that a user wrote, is served too: see `maskwise.ops.loss.unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal

import torch.nn.functional as F

__all__ = ["KINDS", "TAKES", "Kind"]


@dataclass(frozen=True)
class Kind:
    """What is known of one loss.

    ``lines_up`` tells the shape of the unreduced loss. "elements": all operands broadcast together, and so does the
    loss. "classes": the first operand has the classes in dim 1, which the loss has not. "rows": the first operand has a
    last dim that the loss has not.
    """

    lines_up: Literal["elements", "classes", "rows"]
    #: What stands in the place of a dropped value, operand by operand; None for one that all elements share.
    fills: tuple[float | None, ...]
    #: The same for keyword arguments that may come with one value for each element of the loss.
    named: Mapping[str, float] = field(default_factory=dict)
    #: What ``weight`` does to the mean: it divides by the weights of the classes, or of the elements, instead of by how
    #: many there are.
    divides: Literal["", "classes", "elements"] = ""
    #: Whether torch lets the operands broadcast.
    broadcasts: bool = True
    #: The class that is never counted, unless ``ignore_index`` says otherwise.
    ignores: int | None = None


_KNOWN: dict[str, Kind] = {
    "mse_loss": Kind("elements", (0.0, 0.0), {"weight": 1.0}, divides="elements"),
    "l1_loss": Kind("elements", (0.0, 0.0), {"weight": 1.0}, divides="elements"),
    "huber_loss": Kind("elements", (0.0, 0.0), {"weight": 1.0}),
    "smooth_l1_loss": Kind("elements", (0.0, 0.0)),
    "binary_cross_entropy": Kind("elements", (0.5, 0.5), {"weight": 1.0}, broadcasts=False),
    "binary_cross_entropy_with_logits": Kind("elements", (0.0, 0.5), {"weight": 1.0}, broadcasts=False),
    "kl_div": Kind("elements", (0.0, 1.0)),
    "gaussian_nll_loss": Kind("elements", (0.0, 0.0, 1.0), {"var": 1.0}),
    "poisson_nll_loss": Kind("elements", (1.0, 1.0)),
    "hinge_embedding_loss": Kind("elements", (1.0, 1.0)),
    "soft_margin_loss": Kind("elements", (0.0, 1.0)),
    "margin_ranking_loss": Kind("elements", (0.0, 0.0, 1.0)),
    "cross_entropy": Kind("classes", (0.0, 0.0), divides="classes", ignores=-100),
    "nll_loss": Kind("classes", (0.0, 0.0), divides="classes", ignores=-100),
    "linear_cross_entropy": Kind("rows", (0.0, None, 0.0), divides="classes"),
    "multi_margin_loss": Kind("rows", (0.0, 0.0)),
    "multilabel_margin_loss": Kind("rows", (0.0, -1.0)),
    "multilabel_soft_margin_loss": Kind("rows", (0.0, 0.0)),
    "cosine_embedding_loss": Kind("rows", (1.0, 1.0, 1.0)),
    # Three different places, since the distance of a point to itself has no gradient.
    "triplet_margin_loss": Kind("rows", (0.0, 1.0, 2.0), {"negative": 2.0}),
    "triplet_margin_with_distance_loss": Kind("rows", (0.0, 1.0, 2.0), {"negative": 2.0}),
}

#: The losses of torch.nn.functional that this torch has.
KINDS: dict[Callable[..., Any], Kind] = {getattr(F, name): kind for name, kind in _KNOWN.items() if hasattr(F, name)}

#: What each of them must be given, by name. Read here, since a graph that is being compiled cannot look.
TAKES: dict[Callable[..., Any], tuple[str, ...]] = {
    fn: tuple(name for name, each in signature(fn).parameters.items() if each.default is each.empty) for fn in KINDS
}
