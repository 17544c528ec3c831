"""Pools and norms give 0 where nothing is kept, or what ``empty=`` says, and no NaN reaches a weight."""

import copy

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError
from tests.nn.layers import LAYERS

every_layer = pytest.mark.parametrize("layer", LAYERS, ids=str)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
#: The batch entry of which the inputs of `tests.nn.layers` keep nothing.
EMPTY = 1
ALL = {
    "MaskedMeanPool": ((), (2, 6, 4), (2, 6)),
    "MaskedMaxPool": ((), (2, 6, 4), (2, 6)),
    "MaskedAttentionPool": ((4,), (2, 6, 4), (2, 6)),
    "MaskedBatchNorm1d": ((4,), (2, 4, 6), (2, 6)),
    "MaskedBatchNorm2d": ((4,), (2, 4, 3, 2), (2, 3, 2)),
    "MaskedBatchNorm3d": ((4,), (2, 4, 3, 2, 1), (2, 3, 2, 1)),
    "MaskedGroupNorm": ((2, 4), (2, 4, 6), (2, 6)),
    "MaskedInstanceNorm1d": ((4,), (2, 4, 6), (2, 6)),
    "MaskedLayerNorm": ((4,), (2, 6, 4), (2, 6)),
}
every_kind = pytest.mark.parametrize("kind", ALL)


class Between(nn.Module):
    """A layer with a linear one before and after it."""

    def __init__(self, layer, x, mask):
        super().__init__()
        torch.manual_seed(3)
        self.before, self.layer = nn.Linear(x.shape[-1], x.shape[-1]), layer
        self.after = nn.Linear(copy.deepcopy(layer)(x, mask).shape[-1], 4)

    def forward(self, x, mask):
        return self.after(self.layer(self.before(x), mask))


def weight_gradients(model, x, mask, weights):
    out = model(x, mask)
    return torch.autograd.grad((out * weights.reshape(-1, *[1] * (out.dim() - 1))).sum(), list(model.parameters()))


@every_layer
@both_modes
@pytest.mark.parametrize("route", [None, "dense"], ids=["usual", "dense"])
def test_an_empty_sequence_leaves_every_weight_the_gradient_of_the_others(layer, training, route):
    x, bits = layer.inputs()
    model = Between(layer.make(), x, bits).train(training)
    others = torch.arange(x.shape[0]) != EMPTY
    without = copy.deepcopy(model)
    with mw.force(route):
        found = weight_gradients(model, x, bits, others.float())
        expected = weight_gradients(without, x[others], bits[others], torch.ones(int(others.sum())))
    for name, ours, theirs in zip(dict(model.named_parameters()), found, expected, strict=True):
        # Sums over the batch in float32, of which one has a term of 0 more.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda told, name=name: f"{name}: {told}")
    for (name, ours), theirs in zip(model.named_buffers(), without.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda told, name=name: f"{name}: {told}")


@every_kind
@pytest.mark.parametrize("empty", [0.0, 7.5, float("nan"), -float("inf")])
def test_nothing_kept_at_all_gives_the_empty_value_with_a_gradient_of_zero(kind, empty):
    arguments, shape, mask = ALL[kind]
    layer = getattr(mw.nn, kind)(*arguments, empty=empty)
    x = torch.full(shape, torch.nan, requires_grad=True)
    before = copy.deepcopy(layer.state_dict())
    out = layer(x, torch.zeros(mask, dtype=torch.bool))
    assert torch.equal(out.nan_to_num(nan=99.0), torch.full_like(out, empty).nan_to_num(nan=99.0))
    for gradient in torch.autograd.grad(out.sum(), [x, *layer.parameters()], allow_unused=True):
        assert gradient is None or torch.equal(gradient, torch.zeros_like(gradient))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert f"empty={empty}" in repr(layer)


