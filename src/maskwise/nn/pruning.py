"""Prune a whole model: gates on its weights, their topology chosen again, and a report of what they keep."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import nan, prod
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.rnn import RNNCellBase
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from maskwise.errors import ArgumentError, DtypeError, say
from maskwise.mask import Mask
from maskwise.nn.arguments import check_module
from maskwise.nn.attaching import Gated, attach, chains_of, check_attach, gated
from maskwise.nn.gates import Gate, Selecting, TopK
from maskwise.nn.gates.gate import check_unbound
from maskwise.nn.gates.selecting import check_density, largest, scores_of, share
from maskwise.nn.sparse_linear import SparseLinear
from maskwise.plan.explain import Tabular

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LeftOut", "Report", "Row", "prune", "report", "reselect", "ungated", "weights_of"]

M = TypeVar("M", bound=nn.Module)
Pattern: TypeAlias = str | type[nn.Module]


def prune(
    model: M,
    gate_factory: float | Gate | Callable[[], Gate],
    include: Pattern | Sequence[Pattern] | None = None,
    exclude: Pattern | Sequence[Pattern] = (),
    name: str | None = None,
) -> M:
    """Put a gate on every layer of a model, with one budget for each layer or one for all of them.

    >>> import torch, maskwise as mw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> _ = mw.nn.prune(model, 0.9)                          # drops 90 % of each weight, and keeps the largest 10 %
    >>> [row.kept for row in mw.nn.report(model)]
    [13, 6]
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> _ = mw.nn.prune(model, mw.nn.gates.TopK(0.1, scope="global"))
    >>> mw.nn.report(model).kept, round(0.1 * (8 * 16 + 16 * 4))
    (19, 19)

    A number is what is pruned, as the ``amount`` of ``torch.nn.utils.prune``; the density of a gate is what is kept.
    With ``TopK(density, scope="global")`` the largest weights of all these layers together are kept, exactly
    ``round(density * all weights)`` of them. Other gates select within their own layer.

    Weights are what an input is multiplied by: those of linear layers, convolutions, recurrent layers, the projections
    of ``nn.MultiheadAttention``, the ``Conv1D`` of transformers (GPT-2), and experts, whose weights have three dims.
    Embedding tables and other parameters of two or more dims are left out, and `mw.nn.report` lists them with the
    reason. A weight that is tied to an embedding is masked where it is multiplied, and not where it is looked up.

    ``NM`` takes the dims as the weight holds them: the input of a Conv1D is dim 0.

    Args:
        model: any module; it may itself be a layer.
        gate_factory: the share that is pruned, between 0 and 1: 0.9 is ``TopK(0.1)`` for each layer; or a gate, of
            which each layer gets a copy; or a function that is called without arguments for each layer, and returns a
            new gate.
        include: which modules: types, or patterns of their names such as ``"encoder.*.linear?"``; each must match one.
            By default, every one with weights.
        exclude: which of these not, likewise.
        name: the tensor of each module that is gated. By default its weights; of a module of another kind that
            ``include`` matches, the tensor ``"weight"``.

    Returns:
        The model, changed in place; if one layer cannot be gated, none is.

    Raises:
        DtypeError: ``model`` is not a module, the factory is neither a number nor a gate, cannot be called or does not
            return a gate, or a pattern is neither a name nor a type.
        ArgumentError: the share is not between 0 and 1, the gate belongs to a weight, a pattern matches nothing, no
            layer is left, or a layer has a gate already or is a lazy one that is not initialized.
        ShapeError: a gate does not fit a layer's weight.
    """
    check_module("prune", model)
    make = _factory(gate_factory)
    chosen = _chosen(model, include, exclude, name)
    gates = [make() for _ in chosen]
    # Everything is tried before anything is changed.
    weights = [check_attach(module, gate, tensor) for (module, tensor), gate in zip(chosen, gates, strict=True)]
    if len({id(gate) for gate in gates}) < len(gates):
        must = "make a new gate at every call"
        raise ArgumentError(say("prune", "gate_factory", must=must, got="the same one twice", hint="lambda: TopK(0.1)"))
    _one_density("prune", [*gates, *(found.gate for found in gated(model))])
    try:
        for gate, weight in zip(gates, weights, strict=True):
            gate.bind(weight)
    finally:
        for gate in gates:
            gate.bound = False
    for (module, tensor), gate in zip(chosen, gates, strict=True):
        attach(module, gate, tensor)
    _select_together(model)
    return model


def _factory(given: object) -> Callable[[], Gate]:
    """A function that makes a new gate at every call, of whatever `prune` was given."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        # Written so that NaN fails too.
        if not 0.0 <= given <= 1.0:
            hint = f"mw.nn.prune(model, {given / 100:g})" if 1.0 < given <= 100.0 else "mw.nn.prune(model, 0.9)"
            must = "be between 0 and 1, the share that is pruned"
            raise ArgumentError(say("prune", "gate_factory", must=must, got=given, hint=hint))
        # Without the digits that a subtraction of floats leaves.
        density = round(1.0 - given, 12)
        return lambda: TopK(density)
    if isinstance(given, Gate):
        check_unbound("prune", given)
        return lambda: deepcopy(given)
    if callable(given) and not _needs_arguments(given):
        return given
    must, hint = "be a share to prune, a gate, or a function that makes one", "mw.nn.prune(model, 0.9)"
    if isinstance(given, (Mask, Tensor)):
        hint = "mw.nn.attach(layer, mask) for one layer"
    elif isinstance(given, type):
        hint = f"{given.__name__}(...)"
    got = given.__name__ if isinstance(given, type) else type(given).__name__
    raise DtypeError(say("prune", "gate_factory", must=must, got=got, hint=hint))


