"""mw.nn.masked: a model with a mask gives what each sequence gives alone, and nothing that is dropped reaches it."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.nn.sequential import _seen_through, _windows_of

LENGTHS = [13, 6, 0, 3, 9]


class Residual(nn.Module):
    """A block of the user's own, which hands the mask on."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())
        self.last = nn.ModuleList([nn.GroupNorm(2, 4)])

    def forward(self, x, mask=None):
        if mask is None:
            return x + self.last[0](self.body(x))
        return x + self.last[0](self.body(x, mask), mask)


def convolutions():
    return nn.Sequential(
        nn.Conv1d(3, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.GELU(),
        nn.Sequential(nn.Conv1d(4, 4, 5, stride=2, padding=2), nn.GroupNorm(2, 4), nn.Sigmoid()),
        nn.Conv1d(4, 4, 3, dilation=2, padding="same"),
        nn.InstanceNorm1d(4, affine=True),
        nn.Conv1d(4, 6, 1),
        nn.PReLU(6),
    )


def classifier():
    return nn.Sequential(
        *convolutions(),
        nn.MaxPool1d(3, 2, 1),
        nn.AdaptiveMaxPool1d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.BatchNorm1d(5),
        nn.LogSoftmax(-1),
    )


def tokens():
    return nn.Sequential(
        nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 8), nn.GLU(), nn.RMSNorm(4), nn.Dropout(0.0), nn.Linear(4, 2)
    )


def images():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(3, 1, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def volumes():
    return nn.Sequential(nn.Conv3d(3, 4, (1, 3, 3), padding=(0, 1, 1)), nn.BatchNorm3d(4), nn.AdaptiveAvgPool3d(1))


def residual():
    return nn.Sequential(nn.Conv1d(3, 4, 1), Residual(), nn.Tanh(), nn.AdaptiveAvgPool1d(1))


def rows():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Linear(4, 2), nn.Softmax(1))


def flattened():
    return nn.Sequential(nn.Conv1d(3, 2, 3, padding=1), nn.Flatten(), nn.Linear(26, 3))


def pooled_by_ours():
    return nn.Sequential(nn.Linear(3, 4), mw.nn.MaskedMeanPool(), nn.Linear(4, 2))


class Moved(nn.Module):
    """Moves channels between dim 1 and the last dim; takes a mask, since that is where places are."""

    def forward(self, x, mask=None):
        return x.transpose(1, -1)


def moved(features):
    return nn.Sequential(
        nn.Embedding(10, features),
        Moved(),
        nn.Conv1d(features, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        Moved(),
        nn.Linear(4, 2),
    )


def valid():
    return nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.AvgPool1d(2))


STRIPES = mw.Mask.from_lengths(LENGTHS)
CASES = {
    "convolutions": (convolutions, (5, 3, 13), STRIPES),
    "a classifier": (classifier, (5, 3, 13), STRIPES),
    "tokens": (tokens, (5, 13), STRIPES),
    "images": (images, (2, 3, 12, 11), mw.Mask.from_lengths([[12] * 9 + [0] * 2, [5] * 4 + [0] * 7]).mT),
    "volumes": (volumes, (2, 3, 2, 4, 5), mw.Mask(torch.rand(2, 2, 4, 5, generator=torch.manual_seed(0)) < 0.5)),
    "a block that takes a mask": (residual, (5, 3, 13), STRIPES),
    "rows": (rows, (5, 3), torch.tensor([True, False, True, True, False])),
    "flattened places": (flattened, (5, 3, 13), STRIPES),
    "a pool of ours": (pooled_by_ours, (5, 13, 3), STRIPES),
    "no padding": (valid, (5, 3, 13), STRIPES),
    "channels that move": (lambda: moved(6), (5, 13), STRIPES),
    "as many channels as places": (lambda: moved(13), (5, 13), STRIPES),
    "holes": (convolutions, (5, 3, 13), torch.rand(5, 13, generator=torch.manual_seed(1)) < 0.5),
}
IDS = {"tokens", "channels that move", "as many channels as places"}
every_case = pytest.mark.parametrize("name", CASES)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def made(name):
    torch.manual_seed(0)
    make, shape, mask = CASES[name]
    x = torch.randint(10, shape) if name in IDS else torch.randn(shape)
    model = make()
    for module in model.modules():
        if getattr(module, "running_var", None) is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model, x, mask


