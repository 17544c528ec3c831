"""The recipes of the documents: each idiom as people write it, its best form, and the Maskwise line.

What a side is called is what the page shows. ``leaky`` are idioms that are right on clean data only: they multiply by
the mask, so that NaN or inf under it reaches the result or a gradient.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import maskwise as mw
from benchmarks.case import Case, Side, never_slower
from benchmarks.cases.sides import Call, masked_inputs
from maskwise.mask import Mask
from maskwise.nn import gates

__all__ = ["cases"]

TOP = 10
WARM = 60
"""How often a layer is called before it is timed: it makes a layout when that has paid for itself."""


def _random(case: Case) -> torch.Generator:
    return torch.Generator().manual_seed(len(case.variant))


def _ours(line: str, prepare: object) -> Side:
    assert callable(prepare)
    return Side(line, prepare, kind="ours")


# -- values ------------------------------------------------------------------------------------------------------------
def _pair(case: Case) -> SimpleNamespace:
    inputs = masked_inputs(case)
    return SimpleNamespace(x=inputs.x, y=inputs.x.flip(0), keep=inputs.keep, mask=inputs.mask)


PRODUCT = (
    _ours("mw.pack(x, mask) * y", lambda i: lambda: (mw.pack(i.x, i.mask) * i.y).values),
    Side("x[mask] * y[mask]", lambda i: lambda: i.x[i.keep] * i.y[i.keep]),
    Side("(x * y)[mask]", lambda i: lambda: (i.x * i.y)[i.keep]),
)
SUM = (
    _ours("mw.sum(x, mask)", lambda i: lambda: mw.sum(i.x, i.mask)),
    Side("x[mask].sum()", lambda i: lambda: torch.sum(i.x[i.keep])),
    Side("x.masked_fill(~mask, 0).sum()", lambda i: lambda: i.x.masked_fill(~i.keep, 0).sum()),
    Side("where(mask, x, 0).sum()", lambda i: lambda: torch.where(i.keep, i.x, 0).sum()),
)


@dataclass(frozen=True)
class Ratings:
    """Scores of items by users, what is rated already, and which items are of the category."""

    scores: Tensor  # (users, items)
    rated: Tensor  # (users, items) bool
    category: Tensor  # (items,) bool


def _ratings(case: Case) -> Ratings:
    generator = _random(case)
    # All values differ, so that the best of them have one order.
    scores = torch.randperm(case.shape[0] * case.shape[1], generator=generator).view(case.shape).float()
    category = torch.rand(case.shape[1], generator=generator) < 0.8
    # Enough are allowed for everyone: where they are not, the idiom recommends what is forbidden.
    rated = torch.rand(case.shape, generator=generator) < 0.3
    category[: 2 * TOP], rated[:, : 2 * TOP] = True, False
    return Ratings(scores, rated, category)


def _criteria_written(i: Ratings) -> Call:
    def call() -> Tensor:
        allowed = ~i.rated & i.category.unsqueeze(0).expand_as(i.rated)
        return i.scores.masked_fill(~allowed, -torch.inf).topk(TOP).indices

    return call


CRITERIA = (
    _ours("mw.topk(scores, ~rated & category, k)", lambda i: lambda: _topk(i)),
    Side("masked_fill(~allowed, -inf).topk(k)", _criteria_written),
    Side(
        "where(rated | ~category, -inf, scores).topk(k)",
        lambda i: lambda: torch.where(i.rated | ~i.category, -torch.inf, i.scores).topk(TOP).indices,
    ),
)


def _topk(i: Ratings) -> Tensor:
    return mw.topk(i.scores, ~Mask(i.rated) & i.category, TOP).indices


# -- making masks ------------------------------------------------------------------------------------------------------
def _sequences(case: Case) -> SimpleNamespace:
    generator = _random(case)
    lengths = torch.randint(1, case.shape[1] + 1, case.shape[:1], generator=generator)
    return SimpleNamespace(x=torch.rand(case.shape, generator=generator), lengths=lengths, longest=case.shape[1])


def _lengths_written(i: SimpleNamespace) -> Call:
    def call() -> object:
        positions = torch.arange(i.longest, device=i.x.device).unsqueeze(0).repeat(len(i.lengths), 1)
        mask = positions < i.lengths.unsqueeze(1)
        return (i.x * mask).sum(1) / mask.sum(1)

    return call


def _lengths_best(i: SimpleNamespace) -> Tensor:
    mask = torch.arange(i.longest, device=i.x.device) < i.lengths[:, None]
    mean: Tensor = torch.where(mask, i.x, 0).sum(1) / i.lengths
    return mean


LENGTHS = (
    _ours(
        "mw.mean(x, Mask.from_lengths(lengths))",
        lambda i: lambda: mw.mean(i.x, Mask.from_lengths(i.lengths, max_len=i.longest), dim=1),
    ),
    Side("(x * mask).sum(1) / mask.sum(1)", _lengths_written, kind="leaky"),
    Side(
        "where(mask, x, 0).sum(1) / lengths",
        lambda i: lambda: _lengths_best(i),
    ),
)


def _dropped(case: Case) -> SimpleNamespace:
    generator = _random(case)
    size = case.shape[1]
    indices = torch.randperm(size, generator=generator)[: max(size // 64, 1)].tolist()
    return SimpleNamespace(x=torch.rand(case.shape, generator=generator), indices=indices, size=size)


def _indices_written(i: SimpleNamespace) -> Call:
    def call() -> object:
        mask = torch.ones(i.size, dtype=torch.bool, device=i.x.device)
        mask[torch.tensor(i.indices, device=i.x.device)] = False
        return (i.x * mask).sum(1) / mask.sum()

    return call


def _indices_best(i: SimpleNamespace) -> Tensor:
    indices = torch.tensor(i.indices, device=i.x.device)
    mean: Tensor = i.x.index_fill(1, indices, 0.0).sum(1) / (i.size - len(i.indices))
    return mean


INDICES = (
    _ours(
        "mw.mean(x, ~Mask.from_indices(indices))",
        lambda i: lambda: mw.mean(i.x, ~Mask.from_indices(i.indices, size=i.size, device=i.x.device), dim=1),
    ),
    Side("(x * mask).sum(1) / mask.sum()", _indices_written, kind="leaky"),
    Side(
        "x.index_fill(1, indices, 0).sum(1) / kept",
        lambda i: lambda: _indices_best(i),
    ),
)


def _tokens(case: Case) -> SimpleNamespace:
    generator = _random(case)
    tokens = torch.randint(0, 100, case.shape[:2], generator=generator)
    # One real token at least, so that no mean is of nothing.
    tokens[:, 0] = 99
    return SimpleNamespace(tokens=tokens, x=torch.rand(case.shape, generator=generator), dropped=list(range(30)))


def _tokens_written(i: SimpleNamespace) -> Call:
    def call() -> object:
        mask = ~torch.isin(i.tokens, torch.tensor(i.dropped, device=i.tokens.device))
        return (i.x * mask.unsqueeze(-1).float()).sum(1) / mask.sum(1, keepdim=True)

    return call


def _tokens_best(i: SimpleNamespace) -> Call:
    def call() -> object:
        mask = ~torch.isin(i.tokens, torch.tensor(i.dropped, device=i.tokens.device))
        return torch.where(mask[..., None], i.x, 0).sum(1) / mask.sum(1, keepdim=True)

    return call


TOKENS = (
    _ours(
        "mw.mean(x, ~Mask.from_values(tokens, ids))",
        lambda i: lambda: mw.mean(i.x, (~Mask.from_values(i.tokens, i.dropped))[..., None], dim=1),
    ),
    Side("(x * mask.float()).sum(1) / mask.sum(1)", _tokens_written, kind="leaky"),
    Side("where(mask, x, 0).sum(1) / mask.sum(1)", _tokens_best),
)


# -- weights -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Layer:
    """A batch, a dense layer, what is kept of its weight, and the gradient that comes back."""

    x: Tensor
    dense: nn.Linear
    kept: Tensor
    threshold: float
    above: Tensor
    logits: Tensor


def _layer(case: Case) -> Layer:
    batch, inputs, outputs = case.shape
    generator = _random(case)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dense = nn.Linear(inputs, outputs)
    # What is larger than the threshold is the case's density.
    size = dense.weight.detach().abs()
    threshold = float(size.flatten().kthvalue(round((1 - (case.density or 0.0)) * size.numel())).values)
    x, above = torch.randn(batch, inputs, generator=generator), torch.randn(batch, outputs, generator=generator)
    return Layer(x, dense, size > threshold, threshold, above, torch.randn(outputs, inputs, generator=generator))


def _frozen(i: Layer, layer: nn.Module) -> Call:
    layer.requires_grad_(False)
    for _ in range(WARM):
        layer(i.x)
    return lambda: layer(i.x)


def _zeros(i: Layer) -> Call:
    layer = nn.Linear(i.dense.in_features, i.dense.out_features, device=i.x.device)
    with torch.no_grad():
        layer.weight.copy_(torch.where(i.kept, i.dense.weight, 0.0))
        layer.bias.copy_(i.dense.bias)
    return _frozen(i, layer)


def _times_mask(i: Layer) -> Call:
    weight, bias, mask = i.dense.weight.detach(), i.dense.bias.detach(), i.kept.float()
    return lambda: F.linear(i.x, weight * mask, bias)


def _times_threshold(i: Layer) -> Call:
    weight, bias = i.dense.weight.detach(), i.dense.bias.detach()
    return lambda: F.linear(i.x, weight * (weight.abs() > i.threshold).float(), bias)


FIXED = (
    _ours(
        "SparseLinear.from_linear(layer, mask)", lambda i: _frozen(i, mw.nn.SparseLinear.from_linear(i.dense, i.kept))
    ),
    Side("F.linear(x, weight * mask)", _times_mask, kind="leaky"),
    Side("zeros written into the weight", _zeros),
)
THRESHOLD = (
    _ours(
        "MaskedLinear.from_linear(layer, Threshold(t))",
        lambda i: _frozen(i, mw.nn.MaskedLinear.from_linear(i.dense, gates.Threshold(i.threshold))),
    ),
    Side("F.linear(x, weight * (weight.abs() > t))", _times_threshold, kind="leaky"),
    Side("zeros written into the weight", _zeros),
)


def _gate_ours(i: Layer) -> Call:
    layer = nn.Linear(i.dense.in_features, i.dense.out_features, device=i.x.device)
    layer.load_state_dict(i.dense.state_dict())
    mw.nn.attach(layer, gates.Sigmoid(i.logits.clone()))
    wanted = [layer.get_parameter(f"parametrizations.weight.{name}") for name in ("original", "0.logits")]
    return lambda: torch.autograd.grad(layer(i.x), wanted, i.above)


def _gate_plain(i: Layer, *, safe: bool) -> Call:
    weight, logits = i.dense.weight.detach().clone().requires_grad_(), i.logits.clone().requires_grad_()
    bias = i.dense.bias.detach()

    def call() -> object:
        gate = logits.sigmoid()
        kept = torch.where(gate > 0, weight, 0.0) if safe else weight
        return torch.autograd.grad(F.linear(i.x, kept * gate, bias), [weight, logits], i.above)

    return call


GATE = (
    _ours("attach(layer, Sigmoid(logits))", _gate_ours),
    Side("F.linear(x, weight * sigmoid(logits))", lambda i: _gate_plain(i, safe=False), kind="leaky"),
    Side("where(gate > 0, weight, 0) * gate", lambda i: _gate_plain(i, safe=True)),
)


# -- computing less ----------------------------------------------------------------------------------------------------
def _map(case: Case) -> SimpleNamespace:
    generator = _random(case)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        width = case.shape[-1]
        network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    keep = torch.rand(case.shape[:-1], generator=generator) < (case.density or 0.0)
    network.requires_grad_(False)
    return SimpleNamespace(x=torch.randn(case.shape, generator=generator), keep=keep, mask=Mask(keep), fn=network)


def _indexed(i: SimpleNamespace) -> Call:
    def call() -> Tensor:
        out: Tensor = i.x.clone()
        out[i.keep] = i.fn(i.x[i.keep])
        return out

    return call


UPDATE = (
    _ours("mw.apply(fn, x, mask=mask, other=x)", lambda i: lambda: mw.apply(i.fn, i.x, mask=i.mask, other=i.x)),
    Side("where(mask, fn(x), x)", lambda i: lambda: torch.where(i.keep[..., None], i.fn(i.x), i.x)),
    Side("out[mask] = fn(x[mask])", _indexed),
)


def _matrix(i: Layer) -> Tensor:
    return torch.where(i.kept, i.dense.weight.detach(), 0.0)


def _sparse_ours(i: Layer) -> Call:
    weight, mask = i.dense.weight.detach(), Mask(i.kept)
    for _ in range(WARM):
        mw.linear(i.x, weight, mask)
    return lambda: mw.linear(i.x, weight, mask)


def _multiplied(i: Layer, matrix: Tensor) -> Call:
    turned = i.x.T.contiguous()
    return lambda: (matrix @ turned).T


def _by_rows(i: Layer) -> Call:
    with warnings.catch_warnings():
        # Torch says once that the layout is in beta, which is its peer's business.
        warnings.simplefilter("ignore", UserWarning)
        return _multiplied(i, _matrix(i).to_sparse_csr())


SPARSE = (
    _ours("mw.linear(x, weight, mask)", _sparse_ours),
    Side("sparse_coo_tensor @ x", lambda i: _multiplied(i, _matrix(i).to_sparse().coalesce())),
    Side("sparse_csr_tensor @ x", _by_rows),
    Side("F.linear(x, weight of zeros)", lambda i: partial(F.linear, i.x, _matrix(i))),
)


def _values(case: Case) -> SimpleNamespace:
    x = torch.randn(case.shape, generator=_random(case))
    threshold = float(x.flatten().kthvalue(round((1 - (case.density or 0.0)) * x.numel())).values)
    return SimpleNamespace(x=x, t=threshold, fn=torch.lgamma)


def _conditional_indexed(i: SimpleNamespace) -> Call:
    def call() -> Tensor:
        out: Tensor = i.x.clone()
        mask = i.x > i.t
        out[mask] = i.fn(i.x[mask])
        return out

    return call


CONDITIONAL = (
    _ours("mw.apply(fn, x, mask=x > t, other=x)", lambda i: lambda: mw.apply(i.fn, i.x, mask=i.x > i.t, other=i.x)),
    Side("where(x > t, fn(x), x)", lambda i: lambda: torch.where(i.x > i.t, i.fn(i.x), i.x)),
    Side("out[x > t] = fn(x[x > t])", _conditional_indexed),
)


def cases() -> tuple[Case, ...]:
    """Return one case a recipe; the variant is the name of its section."""
    square, linear = (2048, 2048), (512, 768, 3072)
    case = partial(Case, "recipes", "recipe")
    # Sums of thousands of products of both signs, in another order.
    loose = partial(case, absolute_tolerance=1e-3)

    made = (
        case("elementwise product", _pair, PRODUCT, square, 0.5),
        case("masked sum", masked_inputs, SUM, square, 0.5, relative_tolerance=1e-3),
        case("several criteria", _ratings, CRITERIA, square),
        case("from lengths", _sequences, LENGTHS, (4096, 512)),
        case("from indices", _dropped, INDICES, (64, 65536)),
        case("from token ids", _tokens, TOKENS, (64, 512, 256)),
        loose("fixed mask", _layer, FIXED, linear, 0.1),
        loose("threshold", _layer, THRESHOLD, linear, 0.1),
        loose("learned gate", _layer, GATE, linear, 0.5, relative_tolerance=1e-3),
        case("selective update", _map, UPDATE, (4, 64, 64, 64), 0.25, relative_tolerance=1e-3),
        loose("sparse tensors", _layer, SPARSE, linear, 0.1),
        case("conditional", _values, CONDITIONAL, square, 0.1),
    )
    return tuple(replace(each, targets=(never_slower(),)) for each in made)
