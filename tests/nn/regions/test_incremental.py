"""mw.nn.Incremental: an update equals a run of the whole model."""

import copy
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import maskwise as mw
from tests.nn.regions.networks import ResNet, UNet, chain, settled

#: In float64, of some layers.
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def double(model):
    return settled(model).double()


def edit(x, box, seed=1):
    new = x.clone(memory_format=torch.preserve_format)
    part = new[..., box[0], box[1]]
    part += torch.randn(part.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    return new


MODELS = [
    lambda: ResNet(4),
    lambda: ResNet(4, head=False),
    lambda: UNet(4),
    lambda: UNet(4, up="nearest"),
    lambda: UNet(4, up="bilinear"),
]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_updates_in_a_row_equal_runs_of_the_model(make, layout):
    model = double(make())
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64).contiguous(memory_format=layout)
    inc = mw.nn.Incremental(model)
    y = inc(x)
    truth = model(x)
    torch.testing.assert_close(y, truth, **EXACT)
    assert y.stride() == truth.stride()
    boxes = [(slice(3, 9), slice(50, 60)), (slice(60, 64), slice(0, 5)), (slice(0, 64), slice(30, 31))]
    for at, box in enumerate(boxes):
        new = edit(x, box, at)
        bits = torch.zeros(64, 96, dtype=torch.bool)
        bits[box] = True
        changed = (box, bits, None, mw.Mask(bits))[at % 4]
        y = inc.update(new, changed)
        torch.testing.assert_close(y, model(new), **EXACT)
        assert y.stride() == truth.stride()
        x = new


@pytest.mark.parametrize("route", [None, "tiles", "pixels", "plain"])
@pytest.mark.parametrize("seed", range(60))
def test_random_chains_of_layers_equal_a_run(seed, route):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = (rng.choice((17, 24, 31)), rng.choice((16, 23, 40)))
    model = chain(seed, sizes)
    if model is None or not any(isinstance(m, (nn.Conv2d, nn.MaxPool2d, nn.ConvTranspose2d)) for m in model.modules()):
        model = settled(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)))
    model = model.double()
    inc = mw.nn.Incremental(model)
    x = torch.randn(2, 3, *sizes, generator=generator, dtype=torch.float64)
    with mw.force(route):
        torch.testing.assert_close(inc(x), model(x.clone()), **EXACT)
        for kept in (0.0, 0.005, 0.05, 0.5, 1.0):
            bits = torch.rand(2, *sizes, generator=generator) < kept
            new = torch.where(bits[:, None], torch.randn(x.shape, generator=generator, dtype=torch.float64), x)
            torch.testing.assert_close(
                inc.update(new, bits if rng.random() < 0.5 else None), model(new.clone()), **EXACT
            )
            x = new


def test_only_what_an_edit_reaches_is_computed():
    model = settled(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(2, 2, 5, padding=2)))
    inc = mw.nn.Incremental(model)
    x = torch.randn(1, 1, 64, 64)
    inc(x)
    inc.update(edit(x, (slice(32, 33), slice(20, 21))))
    assert [row.reached for row in inc.report.rows] == [9, 4, 36]
    assert inc.report.share == 49 / (64 * 64 + 2 * 32 * 32)


def test_an_edit_that_nothing_reads_changes_nothing():
    inc = mw.nn.Incremental(settled(nn.Conv2d(1, 1, 1, stride=2)))
    x = torch.randn(1, 1, 8, 8)
    y = inc(x)
    assert torch.equal(inc.update(edit(x, (slice(1, 2), slice(3, 4)))), y)
    assert [row.route for row in inc.report.rows] == ["reused"]


def test_statistics_of_the_whole_map_are_computed_as_a_whole_and_reported():
    model = settled(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)))
    inc, x = mw.nn.Incremental(model), torch.randn(1, 3, 32, 32)
    inc(x)
    new = edit(x, (slice(4, 6), slice(4, 6)))
    torch.testing.assert_close(inc.update(new), model(new), rtol=1e-4, atol=1e-5)
    rows = {row.name: row for row in inc.report.rows}
    assert rows["0"].reached == 16
    assert (rows["1"].route, rows["1"].reason) == ("whole", "GroupNorm has no rule for regions")
    assert rows["2"].reached == 32 * 32
    assert "GroupNorm has no rule for regions" in str(inc.report)


class Gated(nn.Module):
    """A squeeze-and-excitation block, and a second input."""

    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x, y):
        maps = self.conv(x) * self.scale
        maps = maps * torch.sigmoid(self.gate(maps.mean((2, 3), keepdim=True)))
        return F.relu(maps, inplace=True) + y[:, :1], maps.shape[0]


