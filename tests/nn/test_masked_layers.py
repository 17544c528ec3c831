"""MaskedLinear and MaskedConv2d: torch's numbers on every route, and nothing cached for too long."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import maskwise as mw
from maskwise.errors import DtypeError, ShapeError
from maskwise.nn.gates import NM, Binary, HardConcrete, Sigmoid, Threshold, TopK
from maskwise.nn.linear import EffectiveWeight
from maskwise.plan import dispatch
from maskwise.plan.dispatch import force

# Sums of a few hundred float32 products in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def always_without_dead_units():
    """Small tests on a route of large layers."""
    with force("units"):
        yield


@pytest.fixture(params=["units", "sparse"])
def every_route(request):
    """Small tests on the routes of large layers, one after the other."""
    with force(request.param):
        yield request.param


def unit_mask(outputs, inputs, dead_outputs, dead_inputs):
    bits = torch.rand(outputs, inputs) < 0.7
    bits[dead_outputs] = False
    bits[:, dead_inputs] = False
    return bits


MASKS = {
    "random": lambda: torch.rand(9, 7) < 0.4,
    "dead outputs": lambda: unit_mask(9, 7, [0, 4, 8], []),
    "dead inputs": lambda: unit_mask(9, 7, [], [1, 6]),
    "both": lambda: unit_mask(9, 7, [2, 3], [0]),
    "one": lambda: torch.arange(63).reshape(9, 7) == 17,
    "nothing": lambda: torch.zeros(9, 7, dtype=torch.bool),
    "everything": lambda: torch.ones(9, 7, dtype=torch.bool),
}
every_mask = pytest.mark.parametrize("mask", MASKS)


@every_mask
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(5,), (), (2, 3), (0,)], ids=str)
@pytest.mark.usefixtures("every_route")
def test_evaluation_gives_the_numbers_of_the_masked_dense_product(mask, bias, lead):
    bits = MASKS[mask]()
    layer = mw.nn.MaskedLinear(7, 9, bias, gate=bits)
    with torch.no_grad():
        layer.weight[~bits] = torch.nan
    x = torch.randn(*lead, 7)
    expected = F.linear(x, torch.where(bits, layer.weight, 0.0), layer.bias)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected.detach(), **CLOSE)
        torch.testing.assert_close(layer(x), expected.detach(), **CLOSE)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected.detach(), **CLOSE)


@every_mask
@pytest.mark.usefixtures("every_route")
def test_gradients_are_those_of_dense_float64_with_trained_and_with_frozen_weights(mask):
    bits = MASKS[mask]()
    layer = mw.nn.MaskedLinear(7, 9, gate=bits)
    x, scale = torch.randn(5, 7, requires_grad=True), torch.randn(5, 9)
    weight, bias = layer.weight.detach().double().requires_grad_(), layer.bias.detach().double().requires_grad_()
    wide = x.detach().double().requires_grad_()
    ((F.linear(wide, torch.where(bits, weight, 0.0), bias)) * scale).sum().backward()
    (layer(x) * scale).sum().backward()
    for ours, theirs in ((x, wide), (layer.weight, weight), (layer.bias, bias)):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, **CLOSE)
    layer.requires_grad_(False)
    for _ in range(2):
        (found,) = torch.autograd.grad((layer(x) * scale).sum(), x)
        torch.testing.assert_close(found.double(), wide.grad, **CLOSE)


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    rows=st.integers(0, 9),
    density=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 1000),
)
def test_any_pattern_gives_the_numbers_of_the_masked_dense_product(shape, rows, density, seed):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.rand(shape, generator=generator) < density
    bits &= torch.rand(shape[0], 1, generator=generator) < 0.7
    bits &= torch.rand(1, shape[1], generator=generator) < 0.7
    layer, x = mw.nn.MaskedLinear(shape[1], shape[0], gate=bits), torch.randn(rows, shape[1], generator=generator)
    effective = EffectiveWeight(layer.gate(layer.weight), bits)
    expected = F.linear(x, torch.where(bits, layer.weight, 0.0), layer.bias)
    for route in ("units", "kernel"):
        with force(route):
            for _ in range(2):
                torch.testing.assert_close(effective.multiply(x, layer.bias), expected, **CLOSE)


def changes():
    def step(layer):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        layer(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()

    def load(layer):
        layer.load_state_dict(mw.nn.MaskedLinear(6, 5, gate=TopK(0.5)).state_dict())

    def load_assigned(layer):
        layer.load_state_dict(mw.nn.MaskedLinear(6, 5, gate=TopK(0.5)).state_dict(), assign=True)

    def in_place(layer):
        layer.weight.detach()[0, 0] += 1.0
        layer.weight.detach().mul_(2.0)

    def replace(layer):
        layer.weight = nn.Parameter(torch.randn(5, 6))

    def replace_data(layer):
        layer.weight.data = torch.randn(5, 6)

    def write_through_data(layer):
        layer.weight.data.mul_(1.5)

    def add_through_data(layer):
        layer.weight.data += 0.5

    def init(layer):
        nn.init.normal_(layer.weight)

    def mask(layer):
        layer.gate.hold(~layer.gate.kept)

    def other_gate(layer):
        gate = TopK(0.1)
        gate.bind(layer.weight)
        layer.gate = gate

    def bias(layer):
        layer.bias.detach().add_(1.0)

    def move(layer):
        layer.double().float()
        layer.weight.detach().neg_()

    every = (step, load, load_assigned, in_place, replace, replace_data, write_through_data, add_through_data)
    return [*every, init, mask, other_gate, bias, move]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_every_change_of_weight_or_gate_is_noticed(change):
    layer, x = mw.nn.MaskedLinear(6, 5, gate=TopK(0.5)), torch.randn(4, 6)
    with torch.no_grad():
        before = layer(x)
    change(layer)
    with torch.no_grad():
        after = layer(x)
        expected = F.linear(x, torch.where(layer.gate.kept, layer.weight, 0.0), layer.bias)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, expected, **CLOSE)


def test_what_few_values_through_data_change_is_seen_after_forget():
    layer, x = mw.nn.MaskedLinear(100, 100, gate=torch.ones(100, 100).bool()), torch.randn(2, 100)
    with torch.no_grad():
        layer(x)
        layer.weight.data[50, 51] = 100.0
        layer.forget()
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), **CLOSE)


def test_the_effective_weight_is_made_once_while_nothing_changes(monkeypatch):
    made = []
    monkeypatch.setattr("maskwise.nn.linear.EffectiveWeight", lambda *a: made.append(1) or EffectiveWeight(*a))
    layer, x = mw.nn.MaskedLinear(6, 5, gate=Threshold(0.1)).requires_grad_(False), torch.randn(4, 6)
    for _ in range(5):
        layer(x)
    assert len(made) == 1
    layer.gate.threshold.fill_(0.2)
    layer(x)
    assert len(made) == 2


def test_a_gate_that_draws_is_never_cached_in_training():
    layer, x = mw.nn.MaskedLinear(6, 5, gate=HardConcrete(0.0)), torch.randn(4, 6)
    with torch.no_grad():
        assert not torch.equal(layer(x), layer(x))
        assert torch.equal(layer.eval()(x), layer(x))
        assert not torch.equal(layer.train()(x), layer(x))


def test_what_was_made_in_inference_mode_serves_gradients_later():
    layer = mw.nn.MaskedLinear(6, 5, gate=TopK(0.5)).requires_grad_(False)
    with torch.inference_mode():
        layer(torch.randn(4, 6))
    x = torch.randn(4, 6, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()


def test_state_dicts_have_torchs_keys_and_the_gates():
    layer = mw.nn.MaskedLinear(6, 5, gate=TopK(0.5))
    assert list(layer.state_dict()) == ["weight", "bias", "gate.kept"]
    assert list(mw.nn.MaskedConv2d(2, 3, 3, bias=False, gate=Sigmoid()).state_dict()) == ["weight", "gate.logits"]
    other, x = mw.nn.MaskedLinear(6, 5), torch.randn(4, 6)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert isinstance(layer, nn.Linear)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_are_equal_and_share_nothing(make_copy):
    for layer, x in (
        (mw.nn.MaskedLinear(6, 5, gate=TopK(0.5)), torch.randn(4, 6)),
        (mw.nn.MaskedConv2d(6, 5, 3, gate=TopK(0.5)), torch.randn(2, 6, 4, 4)),
    ):
        with torch.no_grad():
            before = layer(x)
            other = make_copy(layer)
            assert torch.equal(other(x), before)
            other.weight.zero_()
            other.bias.zero_()
            assert torch.equal(other(x), torch.zeros_like(before))
            assert torch.equal(layer(x), before)


@pytest.mark.parametrize("grad", [True, False])
def test_they_compile_into_one_graph_with_the_eager_results(grad):
    for layer, x in (
        (mw.nn.MaskedLinear(6, 5, gate=TopK(0.5)), torch.randn(4, 6)),
        (mw.nn.MaskedConv2d(6, 5, 3, gate=NM(2, 3)), torch.randn(2, 6, 4, 4)),
    ):
        torch._dynamo.reset()
        with torch.set_grad_enabled(grad):
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x), layer(x))
            layer.weight.detach().mul_(2.0)
            torch.testing.assert_close(compiled(x), layer(x))


def test_functional_calls_and_vmap_over_weights_see_through_the_layer():
    layer, x = mw.nn.MaskedLinear(6, 5, gate=TopK(0.5)), torch.randn(4, 6)
    weights = torch.randn(3, 5, 6)

    def out(weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    with torch.no_grad():
        looped = torch.stack([out(weight) for weight in weights])
        torch.testing.assert_close(torch.func.vmap(out)(weights), looped)
        expected = F.linear(x, torch.where(layer.gate.kept, weights[1], 0.0), layer.bias)
        torch.testing.assert_close(looped[1], expected)


def test_half_precision_and_autocast_give_what_torch_gives():
    layer, x = mw.nn.MaskedLinear(64, 32, gate=TopK(0.3)), torch.randn(8, 64)
    plain = layer.to_linear()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), plain(x))
        assert layer.bfloat16()(x.bfloat16()).dtype is torch.bfloat16
        assert torch.equal(layer(x.bfloat16()), plain.bfloat16()(x.bfloat16()))


def test_a_layer_comes_from_a_linear_and_goes_back():
    linear, x = nn.Linear(6, 5), torch.randn(4, 6)
    layer = mw.nn.MaskedLinear.from_linear(linear, TopK(0.5))
    assert layer.weight is linear.weight
    back = layer.to_linear()
    assert type(back) is nn.Linear
    assert torch.equal(back(x), layer(x))
    assert (back.weight != 0).sum() == 15
    assert "TopK" in str(layer)


# -- routes ------------------------------------------------------------------------------------------------------------
def test_explain_tells_the_route_and_dead_units_are_left_out_where_that_pays():
    bits = torch.rand(512, 512) < 0.9
    bits[:, 128:] = False
    few = torch.rand(512, 512) < 0.05
    layers = [mw.nn.MaskedLinear(512, 512, gate=gate) for gate in (bits, few, None)]
    layers.append(mw.nn.MaskedLinear(8, 8, gate=torch.eye(8).bool()[:, :1]))
    inputs = [*[torch.randn(64, 512)] * 3, torch.randn(1, 8)]
    with mw.explain() as log, torch.no_grad():
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)
            layer(x)
    calls = [call for call in log if call.op == "MaskedLinear"]
    # The first call after a change is dense: nothing is made of a weight that may change again.
    assert [call.route for call in calls[::2]] == ["plain"] * 4
    assert [call.route for call in calls[1::2]] == ["units", "plain", "plain", "plain"]
    assert calls[3].reason == "a layout would cost more than it has been worth so far"
    assert calls[1].reason == "512 of 512 outputs and 128 of 512 inputs are live"


def test_every_route_of_a_layer_can_be_forced_and_planned_without_a_run():
    bits = unit_mask(9, 7, [2, 3], [0])
    linear, images = mw.nn.MaskedLinear(7, 9, gate=bits), mw.nn.MaskedConv2d(7, 9, 1, gate=bits[..., None, None])
    for layer, x, routes in (
        (linear, torch.randn(5, 7), ("plain", "units", "sparse")),
        (images, torch.randn(5, 7, 2, 2), ("plain", "units")),
    ):
        layer.requires_grad_(False)
        for route in routes:
            with force(route):
                plan = mw.plan(layer, x)
            assert (plan.op, plan.route, plan.reason) == (type(layer).__name__, route, "forced")
            assert {refusal.route for refusal in plan.refused} == {*routes} - {route}


def test_decisions_of_a_layer_are_made_again_after_they_were_invalidated(monkeypatch):
    layer, x = mw.nn.MaskedLinear(512, 512, gate=unit_mask(512, 512, [], range(128, 512))), torch.randn(64, 512)
    layer.requires_grad_(False)
    layer(x)
    assert mw.plan(layer, x).route == "units"
    monkeypatch.setattr("maskwise.nn.linear.CALLS", 1e9)
    assert mw.plan(layer, x).route == "units"
    dispatch.invalidate()
    assert mw.plan(layer, x).route != "units"
    monkeypatch.undo()
    dispatch.invalidate()


def test_the_kernel_is_used_once_it_has_paid_for_its_layout_and_gives_the_same_numbers():
    bits = torch.rand(256, 256) < 0.05
    layer, x = mw.nn.MaskedLinear(256, 256, gate=bits).requires_grad_(False), torch.randn(64, 256)
    expected = F.linear(x, torch.where(bits, layer.weight, 0.0), layer.bias)
    for _ in range(50):
        torch.testing.assert_close(layer(x), expected, **CLOSE)
    assert layer._cache._entry.value.sparse.layout is not None
    layer.weight.mul_(2.0)
    torch.testing.assert_close(layer(x), 2 * expected - layer.bias, **CLOSE)


@pytest.mark.kernel
@pytest.mark.parametrize("density", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_after_ten_calls_a_layer_takes_the_route_of_a_sparse_one(density, batch):
    linear, keep, x = nn.Linear(768, 512), torch.rand(512, 768) < density, torch.randn(batch, 768)
    layers = [mw.nn.MaskedLinear.from_linear(linear, keep).eval(), mw.nn.SparseLinear.from_linear(linear, keep).eval()]
    with torch.no_grad():
        for _ in range(10):
            masked = layers[0](x)
        with mw.explain() as log:
            ours, sparse = (layer(x) for layer in layers)
        assert log.calls[0].route == log.calls[1].route
        assert log.calls[0].route == "sparse" or density > 0.1 or batch == 1
        torch.testing.assert_close(ours, sparse, **CLOSE)
        torch.testing.assert_close(ours, masked, **CLOSE)


@pytest.mark.kernel
@pytest.mark.parametrize("change", ["weight", "bits", "state", "copy", "train"])
def test_what_changes_after_the_layout_was_built_is_computed_anew(change):
    linear, keep, x = nn.Linear(768, 512), torch.rand(512, 768) < 0.1, torch.randn(16, 768)
    layer = mw.nn.MaskedLinear.from_linear(linear, keep.clone()).eval()
    with torch.no_grad():
        for _ in range(10):
            layer(x)
        assert layer._cache._entry.value.sparse.layout is not None
        if change == "weight":
            layer.weight.mul_(2.0)
        elif change == "bits":
            layer.gate.kept.logical_not_()
        elif change == "state":
            other = mw.nn.MaskedLinear.from_linear(nn.Linear(768, 512), ~keep)
            layer.load_state_dict(other.state_dict())
        elif change == "copy":
            layer = copy.deepcopy(layer)
            layer.weight.neg_()
        else:
            layer.train()
        for _ in range(10):
            expected = F.linear(x.double(), (layer.weight * layer.gate.kept).double(), layer.bias.double())
            torch.testing.assert_close(layer(x), expected.float(), **CLOSE)


@pytest.mark.parametrize("block", [(16, 16), (4, 1), (1, 1)])
def test_masks_of_whole_blocks_are_found_also_where_a_kept_weight_is_zero(block):
    kept = torch.rand(4, 48 // block[1]) < 0.5 if block[0] == 16 else torch.rand(64 // block[0], 48 // block[1]) < 0.5
    bits = kept.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    layer, x = mw.nn.MaskedLinear(bits.shape[1], bits.shape[0], gate=bits), torch.randn(8, bits.shape[1])
    with torch.no_grad(), force("kernel"):
        layer.weight[bits.nonzero()[0, 0]] = 0.0
        torch.testing.assert_close(layer(x), layer.to_linear()(x), **CLOSE)
    assert layer._cache._entry.value.sparse.layout.block == block


def test_a_soft_gate_is_computed_whole_whatever_its_hard_mask_says():
    layer, x = mw.nn.MaskedLinear(16, 16, gate=Sigmoid(torch.randn(16, 16))).eval(), torch.randn(4, 16)
    expected = F.linear(x, layer.weight * layer.gate.logits.sigmoid(), layer.bias)
    with torch.no_grad(), force("kernel"):
        torch.testing.assert_close(layer(x), expected.detach(), **CLOSE)


CONVOLUTIONS = [
    {"padding": 1},
    {"stride": 2, "dilation": 2},
    {"padding": "same", "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "reflect", "bias": False},
    {"groups": 2},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("mask", ["random", "dead", "nothing"])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.usefixtures("always_without_dead_units")
def test_convolutions_give_the_numbers_of_the_masked_dense_one(options, mask, batched):
    plain = nn.Conv2d(6, 8, 3, **options)
    bits = torch.rand(plain.weight.shape) < (0.0 if mask == "nothing" else 0.5)
    if mask == "dead":
        bits[[0, 3, 7]] = False
        bits[:, [1]] = False
    layer = mw.nn.MaskedConv2d(6, 8, 3, gate=Binary(bits), **options)
    with torch.no_grad():
        layer.weight[~bits] = torch.nan
        plain.weight.copy_(torch.where(bits, layer.weight, 0.0))
        if layer.bias is not None:
            plain.bias.copy_(layer.bias)
    x = torch.randn(2, 6, 9, 9) if batched else torch.randn(6, 9, 9)
    torch.testing.assert_close(layer(x), plain(x), **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x), **CLOSE)
    layer(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.where(bits, plain.weight.grad, 0.0), rtol=1e-4, atol=1e-4)


def test_gates_that_do_not_fit_or_are_none_are_refused():
    with pytest.raises(ShapeError, match=r"Binary: `mask` .* \(5, 10\), got \(10, 5\)\. Hint: mask\.T"):
        mw.nn.MaskedLinear(10, 5, gate=torch.ones(10, 5).bool())
    with pytest.raises(DtypeError, match=r"MaskedConv2d: `gate` must be a gate of mw\.nn\.gates, or a mask, got float"):
        mw.nn.MaskedConv2d(1, 1, 1, gate=0.5)


def test_weights_and_masks_made_in_inference_mode_are_served_and_never_cached():
    layer, x = mw.nn.MaskedLinear(6, 5, gate=TopK(0.5)).requires_grad_(False), torch.randn(4, 6)
    layer(x)
    with torch.inference_mode():
        layer.weight = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        layer.gate.kept = torch.rand(5, 6) < 0.5
        for _ in range(3):
            layer.weight.add_(1.0)
            torch.testing.assert_close(
                layer(x), F.linear(x, torch.where(layer.gate.kept, layer.weight, 0.0), layer.bias)
            )


@pytest.mark.parametrize("density", [0.05, 0.5])
def test_large_layers_train_by_the_gradients_of_dense_float64(density):
    bits = torch.rand(256, 300) < density
    layer, x = mw.nn.MaskedLinear(300, 256, gate=bits), torch.randn(128, 300, requires_grad=True)
    weight, wide = layer.weight.detach().double().requires_grad_(), x.detach().double().requires_grad_()
    expected = torch.autograd.grad(
        F.linear(wide, torch.where(bits, weight, 0.0), layer.bias.detach().double()).square().mean(), [wide, weight]
    )
    for _ in range(30):
        found = torch.autograd.grad(layer(x).square().mean(), [x, layer.weight])
        for ours, theirs in zip(found, expected, strict=True):
            # Means of thousands: small numbers, of which a millionth is enough.
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-7)
