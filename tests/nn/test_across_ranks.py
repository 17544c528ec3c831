"""Gates, sparse layers and their topology on several ranks: the same masks everywhere, sharded or not."""

import functools
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import maskwise as mw
from maskwise.errors import ArgumentError
from tests.ranks import ranks  # noqa: F401, a fixture

RANKS = 3
# Sums over ranks, in another order than over rows.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def model(seed=0):
    torch.manual_seed(seed)
    gates = mw.nn.gates
    return nn.Sequential(
        mw.nn.SparseLinear(20, 31, density=0.2),
        nn.Tanh(),
        mw.nn.MaskedLinear(31, 17, gate=gates.TopK(0.5)),
        nn.Tanh(),
        mw.nn.attach(nn.Linear(17, 16), gates.TopK(0.4, scope="global", straight_through=True)),
        mw.nn.attach(nn.Linear(16, 12), gates.NM(2, 4)),
        mw.nn.attach(nn.Linear(12, 8), gates.TopK(0.4, scope="global")),
        mw.nn.attach(nn.Linear(8, 5), gates.Sigmoid()),
    ).double()


def wrapped(net, wrap, mesh=None):
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(net, process_group=None if mesh is None else mesh.get_group())
    if wrap == "fsdp":
        for part in net:
            if list(part.parameters()):
                fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def data(step, share=slice(None)):
    """A batch of 12 rows, of which each rank has its part: 4 of them, or 5, 7 and none."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 20, generator=generator, dtype=torch.float64)
    return x[share], x[share, :5].cos()


def shares(rank):
    starts = [0, 5, 12, 12]
    return slice(starts[rank], starts[rank + 1])


def step(net, outer, optimizer, at, share=slice(None), factor=1):
    """One step of a summed loss; DDP and FSDP divide gradients by the number of ranks, which the factor undoes."""
    x, target = data(at, share)
    optimizer.zero_grad()
    loss = factor * (outer(x) - target).square().sum() / 12 + 1e-3 * net[7].parametrizations.weight[0].penalty()
    loss.backward()
    optimizer.step()


def dense(net):
    """What the model computes with: every effective weight, and every mask."""
    weights = [net[0].to_dense(), *(found.gate(found.weight()) for found in gated(net) if found.module_name != "7")]
    masks = [net[0].mask, *(found.mask() for found in gated(net))]
    return [weight.detach().clone() for weight in weights], [mask.to_bool() for mask in masks]


def gated(net):
    from maskwise.nn.attaching import gated as found

    return list(found(net))


def train(wrap, kind, make_optimizer, mesh=None, steps=6, share=slice(None), factor=1):
    net = model()
    outer = wrapped(net, wrap, mesh)
    optimizer = make_optimizer(net.parameters())
    rewire = getattr(mw.nn, kind)(net, optimizer, every=2, until=100, fraction=0.4)
    before = net[0].mask.to_bool()
    for at in range(steps):
        step(net, outer, optimizer, at, share, factor)
        torch.manual_seed(distributed.get_rank() if distributed.is_initialized() else 0)
        rewire.step()
        if at == 3:
            mw.nn.reselect(net, density=0.3)
    moved = bool((before != net[0].mask.to_bool()).any())
    return (*dense(net), moved)


OPTIMIZERS = {
    "adam": functools.partial(torch.optim.Adam, lr=0.02, foreach=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}


def train_on_a_rank(wrap, kind, optimizer):
    return train(wrap, kind, OPTIMIZERS[optimizer], share=shares(distributed.get_rank()), factor=RANKS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["RigL", "SET"])
def test_a_rewired_and_reselected_model_trains_as_in_one_process(ranks, kind, wrap, optimizer):  # noqa: F811
    found = ranks.run(train_on_a_rank, wrap, kind, optimizer)
    weights, masks, moved = train(None, kind, OPTIMIZERS[optimizer])
    assert moved
    for weights_here, masks_here, moved_here in found:
        assert moved_here
        for here, there in zip(masks_here, masks, strict=True):
            assert torch.equal(here, there)
        for here, there, first in zip(weights_here, weights, found[0][0], strict=True):
            assert torch.equal(here, first)
            torch.testing.assert_close(here, there, **CLOSE)


# -- checkpoints -------------------------------------------------------------------------------------------------------
def saved(folder, wrap):
    """Train two steps, save, train two more; what comes out."""
    net = model()
    outer = wrapped(net, wrap)
    optimizer = OPTIMIZERS["adam"](net.parameters())
    rewire = mw.nn.RigL(net, optimizer, every=2, until=100, fraction=0.4)
    share = shares(distributed.get_rank())
    for at in range(4):
        step(net, outer, optimizer, at, share, RANKS)
        rewire.step()
        if at == 1:
            mw.nn.reselect(net, density=0.3)
            states, moments = get_state_dict(outer, optimizer)
            dcp.save({"model": states, "optimizer": moments, "rewire": rewire.state_dict()}, checkpoint_id=folder)
    return dense(net)


def resumed(folder, wrap, count):
    """Load on so many ranks, into a model of other weights at other places, and train two steps."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    mesh = DeviceMesh("cpu", list(range(count))) if distributed.is_initialized() else None
    if rank >= count:
        return None
    group = mesh.get_group() if mesh is not None else None
    net = model(seed=5)
    outer = wrapped(net, wrap, mesh)
    optimizer = OPTIMIZERS["adam"](net.parameters())
    rewire = mw.nn.RigL(net, optimizer, every=2, until=100, fraction=0.4, group=group)
    states, moments = get_state_dict(outer, optimizer)
    loaded = {"model": states, "optimizer": moments, "rewire": rewire.state_dict()}
    with warnings.catch_warnings():
        # Torch's own, that one process loads without others.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(loaded, checkpoint_id=folder, process_group=group, no_dist=count == 1)
    set_state_dict(outer, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    rewire.load_state_dict(loaded["rewire"])
    share = slice(None) if count == 1 else (slice(0, 7), slice(7, 12))[rank]
    for at in range(2, 4):
        step(net, outer, optimizer, at, share, count)
        rewire.step()
    return dense(net)


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(ranks, wrap, tmp_path):  # noqa: F811
    folder = str(tmp_path / wrap)
    weights, masks = ranks.run(saved, folder, wrap)[0]
    # This process alone, and two ranks of the three.
    after = [resumed(folder, None, 1), *ranks.run(resumed, folder, wrap, 2)[:2]]
    for weights_after, masks_after in after:
        for one, other in zip(masks_after, masks, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(weights_after, weights, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


# -- what is refused, on every rank ------------------------------------------------------------------------------------
def refusals():
    rank = distributed.get_rank()
    net = model()
    masks = net[0].mask.to_bool()
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters())
    found = []
    for call in (
        lambda: net[0].drop(0.5, optimizer),
        lambda: net[0].regrow(3, optimizer),
        lambda: net[0].set_mask(torch.ones(31, 20, dtype=torch.bool), optimizer),
        lambda: mw.nn.detach(net[4]),
        lambda: mw.nn.attach(net[2], torch.ones(17, dtype=torch.bool), "bias"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        found.append(str(caught.value))
    # As many weights at other places can be set.
    net[0].set_mask(masks.flip(0), optimizer)
    set_to = torch.equal(net[0].mask.to_bool(), masks.flip(0)) and torch.equal(
        net[0].to_dense() != 0, masks & masks.flip(0)
    )
    other = mw.nn.SparseLinear(20, 31, density=0.3).double()
    with pytest.raises(RuntimeError) as caught:
        net[0].load_state_dict(other.state_dict())
    found.append(str(caught.value))
    torch.manual_seed(rank)
    apart = nn.Sequential(mw.nn.SparseLinear(8, 8, density=0.5))
    rewire = mw.nn.SET(apart, torch.optim.SGD(apart.parameters(), lr=0.1), every=1)
    with pytest.raises(ArgumentError) as caught:
        rewire.step()
    found.append(str(caught.value))
    return found, set_to


def test_what_a_sharded_layer_cannot_do_is_refused_on_every_rank(ranks):  # noqa: F811
    for found, set_to in ranks.run(refusals):
        assert set_to
        assert [message.split(":")[0] for message in found[:5]] == [
            "SparseLinear.drop", "SparseLinear.regrow", "SparseLinear.set_mask", "detach", "attach",
        ]  # fmt: skip
        assert "124 values while they are sharded over ranks" in found[0]
        assert "before fully_shard" in found[3]
        assert "124 values are sharded over ranks, and the state has 186" in found[5]
        assert "SET: `model` must have weights at the same places on all ranks" in found[6]


def reports():
    net = model()
    expected = (
        str(mw.nn.report(net)),
        net[2].to_linear().weight.detach().clone(),
        net[0].to_linear().bias.detach().clone(),
    )
    fully_shard(net)
    found = (str(mw.nn.report(net)), net[2].to_linear().weight.detach(), net[0].to_linear().bias.detach())
    return expected[0] == found[0] and all(torch.equal(a, b) for a, b in zip(expected[1:], found[1:], strict=True))


def test_a_sharded_model_is_reported_and_made_dense_as_a_whole_one(ranks):  # noqa: F811
    assert ranks.run(reports) == [True] * RANKS