@every_kind
def test_by_default_it_is_zero_and_only_for_slices_of_which_nothing_is_kept(kind):
    arguments, shape, mask = ALL[kind]
    x, bits = torch.rand(shape), torch.zeros(mask, dtype=torch.bool)
    bits[1].reshape(-1)[:2] = True
    torch.manual_seed(0)
    usual = getattr(mw.nn, kind)(*arguments)
    torch.manual_seed(0)
    other = getattr(mw.nn, kind)(*arguments, empty=7.5)
    assert usual.empty == 0.0
    usual, other = usual(x, bits), other(x, bits)
    assert usual.isfinite().all()
    if "BatchNorm" in kind:
        # Every channel keeps something in the batch.
        assert torch.equal(usual, other)
    elif kind == "MaskedLayerNorm":
        assert torch.equal(other[~bits], torch.full((10, 4), 7.5))
        assert torch.equal(usual[bits], other[bits])
    else:
        assert torch.equal(usual[0], torch.zeros_like(usual[0]))
        assert torch.equal(other[0], torch.full_like(other[0], 7.5))
        assert torch.equal(usual[1], other[1])


@pytest.mark.parametrize("pool", [mw.nn.MaskedMeanPool(), mw.nn.MaskedMaxPool(), mw.nn.MaskedAttentionPool(4)], ids=str)
@pytest.mark.parametrize("mask", [None, torch.ones(2, 0, dtype=torch.bool), mw.Mask.full((2, 0))], ids=str)
def test_a_sequence_without_positions_is_pooled_to_zero(pool, mask):
    x = torch.rand(2, 0, 4, requires_grad=True)
    out = pool(x, mask)
    assert torch.equal(out, torch.zeros(2, 4))
    out.sum().backward()
    assert x.grad.shape == (2, 0, 4)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_without_entries_leaves_running_statistics(momentum):
    for layer, shape in (
        (mw.nn.MaskedBatchNorm1d(3, momentum=momentum), (0, 3)),
        (mw.nn.MaskedBatchNorm2d(3, momentum=momentum), (2, 3, 0, 4)),
        (mw.nn.MaskedBatchNorm3d(3, momentum=momentum), (2, 3, 0, 4, 1)),
        (mw.nn.MaskedGroupNorm(3, 6), (2, 6, 0)),
        (mw.nn.MaskedGroupNorm(3, 6), (0, 6, 4)),
        (mw.nn.MaskedInstanceNorm1d(3, track_running_stats=True), (2, 3, 0)),
    ):
        before = copy.deepcopy(layer.state_dict())
        out = layer(torch.ones(shape), torch.ones((shape[0], *shape[2:]), dtype=torch.bool))
        assert out.shape == shape
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_the_largest_of_integers_and_bools_keeps_its_dtype():
    bits = torch.tensor([[True, True], [False, False]])
    for dtype in (torch.int64, torch.uint8, torch.bool):
        out = mw.nn.MaskedMaxPool()(torch.ones(2, 2, 1, dtype=dtype), bits)
        assert out.dtype is dtype
        assert out.flatten().tolist() == [1, 0]


@every_kind
@pytest.mark.parametrize("empty", [None, "nan", True, torch.tensor(0.0), 1j])
def test_what_is_no_number_is_refused_when_the_layer_is_made(kind, empty):
    with pytest.raises(DtypeError, match=rf"{kind}: `empty` must be a number, got .*Hint: empty=0\.0"):
        getattr(mw.nn, kind)(*ALL[kind][0], empty=empty)


@pytest.mark.parametrize(("empty", "dtype"), [(float("nan"), torch.int64), (0.5, torch.int64), (1e6, torch.float16)])
def test_a_value_that_the_input_cannot_hold_is_refused(empty, dtype):
    with pytest.raises(ArgumentError, match=r"MaskedMaxPool: `empty` must fit the input's dtype"):
        mw.nn.MaskedMaxPool(empty=empty)(torch.ones(2, 6, 4).to(dtype), torch.zeros(2, 6, dtype=torch.bool))