def _needs_arguments(make: Callable[..., object]) -> bool:
    try:
        inspect.signature(make).bind()
    except TypeError:
        return True
    except ValueError:
        # A builtin without a signature.
        return False
    return False


def reselect(model: nn.Module, density: float | None = None) -> None:
    """Choose again what is kept, in every gate of a model that chooses: TopK, NM, Block.

    >>> import torch, maskwise as mw
    >>> layer = mw.nn.attach(torch.nn.Linear(10, 10), mw.nn.gates.TopK(0.5))
    >>> mw.nn.reselect(layer, density=0.2)
    >>> mw.nn.report(layer).density
    0.2

    Args:
        model: a model with gates.
        density: the share that is kept from now on; by default, each gate's own. NM has none to set.

    Raises:
        ArgumentError: the density is not between 0 and 1, or no gate of the model has one.
        DtypeError: ``model`` is not a module, or the density is not a number.
    """
    check_module("reselect", model)
    choosing = [(found, found.gate) for found in gated(model) if isinstance(found.gate, Selecting)]
    if density is not None:
        value = check_density("reselect", density)
        settable = [gate for _, gate in choosing if gate.density is not None]
        if not settable:
            must = "have a gate with a density, TopK or Block"
            kinds = sorted({type(found.gate).__name__ for found in gated(model)})
            got = ", ".join(kinds) if kinds else "no gates"
            hint = "mw.nn.prune(model, lambda: TopK(0.1))"
            raise ArgumentError(say("reselect", "model", must=must, got=got, hint=hint))
        for gate in settable:
            gate.density = value
    _one_density("reselect", [gate for _, gate in choosing])
    for found, gate in choosing:
        if not _is_global(gate):
            gate.select(found.weight())
    _select_together(model)


def _is_global(gate: Gate) -> bool:
    return isinstance(gate, TopK) and gate.scope == "global"


def _one_density(op: str, gates: Iterable[Gate]) -> None:
    """Raise unless the gates of global scope, which share one budget, agree on it."""
    densities = sorted({gate.density for gate in gates if isinstance(gate, TopK) and _is_global(gate)})
    if len(densities) > 1:
        must = "be the same for all gates of global scope, which share one budget"
        hint = "mw.nn.reselect(model, density=0.1)"
        raise ArgumentError(say(op, "density", must=must, got=densities, hint=hint))


