"""Whole models: which layers get gates, budgets that are exact, schedules, reports."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError, ShapeError
from maskwise.nn import schedule
from maskwise.nn.gates import NM, Binary, Block, Sigmoid, TopK
from maskwise.nn.schedule import DensityScheduler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.encoder = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.conv(self.embed(x).mT).mT
        for layer in self.encoder:
            x = layer(x).relu()
        return self.head(self.norm(x))


def names(model):
    return [row.name for row in mw.nn.report(model)]


# -- which layers ------------------------------------------------------------------------------------------------------
def test_linears_and_convolutions_get_gates_by_default():
    model = mw.nn.prune(Net(), lambda: TopK(0.5))
    assert names(model) == ["conv.weight", "encoder.0.weight", "encoder.1.weight", "head.weight"]
    assert model(torch.arange(10).reshape(2, 5)).shape == (2, 5, 3)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (nn.Linear, (), ["encoder.0.weight", "encoder.1.weight", "head.weight"]),
        (nn.Linear, "head", ["encoder.0.weight", "encoder.1.weight"]),
        ("encoder.*", ["*.1"], ["encoder.0.weight"]),
        ([nn.Embedding, "head"], (), ["embed.weight", "head.weight"]),
        ((nn.Linear, nn.Conv1d), nn.Linear, ["conv.weight"]),
    ],
)
def test_types_and_patterns_of_names_choose(include, exclude, expected):
    assert names(mw.nn.prune(Net(), lambda: TopK(0.5), include=include, exclude=exclude)) == expected


@pytest.mark.parametrize(("pruned", "kept"), [(0.9, 0.1), (0.75, 0.25), (0, 1.0), (1, 0.0)])
def test_a_number_is_the_share_of_each_layer_that_is_pruned(pruned, kept):
    by_number, by_gate = mw.nn.prune(Net(), pruned), mw.nn.prune(Net(), lambda: TopK(kept))
    for mine, theirs in zip(mw.nn.report(by_number), mw.nn.report(by_gate), strict=True):
        assert (mine.name, mine.kept) == (theirs.name, theirs.kept)
    layer = nn.Linear(20, 10)
    torch_pruned = torch_prune.l1_unstructured(copy.deepcopy(layer), "weight", amount=float(pruned))
    assert torch.equal(mw.nn.prune(layer, pruned).weight != 0, torch_pruned.weight_mask.bool())


@pytest.mark.parametrize("gate", [TopK(0.25), TopK(0.25, scope="global"), Block((1, 1), 0.25), Sigmoid()])
def test_each_layer_gets_a_copy_of_a_gate(gate):
    model = mw.nn.prune(Net(), gate, include=nn.Linear)
    found = [model.encoder[0].parametrizations.weight[0], model.head.parametrizations.weight[0]]
    assert all(type(each) is type(gate) and each is not gate for each in found)
    assert found[0] is not found[1]
    assert not gate.bound
    assert model(torch.arange(10).reshape(2, 5)).shape == (2, 5, 3)


class Experts(nn.Module):
    """One matrix for each expert, and a bias."""

    def __init__(self):
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.randn(3, 4, 6)), nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return torch.einsum("bi,eio->beo", x, self.up) + self.bias


class Routed(nn.Module):
    """The same under a name of its own, with a table of positions beside it."""

    def __init__(self):
        super().__init__()
        self.num_experts = 3
        self.matrices = nn.Parameter(torch.randn(3, 4, 6))
        self.positions = nn.Parameter(torch.randn(5, 4))


EVERY_KIND = {
    "linear": (lambda: nn.Linear(4, 6), ["weight"]),
    "bilinear": (lambda: nn.Bilinear(4, 4, 6), ["weight"]),
    "conv": (lambda: nn.Conv2d(4, 6, 3), ["weight"]),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3), ["weight"]),
    "lstm": (lambda: nn.LSTM(4, 6, proj_size=2), ["weight_ih_l0", "weight_hh_l0", "weight_hr_l0"]),
    "cell": (lambda: nn.GRUCell(4, 6), ["weight_ih", "weight_hh"]),
    "attention": (lambda: nn.MultiheadAttention(4, 2), ["in_proj_weight", "out_proj.weight"]),
    "apart": (
        lambda: nn.MultiheadAttention(4, 2, kdim=6, vdim=6),
        ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
    ),
    "experts": (Experts, ["up"]),
    "routed": (Routed, ["matrices"]),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_tensor_that_an_input_is_multiplied_by_gets_a_gate(kind):
    make, expected = EVERY_KIND[kind]
    assert names(mw.nn.prune(make(), lambda: TopK(0.5))) == expected


def test_transformers_conv1d_and_experts_get_gates_and_run_with_them():
    transformers = pytest.importorskip("transformers", reason="an extra")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    moe = transformers.MixtralConfig(vocab_size=50, num_key_value_heads=2, num_local_experts=3, **sizes)
    x = torch.randint(50, (2, 5))
    for model, some in (
        (transformers.GPT2LMHeadModel(config).eval(), {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        (transformers.MixtralForCausalLM(moe).eval(), {"experts.gate_up_proj", "experts.down_proj"}),
    ):
        twin = copy.deepcopy(model)
        mw.nn.prune(model, lambda: TopK(0.5), exclude="lm_head")
        gated = names(model)
        assert {part for part in some if any(part in name for name in gated)} == some
        with torch.no_grad():
            for name, mask in zip(gated, masks_of(model), strict=True):
                twin.get_parameter(name).mul_(mask.to_bool())
            assert torch.equal(model(x).logits, twin(x).logits)


def test_what_is_left_out_is_listed_with_the_reason():
    model = nn.ModuleDict({"net": Net(), "routed": Routed(), "attention": nn.MultiheadAttention(4, 2)})
    report = mw.nn.report(mw.nn.prune(model, lambda: TopK(0.5), exclude="net.head"))
    assert {each.name: each.reason for each in report.left_out} == {
        "net.embed.weight": "a table that is looked up, not multiplied",
        "net.head.weight": "it has no gate",
        "routed.positions": "prune does not recognize it as a weight; mw.nn.attach(module, gate, 'positions') gates it",
    }
    first = report.left_out[0]
    assert (first.layer, first.shape, first.total) == ("Embedding", (10, 8), 80)
    assert json.loads(report.to_json())["left_out"][1]["name"] == "net.head.weight"
    assert "left out: net.embed.weight (80 numbers): a table" in " ".join(str(report).split())
    # What a gate or another parametrization holds is none of the model's own weights.
    soft = mw.nn.prune(nn.Linear(4, 4), Sigmoid)
    assert mw.nn.report(soft).left_out == ()
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert [each.name for each in mw.nn.report(normed).left_out] == ["weight"]


def test_a_class_of_gates_is_a_factory():
    model = mw.nn.prune(Net(), Sigmoid, include="head")
    assert isinstance(model.head.parametrizations.weight[0], Sigmoid)


def test_a_layer_itself_can_be_pruned():
    assert mw.nn.report(mw.nn.prune(nn.Linear(4, 4), lambda: TopK(0.25))).kept == 4


# -- budgets -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("density", [0.0, 0.03, 0.1, 0.5, 1.0])
def test_a_global_budget_is_exact_and_takes_the_largest_of_all_layers(density):
    model = Net()
    with torch.no_grad():
        model.head.weight.mul_(10)
    originals = [model.conv.weight, model.encoder[0].weight, model.encoder[1].weight, model.head.weight]
    mw.nn.prune(model, lambda: TopK(density, scope="global"))
    report = mw.nn.report(model)
    assert report.kept == round(density * sum(w.numel() for w in originals)) == round(density * report.total)
    masks = [found.to_bool() for found in masks_of(model)]
    if 0 < density < 1:
        kept = torch.cat([w[m].abs() for w, m in zip(originals, masks, strict=True)])
        lost = torch.cat([w[~m].abs() for w, m in zip(originals, masks, strict=True)])
        assert kept.min() >= lost.max()
        # The layer whose weights are the largest keeps the most.
        assert report.rows[-1].density > report.density


def masks_of(model):
    from maskwise.nn.attaching import gated

    return [found.mask() for found in gated(model)]


def test_layer_budgets_are_exact_in_every_layer():
    for row in mw.nn.report(mw.nn.prune(Net(), lambda: TopK(0.3))):
        assert row.kept == round(0.3 * row.total)


def test_reselect_follows_the_weights_and_keeps_the_budget():
    model = mw.nn.prune(Net(), lambda: TopK(0.2, scope="global"))
    before = masks_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    assert all(a.equal(b) for a, b in zip(masks_of(model), before, strict=True))
    mw.nn.reselect(model)
    assert not all(a.equal(b) for a, b in zip(masks_of(model), before, strict=True))
    assert mw.nn.report(model).kept == round(0.2 * mw.nn.report(model).total)
    mw.nn.reselect(model, density=0.05)
    assert mw.nn.report(model).kept == round(0.05 * mw.nn.report(model).total)


def test_reselect_serves_masked_layers_and_other_gates_alike():
    model = nn.Sequential(
        mw.nn.MaskedLinear(8, 8, gate=TopK(0.5)),
        mw.nn.attach(nn.Linear(8, 8), NM(2, 4)),
        mw.nn.attach(nn.Linear(8, 8), Block(2, 0.5)),
        mw.nn.attach(nn.Linear(8, 8), Binary(torch.eye(8).bool())),
    )
    mw.nn.reselect(model, density=0.25)
    assert [row.density for row in mw.nn.report(model)] == [0.25, 0.5, 0.25, 0.125]


# -- schedules ---------------------------------------------------------------------------------------------------------
def test_schedules_have_the_values_of_their_formulas():
    cubic = schedule.cubic(0.05, steps=10, start=0.8, begin=5)
    for step in range(30):
        t = min(max((step - 5) / 10, 0.0), 1.0)
        assert cubic(step) == pytest.approx(0.05 + 0.75 * (1 - t) ** 3)
    linear = schedule.linear(0.0, steps=4, start=1.0)
    assert [linear(step) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [schedule.constant(0.3, steps=2)(step) for step in range(4)] == [0.3] * 4
    assert schedule.cubic(0.1, steps=0)(0) == 0.1


def test_a_scheduler_reaches_each_density_exactly_and_then_lets_the_topology_be():
    model = mw.nn.prune(Net(), lambda: TopK(1.0, scope="global"))
    scheduler = DensityScheduler(model, schedule.cubic(0.1, steps=7), every=2)
    total = mw.nn.report(model).total
    for step in range(1, 12):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        before = masks_of(model)
        scheduler.step()
        due = step == 7 or (step < 7 and step % 2 == 0)
        if due:
            assert mw.nn.report(model).kept == round(schedule.cubic(0.1, steps=7)(step) * total)
        else:
            assert all(a.equal(b) for a, b in zip(masks_of(model), before, strict=True))
    assert scheduler.density == 0.1


def test_a_scheduler_goes_on_from_its_state_dict():
    model = mw.nn.prune(Net(), lambda: TopK(1.0))
    scheduler = DensityScheduler(model, schedule.linear(0.1, steps=10))
    for _ in range(5):
        scheduler.step()
    other_model = mw.nn.prune(Net(), lambda: TopK(1.0))
    other = DensityScheduler(other_model, schedule.linear(0.1, steps=10))
    other.load_state_dict(scheduler.state_dict())
    other_model.load_state_dict(model.state_dict())
    assert all(a.equal(b) for a, b in zip(masks_of(model), masks_of(other_model), strict=True))
    for each in (scheduler, other):
        for _ in range(3):
            each.step()
    assert all(a.equal(b) for a, b in zip(masks_of(model), masks_of(other_model), strict=True))
    assert mw.nn.report(model).kept == mw.nn.report(other_model).kept


# -- reports -----------------------------------------------------------------------------------------------------------
def test_a_report_counts_parameters_and_flops_of_one_position():
    model = nn.ModuleDict(
        {
            "linear": mw.nn.attach(nn.Linear(8, 4), TopK(0.25)),
            "conv": mw.nn.attach(nn.Conv2d(4, 8, 3), TopK(0.5)),
            "embed": mw.nn.attach(nn.Embedding(10, 4), TopK(0.5)),
            "bias": mw.nn.attach(nn.Linear(2, 10), TopK(0.3), "bias"),
            "lstm": mw.nn.attach(nn.LSTM(4, 3), TopK(0.5), "weight_hh_l0"),
            "masked": mw.nn.MaskedLinear(4, 4, gate=NM(1, 4)),
            "sparse": mw.nn.SparseLinear(10, 10, density=0.2),
            "plain": nn.Linear(4, 4),
        }
    )
    rows = {row.name: row for row in mw.nn.report(model)}
    assert {name: (row.layer, row.kept, row.total, row.flops, row.dense_flops) for name, row in rows.items()} == {
        "linear.weight": ("Linear", 8, 32, 16, 64),
        "conv.weight": ("Conv2d", 144, 288, 288, 576),
        "embed.weight": ("Embedding", 20, 40, 0, 0),
        "bias.bias": ("Linear", 3, 10, 3, 10),
        "lstm.weight_hh_l0": ("LSTM", 18, 36, 36, 72),
        "masked.weight": ("MaskedLinear", 4, 16, 8, 32),
        "sparse.values": ("SparseLinear", 20, 100, 40, 200),
    }
    report = mw.nn.report(model)
    assert (report.kept, report.total) == (217, 522)
    assert report.density == 217 / 522
    found = json.loads(report.to_json())
    assert found["kept"] == 217
    assert found["layers"][0]["density"] == 0.25
    for part in ("linear.weight", "TopK(0.25, scope='layer')", "25.00%", "8 of 32", "16 of 64", "217 of 522"):
        assert part in str(report)


def test_a_report_of_a_plain_model_is_empty():
    report = mw.nn.report(Net())
    assert (len(report), report.kept, json.loads(report.to_json())["density"]) == (0, 0, None)
    assert "0 gated weights" in str(report)


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: mw.nn.prune(m, TopK), DtypeError, r"prune: `gate_factory` .* Hint: TopK\(\.\.\.\)"),
        (lambda m: mw.nn.prune(m, 90), ArgumentError, r"the share that is pruned, got 90. Hint: .*prune\(model, 0.9\)"),
        (lambda m: mw.nn.prune(m, lambda: 3), DtypeError, "must be a gate of mw.nn.gates, or a mask, got int"),
        (lambda m: mw.nn.prune(m, lambda: TopK(0.1), include="decoder.*"), ArgumentError, "match the name of a module"),
        (lambda m: mw.nn.prune(m, lambda: TopK(0.1), exclude="heads"), ArgumentError, "prune: `exclude`"),
        (lambda m: mw.nn.prune(m, lambda: TopK(0.1), include=nn.Conv3d), ArgumentError, "have a layer to gate"),
        (lambda m: mw.nn.prune(m, lambda: TopK(0.1), include=[3]), DtypeError, "names or types of modules, got 3"),
        (lambda m: mw.nn.prune(m, lambda: NM(2, 4)), ShapeError, r"multiple of m = 4, got \(6, 6\)"),
        (lambda m: mw.nn.reselect(m, density=0.1), ArgumentError, "have a gate with a density, TopK or Block, got no"),
        (lambda m: DensityScheduler(m, schedule.constant(0.1)), ArgumentError, "DensityScheduler: `model` must have"),
        (lambda m: schedule.cubic(1.5, steps=3), ArgumentError, "cubic: `density` must be between 0 and 1"),
        (lambda m: schedule.linear(0.5, steps=-3), ArgumentError, "linear: `steps` must be a number of steps"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_the_model_is_left_as_it_was(call, error, message):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        call(model)
    assert model.state_dict().keys() == before.keys()
    assert len(mw.nn.report(model)) == 0


def test_one_gate_for_two_layers_and_two_densities_for_one_budget_are_refused():
    shared, model = TopK(0.5), Net()
    with pytest.raises(ArgumentError, match="must make a new gate at every call"):
        mw.nn.prune(model, lambda: shared)
    densities = iter([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(ArgumentError, match="be the same for all gates of global scope"):
        mw.nn.prune(model, lambda: TopK(next(densities), scope="global"))
    assert len(mw.nn.report(model)) == 0


@pytest.mark.parametrize("lazy", [lambda: nn.LazyLinear(4), lambda: nn.LazyConv2d(4, 3)], ids=["linear", "convolution"])
def test_a_lazy_layer_is_refused_until_its_shape_is_known_and_then_pruned(lazy):
    net = nn.Sequential(lazy())

    def gate():
        return TopK(0.5)

    for use in (lambda: mw.nn.prune(net, gate), lambda: mw.nn.attach(net[0], gate())):
        with pytest.raises(ArgumentError, match="got an uninitialized parameter of a lazy module"):
            use()
    assert [(each.name, each.reason) for each in mw.nn.report(net).left_out] == [("0.weight", "not initialized yet")]
    net(torch.ones(1, 6, 8, 6))
    assert mw.nn.report(mw.nn.prune(net, gate)).density == 0.5


@pytest.mark.parametrize("kind", ["SparseLinear", "MaskedLinear"])
def test_a_lazy_linear_has_no_masked_form_until_its_shape_is_known(kind):
    rest = (TopK(0.5),) if kind == "MaskedLinear" else ()
    with pytest.raises(ArgumentError, match=f"{kind}.from_linear: `linear` must have weights"):
        getattr(mw.nn, kind).from_linear(nn.LazyLinear(4), *rest)