def kept_of(x, mask):
    """The mask as it broadcasts to x."""
    bits = mask.to_bool() if isinstance(mask, mw.Mask) else mask
    if bits.dim() == x.dim():
        return bits
    return bits.unsqueeze(-1 if bits.dim() == 1 or x.shape[: bits.dim()] == bits.shape else 1)


def step(model, x, mask):
    """The output, every gradient, and the buffers after it."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    out = model(x, mask)
    (out * torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape)).sum().backward()
    found = [out.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    model.zero_grad()
    return found + ([x.grad] if x.requires_grad else [])


@every_case
@both_modes
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_poison_in_dropped_places_changes_no_bit_of_output_gradients_or_buffers(name, training, poison):
    found = []
    for value in (0.0, poison):
        model, x, mask = made(name)
        under = 7 if name in IDS and value else value
        x = torch.where(kept_of(x, mask), x, torch.tensor(under, dtype=x.dtype))
        found.append(step(mw.nn.masked(model).train(training), x, mask))
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name", ["convolutions", "a classifier", "a block that takes a mask", "no padding", *sorted(IDS)]
)
def test_in_evaluation_each_sequence_has_the_output_that_it_has_alone(name):
    model, x, mask = made(name)
    model.eval()
    out = mw.nn.masked(model)(x, mask)
    for row, length in enumerate(LENGTHS):
        if not length:
            assert not out[row].any()
            continue
        alone = model(x[row : row + 1, :length] if name in IDS else x[row : row + 1, :, :length])[0]
        if name in IDS:
            torch.testing.assert_close(out[row, :length], alone)
            assert not out[row, length:].any()
        elif alone.dim() == 1:
            torch.testing.assert_close(out[row], alone)
        else:
            torch.testing.assert_close(out[row, :, : alone.shape[-1]], alone)
            assert not out[row, :, alone.shape[-1] :].any()


@pytest.mark.parametrize("name", ["convolutions", "a classifier", "a block that takes a mask"])
def test_in_training_more_padding_changes_nothing(name):
    found = []
    for more in (0, 24):
        model, x, _ = made(name)
        # All the same weight, since the outputs differ in size.
        padded = nn.functional.pad(x, (0, more), value=3.0)
        model = mw.nn.masked(model).double()
        model(padded.double(), mw.Mask.from_lengths(LENGTHS, 13 + more)).square().sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@every_case
@both_modes
def test_without_a_mask_it_is_the_model_bit_for_bit_around_the_same_parameters(name, training):
    model, x, _ = made(name)
    model.train(training)
    twin, before = copy.deepcopy(model), repr(model)
    new = mw.nn.masked(model)
    assert list(new.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(new.parameters(), model.parameters(), strict=True))
    assert [each.training for each in new.modules()] == [each.training for each in model.modules()]
    assert torch.equal(new(x), twin(x))
    for a, b in zip(new.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)
    # And the model itself is what it was.
    assert repr(model) == before
    assert all(a is b for a, b in zip(new.buffers(), model.buffers(), strict=True))
    new.double()
    assert all(a is b for a, b in zip(new.buffers(), model.buffers(), strict=True))


@every_case
def test_copies_give_the_same(name):
    model, x, mask = made(name)
    new = mw.nn.masked(model).eval()
    expected = new(x, mask)
    for each in (copy.deepcopy(new), pickle.loads(pickle.dumps(new)), mw.nn.masked(new)):
        assert torch.equal(each(x, mask=mask), expected)


@pytest.mark.parametrize("name", ["a classifier", "tokens", "images", "a block that takes a mask"])
def test_it_compiles_into_one_graph(name):
    torch._dynamo.reset()
    model, x, mask = made(name)
    # In float64: norms of a few values make roundings of float32 large.
    new, x = mw.nn.masked(model).double(), x.double() if x.is_floating_point() else x
    expected = step(copy.deepcopy(new), x, mask)
    got = step(torch.compile(new, fullgraph=True, backend="aot_eager"), x, mask)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_it_runs_under_autocast_and_under_functional_call():
    model, x, mask = made("a classifier")
    new = mw.nn.masked(model).eval()
    expected = new(x, mask)
    with torch.autocast("cpu", torch.bfloat16):
        # Convolutions in bfloat16, of values of about 1.
        torch.testing.assert_close(new(x, mask).float(), expected, rtol=0.05, atol=0.05)
    # In float64: norms of a few values make roundings of float32 large.
    new, x = new.double(), x.double()
    parameters = dict(new.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(new, parameters, (x, mask)).sum()

    gradients = torch.func.grad(loss)(parameters, torch.where(kept_of(x, mask), x, torch.nan))
    wanted = torch.autograd.grad(new(x, mask).sum(), list(parameters.values()))
    for a, b in zip(gradients.values(), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mask", [torch.arange(13)[None] < 9, torch.tensor([[True], [False], [True], [True], [False]])])
@pytest.mark.parametrize("name", ["convolutions", "a classifier", "no padding"])
def test_sizes_of_1_broadcast(name, mask):
    model, x, _ = made(name)
    new = mw.nn.masked(model).eval()
    assert torch.equal(new(x, mask), new(x, mask.expand(5, 13)))


# -- windows -----------------------------------------------------------------------------------------------------------
GRID = [
    (size, stride, dilation, padding)
    for size, stride, dilation in itertools.product((1, 2, 3, 4, 5), (1, 2, 3), (1, 2))
    for padding in {0, dilation * (size - 1) // 2}
    if padding == 0 or 2 * padding == dilation * (size - 1)
]


@pytest.mark.parametrize(("size", "stride", "dilation", "padding"), GRID)
def test_as_many_outputs_are_kept_as_a_sequence_has_alone(size, stride, dilation, padding):
    conv = nn.Conv1d(1, 1, size, stride, padding, dilation)
    kept = _seen_through(_windows_of(conv), mw.Mask.from_lengths(range(21), 20))
    assert kept.shape[1] == conv(torch.ones(1, 1, 20)).shape[-1]
    for length, row in enumerate(kept.to_bool()):
        fits = length > 0 and length + 2 * padding > dilation * (size - 1)
        alone = conv(torch.ones(1, 1, length)).shape[-1] if fits else 0
        assert row.tolist() == [True] * alone + [False] * (kept.shape[1] - alone)


# -- what is swapped ---------------------------------------------------------------------------------------------------
def test_a_norm_alone_becomes_the_masked_one():
    norm = nn.BatchNorm1d(3)
    new = mw.nn.masked(norm)
    assert type(new) is mw.nn.MaskedBatchNorm1d
    assert new.weight is norm.weight
    x, mask = torch.randn(2, 3, 4), mw.Mask.from_lengths([4, 2])
    new(x, mask)
    assert norm.num_batches_tracked == 1


def test_the_names_of_masked_layers_are_printed():
    printed = repr(mw.nn.masked(classifier()))
    for kind in ("MaskedSequential", "MaskedBatchNorm1d", "MaskedGroupNorm", "MaskedAdaptiveMaxPool1d"):
        assert f"{kind}(" in printed


def test_hooks_go_along_and_new_ones_stay_apart():
    model, calls = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), []
    model[1].register_forward_hook(lambda module, args, out: calls.append(type(module).__name__))
    new = mw.nn.masked(model)
    new[1].register_forward_hook(lambda module, args, out: calls.append("new"))
    new(torch.randn(4, 3), torch.tensor([True, True, False, True]))
    model(torch.randn(4, 3))
    assert calls == ["MaskedBatchNorm1d", "new", "BatchNorm1d"]


def test_a_module_that_is_used_twice_stays_one():
    norm = nn.BatchNorm1d(3)
    new = mw.nn.masked(nn.Sequential(norm, nn.ReLU(), nn.Sequential(norm)))
    assert new[0] is new[2][0]


def test_a_module_that_takes_a_mask_has_its_children_swapped_and_those_of_the_model_stay():
    block = Residual()
    new = mw.nn.masked(block)
    assert type(new) is Residual
    assert [type(each).__name__ for each in (new.body, new.body[1], new.last[0])] == [
        "MaskedSequential", "MaskedBatchNorm1d", "MaskedGroupNorm",
    ]  # fmt: skip
    assert type(block.body[1]) is nn.BatchNorm1d
    x, mask = torch.randn(2, 4, 6), mw.Mask.from_lengths([6, 2])
    under = x.masked_fill(~mask.to_bool()[:, None], 99.0)
    assert torch.equal(new(x, mask)[1, :, :2], new(under, mask)[1, :, :2])


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("pointwise", ["1", "*1", Doubled, (Doubled,)])
def test_what_computes_each_place_by_itself_is_called_without_the_mask(pointwise):
    model = nn.Sequential(nn.BatchNorm1d(3), Doubled())
    x, mask = torch.randn(2, 3, 4), mw.Mask.from_lengths([4, 2])
    new = mw.nn.masked(model, pointwise=pointwise)
    assert torch.equal(new(x, mask), 2 * new[0](x, mask))


def test_gated_layers_stay_gated():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mw.nn.attach(model[0], mw.nn.gates.TopK(0.5))
    new = mw.nn.masked(model)
    assert new(torch.randn(3, 4), torch.tensor([True, False, True])).shape == (3, 4)
    assert new[0] is model[0]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x)


class Holds(nn.Module):
    """Takes a mask, and calls a child that holds a norm and takes none."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def forward(self, x, mask=None):
        return self.child(x)