@torch.no_grad()
def _select_together(model: nn.Module) -> None:
    """Share one budget among all the gates of global scope."""
    together = [(found, found.gate) for found in gated(model) if isinstance(found.gate, TopK)]
    together = [(found, gate) for found, gate in together if _is_global(gate)]
    if not together:
        return
    weights = [found.weight() for found, _ in together]
    scores = [scores_of(weight).reshape(-1) for weight in weights]
    # In one order, of the widest dtype, where the first weight is.
    ranked = torch.cat([score.to(device=scores[0].device) for score in scores])
    kept = largest(ranked, share(together[0][1].density, ranked.shape))
    start = 0
    for (_, gate), weight in zip(together, weights, strict=True):
        bits = kept[start : start + weight.numel()]
        gate.hold(bits.reshape(weight.shape).to(weight.device))
        start += weight.numel()


def _chosen(
    model: nn.Module,
    include: Pattern | Sequence[Pattern] | None,
    exclude: Pattern | Sequence[Pattern],
    name: str | None,
) -> list[tuple[nn.Module, str]]:
    """The tensors to gate: of modules that are included and not excluded, each once."""
    wanted, unwanted = None if include is None else _patterns("include", include), _patterns("exclude", exclude)
    named = dict(model.named_modules())
    for argument, patterns in (("include", wanted or ()), ("exclude", unwanted)):
        for pattern in patterns:
            if isinstance(pattern, str) and not any(fnmatchcase(each, pattern) for each in named):
                some = [each for each in named if each][:5]
                must = "match the name of a module"
                raise ArgumentError(say("prune", argument, must=must, got=repr(pattern), hint=f"names are {some}, ..."))
    chosen = [
        (module, tensor)
        for each, module in named.items()
        if (wanted is None or any(_matches(pattern, each, module) for pattern in wanted))
        and not any(_matches(pattern, each, module) for pattern in unwanted)
        for tensor in _names(module, name, by_pattern=wanted is not None)
    ]
    if not chosen:
        kinds = sorted({type(module).__name__ for module in named.values()})
        must = "have a layer to gate" + ("" if name is None else f", with a {name!r}")
        hint = "include=nn.Linear, exclude=()"
        raise ArgumentError(say("prune", "model", must=must, got=f"modules of {kinds}", hint=hint))
    return chosen


def _names(module: nn.Module, name: str | None, *, by_pattern: bool) -> list[str]:
    if name is not None:
        # A pattern of names reaches activations and containers too.
        return [name] if hasattr(module, name) else []
    found = weights_of(module)
    return ["weight"] if by_pattern and not found and hasattr(module, "weight") else found


def _patterns(argument: str, given: Pattern | Sequence[Pattern]) -> list[Pattern]:
    patterns = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for pattern in patterns:
        if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            hint = f'{argument}=nn.Linear, or {argument}="encoder.*"'
            raise DtypeError(say("prune", argument, must="be names or types of modules", got=repr(pattern), hint=hint))
    return patterns


def _matches(pattern: Pattern, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern)


# -- which tensors are weights: what an input is multiplied by ---------------------------------------------------------
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def weights_of(module: nn.Module) -> list[str]:
    """The names of a module's own weights; none for norms, tables of embeddings, and modules of other kinds.

    Weights are those of linear layers and convolutions of torch, ``Bilinear``, recurrent layers and cells, the
    projections of ``MultiheadAttention``, the ``Conv1D`` of transformers, and weights of three dims, one matrix for
    each expert.

    >>> weights_of(nn.MultiheadAttention(4, 2)), weights_of(nn.GRUCell(2, 3)), weights_of(nn.LayerNorm(4))
    (['in_proj_weight'], ['weight_ih', 'weight_hh'], [])
    """
    tensors = _tensors(module)
    if isinstance(module, nn.Linear | nn.Bilinear | _ConvNd) or _is_transformers_conv1d(module):
        return ["weight"] if "weight" in tensors else []
    if isinstance(module, nn.RNNBase | RNNCellBase):
        return [name for name in tensors if name.startswith("weight_")]
    if isinstance(module, nn.MultiheadAttention):
        return [name for name in tensors if name.endswith("proj_weight")]
    if _has_experts(module):
        return [name for name, tensor in tensors.items() if not is_lazy(tensor) and tensor.dim() == 3]
    return []


