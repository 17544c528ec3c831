"""What has a mask and is no function of the registry: attention, linear, apply, pack, convolutions, layers.

Each is a function of tensors and one mask, of bits or of intervals, and says what of its tensors the mask drops, and
which of its results may depend on nothing else. The laws are tried on all of them, as they are on the registry's
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import maskwise as mw
from maskwise.ops.attention.reference import fill_dropped_inputs
from tests.laws.samples import as_bool, interval_masks, outputs
from tests.nn.layers import LAYERS, Layer

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    name: str
    #: The sizes of the tensors, all of which have a gradient, and of the mask.
    shapes: tuple[tuple[int, ...], ...]
    mask: tuple[int, ...]
    #: (tensors, mask) -> a tensor or a tuple of them.
    call: Callable[[Tensors, Any], Any]
    #: mask -> for each tensor what is dropped of it, as a mask that broadcasts; None for nothing.
    dropped: Callable[[Tensor], tuple[Tensor | None, ...]]
    #: mask -> which of the results depend only on what is kept, as a mask that broadcasts; None for all.
    read: Callable[[Tensor], Tensor | None] = lambda mask: None
    #: The result where nothing is kept; None where that is another suite's.
    empty: float | None = 0.0
    #: Whether a mask that is mapped by torch.vmap serves it, and one that is an argument of a compiled graph: not where
    #: the sizes of its results, or the parameters of a layer, come of the mask.
    maps: bool = True

    def __str__(self) -> str:
        return self.name

    def tensors(self, dtype: torch.dtype = torch.float32) -> Tensors:
        generator = torch.Generator().manual_seed(3)
        return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in self.shapes)

    def bits(self) -> Tensor:
        """A mask of which the first entry keeps everything, and the second nothing where others keep something."""
        mask = torch.rand(self.mask, generator=torch.Generator().manual_seed(4)) < 0.5
        mask[0] = True
        if len(mask) > 2:
            mask[1] = False
        return mask

    def masks(self) -> dict[str, Tensor | mw.Mask]:
        """The masks on which the laws are tried, by origin: bits, and every kind of intervals."""
        return {"bits": self.bits(), **interval_masks(self.mask)}

    def poisoned(self, value: float, mask: Any, dtype: torch.dtype = torch.float32) -> Tensors:
        """The tensors with a value where they are dropped."""
        filled = zip(self.tensors(dtype), self.dropped(as_bool(mask)), strict=True)
        return tuple(x if gone is None else torch.where(gone, value, x) for x, gone in filled)

    def run(self, tensors: Tensors, mask: Any) -> list[Tensor]:
        """The results that may be read, and the gradients of a weighted sum of them."""
        leaves = tuple(x.detach().clone().requires_grad_() for x in tensors)
        results = self.visible(self.call(leaves, mask), mask)
        return [*(out.detach() for out in results), *torch.autograd.grad(total(results), leaves)]

    def visible(self, result: Any, mask: Any) -> list[Tensor]:
        """The results with zeros where they may depend on what is dropped."""
        read = self.read(as_bool(mask))
        return [out if read is None else torch.where(read, out, 0.0) for out in outputs(result)]


def total(results: list[Tensor]) -> Tensor:
    """One number of all of them, with weights that differ by element, so that no two gradients cancel by chance."""
    return sum(
        (torch.where(out.isfinite(), out, 0.0) * torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape)).sum()
        for out in results
    )


# -- attention ---------------------------------------------------------------------------------------------------------
B, H, L, D = 3, 4, 9, 8


def tokens(mask: Tensor) -> Tensor:
    return mask[:, None, :, None]


def lost(mask: Tensor) -> tuple[Tensor, ...]:
    """What nothing of q, k and v depends on, of a mask of pairs: its queries without keys, and keys without queries."""
    ones = fill_dropped_inputs(torch.ones(B, H, L, 1), torch.ones(B, H, L, 1), torch.ones(B, H, L, 1), mask)
    return tuple(x == 0 for x in ones)


def keys_of(mask: Any) -> Any:
    return mask[:, None, None, :]


def of_keys(**options: Any) -> Callable[[Tensors, Any], Tensor]:
    return lambda x, mask: mw.attention(*x, keys_of(mask), **options)


def of_queries(x: Tensors, mask: Any) -> Tensor:
    return mw.attention(*x, keys_of(mask), query_mask=mask)


def packed_attention(x: Tensors, mask: Any) -> Tensor:
    packed = [mw.pack(each.transpose(1, 2), mask) for each in x]
    return mw.attention(*packed).unpack().transpose(1, 2)


def packed_with_scores(x: Tensors, mask: Any) -> Tensor:
    packed = [mw.pack(each.transpose(1, 2), mask) for each in x[:3]]
    return mw.attention(*packed, bias=mw.RelativeBias(x[3]), sinks=x[4]).unpack().transpose(1, 2)


def everywhere(mask: Tensor) -> tuple[Tensor, ...]:
    return (~tokens(mask),) * 3


# Three leaves rather than one, whose gradients autograd would add up in an order of its own.
QKV, SHARED = ((B, H, L, D),) * 3, ((B, H, L, D), (B, 2, L, D), (B, 2, L, D))
ATTENTION = [
    # The mask drops tokens as keys only; as queries, the loss drops them.
    Subject("attention", QKV, (B, L), of_keys(), everywhere, tokens),
    Subject("attention-causal", QKV, (B, L), of_keys(is_causal=True), everywhere, tokens),
    Subject("attention-grouped", SHARED, (B, L), of_keys(), everywhere, tokens),
    Subject("attention-queries", QKV, (B, L), of_queries, everywhere),
    Subject(
        "attention-only-queries",
        QKV,
        (B, L),
        lambda x, m: mw.attention(*x, query_mask=m),
        lambda m: (~tokens(m), None, None),
    ),
    Subject("attention-pairs", QKV, (B, 1, L, L), lambda x, m: mw.attention(*x, m), lost),
    # The bias of a pair that is dropped is dropped, too.
    Subject(
        "attention-bias",
        (*QKV, (B, H, L, L)),
        (B, 1, L, L),
        lambda x, m: mw.attention(*x[:3], m, bias=x[3]),
        lambda m: (*lost(m), ~m),
    ),
    Subject(
        "attention-softcap-sinks",
        (*QKV, (H,)),
        (B, L),
        lambda x, m: mw.attention(*x[:3], keys_of(m), softcap=2.0, sinks=x[3]),
        lambda m: (*everywhere(m), None),
        tokens,
    ),
    Subject(
        "attention-alibi",
        (*QKV, (H,)),
        (B, L),
        lambda x, m: mw.attention(*x[:3], keys_of(m), bias=mw.AlibiBias(x[3])),
        lambda m: (*everywhere(m), None),
        tokens,
    ),
    Subject(
        "attention-table",
        (*QKV, (8, H)),
        (B, 1, L, L),
        lambda x, m: mw.attention(*x[:3], m, bias=mw.RelativeBias(x[3])),
        lambda m: (*lost(m), None),
    ),
    Subject(
        "attention-packed-scores",
        (*QKV, (8, H), (H,)),
        (B, L),
        packed_with_scores,
        lambda m: (*everywhere(m), None, None),
        maps=False,
    ),
    Subject("attention-packed", QKV, (B, L), packed_attention, everywhere, maps=False),
]


# -- selection and products --------------------------------------------------------------------------------------------
def rows(mask: Tensor) -> tuple[Tensor]:
    return (~mask[..., None],)


def polynomial(row: Tensor) -> Tensor:
    return row * row + row


SELECTION = [
    Subject("apply", ((5, 7, 3),), (5, 7), lambda x, m: mw.apply(polynomial, x[0], mask=m), rows),
    Subject(
        "apply-weight",
        ((5, 7, 3), (3, 4)),
        (5, 7),
        lambda x, m: mw.apply(lambda rows: rows @ x[1], x[0], mask=m),
        lambda m: (*rows(m), None),
    ),
    Subject("apply-elements", ((5, 7),), (5, 7), lambda x, m: mw.apply(polynomial, x[0], mask=m), lambda m: (~m,)),
    Subject("pack", ((5, 7, 3),), (5, 7), lambda x, m: mw.pack(x[0], m).values, rows, maps=False),
    Subject("pack-capacity", ((5, 7, 3),), (5, 7), lambda x, m: mw.pack(x[0], m, capacity=35).values, rows),
    Subject("unpack", ((5, 7, 3),), (5, 7), lambda x, m: mw.pack(x[0], m).unpack(), rows, maps=False),
]
#: Other names for the ops of the registry's functions.
NAMES = [
    Subject("where", ((5, 7),), (5, 7), lambda x, m: mw.where(m, x[0], 0.0), lambda m: (~m,)),
    Subject("mul", ((5, 7),), (5, 7), lambda x, m: mw.mul(x[0], m), lambda m: (~m,)),
    Subject("max", ((5, 7),), (5, 7), lambda x, m: mw.max(x[0], m, empty=0.0), lambda m: (~m,)),
    Subject("max-dim", ((5, 7),), (5, 7), lambda x, m: mw.max(x[0], m, -1, empty=0.0).values, lambda m: (~m,)),
    Subject("min-dim", ((5, 7),), (5, 7), lambda x, m: mw.min(x[0], m, 0, True, empty=0.0).values, lambda m: (~m,)),
]
LINEAR = [
    Subject(
        "linear", ((5, 40), (24, 40)), (24, 40), lambda x, m: mw.linear(x[0], x[1], m), lambda m: (None, ~m), maps=False
    ),
    Subject(
        "linear-large",
        ((64, 256), (128, 256)),
        (128, 256),
        lambda x, m: mw.linear(x[0], x[1], m),
        lambda m: (None, ~m),
        maps=False,
    ),
]


# -- convolutions ------------------------------------------------------------------------------------------------------
def convolved(
    call: Callable[..., Tensor], route: str | None = None, **options: Any
) -> Callable[[Tensors, Any], Tensor]:
    def run(x: Tensors, mask: Any) -> Tensor:
        return call(*x, **options, mask=mask)

    def run_forced(x: Tensors, mask: Any) -> Tensor:
        with mw.force(route):
            return run(x, mask)

    return run if route is None else run_forced


def image(mask: Tensor) -> tuple[Tensor | None, ...]:
    return ~mask[:, None], None, None


IMAGE, SEQUENCES = ((3, 4, 9, 11), (6, 4, 3, 3), (6,)), ((3, 4, 40), (4, 1, 7), (4,))
CONVOLUTIONS = [
    Subject("conv2d", IMAGE, (3, 9, 11), convolved(mw.conv2d, padding=1), image),
    Subject("conv2d-stride", IMAGE, (3, 9, 11), convolved(mw.conv2d, stride=2), image),
    Subject("conv_transpose2d", ((3, 6, 9, 11), (6, 6, 3, 3), (6,)), (3, 9, 11), convolved(mw.conv_transpose2d), image),
    Subject("conv1d", SEQUENCES, (3, 40), convolved(mw.conv1d, padding="same", groups=4), image),
    Subject("conv_transpose1d", SEQUENCES, (3, 40), convolved(mw.conv_transpose1d, stride=2, groups=4), image),
    *(
        Subject(f"conv2d-{route}", IMAGE, (3, 9, 11), convolved(mw.conv2d, route, padding=1), image, maps=False)
        for route in ("tiles", "pixels")
    ),
    Subject(
        "conv1d-rows", SEQUENCES, (3, 40), convolved(mw.conv1d, "rows", padding="same", groups=4), image, maps=False
    ),
]


# -- losses ------------------------------------------------------------------------------------------------------------
def loss(function: Callable[..., Tensor], target: Tensor, **options: Any) -> Callable[[Tensors, Any], Tensor]:
    return lambda x, mask: mw.loss(function, x[0], target.to(x[0].dtype), mask, **options)


def loss_head(x: Tensors, mask: Any, route: str, reduction: str) -> Tensor:
    # A graph takes the chunks, whatever the size.
    with nullcontext() if torch.compiler.is_compiling() else mw.force(route):
        return mw.linear_cross_entropy(x[0], x[1], CLASSES, mask, x[2], reduction=reduction)


TARGET, CLASSES = torch.linspace(0.1, 0.9, 35).reshape(5, 7), torch.arange(35).reshape(5, 7) % 4
LOSSES = [
    *(
        Subject(f"loss-{reduction}", ((5, 7),), (5, 7), loss(F.mse_loss, TARGET, reduction=reduction), lambda m: (~m,))
        for reduction in ("mean", "sum", "sequence")
    ),
    *(
        Subject(
            f"cross_entropy-{reduction}",
            ((5, 4, 7),),
            (5, 7),
            lambda x, m, r=reduction: mw.loss(F.cross_entropy, x[0], CLASSES, m, reduction=r),
            lambda m: (~m[:, None],),
        )
        for reduction in ("mean", "sum", "none")
    ),
    *(
        Subject(
            f"linear_cross_entropy-{reduction}-{route}",
            ((5, 7, 6), (9, 6), (9,)),
            (5, 7),
            lambda x, m, route=route, r=reduction: loss_head(x, m, route, r),
            lambda m: (~m[..., None], None, None),
        )
        for route in ("plain", "pieces")
        for reduction in ("mean", "none")
    ),
]


# -- layers ------------------------------------------------------------------------------------------------------------
def functional(module: torch.nn.Module, names: list[str]) -> Callable[..., Any]:
    """A module as a function of its inputs and of parameters by name."""
    return lambda parameters, *inputs: torch.func.functional_call(
        module, dict(zip(names, parameters, strict=True)), inputs
    )


def gated(make: Callable[..., torch.nn.Module]) -> Callable[[Tensors, Any], Any]:
    """A layer with a gate on its weight, as a function of input and weight."""
    return lambda x, mask: functional(make(mask), ["weight"])(x[1:], x[0])


def of_layer(layer: Layer) -> Subject:
    """A norm or a pool in evaluation, as a function of its input alone."""
    modules = {dtype: layer.make().eval().to(dtype) for dtype in (torch.float32, torch.float64)}
    return Subject(
        layer.label,
        (layer.shape,),
        layer.mask,
        lambda x, mask: modules[x[0].dtype](x[0], mask),
        lambda mask: (~layer.to_input(mask),),
        empty=0.0 if layer.same_layout else None,
    )


def masked_linear(mask: Any) -> torch.nn.Module:
    return mw.nn.MaskedLinear(6, 5, bias=False, gate=mask)


def masked_conv(mask: Any) -> torch.nn.Module:
    return mw.nn.MaskedConv2d(3, 4, 3, bias=False, gate=mask)


def sparse_linear(x: Tensors, mask: Any) -> Tensor:
    """A SparseLinear holds nothing but the kept weights, so the weight is cut to them."""
    layer = mw.nn.SparseLinear(6, 5, bias=False, mask=mask)
    return functional(layer, ["values"])((x[1][as_bool(mask)],), x[0])


SINGLE = {layer.label: layer for layer in LAYERS}
LAYER_SUBJECTS = [
    *(of_layer(layer) for layer in SINGLE.values()),
    Subject("MaskedLinear", ((7, 6), (5, 6)), (5, 6), gated(masked_linear), lambda m: (None, ~m), maps=False),
    Subject(
        "MaskedConv2d", ((2, 3, 5, 5), (4, 3, 3, 3)), (4, 3, 3, 3), gated(masked_conv), lambda m: (None, ~m), maps=False
    ),
    Subject("SparseLinear", ((7, 6), (5, 6)), (5, 6), sparse_linear, lambda m: (None, ~m), maps=False),
]

SUBJECTS = [*ATTENTION, *NAMES, *SELECTION, *LINEAR, *CONVOLUTIONS, *LOSSES, *LAYER_SUBJECTS]


def trials(*, few: bool = False, maps: bool = False) -> list:
    """Every subject with every one of its masks, for ``pytest.mark.parametrize``.

    Args:
        few: bits, and one origin of intervals for each subject, the next one for the next, where a test is slow.
        maps: only what a mask that is an argument of a graph serves.
    """
    found = []
    for turn, subject in enumerate(subject for subject in SUBJECTS if subject.maps or not maps):
        masks = subject.masks()
        names = list(masks)
        chosen = ("bits", names[1 + turn % (len(names) - 1)]) if few else names
        found.extend(pytest.param(subject, masks[name], id=f"{subject}-{name}") for name in chosen)
    return found
