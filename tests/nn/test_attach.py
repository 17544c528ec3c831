"""Gates on any weight of any module: what they do there, how they travel, and what is refused."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError
from maskwise.nn.gates import Binary, HardConcrete, Sigmoid, TopK

KINDS = {
    "Linear": (lambda: nn.Linear(6, 4), "weight", lambda: torch.randn(3, 6)),
    "bias": (lambda: nn.Linear(6, 4), "bias", lambda: torch.randn(3, 6)),
    "Conv1d": (lambda: nn.Conv1d(6, 4, 3), "weight", lambda: torch.randn(2, 6, 9)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, groups=1), "weight", lambda: torch.randn(2, 3, 5, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), "weight", lambda: torch.randn(2, 3, 5, 5)),
    "Embedding": (lambda: nn.Embedding(7, 5), "weight", lambda: torch.arange(7)),
    "Bilinear": (lambda: nn.Bilinear(3, 3, 4), "weight", lambda: torch.randn(2, 3)),
    "LSTM": (lambda: nn.LSTM(5, 4, 2), "weight_hh_l0", lambda: torch.randn(3, 2, 5)),
    "GRU": (lambda: nn.GRU(5, 4, bidirectional=True), "weight_ih_l0_reverse", lambda: torch.randn(3, 2, 5)),
    "RNNCell": (lambda: nn.RNNCell(5, 4), "weight_hh", lambda: torch.randn(2, 5)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), "in_proj_weight", lambda: torch.randn(3, 2, 4)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def call(module, x):
    if isinstance(module, nn.MultiheadAttention):
        return module(x, x, x)[0]
    if isinstance(module, nn.Bilinear):
        return module(x, x)
    out = module(x)
    return out[0] if isinstance(out, tuple) else out


def masked_twin(module, name, kept):
    """The same module, plain, with the masked weight written into it."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        getattr(twin, name).copy_(torch.where(kept, getattr(twin, name), 0.0))
    return twin


@every_kind
def test_outputs_and_gradients_are_those_of_the_module_with_the_masked_weight(kind):
    make, name, inputs = KINDS[kind]
    module, x = make(), inputs()
    kept = torch.rand(getattr(module, name).shape) < 0.5
    twin = masked_twin(module, name, kept)
    mw.nn.attach(module, Binary(kept), name)
    out, expected = call(module, x), call(twin, x)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    theirs = getattr(twin, name).grad
    torch.testing.assert_close(
        getattr(module.parametrizations, name).original.grad, torch.where(kept, theirs, 0.0), rtol=1e-5, atol=1e-6
    )


@every_kind
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same_and_can_be_detached_alone(kind, how):
    make, name, inputs = KINDS[kind]
    module, x = mw.nn.attach(make(), TopK(0.5), name), inputs()
    call(module, x).sum().backward()
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    assert type(other) is not type(module)
    assert torch.equal(call(other, x), call(module, x))
    assert other.state_dict().keys() == module.state_dict().keys()
    mw.nn.detach(other)
    assert type(other) is type(make())
    assert torch.equal(call(other, x), call(module, x))
    # A copy of a copy, and of one that was detached.
    assert torch.equal(call(copy.deepcopy(copy.deepcopy(module)), x), call(module, x))
    assert torch.equal(call(pickle.loads(pickle.dumps(other)), x), call(module, x))


@every_kind
def test_state_dicts_round_trip_through_a_fresh_module(kind):
    make, name, inputs = KINDS[kind]
    module, x = mw.nn.attach(make(), TopK(0.5), name), inputs()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    assert {f"parametrizations.{name}.original", f"parametrizations.{name}.0.kept"} <= state.keys()
    other = mw.nn.attach(make(), TopK(0.5), name)
    other.load_state_dict(state)
    assert torch.equal(call(other, x), call(module, x))


def test_two_weights_of_one_module_have_gates_of_their_own():
    lstm, x = nn.LSTM(5, 4), torch.randn(3, 2, 5)
    mw.nn.attach(lstm, TopK(0.25), "weight_hh_l0")
    mw.nn.attach(lstm, HardConcrete(-1.0), "weight_ih_l0")
    lstm.eval()
    before = lstm(x)[0]
    assert (lstm.weight_hh_l0 != 0).sum() == 16
    mw.nn.detach(lstm, name="weight_hh_l0")
    assert parametrize.is_parametrized(lstm, "weight_ih_l0")
    assert not parametrize.is_parametrized(lstm, "weight_hh_l0")
    assert torch.equal(lstm(x)[0], before)
    mw.nn.detach(lstm)
    assert type(lstm) is nn.LSTM
    assert torch.equal(lstm(x)[0], before)