def _is_transformers_conv1d(module: nn.Module) -> bool:
    # By name, since transformers is not imported for this.
    return any(
        (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D") for kind in type(module).mro()
    )


def _has_experts(module: nn.Module) -> bool:
    if any(kind.__name__.endswith("Experts") for kind in type(module).mro()):
        return True
    count = getattr(module, "num_experts", None)
    return count is not None and any(
        not is_lazy(t) and t.dim() == 3 and t.shape[0] == count for t in _tensors(module).values()
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters, and its parametrized tensors as they were before that; only those of floats."""
    found = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    for name, chain in chains_of(module).items():
        # Where a weight is made of several tensors, it has the number of dims of the largest.
        found[name] = max(chain.parameters(recurse=False), key=lambda tensor: tensor.dim(), default=nn.Parameter())
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point() or tensor.is_complex()}


def ungated(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, tuple[int, ...], str]]:
    """What could be a weight of a model and has no gate: everything of two dims or more, with the reason.

    >>> [(name, why) for name, _, _, _, why in ungated(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)))]
    [('0.weight', 'a table that is looked up, not multiplied'), ('1.weight', 'it has no gate')]
    """
    with_gate = {(found.module, found.tensor_name) for found in gated(model)}
    # What a gate or a parametrization holds for itself is no weight of the model.
    inner = {
        part
        for module in model.modules()
        if isinstance(module, Gate | parametrize.ParametrizationList)
        for part in module.modules()
    }
    for module_name, module in model.named_modules():
        if module in inner:
            continue
        weights = weights_of(module)
        for name, tensor in _tensors(module).items():
            if is_lazy(tensor):
                if name in weights:
                    yield f"{module_name}.{name}" if module_name else name, module, name, (), "not initialized yet"
                continue
            if tensor.dim() < 2 or (module, name) in with_gate:
                continue
            if name in weights:
                reason = "it has no gate"
            elif isinstance(module, _TABLES):
                reason = "a table that is looked up, not multiplied"
            else:
                reason = f"prune does not recognize it as a weight; mw.nn.attach(module, gate, {name!r}) gates it"
            yield f"{module_name}.{name}" if module_name else name, module, name, tuple(tensor.shape), reason


# -- the report --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """One gated weight. FLOPs are those of one position: a token, a time step, an output pixel."""

    name: str
    layer: str
    gate: str
    shape: tuple[int, ...]
    total: int
    kept: int
    dense_flops: int
    flops: int

    @property
    def density(self) -> float:
        """The share that is kept; NaN of no weights."""
        return self.kept / self.total if self.total else nan


@dataclass(frozen=True)
class LeftOut:
    """One tensor of two dims or more that has no gate, and why `mw.nn.prune` gave it none."""

    name: str
    layer: str
    shape: tuple[int, ...]
    reason: str

    @property
    def total(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class Report(Tabular):
    """The gated weights of a model. Print it for a table, iterate it, or take ``to_json()``.

    Attributes:
        rows: the gated weights.
        left_out: what else has two dims or more, and why it has no gate. No sum counts it.
    """

    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def total(self) -> int:
        """How many weights have a gate."""
        return sum(row.total for row in self.rows)

    @property
    def kept(self) -> int:
        """How many of them are kept."""
        return sum(row.kept for row in self.rows)

    @property
    def density(self) -> float:
        """The share that is kept of all together; NaN of no weights."""
        return self.kept / self.total if self.total else nan

    def to_json(self) -> str:
        """The rows and their sums as a JSON object."""
        rows = [{**asdict(row), "density": row.density if row.total else None} for row in self.rows]
        sums = {"total": self.total, "kept": self.kept, "density": self.density if self.total else None}
        return json.dumps({"layers": rows, **sums, "left_out": [asdict(each) for each in self.left_out]})

    def table(self) -> Table:
        """The rows as a rich table, with a line of sums."""
        from rich.table import Table

        some = len(self.rows)
        title = f"{some} gated weight{'s' if some != 1 else ''}"
        table = Table(title=title, caption=self._caption(), caption_justify="left", show_footer=some > 1)
        sums = ("all", "", "", "", f"{self.density:.2%}", f"{self.kept:,} of {self.total:,}", "")
        headings = ("weight", "layer", "gate", "shape", "density", "kept", "FLOPs per position")
        for heading, total in zip(headings, sums, strict=True):
            justify = "right" if heading in headings[4:] else "left"
            table.add_column(heading, total, justify=justify)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(
                row.name,
                row.layer,
                row.gate,
                " × ".join(map(str, row.shape)),
                f"{row.density:.2%}",
                f"{row.kept:,} of {row.total:,}",
                f"{row.flops:,} of {row.dense_flops:,}",
            )
        return table

    def _caption(self) -> str | None:
        """What was left out, one line for each reason."""
        by_reason: dict[str, list[LeftOut]] = {}
        for each in self.left_out:
            by_reason.setdefault(each.reason, []).append(each)
        lines = []
        for reason, found in by_reason.items():
            names = ", ".join(each.name for each in found[:3]) + (", ..." if len(found) > 3 else "")
            lines.append(f"left out: {names} ({sum(each.total for each in found):,} numbers): {reason}")
        return "\n".join(lines) or None


def report(model: nn.Module) -> Report:
    """Report what every gate of a model keeps: density, kept parameters, FLOPs.

    >>> import torch, maskwise as mw
    >>> model = torch.nn.Sequential(mw.nn.attach(torch.nn.Linear(8, 4), mw.nn.gates.NM(2, 4)))
    >>> row, = mw.nn.report(model)
    >>> row.name, row.density, row.kept, row.flops
    ('0.weight', 0.5, 16, 32)

    FLOPs are those of the weight at one position: a token for Linear, a time step for an RNN, an output pixel for a
    convolution, an input pixel for a transposed one. A multiplication and an addition are two. A bias is one addition;
    an embedding looks up, and computes nothing.

    A SparseLinear, which has no gate but only the weights that it keeps, has a row too. FLOPs of experts are those of
    all of them; a token goes to a few.

    What has two dims or more and no gate is listed in ``left_out``, with the reason:

    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 4))
    >>> [(each.name, each.reason) for each in mw.nn.report(mw.nn.prune(model, lambda: mw.nn.gates.NM(2, 4))).left_out]
    [('0.weight', 'a table that is looked up, not multiplied')]

    Args:
        model: any module.

    Returns:
        A Report, empty if nothing has a gate.

    Raises:
        DtypeError: ``model`` is not a module.
    """
    check_module("report", model)
    by_module: dict[nn.Module, list[Row]] = {}
    for found in gated(model):
        by_module.setdefault(found.module, []).append(_row(found))
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear):
            by_module[module] = [_sparse_row(f"{name}.values" if name else "values", module)]
    left_out = tuple(
        LeftOut(name, parametrize.type_before_parametrizations(module).__name__, shape, reason)
        for name, module, _, shape, reason in ungated(model)
    )
    return Report(tuple(row for module in model.modules() for row in by_module.get(module, ())), left_out)


def _sparse_row(name: str, layer: SparseLinear) -> Row:
    shape, kept = (layer.out_features, layer.in_features), layer.mask.count()
    assert isinstance(kept, int)
    return Row(name, "SparseLinear", "", shape, prod(shape), kept, 2 * prod(shape), 2 * kept)


def _row(found: Gated) -> Row:
    mask = found.mask()
    kind = parametrize.type_before_parametrizations(found.module)
    each = 0 if issubclass(kind, nn.Embedding | nn.EmbeddingBag) else 2 if mask.ndim > 1 else 1
    shape, kept = tuple(mask.shape), mask.count()
    assert isinstance(kept, int)
    total = prod(shape)
    gate = str(found.gate).replace("\n", " ")
    return Row(found.name, kind.__name__, gate, shape, total, kept, each * total, each * kept)
