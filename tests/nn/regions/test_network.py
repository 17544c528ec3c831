"""mw.nn.Regions: masks flow through a network, and what they drop is not computed and reaches nothing."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import maskwise as mw
from tests.nn.regions.networks import ResNet, UNet, settled

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def patches(batch, sizes, side, kept, seed=0):
    """A mask of whole patches."""
    grid = torch.rand(batch, sizes[0] // side, sizes[1] // side, generator=torch.Generator().manual_seed(seed)) < kept
    return grid.repeat_interleave(side, 1).repeat_interleave(side, 2)


class Truth(fx.Interpreter):
    """Runs a model node by node, with zeros outside of a mask of patches after each; maxima are of positive maps."""

    def __init__(self, model, mask):
        super().__init__(fx.symbolic_trace(model))
        self.mask = mask

    def at(self, sizes):
        step = self.mask.shape[1] // sizes[0]
        return self.mask[:, ::step, ::step][:, None]

    def run_node(self, n):
        value = super().run_node(n)
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or tuple(value.shape[2:]) == (1, 1):
            return value
        return torch.where(self.at(value.shape[2:]), value, 0.0)


NETWORKS = [
    (lambda: ResNet(4, head=False), 32),
    (lambda: UNet(4), 8),
    (lambda: UNet(4, up="nearest"), 8),
]


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("route", [None, "tiles", "pixels", "plain"])
def test_a_network_on_patches_is_the_network_with_zeros_around_them(make, kept, layout, route):
    build, side = make
    model = settled(build()).double()
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64).contiguous(memory_format=layout)
    mask = patches(2, (64, 96), side, kept)
    truth = Truth(model, mask).run(torch.where(mask[:, None], x, 0.0))
    regions = mw.nn.Regions(model)
    with mw.force(route):
        ours = regions(torch.where(mask[:, None], x, float("nan")), mask)
    torch.testing.assert_close(ours, truth, **EXACT)
    assert ours.is_contiguous(memory_format=layout)
    assert torch.equal(regions.outputs(mask).to_bool(), mask[:, :: 64 // ours.shape[2], :: 64 // ours.shape[2]])


@pytest.mark.parametrize("make", NETWORKS)
def test_layer_by_layer_gives_the_same_and_gradients_to_valid_positions_only(make):
    build, side = make
    model = settled(build()).double().requires_grad_()
    x, mask = torch.randn(2, 3, 64, 96, dtype=torch.float64), patches(2, (64, 96), side, 0.4)
    poisoned = torch.where(mask[:, None], x, float("nan")).requires_grad_()
    out = mw.nn.Regions(model)(poisoned, mask)
    with torch.no_grad():
        torch.testing.assert_close(out.detach(), mw.nn.Regions(model)(poisoned, mask), **EXACT)
    clean = torch.where(mask[:, None], x, 0.0).requires_grad_()
    truth = Truth(model, mask).run(clean)
    leaves = list(model.parameters())
    ours = torch.autograd.grad(out.square().sum(), [poisoned, *leaves], allow_unused=True)
    theirs = torch.autograd.grad(truth.square().sum(), [clean, *leaves], allow_unused=True)
    assert (ours[0][(~mask)[:, None].expand(x.shape)] == 0).all()
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        # Shortcuts of blocks that do without one are unused.
        assert (a is None) == (b is None)
        if a is not None:
            expected = torch.where(mask[:, None], b, 0.0) if at == 0 else b
            torch.testing.assert_close(a, expected, rtol=1e-7, atol=1e-7)


def test_a_classifier_pools_what_is_valid():
    model = settled(ResNet(4)).double()
    x, mask = torch.randn(3, 3, 64, 64, dtype=torch.float64), patches(3, (64, 64), 32, 0.6, seed=3)
    mask[2] = False
    maps = Truth(nn.Sequential(model.stem, model.stages), mask).run(torch.where(mask[:, None], x, 0.0))
    small = mask[:, ::32, ::32]
    pooled = maps.sum((2, 3)) / small.sum((1, 2)).clamp(min=1)[:, None]
    torch.testing.assert_close(mw.nn.Regions(model)(x, mask), model.head[2](pooled), **EXACT)


def test_batch_norms_in_training_take_the_statistics_of_what_is_valid():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).double().train()
    x, mask = torch.randn(2, 3, 16, 16, dtype=torch.float64), patches(2, (16, 16), 4, 0.5)
    out = mw.nn.Regions(model)(torch.where(mask[:, None], x, float("nan")), mask)
    rows = model[0](torch.where(mask[:, None], x, 0.0)).permute(0, 2, 3, 1)[mask]
    expected = F.relu(F.batch_norm(rows, None, None, model[1].weight, model[1].bias, True))
    torch.testing.assert_close(out.permute(0, 2, 3, 1)[mask], expected, **EXACT)
    assert (out.permute(0, 2, 3, 1)[~mask] == 0).all()
    torch.testing.assert_close(model[1].running_mean, 0.1 * rows.mean(0), **EXACT)
    out.sum().backward()
    assert model[0].weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(3, 2, 1),
        nn.AvgPool2d(2, count_include_pad=False),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(3, 1, 1, divisor_override=9),
    ],
)
@pytest.mark.parametrize("route", ["tiles", "plain"])
def test_pooling_on_tiles_is_the_pooling_layer(pool, route):
    ours = {nn.MaxPool2d: mw.nn.RegionMaxPool2d, nn.AvgPool2d: mw.nn.RegionAvgPool2d}[type(pool)]
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override", "dilation")
    layer = ours(**{name: getattr(pool, name) for name in names if hasattr(pool, name)})
    x = torch.randn(2, 3, 23, 31, dtype=torch.float64)
    mask = torch.rand(2, 23, 31, generator=torch.Generator().manual_seed(0)) < 0.3
    poisoned = torch.where(mask[:, None], x, float("nan"))
    conv = settled(nn.Conv2d(3, 3, 1)).double()
    with mw.force(route):
        found = mw.nn.Regions(nn.Sequential(conv, pool).eval())(poisoned, mask)
    expected = layer(mw.conv2d(poisoned, conv.weight, conv.bias, mask=mask), mask)
    torch.testing.assert_close(found, expected, **EXACT)


def test_pools_reduce_what_is_valid_of_each_window():
    x = torch.randn(1, 2, 12, 12)
    mask = torch.rand(1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.4
    poisoned = torch.where(mask[:, None], x, float("nan")).requires_grad_()
    everything = torch.ones(1, 4, 4, dtype=torch.bool)
    windows = x.unfold(2, 3, 3).unfold(3, 3, 3).flatten(4)
    kept = mask[:, None].unfold(2, 3, 3).unfold(3, 3, 3).flatten(4)
    largest = mw.nn.RegionMaxPool2d(3)(poisoned, mask, everything)
    average = mw.nn.RegionAvgPool2d(3)(poisoned, mask, everything)
    torch.testing.assert_close(largest, mw.amax(windows, kept.expand(windows.shape), dim=-1, empty=0.0))
    torch.testing.assert_close(average, mw.mean(windows, kept.expand(windows.shape), dim=-1, empty=0.0))
    for out in (largest, average):
        (grad,) = torch.autograd.grad(out.sum(), poisoned, retain_graph=True)
        assert (grad[(~mask)[:, None].expand(x.shape)] == 0).all()
    layer = mw.nn.RegionMaxPool2d(3)
    assert torch.equal(layer.outputs(mask).to_bool(), mask[:, 1::3, 1::3])
    assert (layer(poisoned, mask)[(~mask[:, 1::3, 1::3])[:, None].expand(1, 2, 4, 4)] == 0).all()
    assert torch.equal(mw.nn.RegionMaxPool2d(3)(x), nn.MaxPool2d(3)(x))
    assert torch.equal(mw.nn.RegionAvgPool2d(3, padding=1)(x), nn.AvgPool2d(3, padding=1)(x))


def test_without_a_mask_it_is_the_model():
    model, x = settled(UNet(2)), torch.randn(1, 3, 16, 16)
    assert torch.equal(mw.nn.Regions(model)(x), model(x))


def test_new_weights_are_noticed():
    model, x, mask = settled(nn.Conv2d(1, 1, 3, padding=1)), torch.randn(1, 1, 16, 16), torch.ones(16, 16).bool()
    regions = mw.nn.Regions(nn.Sequential(model))
    regions(x, mask)
    model.weight.add_(1.0)
    torch.testing.assert_close(regions(x, mask), model(x))


def test_copies_have_a_model_of_their_own():
    regions, x, mask = mw.nn.Regions(settled(UNet(2))), torch.randn(1, 3, 16, 16), torch.ones(16, 16).bool()
    y = regions(x, mask)
    for other in (copy.deepcopy(regions), pickle.loads(pickle.dumps(regions))):
        torch.testing.assert_close(other(x, mask), y)
        other.model.head.bias.add_(1.0)
        torch.testing.assert_close(other(x, mask), y + 1.0)
        torch.testing.assert_close(regions(x, mask), y)


def test_state_dicts_are_those_of_the_model():
    model = UNet(2)
    assert [name.removeprefix("model.") for name in mw.nn.Regions(model).state_dict()] == list(model.state_dict())


def test_layers_without_a_rule_for_masks_are_refused_with_the_reason():
    net = mw.nn.Regions(settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))))
    with pytest.raises(mw.MaskwiseError, match="'1': GroupNorm has no rule for regions"):
        net(torch.randn(1, 3, 8, 8), torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(mw.MaskwiseError, match="map of"):
        net(torch.randn(3, 8, 8), torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(mw.MaskwiseError, match="positions"):
        net(torch.randn(1, 3, 8, 8), torch.ones(7, 8, dtype=torch.bool))
    with pytest.raises(mw.MaskwiseError, match="return_indices"):
        mw.nn.RegionMaxPool2d(2, return_indices=True)


@pytest.mark.parametrize("kind", [mw.nn.Regions, mw.nn.Incremental])
@pytest.mark.parametrize("x", [torch.zeros(1, 5, 8, 8), torch.zeros(1, 3, 1, 1), torch.zeros(1, 3, 8, 8).double()])
def test_an_input_that_the_model_does_not_take_is_refused_with_its_reason(kind, x):
    model = kind(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2)).eval())
    arguments = (x, torch.ones(1, *x.shape[2:], dtype=torch.bool)) if kind is mw.nn.Regions else (x,)
    with pytest.raises(mw.MaskwiseError, match=r"must be what the model takes.*Hint"):
        model(*arguments)


@pytest.mark.parametrize("layer", [mw.nn.RegionMaxPool2d(2), mw.nn.RegionAvgPool2d(2)])
@pytest.mark.parametrize(
    "call",
    [
        lambda layer: layer(torch.zeros(1, 1, 1, 1)),
        lambda layer: layer(torch.zeros(1, 1, 0, 4)),
        lambda layer: layer(torch.zeros(1, 1, 4, 4, dtype=torch.int32)),
        lambda layer: layer.outputs(None),
        lambda layer: layer.outputs(torch.ones(4, dtype=torch.bool)),
        lambda layer: layer.outputs(torch.ones(1, 1, dtype=torch.bool)),
        lambda layer: layer.outputs(torch.ones(4, 4)),
    ],
)
def test_pools_refuse_what_they_cannot_pool_with_a_hint(layer, call):
    with pytest.raises(mw.MaskwiseError, match=r"must.*Hint"):
        call(layer)


def test_the_mask_of_a_result_is_asked_for_with_a_mask():
    with pytest.raises(mw.MaskwiseError, match=r"mask.*bool.*Hint"):
        mw.nn.Regions(nn.Conv2d(3, 4, 3).eval()).outputs([True])


def test_a_result_of_several_maps_without_a_rule_is_refused():
    class Halves(nn.Module):
        def forward(self, x):
            top, bottom = x.chunk(2, 2)
            return top + bottom

    with pytest.raises(mw.MaskwiseError, match=r"a rule for each layer.*Hint"):
        mw.nn.Regions(Halves().eval())(torch.zeros(1, 3, 8, 8), torch.ones(8, 8, dtype=torch.bool))