def test_an_optimizer_made_before_goes_on_after():
    layer = nn.Linear(6, 4)
    weight = layer.weight
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    mw.nn.attach(layer, Binary(torch.rand(4, 6) < 0.5))
    assert layer.parametrizations.weight.original is weight
    before = weight.detach().clone()
    layer(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    kept = layer.parametrizations.weight[0].kept
    assert (weight != before)[kept].all()
    assert torch.equal(weight[~kept], before[~kept])


def test_assigning_a_weight_stores_it_and_the_topology_stays():
    layer = mw.nn.attach(nn.Linear(3, 2), Binary(torch.eye(2, 3).bool()))
    layer.weight = torch.full((2, 3), 5.0)
    assert layer.weight.tolist() == [[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]]
    assert (layer.parametrizations.weight.original == 5.0).all()


def test_a_gate_goes_on_top_of_another_parametrization():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    normed = layer.weight.detach().clone()
    mw.nn.attach(layer, TopK(0.25))
    kept = layer.parametrizations.weight[1].kept
    assert kept.sum() == 4
    assert torch.equal(layer.weight, torch.where(kept, normed, 0.0))
    assert mw.nn.report(layer).kept == 4
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    with pytest.raises(ArgumentError, match="must have nothing but a gate on 'weight', got also _WeightNorm"):
        mw.nn.detach(layer)


def test_functional_calls_and_forward_mode_see_through_the_gate():
    layer, x = mw.nn.attach(nn.Linear(4, 3), TopK(0.5, straight_through=True)), torch.randn(2, 4)
    parameters = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    key = "parametrizations.weight.original"

    def out(weight):
        return torch.func.functional_call(layer, {**parameters, key: weight}, (x,))

    weight = parameters[key].detach()
    direction = torch.randn(3, 4)
    _, tangent = torch.func.jvp(out, (weight,), (direction,))
    torch.testing.assert_close(tangent, x @ direction.T)
    jacobian = torch.func.jacrev(out)(weight)
    torch.testing.assert_close(torch.einsum("boij,ij->bo", jacobian, direction), tangent)
    stacked = torch.func.vmap(out)(torch.stack([weight, 2 * weight]))
    torch.testing.assert_close(stacked[1], out(2 * weight))


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel_trains_a_gated_model_as_one_process_does(process_group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    mw.nn.attach(model[0], TopK(0.4))
    mw.nn.attach(model[2], Sigmoid())
    alone = copy.deepcopy(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    x = torch.randn(8, 6)
    for each in (parallel, alone):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    for a, b in zip(parallel.module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(parallel.module[0].weight == 0, ~model[0].parametrizations.weight[0].kept)


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_what_cannot_be_gated_is_refused_and_left_as_it_was():
    layer = nn.Linear(3, 2)
    with pytest.raises(ArgumentError, match=r"attach: `name` must be a tensor of Linear, one of \['weight', 'bias'\]"):
        mw.nn.attach(layer, TopK(0.5), "weights")
    with pytest.raises(DtypeError, match=r"attach: `gate` must be a gate of .*, or a mask, got list\. Hint: Binary"):
        mw.nn.attach(layer, [[True] * 3] * 2)
    with pytest.raises(DtypeError, match=r"got type\. Hint: TopK\(\.\.\.\)"):
        mw.nn.attach(layer, TopK)
    with pytest.raises(DtypeError, match=r"attach: `module` must be a torch\.nn\.Module, got Tensor"):
        mw.nn.attach(torch.ones(2), TopK(0.5))
    with pytest.raises(ArgumentError, match=r"attach: `module` must have no gate yet, got a MaskedLinear"):
        mw.nn.attach(mw.nn.MaskedLinear(3, 2), TopK(0.5))
    assert type(layer) is nn.Linear
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_one_weight_has_one_gate_and_one_gate_one_weight():
    layer, gate = nn.Linear(3, 2), TopK(0.5)
    mw.nn.attach(layer, gate)
    with pytest.raises(ArgumentError, match="must have no gate on 'weight' yet"):
        mw.nn.attach(layer, TopK(0.5))
    with pytest.raises(ArgumentError, match=r"attach: `gate` must belong to no weight yet.*Hint: a new TopK\(\.\.\.\)"):
        mw.nn.attach(nn.Linear(3, 2), gate)
    with pytest.raises(ArgumentError, match="MaskedLinear: `gate` must belong to no weight yet"):
        mw.nn.MaskedLinear(3, 2, gate=gate)


def test_there_must_be_something_to_detach():
    with pytest.raises(ArgumentError, match="detach: `module` must have a gate, got Linear"):
        mw.nn.detach(nn.Linear(3, 2))
    model = nn.Sequential(mw.nn.attach(nn.Linear(3, 2), TopK(0.5)))
    with pytest.raises(ArgumentError, match="Hint: detach the child '0'"):
        mw.nn.detach(model)
    with pytest.raises(ArgumentError, match="must have a gate on 'bias'"):
        mw.nn.detach(model[0], name="bias")
    with pytest.raises(ArgumentError, match='detach: `keep` must be "masked" or "original"'):
        mw.nn.detach(model[0], keep="both")


# -- weights that two modules share -----------------------------------------------------------------------------------
class Tied(nn.Module):
    """An embedding, and a head that is tied to it."""

    def __init__(self, head=nn.Linear):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), head(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


def test_detaching_a_tied_weight_masks_it_in_this_module_alone():
    model, x = Tied(), torch.arange(20)
    dense = model.embed.weight.detach().clone()
    mw.nn.attach(model.head, TopK(0.3))
    expected = model(x)
    assert model.head.parametrizations.weight.original is model.embed.weight
    with pytest.warns(
        UserWarning, match="'weight' was shared with Embedding, which keeps it unmasked; .* Hint: add it to"
    ):
        mw.nn.detach(model.head)
    assert torch.equal(model.embed.weight, dense)
    assert torch.equal(model(x), expected)
    assert int((model.head.weight != 0).sum()) == 48
    assert model.head.weight is not model.embed.weight
    assert model.head.weight.requires_grad


def test_a_weight_that_is_tied_after_it_was_gated_is_seen_too_and_the_last_holder_keeps_the_object():
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    mw.nn.attach(one, TopK(0.3))
    mw.nn.attach(two, TopK(0.6))
    shared = two.parametrizations.weight.original = one.parametrizations.weight.original
    x = torch.randn(3, 6)
    expected = one(x), two(x)
    with pytest.warns(UserWarning, match="was shared with ParametrizationList"):
        mw.nn.detach(one)
    # Nobody else holds it any more: no warning, and the same object, which an optimizer may hold.
    params = dict(two.named_parameters())
    optimizer = torch.optim.SGD(two.parameters())
    mw.nn.detach(two)
    assert two.weight is shared
    assert (one(x) - expected[0]).abs().max() == (two(x) - expected[1]).abs().max() == 0
    del params, optimizer


def test_detaching_the_original_of_a_tied_weight_leaves_it_tied():
    model = Tied()
    mw.nn.attach(model.head, TopK(0.3))
    mw.nn.detach(model.head, keep="original")
    assert model.head.weight is model.embed.weight
    assert bool((model.head.weight != 0).all())


def test_where_the_garbage_collector_is_blind_a_weight_is_not_masked_at_a_guess():
    import gc

    layer = mw.nn.attach(nn.Linear(3, 3), TopK(0.5))
    gc.freeze()
    try:
        with pytest.raises(ArgumentError, match=r"objects that gc\.freeze\(\) hides. Hint: gc\.unfreeze\(\)"):
            mw.nn.detach(layer)
    finally:
        gc.unfreeze()
    assert int((mw.nn.detach(layer).weight != 0).sum()) == 4


@pytest.mark.parametrize("wrap", [lambda bits: bits, mw.Mask], ids=["bool", "Mask"])
def test_a_bare_mask_is_attached_as_a_binary_gate(wrap):
    bits = torch.tensor([[True, False, True], [False, False, True]])
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(layer.state_dict())
    mw.nn.attach(layer, wrap(bits))
    mw.nn.attach(other, mw.nn.gates.Binary(bits))
    assert type(layer.parametrizations.weight[0]) is mw.nn.gates.Binary
    assert torch.equal(layer.weight, other.weight)
    assert torch.equal(layer.weight != 0, bits)
