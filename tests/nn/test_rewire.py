"""RigL and SET exchange weights, keep the density, and carry the optimizer's state along."""

import copy
import math

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.errors import ArgumentError, StaleMaskError


def model():
    torch.manual_seed(0)
    first, second = mw.nn.SparseLinear(20, 30, density=0.2), mw.nn.SparseLinear(30, 4, density=0.3)
    return nn.Sequential(first, nn.ReLU(), second)


@pytest.mark.parametrize("rewire", [mw.nn.RigL, mw.nn.SET])
def test_the_topology_changes_when_it_is_time_and_the_density_stays(rewire):
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    exchange = rewire(net, optimizer, fraction=0.5, every=3, until=100)
    assert len(exchange.layers) == 2
    counts = [layer.values.numel() for layer in exchange.layers]
    x, target = torch.randn(64, 20), torch.randn(64, 4)
    changed = []
    for _ in range(6):
        before = [layer.mask for layer in exchange.layers]
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), target).backward()
        optimizer.step()
        told = exchange.step()
        moved = any(not layer.mask.equal(mask) for layer, mask in zip(exchange.layers, before, strict=True))
        assert moved == told
        changed.append(told)
    assert changed == [False, False, True, False, False, True]
    assert [layer.values.numel() for layer in exchange.layers] == counts
    for layer in exchange.layers:
        assert optimizer.state[layer.values]["exp_avg"].shape == layer.values.shape


def test_rigl_grows_where_the_dense_gradient_is_largest():
    layer = mw.nn.SparseLinear(20, 10, density=0.2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    exchange = mw.nn.RigL([layer], optimizer, fraction=0.2, every=1, until=1000)
    x, above = torch.randn(16, 20), torch.randn(16, 10)
    dense = above.T @ x
    before = layer.mask.to_bool()
    layer(x).backward(above)
    optimizer.step()
    count = round(exchange.current_fraction * layer.values.numel())
    exchange.step()
    after = layer.mask.to_bool()
    new = after & ~before
    assert 0 < int(new.sum()) <= count
    assert dense[new].abs().min() >= dense[~after & ~before].abs().max()
    assert not layer.to_dense()[new].any()
    exchange.close()
    assert not layer._forward_hooks


def test_the_share_falls_along_a_cosine_and_ends():
    layer = mw.nn.SparseLinear(8, 8, density=0.5)
    exchange = mw.nn.SET(layer, torch.optim.SGD(layer.parameters()), fraction=0.4, every=1, until=4)
    assert exchange.current_fraction == pytest.approx(0.2 * (1 + math.cos(math.pi / 4)))
    assert [exchange.step() for _ in range(6)] == [True, True, True, False, False, False]
    again = mw.nn.SET(layer, torch.optim.SGD(layer.parameters()))
    again.load_state_dict(exchange.state_dict())
    assert again.steps == 6


def test_what_cannot_be_rewired_is_refused():
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters())
    with pytest.raises(ArgumentError, match="RigL: `model` must hold a SparseLinear"):
        mw.nn.RigL(linear, optimizer)
    layer = mw.nn.SparseLinear(2, 2, density=0.5)
    for wrong in ({"fraction": 0.0}, {"every": 0}, {"until": 0}):
        with pytest.raises(ArgumentError, match=f"SET: `{next(iter(wrong))}` must"):
            mw.nn.SET(layer, optimizer, **wrong)


# -- averages, and optimizers that were not there ---------------------------------------------------------------------
def averaging(kind):
    from torch.optim import swa_utils

    return {
        "equal": lambda net: swa_utils.AveragedModel(net),
        "ema": lambda net: swa_utils.AveragedModel(net, avg_fn=swa_utils.get_ema_avg_fn(0.5)),
        "foreach": lambda net: swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5)),
        "buffers": lambda net: swa_utils.AveragedModel(net, avg_fn=lambda a, b, n: a + (b - a) // 2, use_buffers=True),
    }[kind]


