"""Every loss that the tests try: how to make its operands, and what to plant under the mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

NAN, INF = float("nan"), float("inf")
BAD = (NAN, INF, -INF, 3e38)


@dataclass(frozen=True)
class Loss:
    """A loss with operands that it likes, and operands that it hates."""

    name: str
    fn: Callable[..., Any]
    #: Operands for a generator: floats in float64; those named in ``differentiable`` carry gradients.
    make: Callable[[torch.Generator], list[Tensor]]
    shape: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Keyword arguments with one value for each element, made as operands are.
    named: Callable[[torch.Generator], dict[str, Tensor]] = lambda g: {}
    #: Where the dims are that an operand has and the loss has not: 1 for classes, -1 for a last dim.
    extra: int = 1
    #: What to plant in each operand; the last also for the rest.
    poison: tuple[tuple[float, ...], ...] = (BAD,)
    #: Operands that are never under the mask.
    shared: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name


def normal(*shape):
    return lambda g: torch.randn(*shape, generator=g, dtype=torch.float64)


def uniform(*shape):
    return lambda g: torch.rand(*shape, generator=g, dtype=torch.float64) * 0.9 + 0.05


def signs(*shape):
    return lambda g: torch.randint(0, 2, shape, generator=g).double() * 2 - 1


def labels(classes, *shape):
    return lambda g: torch.randint(0, classes, shape, generator=g)


def probabilities(dim, *shape):
    return lambda g: torch.randn(*shape, generator=g, dtype=torch.float64).softmax(dim)


def log_probabilities(dim, *shape):
    return lambda g: torch.randn(*shape, generator=g, dtype=torch.float64).log_softmax(dim)


def operands(*makers):
    return lambda g: [make(g) for make in makers]


def focal(input, target, reduction, gamma=2.0):
    """A loss that a user may have written: class dim 1, and it raises for a class that does not exist."""
    p = torch.exp(-F.cross_entropy(input, target, reduction="none"))
    out = -((1 - p) ** gamma) * torch.log(p)
    return out if reduction == "none" else out.mean()


def log_ratio(input, target, reduction):
    """Elementwise; positive values only."""
    return (torch.log(input) - torch.log(target)).abs()


def distance(input, target, reduction):
    """Takes the last dim away."""
    return (input - target).pow(2).sum(-1).add(1e-3).sqrt()


S = (4, 6)
CLASSES = ((NAN, INF, -INF), (-100, 99999, -7))
WEIGHT = torch.tensor([0.2, 1.0, 0.5, 3.0, 0.7], dtype=torch.float64)

TABLE = [
    Loss("mse_loss", F.mse_loss, operands(normal(*S), normal(*S)), S),
    Loss(
        "mse_loss_weight", F.mse_loss, operands(normal(*S), normal(*S)), S, named=lambda g: {"weight": uniform(*S)(g)}
    ),
    Loss("l1_loss", F.l1_loss, operands(normal(*S), normal(*S)), S),
    Loss("l1_loss_weight", F.l1_loss, operands(normal(*S), normal(*S)), S, named=lambda g: {"weight": uniform(*S)(g)}),
    Loss("smooth_l1_loss", F.smooth_l1_loss, operands(normal(*S), normal(*S)), S, {"beta": 0.3}),
    Loss("huber_loss", F.huber_loss, operands(normal(*S), normal(*S)), S, {"delta": 0.4}),
    Loss("huber_weight", F.huber_loss, operands(normal(*S), normal(*S)), S, named=lambda g: {"weight": uniform(*S)(g)}),
    Loss("bce", F.binary_cross_entropy, operands(uniform(*S), uniform(*S)), S, poison=((NAN, -1.0, 2.0, INF), BAD)),
    Loss(
        "bce_weight",
        F.binary_cross_entropy,
        operands(uniform(*S), uniform(*S)),
        S,
        named=lambda g: {"weight": uniform(*S)(g)},
        poison=((NAN, -1.0, 2.0), BAD),
    ),
    Loss(
        "bce_shared_weight",
        F.binary_cross_entropy,
        operands(uniform(*S), uniform(*S)),
        S,
        {"weight": torch.linspace(0.5, 2.0, 6, dtype=torch.float64)},
        poison=((NAN, -1.0, 2.0), BAD),
    ),
    Loss("bce_with_logits", F.binary_cross_entropy_with_logits, operands(normal(*S), uniform(*S)), S),
    Loss(
        "bce_with_logits_pos_weight",
        F.binary_cross_entropy_with_logits,
        operands(normal(*S), uniform(*S)),
        S,
        {"pos_weight": torch.linspace(0.5, 2.0, 6, dtype=torch.float64)},
        named=lambda g: {"weight": uniform(*S)(g)},
    ),
    Loss("kl_div", F.kl_div, operands(log_probabilities(-1, *S), probabilities(-1, *S)), S),
    Loss(
        "kl_div_log_target",
        F.kl_div,
        operands(log_probabilities(-1, *S), log_probabilities(-1, *S)),
        S,
        {"log_target": True},
    ),
    Loss(
        "gaussian_nll_loss",
        F.gaussian_nll_loss,
        operands(normal(*S), normal(*S)),
        S,
        named=lambda g: {"var": uniform(*S)(g)},
        poison=(BAD, BAD, (NAN, -1.0, -INF)),
    ),
    Loss("poisson_nll_loss", F.poisson_nll_loss, operands(normal(*S), uniform(*S)), S, {"full": True}),
    Loss("poisson_nll_loss_rates", F.poisson_nll_loss, operands(uniform(*S), uniform(*S)), S, {"log_input": False}),
    Loss("hinge_embedding_loss", F.hinge_embedding_loss, operands(normal(*S), signs(*S)), S),
    Loss("soft_margin_loss", F.soft_margin_loss, operands(normal(*S), signs(*S)), S),
    Loss("margin_ranking_loss", F.margin_ranking_loss, operands(normal(*S), normal(*S), signs(*S)), S, {"margin": 0.1}),
    Loss("cross_entropy", F.cross_entropy, operands(normal(7, 5), labels(5, 7)), (7,), poison=CLASSES),
    Loss(
        "cross_entropy_tokens",
        F.cross_entropy,
        operands(normal(4, 5, 6), labels(5, 4, 6)),
        (4, 6),
        {"weight": WEIGHT, "label_smoothing": 0.1},
        poison=CLASSES,
    ),
    Loss(
        "cross_entropy_pixels",
        F.cross_entropy,
        operands(normal(2, 5, 3, 4), labels(5, 2, 3, 4)),
        (2, 3, 4),
        {"ignore_index": 2, "weight": WEIGHT},
        poison=CLASSES,
    ),
    Loss(
        "cross_entropy_soft",
        F.cross_entropy,
        operands(normal(4, 5, 6), probabilities(1, 4, 5, 6)),
        (4, 6),
        {"weight": WEIGHT, "label_smoothing": 0.1},
    ),
    Loss("nll_loss", F.nll_loss, operands(log_probabilities(1, 7, 5), labels(5, 7)), (7,), poison=CLASSES),
    Loss(
        "nll_loss_tokens",
        F.nll_loss,
        operands(log_probabilities(1, 4, 5, 6), labels(5, 4, 6)),
        (4, 6),
        {"weight": WEIGHT, "ignore_index": 1},
        poison=CLASSES,
    ),
    Loss("multi_margin_loss", F.multi_margin_loss, operands(normal(7, 5), labels(5, 7)), (7,), poison=CLASSES),
    Loss(
        "multilabel_margin_loss",
        F.multilabel_margin_loss,
        operands(normal(7, 5), lambda g: torch.tensor([3, 0, -1, 1, 2]).expand(7, 5).clone()),
        (7,),
        poison=((NAN, INF, -INF), (99999, -7)),
    ),
    Loss(
        "multilabel_soft_margin_loss",
        F.multilabel_soft_margin_loss,
        operands(normal(7, 5), lambda g: labels(2, 7, 5)(g).double()),
        (7,),
        {"weight": WEIGHT},
    ),
    Loss("cosine_embedding_loss", F.cosine_embedding_loss, operands(normal(7, 3), normal(7, 3), signs(7)), (7,)),
    Loss("triplet_margin_loss", F.triplet_margin_loss, operands(normal(7, 3), normal(7, 3), normal(7, 3)), (7,)),
    Loss(
        "triplet_margin_with_distance_loss",
        F.triplet_margin_with_distance_loss,
        operands(normal(7, 3), normal(7, 3), normal(7, 3)),
        (7,),
    ),
    Loss("user_focal", focal, operands(normal(4, 5, 6), labels(5, 4, 6)), (4, 6), {"gamma": 1.5}, poison=CLASSES),
    Loss("user_log_ratio", log_ratio, operands(uniform(*S), uniform(*S)), S),
    Loss("user_distance", distance, operands(normal(4, 6, 3), normal(4, 6, 3)), (4, 6), extra=-1),
    Loss("user_distance_square", distance, operands(normal(6, 6), normal(6, 6)), (6,), extra=-1),
]
if hasattr(F, "linear_cross_entropy"):
    TABLE.append(
        Loss(
            "linear_cross_entropy",
            F.linear_cross_entropy,
            operands(normal(7, 3), normal(5, 3), labels(5, 7)),
            (7,),
            {"weight": WEIGHT},
            poison=(BAD, BAD, CLASSES[1]),
            shared=(1,),
        )
    )

LOSSES = [pytest.param(loss, id=loss.name) for loss in TABLE]


@dataclass
class Sample:
    """A loss with its operands and a mask."""

    loss: Loss
    tensors: list[Tensor]
    named: dict[str, Tensor]
    mask: Tensor

    def call(self, mw_loss, reduction="mean", mask=None, tensors=None):
        """``mw.loss`` of this sample."""
        tensors = tensors or [*self.tensors, *self.named.values()]
        operands = tensors[: len(self.tensors)]
        named = dict(zip(self.named, tensors[len(self.tensors) :], strict=True))
        inputs, target = operands[:-1], operands[-1]
        return mw_loss(
            self.loss.fn,
            inputs[0] if len(inputs) == 1 else inputs,
            target,
            self.mask if mask is None else mask,
            reduction=reduction,
            **self.loss.kwargs,
            **named,
        )

    def unreduced(self):
        """The loss as torch gives it, without a mask."""
        return self.loss.fn(*self.tensors, reduction="none", **self.named, **self.loss.kwargs)

    def poisoned(self, turn=0):
        """The same sample with bad values under the mask."""
        tensors = []
        for i, x in enumerate([*self.tensors, *self.named.values()]):
            bad = self.loss.poison[min(i, len(self.loss.poison) - 1)]
            keep = self.keep_of(x)
            value = torch.tensor(bad[turn % len(bad)], dtype=x.dtype)
            tensors.append(x if i in self.loss.shared else torch.where(keep, x, value))
        n = len(self.tensors)
        return Sample(self.loss, tensors[:n], dict(zip(self.named, tensors[n:], strict=True)), self.mask)

    def keep_of(self, x):
        """The mask as it lies over one operand."""
        keep = self.mask.expand(self.loss.shape)
        for _ in range(x.dim() - keep.dim()):
            keep = keep.unsqueeze(self.loss.extra)
        return keep

    def to(self, dtype):
        """The same sample with other floats."""

        def cast(x):
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        kwargs = {name: cast(value) for name, value in self.loss.kwargs.items()}
        loss = Loss(**{**self.loss.__dict__, "kwargs": kwargs})
        return Sample(loss, [cast(x) for x in self.tensors], {k: cast(x) for k, x in self.named.items()}, self.mask)


def sample(loss, seed=0, density=0.5):
    """A sample of a loss; its mask keeps and drops something, and drops a whole row."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(loss.shape, generator=g) < density
    mask[0] = True
    mask[1] = False
    return Sample(loss, loss.make(g), loss.named(g), mask)