REFUSED = [
    (nn.InstanceNorm2d(3), r"'1' \(InstanceNorm2d\): there is no masked InstanceNorm2d. Hint: nn.GroupNorm\(C, C\)"),
    (nn.ModuleList([nn.ReLU()]), r"'1' \(ModuleList\): it has no forward"),
    (Plain(), r"'1' \(Plain\): its forward takes no mask. Hint: .*pointwise='1'"),
    (nn.Sequential(nn.ReLU(), Plain()), r"'1\.1' \(Plain\)"),
    (Holds(Plain()), r"'1\.child' \(Plain\)"),
    (nn.LSTM(3, 3), r"'1' \(LSTM\): it may read other places"),
    (nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular"), r"values of other places \(circular\)"),
    (nn.Conv1d(3, 3, 4, padding=1), r"neither 0 nor half its kernel. Hint: padding=1, or 0"),
    (nn.Conv2d(3, 3, 5, padding=1), r"Hint: padding=\(2, 2\), or 0"),
    (nn.MaxPool1d(2, ceil_mode=True), r"ceil_mode=False"),
    (nn.MaxPool1d(2, return_indices=True), r"return_indices=False"),
    (nn.AdaptiveMaxPool1d(1, return_indices=True), r"return_indices=False"),
    (nn.AdaptiveAvgPool1d(4), r"windows depend on the padded size"),
    (nn.AvgPool1d(3, 1, 1, count_include_pad=False), r"count_include_pad=True"),
    (nn.Flatten(2), r"Hint: nn.Flatten\(\)"),
    (nn.RMSNorm((4, 3)), r"normalizes more than a place"),
    (nn.Softmax(), r"it has no dim"),
    (mw.unpad(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), r"replaced its forward"),
]


@pytest.mark.parametrize(("layer", "message"), REFUSED, ids=lambda value: type(value).__name__)
def test_a_layer_that_no_mask_can_be_seen_through_is_refused_by_name(layer, message):
    with pytest.raises(ValueError, match=message) as refused:
        mw.nn.masked(nn.Sequential(nn.ReLU(), layer))
    assert str(refused.value).startswith("masked: `model` must be made of layers that a mask can be seen through, got")


def test_a_layer_norm_in_a_block_that_takes_no_mask_is_left_to_its_caller():
    block = Holds(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    new = mw.nn.masked(block)
    assert new.child is block.child


def test_a_layer_over_places_is_refused_when_it_is_called():
    model = mw.nn.masked(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(4, 4)))
    with pytest.raises(mw.errors.ShapeError, match=r"channels in dim 1 throughout.*got '1' \(Linear\)"):
        model(torch.randn(2, 3, 4), mw.Mask.from_lengths([4, 2]))
    moved = mw.nn.masked(nn.Sequential(nn.BatchNorm1d(4), nn.Softmax(2)))
    with pytest.raises(mw.errors.ShapeError, match=r"'1' \(Softmax\)"):
        moved(torch.randn(2, 4, 4), mw.Mask.from_lengths([4, 2]))