def rewired(net):
    for layer in net.modules():
        if isinstance(layer, mw.nn.SparseLinear):
            layer.regrow(layer.drop(0.5))


@pytest.mark.parametrize("kind", ["equal", "ema", "foreach", "buffers"])
@pytest.mark.parametrize("use", ["forward", "to_dense", "state_dict", "mask"])
def test_an_average_over_a_rewired_layer_is_refused(kind, use):
    net = model()
    average = averaging(kind)(net)
    x = torch.randn(3, 20)
    for _ in range(2):
        average.update_parameters(net)
    average(x)
    rewired(net)
    average.update_parameters(net)
    call = {
        "forward": lambda: average(x),
        "to_dense": lambda: average.module[0].to_dense(),
        "state_dict": average.state_dict,
        "mask": lambda: average.module[2].mask,
    }[use]
    for _ in range(2):
        with pytest.raises(
            StaleMaskError, match=r"values of other weights. Hint: averaged_layer\.set_mask\(layer\.mask\)"
        ):
            call()
    assert "SparseLinear" in str(average)
    # A copy of what is refused is refused, too.
    with pytest.raises(StaleMaskError):
        copy.deepcopy(average)(x)
    net(x)


@pytest.mark.parametrize("kind", ["equal", "ema", "foreach"])
def test_an_average_that_follows_the_topology_is_the_average_of_the_dense_weights(kind):
    net = model()
    average = averaging(kind)(net)
    dense = [layer.to_dense().detach().clone() for layer in (net[0], net[2])]
    for step in range(4):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter))
        if step == 2:
            rewired(net)
        for layer, mine in ((net[0], average.module[0]), (net[2], average.module[2])):
            mine.set_mask(layer.mask)
        average.update_parameters(net)
        share = 1.0 if step == 0 else 1.0 / (step + 1) if kind == "equal" else 0.5
        kept = [layer.mask.to_bool() for layer in (net[0], net[2])]
        now = [layer.to_dense().detach() for layer in (net[0], net[2])]
        # What is dropped is dropped of the average, too; what grows starts at 0 in both.
        dense = [torch.where(k, a + (b - a) * share, 0.0) for k, a, b in zip(kept, dense, now, strict=True)]
    for expected, layer in zip(dense, (average.module[0], average.module[2]), strict=True):
        # Four steps of lerp in another order of operations.
        torch.testing.assert_close(layer.to_dense().detach(), expected, rtol=1e-5, atol=1e-6)


def test_an_average_over_one_topology_goes_on():
    net = model()
    average = averaging("ema")(net)
    for _ in range(3):
        average.update_parameters(net)
    x = torch.randn(3, 20)
    torch.testing.assert_close(average(x), net(x))
    average.load_state_dict(average.state_dict())
    average.module.load_state_dict(net.state_dict())
    assert torch.equal(average(x), net(x))


def test_a_functional_call_with_another_topology_is_that_of_the_other_layer():
    one, two = (mw.nn.SparseLinear(20, 10, density=0.2) for _ in range(2))
    x = torch.randn(3, 20)
    state = {**dict(two.named_parameters()), **dict(two.named_buffers())}
    assert torch.equal(torch.func.functional_call(one, state, (x,)), two(x))
    one(x)


@pytest.mark.parametrize("kind", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_momentum_of_other_weights_is_refused(kind):
    layer = mw.nn.SparseLinear(20, 10, density=0.2)
    optimizer = kind(layer.parameters())

    def step():
        optimizer.zero_grad()
        layer(torch.randn(3, 20)).square().sum().backward()
        optimizer.step()

    # Before the first step there is no state that could be of other weights.
    rewired(layer)
    step(), step()
    layer.set_mask(layer.mask.to_bool().flip(0), optimizer)
    step()
    layer.set_mask(layer.mask.to_bool().flip(0))
    with pytest.raises(
        ArgumentError, match=r"got state of other weights. Hint: layer\.set_mask\(mask, optimizer=optimizer\)"
    ):
        step()
    optimizer.state.pop(layer.values)
    step(), step()
    assert optimizer.state[layer.values]