def effective(s):
    """What is kept and not ignored, and by what each counts in a mean: a float64 loop's view of the sample."""
    keep = s.mask.expand(s.loss.shape).clone()
    weights = torch.ones(s.loss.shape, dtype=torch.float64)
    target = s.tensors[-1]
    if s.loss.fn in (F.cross_entropy, F.nll_loss, getattr(F, "linear_cross_entropy", None)):
        if not target.is_floating_point():
            keep &= target != s.loss.kwargs.get("ignore_index", -100)
            if "weight" in s.loss.kwargs:
                weights = s.loss.kwargs["weight"].double()[target]
    elif s.loss.fn in (F.mse_loss, F.l1_loss) and "weight" in s.named:
        weights = s.named["weight"].double()
    return keep, weights


def expected(s, reduction):
    """The loss by a loop over rows, from torch's own unreduced loss of clean operands in float64."""
    wide = s.to(torch.float64)
    keep, weights = effective(wide)
    out = wide.unreduced()
    if reduction == "none":
        return torch.where(keep, out, 0.0)
    if reduction == "sum":
        return out[keep].sum()
    if reduction == "mean":
        return out[keep].sum() / weights[keep].sum()
    rows = [o[k].sum() / w[k].sum() for o, k, w in zip(out, keep, weights, strict=True) if k.any()]
    return torch.stack(rows).mean()
