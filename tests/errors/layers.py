"""Mistakes with layers, gates, pruning and sparse training."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

import maskwise as mw
from maskwise import Mask
from maskwise.errors import ArgumentError, DeviceError, DtypeError, OutOfRangeError, ShapeError, StaleMaskError
from maskwise.nn import gates, schedule
from maskwise.nn.gates import NM, Binary, Block, Gate, HardConcrete, Sigmoid, Threshold, TopK
from tests.errors.row import Row

X = torch.ones(2, 3)
BITS = torch.ones(2, 3, dtype=torch.bool)
TOKENS = torch.ones(2, 3, 4)
PIXELS, ON_META = torch.ones(1, 3, 5, 5), torch.ones(1, 5, 5, dtype=torch.bool, device="meta")
ATTACHED = TopK(0.5)
GATED = mw.nn.attach(nn.Linear(3, 2), ATTACHED)
OWN = mw.nn.MaskedLinear(3, 2)
IMAGES = mw.nn.MaskedConv2d(3, 2, 1)
SPARSE = mw.nn.SparseLinear(3, 2, density=0.5)
OTHER = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
ONE = TopK(0.1)
MAP, EVERYWHERE = torch.ones(1, 1, 8, 8), torch.ones(8, 8, dtype=torch.bool)
REGIONS = mw.nn.Regions(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)).eval())
POOLED = mw.nn.Regions(nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1)).eval())
UPDATED = mw.nn.Incremental(nn.Conv2d(1, 1, 3).eval())
UPDATED(MAP)


class Branching(nn.Module):
    """A model whose control flow depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Noisy(nn.Module):
    """A model that draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Writing(nn.Module):
    """A model that writes into its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.zero_()


def train_after_tracing() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1)).eval()
    inc = mw.nn.Incremental(model)
    model.train()
    inc(MAP)


def attach(module: Any, gate: Any, *name: str) -> Callable[[], Any]:
    return lambda: mw.nn.attach(module, gate, *name)


def with_another_parametrization() -> None:
    layer = mw.nn.attach(nn.Linear(3, 2), TopK(0.5))
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    mw.nn.detach(layer)


def detach_while_frozen() -> None:
    layer = mw.nn.attach(nn.Linear(3, 2), TopK(0.5))
    gc.freeze()
    try:
        mw.nn.detach(layer)
    finally:
        gc.unfreeze()


def sharded(call: Callable[[nn.Module], Any], make: Callable[[], nn.Module]) -> Callable[[], Any]:
    """The call on a module whose parameters are DTensors, as ``fully_shard`` has them, on one rank."""

    def run() -> None:
        from torch.distributed.fsdp import fully_shard

        distributed = torch.distributed
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            call(fully_shard(make(), mesh=distributed.init_device_mesh("cpu", (1,))))
        finally:
            distributed.destroy_process_group()

    return run


def two_budgets() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    densities = iter((0.1, 0.2))
    mw.nn.prune(model, lambda: TopK(next(densities), scope="global"))


