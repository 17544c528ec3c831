"""RigL and SET exchange weights, keep the density, and carry the optimizer's state along."""

import math

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.errors import ArgumentError


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