class Chunked(nn.Module):
    """A map in two parts, one of which gates the other, and a size that is read."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x):
        first, second = self.conv(x).chunk(2, 1)
        return F.interpolate(first * second.sigmoid() / x.shape[1], scale_factor=2)


def test_parts_of_a_map_are_followed():
    model = settled(Chunked())
    inc, x = mw.nn.Incremental(model), torch.randn(1, 2, 12, 12)
    torch.testing.assert_close(inc(x), model(x))
    new = edit(x, (slice(3, 5), slice(3, 5)))
    torch.testing.assert_close(inc.update(new), model(new))


def test_gates_of_weights_are_followed():
    layer = mw.nn.MaskedConv2d(2, 3, 3, padding=1, gate=mw.nn.gates.TopK(0.5))
    model = settled(nn.Sequential(layer, nn.ReLU(), mw.nn.RegionConv2d(3, 1, 3, padding=1)))
    inc, x = mw.nn.Incremental(model), torch.randn(1, 2, 24, 24)
    torch.testing.assert_close(inc(x), model(x))
    new = edit(x, (slice(3, 5), slice(3, 5)))
    torch.testing.assert_close(inc.update(new), model(new))
    assert [row.name for row in inc.report.rows] == ["0", "2"]


def test_several_inputs_and_results_are_followed():
    model = settled(Gated())
    inc = mw.nn.Incremental(model)
    x, y = torch.randn(2, 3, 20, 20), torch.randn(2, 2, 20, 20)
    for ours, truth in zip(inc(x, y), model(x, y), strict=True):
        torch.testing.assert_close(ours, truth)
    new = edit(y, (slice(1, 3), slice(2, 4)))
    torch.testing.assert_close(inc.update((x, new))[0], model(x, new)[0])
    assert {row.name: row.reached for row in inc.report.rows}["add"] == 2 * 4
    moved = edit(x, (slice(1, 3), slice(2, 4)))
    torch.testing.assert_close(inc.update((moved, new), ((slice(1, 3), slice(2, 4)), None))[0], model(moved, new)[0])


def test_results_and_inputs_are_left_alone_by_later_updates():
    model = settled(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Identity()))
    inc, x = mw.nn.Incremental(model), torch.randn(1, 1, 16, 16)
    y = inc(x)
    kept, given = y.clone(), x.clone()
    new = edit(x, (slice(0, 16), slice(0, 16)))
    second = inc.update(new)
    assert torch.equal(y, kept)
    assert torch.equal(x, given)
    second.zero_()
    new.zero_()
    torch.testing.assert_close(inc.update(x), kept)


def test_what_is_not_said_to_have_changed_stays_as_it_was():
    model = settled(nn.Conv2d(1, 1, 3, padding=1))
    inc, x = mw.nn.Incremental(model), torch.randn(1, 1, 16, 16)
    inc(x)
    new = x + 1.0
    merged = x.clone()
    merged[..., :4, :4] += 1.0
    torch.testing.assert_close(inc.update(new, (slice(0, 4), slice(0, 4))), model(merged))


def test_the_model_is_left_as_it_is():
    model = settled(UNet(2))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    inc = mw.nn.Incremental(model)
    inc(torch.randn(1, 3, 16, 16))
    inc.update(torch.randn(1, 3, 16, 16))
    assert [name for name, _ in model.named_modules()] == names
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_new_weights_are_noticed():
    model = settled(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)))
    inc, x = mw.nn.Incremental(model), torch.randn(1, 1, 16, 16)
    inc(x)
    for change in (model[0].weight, model[1].running_mean):
        change.add_(1.0)
        new = edit(x, (slice(0, 2), slice(0, 2)))
        torch.testing.assert_close(inc.update(new, (slice(0, 2), slice(0, 2))), model(new))
        x = new


def test_after_an_exception_everything_is_as_it_was():
    fails = []

    class Second(nn.Module):
        def forward(self, x):
            if fails:
                raise RuntimeError("no")
            return x * 2

    Second.__module__ = "torch.nn.fake"  # so that it is not traced
    model = settled(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.AdaptiveAvgPool2d(4), Second()))
    inc, x = mw.nn.Incremental(model), torch.randn(1, 1, 16, 16)
    y = inc(x)
    report = inc.report
    fails.append(True)
    with pytest.raises(RuntimeError, match="no"):
        inc.update(edit(x, (slice(3, 5), slice(3, 5))))
    fails.clear()
    assert inc.report is report
    assert torch.equal(inc.update(x, torch.zeros(16, 16, dtype=torch.bool)), y)
    new = edit(x, (slice(9, 10), slice(3, 5)))
    torch.testing.assert_close(inc.update(new), model(new))


def test_reset_drops_what_is_cached():
    inc, x = mw.nn.Incremental(settled(nn.Conv2d(1, 1, 3))), torch.randn(1, 1, 8, 8)
    inc(x)
    inc.reset()
    with pytest.raises(mw.MaskwiseError, match="must follow a call"):
        inc.update(x)
    with pytest.raises(mw.MaskwiseError, match="must follow a call"):
        print(inc.report)
    assert inc(x).shape == (1, 1, 6, 6)


def test_copies_and_pickles_start_without_an_input():
    inc, x = mw.nn.Incremental(settled(nn.Conv2d(1, 1, 3))), torch.randn(1, 1, 8, 8)
    y = inc(x)
    for other in (copy.deepcopy(inc), pickle.loads(pickle.dumps(inc))):
        with pytest.raises(mw.MaskwiseError, match="must follow a call"):
            other.update(x)
        torch.testing.assert_close(other(x), y)
        assert other.model is not inc.model


def test_autocast_that_begins_or_ends_between_calls_computes_everything():
    model = settled(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)))
    inc, x = mw.nn.Incremental(model), torch.randn(1, 3, 32, 32)
    inc(x)
    new = edit(x, (slice(3, 5), slice(3, 5)))
    with torch.autocast("cpu", torch.bfloat16):
        lower = inc.update(new)
        assert lower.dtype is model(new).dtype is torch.bfloat16
        # Two convolutions in bfloat16.
        torch.testing.assert_close(lower, model(new), rtol=5e-2, atol=5e-2)
        newer = edit(new, (slice(9, 11), slice(3, 5)))
        torch.testing.assert_close(inc.update(newer), model(newer), rtol=5e-2, atol=5e-2)
    last = inc.update(x)
    torch.testing.assert_close(last, model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_updated_in_that_precision(dtype):
    model = settled(UNet(4)).to(dtype)
    inc, x = mw.nn.Incremental(model), torch.rand(1, 3, 32, 32).to(dtype)
    inc(x)
    new = edit(x, (slice(3, 9), slice(3, 5)))
    y = inc.update(new)
    assert y.dtype is dtype
    # Some units of the precision, through 15 layers whose batch norms are folded.
    torch.testing.assert_close(y.float(), model(new).float(), rtol=0, atol=40 * torch.finfo(dtype).eps)


def test_another_shape_starts_anew():
    model = settled(nn.Conv2d(1, 1, 3))
    inc = mw.nn.Incremental(model)
    for size in (8, 12):
        x = torch.randn(1, 1, size, size)
        torch.testing.assert_close(inc(x), model(x))


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Random(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Writing(nn.Module):
    def forward(self, x):
        x = x * 1
        x[:, 0] = 0
        return x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Branching(), "symbolically traced variables cannot be used as inputs to control flow"),
        (Random(), "one that calls `rand_like`"),
        (Writing(), "does not support item assignment"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)).train(), "BatchNorm2d '1' in training mode"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout()).train(), "Dropout '1' in training mode"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.FractionalMaxPool2d(2, 4)), "FractionalMaxPool2d .1."),
    ],
)
def test_a_model_that_cannot_be_followed_is_refused_with_the_reason(model, reason):
    with pytest.raises(mw.MaskwiseError, match=reason):
        mw.nn.Incremental(model)


def test_a_model_without_local_layers_is_refused_when_it_is_called():
    with pytest.raises(mw.MaskwiseError, match="`group_norm` has no rule for regions"):
        mw.nn.Incremental(nn.GroupNorm(1, 2).eval())(torch.randn(1, 2, 4, 4))


def test_a_model_that_went_back_to_training_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)).eval()
    inc, x = mw.nn.Incremental(model), torch.randn(1, 1, 4, 4)
    inc(x)
    model.train()
    with pytest.raises(mw.MaskwiseError, match="evaluation mode"):
        inc.update(x)


@pytest.mark.parametrize(
    ("x_new", "changed", "message"),
    [
        (torch.zeros(1, 1, 8, 9), None, r"shape \(1, 1, 8, 8\)"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.float64), None, "dtype torch.float32"),
        (torch.zeros(1, 1, 8, 8), torch.zeros(8, 8), "bool tensor"),
        (torch.zeros(1, 1, 8, 8), torch.zeros(8, 9, dtype=torch.bool), r"positions \(1, 8, 8\)"),
        (torch.zeros(1, 1, 8, 8), (1, 2, 3, 4), "two slices"),
        (torch.zeros(1, 1, 8, 8), "all", "bool tensor"),
        ((torch.zeros(1, 1, 8, 8),) * 2, None, "1 inputs"),
    ],
)
def test_invalid_edits_are_refused_and_change_nothing(x_new, changed, message):
    model = settled(nn.Conv2d(1, 1, 3, padding=1))
    inc, x = mw.nn.Incremental(model), torch.randn(1, 1, 8, 8)
    y = inc(x)
    with pytest.raises(mw.MaskwiseError, match=message):
        inc.update(x_new, changed)
    assert torch.equal(inc.update(x), y)


def test_values_that_are_no_maps_are_refused():
    inc = mw.nn.Incremental(settled(nn.Conv2d(1, 1, 3)))
    with pytest.raises(mw.MaskwiseError, match="map of"):
        inc(torch.zeros(1, 8, 8))
    with pytest.raises(mw.MaskwiseError, match="floating"):
        inc(torch.zeros(1, 1, 8, 8, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(0, 3, 16, 16), (1, 3, 0, 16)])
def test_an_empty_map_is_refused_with_a_hint(shape):
    inc = mw.nn.Incremental(torch.nn.Conv2d(3, 4, 3, padding=1).eval())
    with pytest.raises(mw.MaskwiseError, match=r"inputs.*at least one position.*Hint"):
        inc(torch.zeros(shape))


@pytest.mark.parametrize("where", ["call", "update", "model"])
def test_inference_mode_around_a_call_or_the_model_changes_nothing(where):
    def mode(name):
        return torch.inference_mode(where == name)

    with mode("model"):
        model = settled(UNet(2)).double()
    inc, x = mw.nn.Incremental(model), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    edited = x.clone()
    edited[..., 4:8, 6:10] += 1.0
    with mode("call"):
        inc(x)
    with mode("update"):
        first = inc.update(edited, (slice(4, 8), slice(6, 10)))
    torch.testing.assert_close(first, model(edited), **EXACT)
    torch.testing.assert_close(inc.update(x), model(x), **EXACT)


class Shared(nn.Module):
    """Values that all entries of a batch share, of 4, 3 or 2 dims."""

    def __init__(self, *shape):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.positions = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return torch.relu(self.layer(x) + self.positions) * (2 * self.positions)


class Parts(nn.Module):
    """Parts of the channels that gate each other, and numbers from shapes."""

    def __init__(self, split):
        super().__init__()
        self.layer, self.split = nn.Conv2d(3, 4, 3, padding=1), split

    def forward(self, x):
        y = self.layer(x)
        one, two = y.chunk(2, 1) if self.split == "chunk" else torch.split(y, [y.shape[1] // 2, 2], dim=1)
        return one * two.sigmoid() / x.shape[2]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Shared(1, 4, 40, 36),
        lambda: Shared(1, 1, 40, 36),
        lambda: Shared(4, 40, 36),
        lambda: Shared(40, 36),
        lambda: Shared(1, 4, 1, 1),
        lambda: Parts("chunk"),
        lambda: Parts("split"),
    ],
)
@pytest.mark.parametrize("route", ["tiles", "pixels", None])
def test_values_that_a_batch_shares_and_parts_of_channels_are_followed(make, batch, route):
    model = settled(make()).double()
    x, inc = torch.randn(batch, 3, 40, 36, dtype=torch.float64), mw.nn.Incremental(model)
    inc(x)
    x[-1:, :, 5:9, 30:33] += 1.0
    with mw.force(route):
        torch.testing.assert_close(inc.update(x), model(x), **EXACT)
        everything = torch.ones(40, 36, dtype=torch.bool)
        torch.testing.assert_close(mw.nn.Regions(model)(x, everything), model(x), **EXACT)


def test_our_pools_are_followed():
    layers = [nn.Conv2d(3, 4, 3), mw.nn.RegionMaxPool2d(2), mw.nn.RegionAvgPool2d(2)]
    model, x = settled(nn.Sequential(*layers)).double(), torch.randn(1, 3, 34, 34, dtype=torch.float64)
    inc = mw.nn.Incremental(model)
    inc(x)
    x[..., 3, 3] += 1.0
    with mw.force("tiles"):
        torch.testing.assert_close(inc.update(x), model(x), **EXACT)
    assert [row.route for row in inc.report.rows] == ["box"] * 3