def from_linear(kind: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(mw.nn, f"{kind}Linear").from_linear(nn.Linear(3, 2), *arguments, **options)


def prune(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: mw.nn.prune(*arguments, **options)


def rewire(kind: str, model: nn.Module = SPARSE, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(mw.nn, kind)(model, OTHER, **options)


def sparse(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: mw.nn.SparseLinear(3, 2, *arguments, **options)


def averaged(use: Callable[[mw.nn.SparseLinear], Any]) -> Callable[[], Any]:
    """Use the average of a layer that was rewired."""

    def run() -> None:
        layer = mw.nn.SparseLinear(4, 4, mask=torch.eye(4, dtype=torch.bool))
        average = torch.optim.swa_utils.AveragedModel(layer)
        average.update_parameters(layer)
        layer.set_mask(torch.eye(4, dtype=torch.bool).flip(0))
        average.update_parameters(layer)
        use(average.module)

    return run


def step_after_a_move() -> None:
    layer = mw.nn.SparseLinear(4, 4, mask=torch.eye(4, dtype=torch.bool))
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(2):
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        layer.set_mask(torch.eye(4, dtype=torch.bool).flip(0))


def called(kind: str, *arguments: Any, **options: Any) -> Callable[..., Row]:
    """A row for a layer that is made with these arguments."""

    def row(*inputs: Any, error: type[Exception], hint: str) -> Row:
        return Row(f"mw.nn.{kind}", lambda: getattr(mw.nn, kind)(*arguments, **options)(*inputs), error, hint)

    return row


def inputs_of_linear(name: str, layer: nn.Module) -> list[Row]:
    return [
        Row(name, lambda: layer([1.0]), DtypeError, "torch.as_tensor(input)"),
        Row(name, lambda: layer(torch.ones(2, 5)), ShapeError, "a layer of 5 inputs"),
        Row(name, lambda: layer(torch.ones(3, 5)), ShapeError, "input.T"),
        Row(name, lambda: layer(torch.ones(2, 3, 1)), ShapeError, "input.flatten(1)"),
        Row(name, lambda: layer(X.double()), DtypeError, "input.to(torch.float32), or layer.to(torch.float64)"),
        Row(name, lambda: layer(X.to("meta")), DeviceError, "input.to('cpu')"),
    ]


def masks_of_norms() -> list[Row]:
    rows = []
    for kind in ("MaskedBatchNorm1d", "MaskedInstanceNorm1d", "MaskedGroupNorm"):
        norm = called(kind, *((2, 4) if kind == "MaskedGroupNorm" else (4,)))
        first = TOKENS.mT
        rows += [
            norm([1.0], BITS, error=DtypeError, hint="torch.as_tensor(input)"),
            norm(first, X, error=DtypeError, hint="Mask.from_attention_mask(mask)"),
            norm(first, BITS.to("meta"), error=DeviceError, hint="mask.to(input.device)"),
            norm(first, BITS.T, error=ShapeError, hint="mask.T"),
            norm(TOKENS, BITS, error=ShapeError, hint="input.movedim(-1, 1)"),
        ]
        if kind != "MaskedGroupNorm":
            rows += [
                norm(TOKENS[..., None], BITS, error=ShapeError, hint="input.flatten(2)"),
                norm(torch.ones(2, 3, 5), ~torch.eye(2, 5).bool(), error=ShapeError, hint=f"{kind}(3)"),
            ]
    groups = called("MaskedGroupNorm", 2, 4)
    rows += [
        groups(torch.ones(4), BITS, error=ShapeError, hint="input.unflatten(-1, (N, C, *places))"),
        groups(torch.ones(2, 6, 3), BITS, error=ShapeError, hint="MaskedGroupNorm(2, 6)"),
    ]
    return rows


def pools() -> list[Row]:
    rows = []
    for kind, arguments in (("MaskedMeanPool", ()), ("MaskedMaxPool", ()), ("MaskedAttentionPool", (4,))):
        pool = called(kind, *arguments)
        rows += [
            pool([1.0], BITS, error=DtypeError, hint="torch.as_tensor(input)"),
            pool(TOKENS, X, error=DtypeError, hint="Mask.from_attention_mask(mask)"),
            pool(TOKENS, BITS.to("meta"), error=DeviceError, hint="mask.to(input.device)"),
            pool(TOKENS, torch.ones(2, 9) > 0, error=ShapeError, hint="input is pooled along (1,)"),
        ]
    return rows


def empty_values() -> list[Row]:
    half, nothing = torch.ones(2, 5, 4).half(), torch.zeros(2, 5, dtype=torch.bool)
    image = half[:, :, None, :]
    rows = []
    for kind, arguments, input, mask in (
        ("MaskedMeanPool", (), half, nothing),
        ("MaskedMaxPool", (), half, nothing),
        ("MaskedAttentionPool", (4,), half, nothing),
        ("MaskedLayerNorm", (4,), half, nothing),
        ("MaskedInstanceNorm1d", (4,), half.mT, nothing),
        ("MaskedBatchNorm1d", (4,), half.mT, nothing),
        ("MaskedGroupNorm", (2, 4), half.mT, nothing),
        ("MaskedBatchNorm2d", (image.shape[1],), image, torch.zeros(2, 1, 4, dtype=torch.bool)),
        ("MaskedBatchNorm3d", (5,), image[..., None], torch.zeros(2, 1, 4, 1, dtype=torch.bool)),
        ("SyncMaskedBatchNorm1d", (4,), half.mT, nothing),
        ("SyncMaskedBatchNorm2d", (image.shape[1],), image, torch.zeros(2, 1, 4, dtype=torch.bool)),
        ("SyncMaskedBatchNorm3d", (5,), image[..., None], torch.zeros(2, 1, 4, 1, dtype=torch.bool)),
    ):

        def call(kind=kind, arguments=arguments, input=input, mask=mask):
            return getattr(mw.nn, kind)(*arguments, empty=1e30).half()(input, mask)

        def make(kind=kind, arguments=arguments):
            return getattr(mw.nn, kind)(*arguments, empty="nan")

        rows += [
            Row(f"mw.nn.{kind}", call, ArgumentError, f"{kind}(..., empty=0.0)"),
            Row(f"mw.nn.{kind}", make, DtypeError, "empty=0.0"),
        ]
    return rows


class OtherNorm(mw.nn.MaskedBatchNorm1d):
    """A subclass, which may compute something else."""


class Mesh:
    """A device mesh of two dims, or one that this process is not in."""

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim

    def get_group(self) -> None:
        raise AssertionError

    def get_coordinate(self) -> None:
        return None


def synchronized() -> list[Row]:
    convert, plain = mw.nn.convert_sync_masked, nn.Sequential(mw.nn.MaskedBatchNorm1d(2))
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    rows = [
        Row("mw.nn.convert_sync_masked", lambda: convert(X), DtypeError, "torch.nn.Sequential(...)"),  # type: ignore[type-var]
        Row("mw.nn.convert_sync_masked", lambda: convert(OtherNorm(2)), ArgumentError, "convert_sync_masked of other"),
        Row(
            "mw.nn.convert_sync_masked", lambda: convert(plain, "dp"), DtypeError, "torch.distributed.new_group(ranks)"
        ),
        Row("mw.nn.convert_sync_masked", lambda: convert(plain, outside), ArgumentError, "group=None"),
        Row("mw.nn.convert_sync_masked", lambda: convert(plain, Mesh(2)), ArgumentError, "mesh['dp']"),
        Row("mw.nn.convert_sync_masked", lambda: convert(plain, Mesh(1)), ArgumentError, "group=None"),
    ]
    for dims in (1, 2, 3):
        norm, size = called(f"SyncMaskedBatchNorm{dims}d", 3), (2, 3, *[4] * dims)
        meta = torch.ones(2, *[4] * dims, device="meta") > 0
        rows += [
            norm([1.0], BITS, error=DtypeError, hint="torch.as_tensor(input)"),
            norm(torch.ones(size), meta, error=DeviceError, hint="mask.to(input.device)"),
            norm(torch.ones(size)[:, :2], torch.ones(2, *[4] * dims) > 0, error=ShapeError, hint="BatchNorm"),
        ]
    return rows


def masked(*layers: nn.Module, **options: Any) -> Callable[[], Any]:
    return lambda: mw.nn.masked(nn.Sequential(*layers), **options)


class LanguageModel(nn.Module):
    """What a model of transformers is to `mw.nn.kept_head`; ``wrong`` is what is unusual of it."""

    def __init__(self, wrong: str = "", device: str = "cpu") -> None:
        super().__init__()
        self.embed, self.head, self.wrong = nn.Embedding(9, 4), nn.Linear(4, 9, device=device), wrong
        self.config = SimpleNamespace(is_encoder_decoder=wrong == "decoder", get_text_config=SimpleNamespace)

    def get_output_embeddings(self) -> nn.Module:
        return self.embed if self.wrong == "head" else self.head

    def forward(
        self, input_ids: torch.Tensor, labels: Any = None, return_dict: bool = True, num_items_in_batch: int = 0
    ) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        logits = self.head(hidden[:, :2] if self.wrong == "rows" and labels is None else hidden)
        if self.wrong == "rows":
            logits = torch.linspace(-60, 60, 9).expand(*input_ids.shape, 9)
        loss = None
        if labels is not None and self.wrong != "silent":
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss = loss + 1 if self.wrong == "loss" else loss / (num_items_in_batch or 1)
        return SimpleNamespace(loss=loss, logits=logits.square() if self.wrong == "logits" else logits)


def kept_heads() -> list[Row]:
    """Models whose head cannot be replaced."""

    def refused(*arguments: str) -> Callable[[], Any]:
        return lambda: mw.nn.kept_head(LanguageModel(*arguments))

    wrongs = ("decoder", "head", "rows", "silent", "loss", "logits", "")
    hint = "mw.linear_cross_entropy(hidden, head.weight, labels, mask)"
    return [
        *(Row("mw.nn.kept_head", refused(wrong), ArgumentError, hint) for wrong in wrongs),
        Row("mw.nn.kept_head", refused("", "meta"), ArgumentError, hint),
        Row("mw.nn.kept_head", lambda: mw.nn.kept_head(X), DtypeError, "AutoModelForCausalLM"),  # type: ignore[type-var]
        Row("mw.nn.full_head", lambda: mw.nn.full_head(X), DtypeError, "kept_head got"),  # type: ignore[type-var]
    ]


class NoMask(nn.Module):
    """Takes no mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Around(nn.Module):
    """Takes a mask, and holds a norm that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x


def masked_models() -> list[Row]:
    rows = [
        Row("mw.nn.masked", lambda: mw.nn.masked(X), DtypeError, "torch.nn.Sequential(...)"),  # type: ignore[arg-type]
        Row("mw.nn.masked", lambda: mw.nn.masked(nn.Linear(3, 2)), ArgumentError, "nn.Sequential(model)"),
        Row("mw.nn.masked", masked(nn.ReLU(), pointwise="1"), ArgumentError, "names are ['0'], ..."),
        Row("mw.nn.masked", masked(mw.unpad(nn.MultiheadAttention(4, 2))), ArgumentError, "mw.models.repad(model)"),
        Row("mw.nn.masked", masked(nn.AdaptiveAvgPool1d(2)), ArgumentError, "output size 1"),
        Row("mw.nn.masked", masked(nn.Softmax()), ArgumentError, "nn.Softmax(dim=-1)"),
        Row("mw.nn.masked", masked(nn.InstanceNorm2d(3)), ArgumentError, "nn.GroupNorm(C, C)"),
        Row("mw.nn.masked", masked(Around()), ArgumentError, "nn.GroupNorm(C, C)"),
        Row("mw.nn.masked", masked(nn.ModuleList()), ArgumentError, "nn.Sequential(*modules)"),
        Row("mw.nn.masked", masked(nn.LSTM(3, 2)), ArgumentError, "pointwise='0'"),
        Row("mw.nn.masked", masked(NoMask()), ArgumentError, "forward(self, x, mask=None)"),
    ]
    norm, places = nn.Sequential(nn.BatchNorm1d(3)), torch.ones(2, 4, dtype=torch.bool)
    for model, input, mask, error, hint in (
        (norm, [1.0], places, DtypeError, "torch.as_tensor(input)"),
        (norm, torch.ones(2, 3, 4), X, DtypeError, "Mask.from_attention_mask(mask)"),
        (norm, torch.ones(2, 3, 4), torch.ones(2, 3, 4) > 0, ShapeError, "a mask (N, *places)"),
        (nn.Sequential(norm, nn.Linear(4, 4)), torch.ones(2, 3, 4), places, ShapeError, "another order of layers"),
        (nn.Sequential(nn.Softmax(2)), torch.ones(2, 3, 4, 4), torch.ones(2, 4, 4) > 0, ShapeError, "dim=1, or dim=-1"),
    ):

        def call(model=model, input=input, mask=mask):
            return mw.nn.masked(model)(input, mask)

        rows.append(Row("MaskedSequential", call, error, hint))
    return rows


ROWS = [
    *kept_heads(),
    # -- gates
    Row("gates.Binary", lambda: Binary(X), DtypeError, "Binary(mask != 0)"),
    Row("gates.Binary", lambda: Binary([True]), DtypeError, "Binary(torch.as_tensor(mask).bool())"),
    Row("gates.Binary", lambda: Binary(BITS)(torch.ones(3, 2)), ShapeError, "mask.T"),
    Row("mw.nn.attach", attach(nn.Linear(3, 2), Binary(BITS.to("meta"))), DeviceError, "mask.to('cpu')"),
    Row("gates.Threshold", lambda: Threshold("0.1"), DtypeError, "Threshold(0.01)"),
    Row("gates.Threshold", lambda: Threshold(float("nan")), ArgumentError, "Threshold(0.01)"),
    Row("gates.Threshold", lambda: Threshold(0.1, by="size"), ArgumentError, 'by="magnitude"'),
    Row("gates.TopK", lambda: TopK("0.1"), DtypeError, "density=0.1"),
    Row("gates.TopK", lambda: TopK(10), ArgumentError, "density=0.1"),
    Row("gates.TopK", lambda: TopK(0.1, scope="model"), ArgumentError, 'scope="layer"'),
    Row("gates.NM", lambda: NM(5, 4), ArgumentError, "NM(2, 4)"),
    Row("gates.NM", lambda: NM(2, 4)(torch.ones(8)), OutOfRangeError, "NM(2, 4, dim=0)"),
    Row("gates.NM", lambda: NM(2, 4)(torch.ones(2, 6)), ShapeError, "NM(2, 3)"),
    Row("gates.Block", lambda: Block(0, 0.1), ArgumentError, "Block((4, 1), 0.1)"),
    Row("gates.Block", lambda: Block(4, "0.1"), DtypeError, "density=0.1"),
    Row("gates.Sigmoid", lambda: Sigmoid(torch.ones(2, dtype=torch.int64)), DtypeError, "init.float()"),
    Row("gates.Sigmoid", lambda: Sigmoid("open"), DtypeError, "init=2.0"),
    Row("gates.Sigmoid", lambda: Sigmoid(torch.ones(3, 2))(X), ShapeError, "init.T"),
    Row("gates.Sigmoid.penalty", lambda: Sigmoid().penalty(), ArgumentError, "mw.nn.attach(module, gate)"),
    Row("gates.HardConcrete", lambda: HardConcrete("open"), DtypeError, "init=2.0"),
    Row("gates.HardConcrete", lambda: HardConcrete(temperature=0.0), ArgumentError, "temperature=2 / 3"),
    Row("gates.HardConcrete", lambda: HardConcrete(stretch=(0.0, 1.0)), ArgumentError, "stretch=(-0.1, 1.1)"),
    Row("gates.HardConcrete.penalty", lambda: HardConcrete().penalty(), ArgumentError, "mw.nn.attach(module, gate)"),
    Row("gates.HardConcrete", lambda: HardConcrete(torch.ones(3, 2))(X), ShapeError, "init.T"),
    Row("gates.Gate.bind", lambda: Binary(BITS.T).bind(X), ShapeError, "mask.T"),
    Row("gates.Gate.bind", lambda: Binary(BITS.to("meta")).bind(X), DeviceError, "mask.to('cpu')"),
    Row("gates.Gate.bind", lambda: TopK(0.1).bind([1.0]), DtypeError, "gate(module.weight)"),
    Row("gates.Gate", lambda: Gate()(X), NotImplementedError, "return weight.abs() > 0.1"),
    Row("gates.Gate.mask", lambda: Gate().mask([1.0]), DtypeError, "gate(module.weight)"),
    Row("gates.Gate.mask", lambda: Gate().mask(torch.ones(2, dtype=torch.int64)), DtypeError, "weight.float()"),
    Row("gates.Selecting", lambda: gates.Selecting()(X), NotImplementedError, "return weight > weight.mean()"),
    Row("gates.Sigmoid", lambda: Sigmoid.__base__(2.0)(X), NotImplementedError, "return self.logits.sigmoid()"),
    # -- attaching
    Row("mw.nn.attach", attach(X, TopK(0.1)), DtypeError, "torch.nn.Sequential(...)"),
    Row("mw.nn.attach", attach(nn.Linear, TopK(0.1)), DtypeError, "Linear(...)"),
    Row("mw.nn.attach", attach(nn.Linear(3, 2), TopK), DtypeError, "TopK(...)"),
    Row("mw.nn.attach", attach(nn.Linear(3, 2), BITS.T), ShapeError, "mask.T"),
    Row("mw.nn.attach", attach(nn.Linear(3, 2), BITS.float()), DtypeError, "Binary(mask != 0)"),
    Row("mw.nn.attach", attach(nn.Linear(3, 2), 0.9), DtypeError, "mw.nn.prune(module, 0.9) to drop that share"),
    Row("mw.nn.attach", attach(nn.Linear(3, 2), "mask"), DtypeError, "Binary(mask)"),
    Row("mw.nn.attach", attach(OWN, TopK(0.1)), ArgumentError, "MaskedLinear(..., gate=gate)"),
    Row("mw.nn.attach", attach(GATED, TopK(0.1)), ArgumentError, "mw.nn.detach(module) first"),
    Row("mw.nn.attach", attach(nn.Linear(3, 2), ATTACHED), ArgumentError, "a new TopK(...)"),
    Row("mw.nn.attach", attach(nn.Linear(3, 2), TopK(0.1), "kernel"), ArgumentError, "name='weight'"),
    Row("mw.nn.attach", attach(nn.Linear(3, 2), Binary(BITS.T)), ShapeError, "mask.T"),
    Row("mw.nn.attach", attach(nn.LazyLinear(4), TopK(0.1)), ArgumentError, "model(example) once before"),
    Row("mw.nn.detach", detach_while_frozen, ArgumentError, "gc.unfreeze() first"),
    Row("mw.nn.detach", lambda: mw.nn.detach(X), DtypeError, "torch.nn.Sequential(...)"),
    Row("mw.nn.detach", lambda: mw.nn.detach(GATED, keep="dense"), ArgumentError, 'keep="masked"'),
    Row("mw.nn.detach", lambda: mw.nn.detach(nn.Linear(3, 2)), ArgumentError, "mw.nn.attach(module, gate)"),
    Row("mw.nn.detach", with_another_parametrization, ArgumentError, "remove_parametrizations removes all of them"),
    # -- pruning
    Row("mw.nn.prune", prune(X, lambda: TopK(0.1)), DtypeError, "torch.nn.Sequential(...)"),
    Row("mw.nn.prune", prune(nn.Linear(3, 2), TopK), DtypeError, "TopK(...)"),
    Row("mw.nn.prune", prune(nn.Linear(3, 2), "0.9"), DtypeError, "mw.nn.prune(model, 0.9)"),
    Row("mw.nn.prune", prune(nn.Linear(3, 2), BITS), DtypeError, "mw.nn.attach(layer, mask)"),
    Row("mw.nn.prune", prune(nn.Linear(3, 2), 90), ArgumentError, "mw.nn.prune(model, 0.9)"),
    Row("mw.nn.prune", prune(nn.Linear(3, 2), ATTACHED), ArgumentError, "a new TopK(...)"),
    Row(
        "mw.nn.prune",
        prune(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)), lambda: ONE),
        ArgumentError,
        "lambda: TopK(0.1)",
    ),
    Row("mw.nn.prune", prune(nn.Linear(3, 2), lambda: TopK(0.1), include=3), DtypeError, "include=nn.Linear, or"),
    Row("mw.nn.prune", prune(nn.Linear(3, 2), lambda: TopK(0.1), include="encoder"), ArgumentError, "names are"),
    Row("mw.nn.prune", prune(nn.ReLU(), lambda: TopK(0.1)), ArgumentError, "include=nn.Linear, exclude=()"),
    Row("mw.nn.prune", prune(nn.Linear(3, 2), lambda: Binary(BITS.T)), ShapeError, "mask.T"),
    Row(
        "mw.nn.prune",
        prune(nn.Sequential(nn.LazyLinear(4)), lambda: TopK(0.1)),
        ArgumentError,
        "model(example) once before",
    ),
    Row("mw.nn.prune", two_budgets, ArgumentError, "mw.nn.reselect(model, density=0.1)"),
    Row("mw.nn.reselect", lambda: mw.nn.reselect(X), DtypeError, "torch.nn.Sequential(...)"),
    Row(
        "mw.nn.reselect", lambda: mw.nn.reselect(nn.Linear(3, 2), 0.5), ArgumentError, "mw.nn.prune(model, lambda: TopK"
    ),
    Row("mw.nn.reselect", lambda: mw.nn.reselect(GATED, "half"), DtypeError, "density=0.1"),
    Row("mw.nn.report", lambda: mw.nn.report(X), DtypeError, "torch.nn.Sequential(...)"),
    Row("schedule.linear", lambda: schedule.linear(0.1, steps=-1), ArgumentError, "steps=1000"),
    Row("schedule.cubic", lambda: schedule.cubic(0.1, steps=9, begin=0.5), ArgumentError, "begin=1000"),
    Row("schedule.constant", lambda: schedule.constant(10), ArgumentError, "density=0.1"),
    Row("schedule.constant", lambda: schedule.constant("low"), DtypeError, "density=0.1"),
    Row("schedule.linear", lambda: schedule.linear("low", 9), DtypeError, "density=0.1"),
    Row("schedule.cubic", lambda: schedule.cubic("low", 9), DtypeError, "density=0.1"),
    Row(
        "schedule.DensityScheduler",
        lambda: schedule.DensityScheduler(GATED, schedule.constant(0.1), 0),
        ArgumentError,
        "every=10",
    ),
    Row(
        "schedule.DensityScheduler",
        lambda: schedule.DensityScheduler(X, schedule.constant(0.1)),
        DtypeError,
        "torch.nn.",
    ),
    Row(
        "schedule.DensityScheduler",
        lambda: schedule.DensityScheduler(nn.ReLU(), schedule.constant(0.1)),
        ArgumentError,
        "mw.nn.prune(model",
    ),
    # -- layers
    Row("mw.nn.MaskedLinear", lambda: mw.nn.MaskedLinear(3, 2, gate=0.1), DtypeError, "gate=mw.nn.gates.TopK(0.1)"),
    Row("mw.nn.MaskedLinear", lambda: mw.nn.MaskedLinear(3, 2, gate=ATTACHED), ArgumentError, "a new TopK(...)"),
    Row("mw.nn.MaskedLinear", lambda: mw.nn.MaskedLinear(3, 2, gate=BITS.T), ShapeError, "mask.T"),
    *(
        row
        for name, x in (("RegionConv1d", torch.ones(1, 2, 5)), ("RegionConv2d", torch.ones(1, 2, 5, 5)))
        for layer in [getattr(mw.nn, name)(2, 3, 3)]
        for row in (
            Row(
                f"mw.nn.{name}",
                lambda name=name: getattr(mw.nn, name)(2, 3, 3, padding=1, padding_mode="reflect"),
                ArgumentError,
                "mode=padding_mode) first",
            ),
            Row(f"mw.nn.{name}.forward", lambda layer=layer, x=x: layer(x[:, :1]), ShapeError, "a weight of shape"),
            Row(f"mw.nn.{name}.forward", lambda layer=layer, x=x: layer(x.double()), DtypeError, "weight.to(x.dtype)"),
            Row(f"mw.nn.{name}.forward", lambda layer=layer, x=x: layer(x.to("meta")), DeviceError, "to(x.device)"),
            Row(f"mw.nn.{name}.forward", lambda layer=layer, x=x: layer(x.to_sparse()), ArgumentError, "x.to_dense()"),
            Row(f"mw.nn.{name}.outputs", lambda layer=layer: layer.outputs(None), ShapeError, "Mask.full(input.shape"),
        )
    ),
    # -- networks on regions
    *(
        row
        for name in ("RegionMaxPool2d", "RegionAvgPool2d")
        for pool in [getattr(mw.nn, name)(2)]
        for row in (
            Row(
                f"mw.nn.{name}.forward", lambda pool=pool: pool(MAP, torch.ones(3) > 0), ShapeError, "mask of (1, 8, 8)"
            ),
            Row(f"mw.nn.{name}.forward", lambda pool=pool: pool(MAP, MAP), DtypeError, "mask"),
            Row(f"mw.nn.{name}.forward", lambda pool=pool: pool(MAP.int()), DtypeError, "input.float()"),
            Row(f"mw.nn.{name}.forward", lambda pool=pool: pool(MAP[..., :1]), ShapeError, "padding=kernel_size // 2"),
            Row(f"mw.nn.{name}.outputs", lambda pool=pool: pool.outputs(MAP), DtypeError, "mask != 0"),
            Row(f"mw.nn.{name}.outputs", lambda pool=pool: pool.outputs(EVERYWHERE[0]), ShapeError, "mask[None]"),
            Row(
                f"mw.nn.{name}.forward",
                lambda pool=pool: pool(MAP, torch.ones(8, 8, dtype=torch.bool, device="meta")),
                DeviceError,
                "mask.to(x.device)",
            ),
        )
    ),
    Row(
        "mw.nn.RegionMaxPool2d",
        lambda: mw.nn.RegionMaxPool2d(2, return_indices=True),
        ArgumentError,
        "return_indices=False",
    ),
    Row("mw.nn.Regions", lambda: mw.nn.Regions(X), DtypeError, "torch.nn."),
    Row("mw.nn.Regions", lambda: mw.nn.Regions(Branching()), ArgumentError, "Regions(model.backbone)"),
    Row("mw.nn.Regions.forward", lambda: REGIONS(MAP[0], EVERYWHERE), ShapeError, "x[None] for one image"),
    Row("mw.nn.Regions.forward", lambda: REGIONS(MAP, MAP), DtypeError, "mask"),
    Row("mw.nn.Regions.forward", lambda: REGIONS(MAP, EVERYWHERE.to("meta")), DeviceError, "mask.to(x.device)"),
    Row("mw.nn.Regions.forward", lambda: REGIONS(MAP, EVERYWHERE), ArgumentError, "mw.nn.Regions(model.backbone)"),
    Row("mw.nn.Regions.forward", lambda: REGIONS(MAP.expand(1, 2, 8, 8), EVERYWHERE), ArgumentError, "model(x) shows"),
    Row("mw.nn.Regions.outputs", lambda: REGIONS.outputs(EVERYWHERE[0]), ShapeError, "mask[None]"),
    Row("mw.nn.Regions.outputs", lambda: REGIONS.outputs(MAP), DtypeError, "mask != 0"),
    Row("mw.nn.Regions.outputs", lambda: POOLED.outputs(EVERYWHERE), ArgumentError, "outputs of a backbone"),
    Row("mw.nn.Incremental", lambda: mw.nn.Incremental(X), DtypeError, "torch.nn."),
    Row("mw.nn.Incremental", lambda: mw.nn.Incremental(nn.Sequential(nn.Dropout())), ArgumentError, "model.eval()"),
    Row("mw.nn.Incremental", lambda: mw.nn.Incremental(Noisy()), ArgumentError, "model.eval()"),
    Row(
        "mw.nn.Incremental",
        lambda: mw.nn.Incremental(nn.Sequential(nn.FractionalMaxPool2d(2, output_ratio=0.5)).eval()),
        ArgumentError,
        "nn.MaxPool2d",
    ),
    Row("mw.nn.Incremental", lambda: mw.nn.Incremental(Writing()), ArgumentError, "torch.where, or a copy"),
    Row("mw.nn.Incremental.__call__", lambda: UPDATED(MAP[0]), ShapeError, "x[None] for one image"),
    Row("mw.nn.Incremental.__call__", lambda: UPDATED(MAP.int()), DtypeError, "x.float()"),
    Row("mw.nn.Incremental.__call__", lambda: UPDATED(MAP[:0]), ShapeError, "if x.numel(): y = inc(x)"),
    Row("mw.nn.Incremental.__call__", lambda: mw.nn.Incremental(nn.GroupNorm(1, 1))(MAP), ArgumentError, "nn.Conv2d"),
    Row("mw.nn.Incremental.__call__", train_after_tracing, ArgumentError, "model.eval()"),
    Row(
        "mw.nn.Incremental.update", lambda: UPDATED.update((MAP, MAP), (None, None)), ArgumentError, "inc.update((x, y)"
    ),
    Row("mw.nn.Incremental.update", lambda: UPDATED.update(MAP, EVERYWHERE[:3]), ShapeError, "(x_new != x).any(1)"),
    Row(
        "mw.nn.Incremental.update",
        lambda: UPDATED.update(MAP, EVERYWHERE.to("meta")),
        DeviceError,
        "changed.to(x_new.device)",
    ),
    Row("mw.nn.Incremental.report", lambda: mw.nn.Incremental(nn.Conv2d(1, 1, 1)).report, ArgumentError, "inc(x)"),
    Row("mw.nn.Incremental.update", lambda: mw.nn.Incremental(nn.Conv2d(1, 1, 1)).update(X), ArgumentError, "inc(x)"),
    Row("mw.nn.Incremental.update", lambda: UPDATED.update(MAP[..., :4]), ShapeError, "for another shape"),
    Row("mw.nn.Incremental.update", lambda: UPDATED.update(MAP.double()), DtypeError, "for another dtype"),
    Row("mw.nn.Incremental.update", lambda: UPDATED.update(MAP.to("meta")), DeviceError, "for another device"),
    Row("mw.nn.Incremental.update", lambda: UPDATED.update(MAP, (1, 2)), ArgumentError, "(slice(top, bottom)"),
    Row("mw.nn.Incremental.update", lambda: UPDATED.update(MAP, MAP), DtypeError, "changed != 0"),
    Row("mw.nn.MaskedConv2d", lambda: mw.nn.MaskedConv2d(3, 2, 1, gate=0.1), DtypeError, "gate=mw.nn.gates.TopK(0.1)"),
    Row("mw.nn.MaskedConv2d", lambda: mw.nn.MaskedConv2d(3, 2, 1, gate=ATTACHED), ArgumentError, "a new TopK(...)"),
    Row("mw.nn.MaskedConv2d", lambda: mw.nn.MaskedConv2d(3, 2, 1, gate=BITS), ShapeError, "mask[..., None, None]"),
    Row(
        "mw.nn.MaskedLinear.from_linear",
        lambda: mw.nn.MaskedLinear.from_linear(nn.ReLU()),
        DtypeError,
        "mw.nn.prune(model",
    ),
    Row("mw.nn.MaskedLinear.from_linear", from_linear("Masked", ATTACHED), ArgumentError, "a new TopK(...)"),
    Row("mw.nn.MaskedLinear.from_linear", from_linear("Masked", BITS.T), ShapeError, "mask.T"),
    Row("mw.nn.SparseLinear.from_linear", from_linear("Sparse", BITS.T), ShapeError, "mask.T"),
    Row("mw.nn.SparseLinear.from_linear", from_linear("Sparse", BITS, block=(2, 2)), ArgumentError, "block=(1, 1)"),
    *inputs_of_linear("mw.nn.MaskedLinear.forward", OWN),
    *inputs_of_linear("mw.nn.SparseLinear.forward", SPARSE),
    Row("mw.nn.MaskedConv2d.forward", lambda: IMAGES([1.0]), DtypeError, "torch.as_tensor(input)"),
    Row("mw.nn.MaskedConv2d.forward", lambda: IMAGES(torch.ones(1, 5, 5, 3)), ShapeError, "input.movedim(-1, -3)"),
    Row("mw.nn.MaskedConv2d.forward", lambda: IMAGES(torch.ones(1, 5, 5, 5)), ShapeError, "a layer of 5 channels"),
    Row("mw.nn.MaskedConv2d.forward", lambda: IMAGES(torch.ones(1, 75)), ShapeError, "input.unflatten(-1, (3, H, W))"),
    Row(
        "mw.nn.MaskedConv2d.forward",
        lambda: IMAGES(torch.ones(3, 5, 5).double()),
        DtypeError,
        "input.to(torch.float32)",
    ),
    Row(
        "mw.nn.MaskedConv2d.forward", lambda: IMAGES(torch.ones(3, 5, 5, device="meta")), DeviceError, "input.to('cpu')"
    ),
    *masks_of_norms(),
    *masked_models(),
    *pools(),
    *empty_values(),
    *synchronized(),
    called("MaskedBatchNorm2d", 3)([1.0], BITS, error=DtypeError, hint="torch.as_tensor(input)"),
    called("MaskedBatchNorm2d", 3)(
        PIXELS, PIXELS[:, 0].bool().to("meta"), error=DeviceError, hint="mask.to(input.device)"
    ),
    called("MaskedBatchNorm2d", 3)(X, BITS, error=ShapeError, hint="input.unflatten(-1, (N, C, H, W))"),
    called("MaskedBatchNorm2d", 3)(torch.ones(3, 5, 5), torch.ones(5, 5) > 0, error=ShapeError, hint="input[None]"),
    called("MaskedBatchNorm3d", 3)(PIXELS, PIXELS[:, 0] > 0, error=ShapeError, hint="input[None]"),
    called("MaskedBatchNorm3d", 3)(
        PIXELS[..., None],
        PIXELS[0, 0].bool().to("meta")[None, ..., None],
        error=DeviceError,
        hint="mask.to(input.device)",
    ),
    called("MaskedLayerNorm", 4)([1.0], BITS, error=DtypeError, hint="torch.as_tensor(input)"),
    called("MaskedLayerNorm", 4)(X, BITS, error=ShapeError, hint="MaskedLayerNorm(3)"),
    called("MaskedLayerNorm", 4)(TOKENS, BITS.T, error=ShapeError, hint="mask.T"),
    called("MaskedLayerNorm", 4)(TOKENS, X, error=DtypeError, hint="Mask.from_attention_mask(mask)"),
    called("MaskedLayerNorm", 4)(TOKENS, BITS.to("meta"), error=DeviceError, hint="mask.to(input.device)"),
    called("MaskedAttentionPool", 4)(X, BITS, error=ShapeError, hint="MaskedAttentionPool(3)"),
    called("MaskedAttentionPool", 4)(TOKENS, TOKENS > 0, error=ShapeError, hint="mask.to_bool().any(-1)"),
    Row("mw.nn.MaskedAttentionPool", lambda: mw.nn.MaskedAttentionPool(4, 3), ArgumentError, "num_heads=1"),
    # -- sparse layers
    Row("mw.nn.SparseLinear", sparse(), ArgumentError, "density=0.1"),
    Row("mw.nn.SparseLinear", sparse(mask=BITS, block=(2, 2)), ArgumentError, "block=(1, 1)"),
    Row("mw.nn.SparseLinear", sparse(density=10), ArgumentError, "density=0.1"),
    Row("mw.nn.SparseLinear", sparse(mask=X), DtypeError, "weight != 0"),
    Row("mw.nn.SparseLinear", sparse(mask=BITS.T), ShapeError, "mask.T"),
    Row(
        "mw.nn.SparseLinear.from_linear", lambda: mw.nn.SparseLinear.from_linear(nn.ReLU()), DtypeError, "module.linear"
    ),
    Row("mw.nn.SparseLinear.drop", lambda: SPARSE.drop(30), ArgumentError, "fraction=0.3"),
    Row(
        "mw.nn.SparseLinear.drop", lambda: SPARSE.drop(0.3, OTHER), ArgumentError, "torch.optim.SGD(layer.parameters())"
    ),
    Row("mw.nn.SparseLinear.regrow", lambda: SPARSE.regrow(-1), ArgumentError, "layer.drop(fraction) drops"),
    Row("mw.nn.SparseLinear.regrow", lambda: SPARSE.regrow(1, scores=X.T), ShapeError, "scores.T"),
    Row("mw.nn.SparseLinear.set_mask", lambda: SPARSE.set_mask(Mask.full((3, 2))), ShapeError, "mask.T"),
    Row("mw.nn.SparseLinear.set_mask", lambda: SPARSE.set_mask(None), DtypeError, "Mask.full(weight.shape)"),
    Row("mw.nn.SparseLinear.set_mask", lambda: SPARSE.set_mask(BITS, OTHER), ArgumentError, "torch.optim.SGD("),
    Row("mw.nn.SparseLinear.set_mask", step_after_a_move, ArgumentError, "layer.set_mask(mask, optimizer=optimizer)"),
    Row(
        "mw.nn.SparseLinear.forward",
        averaged(lambda layer: layer(torch.ones(1, 4))),
        StaleMaskError,
        "averaged_layer.set_mask(layer.mask)",
    ),
    Row(
        "mw.nn.SparseLinear.layout",
        averaged(lambda layer: layer.layout),
        StaleMaskError,
        "averaged_layer.set_mask(layer.mask)",
    ),
    Row("mw.nn.RigL", rewire("RigL", nn.Linear(3, 2)), ArgumentError, "mw.nn.SparseLinear.from_linear(linear, mask)"),
    Row("mw.nn.RigL", rewire("RigL", fraction=30), ArgumentError, "fraction=0.3"),
    Row("mw.nn.RigL", rewire("RigL", group="dp"), DtypeError, "torch.distributed.new_group(ranks)"),
    Row("mw.nn.SET", rewire("SET", group="dp"), DtypeError, "torch.distributed.new_group(ranks)"),
    Row(
        "mw.nn.attach",
        sharded(lambda layer: mw.nn.attach(layer, TopK(0.5)), lambda: nn.Linear(3, 2)),
        ArgumentError,
        "mw.nn.attach before fully_shard",
    ),
    Row(
        "mw.nn.detach",
        sharded(mw.nn.detach, lambda: mw.nn.attach(nn.Linear(3, 2), TopK(0.5))),
        ArgumentError,
        "mw.nn.detach before fully_shard",
    ),
    Row(
        "mw.nn.SparseLinear.set_mask",
        sharded(lambda layer: layer.set_mask(BITS), lambda: mw.nn.SparseLinear(3, 2, density=0.5)),
        ArgumentError,
        "another number before fully_shard",
    ),
    Row("mw.nn.SET", rewire("SET", every=0), ArgumentError, "every=100"),
]
