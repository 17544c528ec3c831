"""The norms against a loop over channels, of kept values only, in float64."""

import copy
import itertools

import pytest
import torch
from torch import nn

import maskwise as mw
from maskwise.errors import DeviceError, DtypeError, ShapeError

# float32 against float64: a few roundings of values of about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def batch_norm(x, kept, eps):
    """(output, mean, unbiased variance) of each channel's kept values: x is (N, C, *), kept has x's shape."""
    out, means, variances = torch.zeros_like(x), [], []
    for c in range(x.shape[1]):
        values = x[:, c][kept[:, c]]
        out[:, c][kept[:, c]] = (values - values.mean()) / (values.var(correction=0) + eps).sqrt()
        means.append(values.mean())
        variances.append(values.var())
    return out, torch.stack(means), torch.stack(variances)


SHAPES = [((9, 3), (9,)), ((5, 3, 7), (5, 7)), ((4, 3, 5, 6), (4, 5, 6)), ((5, 3, 7), (5, 3, 7)), ((5, 3, 7), (5, 1))]


@pytest.mark.parametrize(("shape", "mask_shape"), SHAPES)
@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_batch_statistics_and_running_ones_are_those_of_kept_values(shape, mask_shape, momentum):
    layer = (mw.nn.MaskedBatchNorm2d if len(shape) == 4 else mw.nn.MaskedBatchNorm1d)(3, momentum=momentum)
    running_mean, running_var = torch.zeros(3).double(), torch.ones(3).double()
    for batch in range(1, 4):
        x, bits = torch.randn(shape) * 3 + 2, torch.rand(mask_shape) < 0.6
        kept = bits if bits.dim() == len(shape) else bits.unsqueeze(1)
        kept = kept.expand(shape)
        expected, mean, variance = batch_norm(x.double(), kept, layer.eps)
        torch.testing.assert_close(layer(x, bits).double(), expected, **CLOSE)
        factor = 1 / batch if momentum is None else momentum
        running_mean = (1 - factor) * running_mean + factor * mean
        running_var = (1 - factor) * running_var + factor * variance
        torch.testing.assert_close(layer.running_mean.double(), running_mean, **CLOSE)
        torch.testing.assert_close(layer.running_var.double(), running_var, **CLOSE)
        assert layer.num_batches_tracked == batch


def test_padding_more_changes_nothing():
    lengths, x = [3, 5, 1], torch.randn(3, 4, 5)
    short, long = mw.nn.MaskedBatchNorm1d(4), mw.nn.MaskedBatchNorm1d(4)
    a = short(x, mw.Mask.from_lengths(lengths, max_len=5))
    b = long(nn.functional.pad(x, (0, 60), value=7.0), mw.Mask.from_lengths(lengths, max_len=65))
    torch.testing.assert_close(a, b[..., :5])
    torch.testing.assert_close(short.running_var, long.running_var)


def test_packed_rows_through_the_layer_of_torch_give_the_same():
    x, bits = torch.randn(6, 4, 9), torch.rand(6, 9) < 0.5
    ours, theirs = mw.nn.MaskedBatchNorm1d(4), nn.BatchNorm1d(4)
    expected = theirs(mw.pack(x.mT, bits).values)
    torch.testing.assert_close(ours(x, bits).mT[bits], expected)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_of_nothing_leaves_running_statistics_and_counts_for_nothing(momentum):
    layer = mw.nn.MaskedBatchNorm1d(2, momentum=momentum)
    layer(torch.randn(4, 2, 3))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    out = layer(torch.full((4, 2, 3), torch.nan), torch.zeros(4, 3, dtype=torch.bool))
    assert torch.equal(out, torch.zeros(4, 2, 3))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_one_kept_value_moves_the_running_mean_and_not_the_running_variance():
    layer = mw.nn.MaskedBatchNorm1d(1, momentum=0.5)
    out = layer(torch.tensor([[4.0], [9.0]]), torch.tensor([True, False]))
    assert torch.equal(out, torch.zeros(2, 1))
    assert (layer.running_mean.item(), layer.running_var.item()) == (2.0, 1.0)


def test_channels_with_nothing_kept_are_left_alone_one_by_one():
    layer = mw.nn.MaskedBatchNorm1d(2, momentum=1.0)
    bits = torch.tensor([[[True, True], [False, False]]])
    layer(torch.tensor([[[1.0, 3.0], [torch.nan, torch.nan]]]), bits)
    assert layer.running_mean.tolist() == [2.0, 0.0]
    assert layer.running_var.tolist() == [2.0, 1.0]


def test_eval_uses_running_statistics_and_leaves_them():
    layer = mw.nn.MaskedBatchNorm1d(3)
    layer(torch.randn(5, 3, 7) * 2 + 1)
    layer.eval()
    before = layer.running_mean.clone()
    x, bits = torch.randn(5, 3, 7), torch.rand(5, 7) < 0.5
    expected = nn.functional.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
    assert torch.equal(layer(x, bits), torch.where(bits.unsqueeze(1), expected, 0.0))
    assert torch.equal(layer.running_mean, before)


def test_without_running_statistics_eval_uses_those_of_the_batch():
    layer = mw.nn.MaskedBatchNorm1d(3, track_running_stats=False)
    x, bits = torch.randn(5, 3, 7), torch.rand(5, 7) < 0.5
    assert torch.equal(layer.train()(x, bits), layer.eval()(x, bits))
    assert layer.running_mean is None


@pytest.mark.parametrize("batched", [True, False])
def test_instances_are_normalized_by_their_own_kept_values(batched):
    layer = mw.nn.MaskedInstanceNorm1d(3, affine=True)
    nn.init.uniform_(layer.weight)
    nn.init.uniform_(layer.bias)
    x, bits = torch.randn(4, 3, 8), torch.rand(4, 8) < 0.6
    bits[2] = False
    expected = torch.zeros(4, 3, 8, dtype=torch.float64)
    for n in range(4):
        for c in range(3 if bits[n].any() else 0):
            values = x[n, c, bits[n]].double()
            normal = (values - values.mean()) / (values.var(correction=0) + layer.eps).sqrt()
            expected[n, c, bits[n]] = normal * layer.weight[c].double() + layer.bias[c].double()
    got = layer(x, bits) if batched else torch.stack([layer(x[n], bits[n]) for n in range(4)])
    torch.testing.assert_close(got.double(), expected.detach(), **CLOSE)


def test_the_running_statistics_of_instances_average_over_those_that_have_any():
    layer = mw.nn.MaskedInstanceNorm1d(2, track_running_stats=True, momentum=0.25)
    x, bits = torch.randn(4, 2, 6), torch.rand(4, 6) < 0.7
    bits[1] = False
    bits[3] = torch.tensor([True, False, False, False, False, False])
    layer(x, bits)
    means = torch.stack([x[n][:, bits[n]].mean(-1) for n in (0, 2, 3)]).mean(0)
    variances = torch.stack([x[n][:, bits[n]].var(-1) for n in (0, 2)]).mean(0)
    torch.testing.assert_close(layer.running_mean, 0.25 * means)
    torch.testing.assert_close(layer.running_var, 0.75 + 0.25 * variances)
    layer.eval()
    expected = nn.functional.instance_norm(x, layer.running_mean, layer.running_var, use_input_stats=False)
    torch.testing.assert_close(layer(x, bits), torch.where(bits.unsqueeze(1), expected, 0.0))


def test_kept_positions_have_the_layer_norm_of_torch_to_the_last_bit():
    layer = mw.nn.MaskedLayerNorm(6)
    x, bits = torch.randn(4, 5, 6), torch.rand(4, 5) < 0.5
    assert torch.equal(layer(x, bits), torch.where(bits[..., None], nn.functional.layer_norm(x, (6,)), 0.0))


@pytest.mark.parametrize("mask_shape", [(4, 5, 6), (1, 1, 6), (4, 1, 6)])
def test_dropped_features_are_left_out_of_the_mean_and_the_variance(mask_shape):
    layer = mw.nn.MaskedLayerNorm(6)
    nn.init.uniform_(layer.weight)
    nn.init.uniform_(layer.bias)
    x, bits = torch.randn(4, 5, 6), torch.rand(mask_shape) < 0.6
    kept = bits.expand(4, 5, 6)
    expected = torch.zeros(4, 5, 6, dtype=torch.float64)
    for place in itertools.product(range(4), range(5)):
        at = kept[place]
        values = x[place][at].double()
        normal = (values - values.mean()) / (values.var(correction=0) + layer.eps).sqrt()
        expected[place][at] = (normal * layer.weight[at] + layer.bias[at]).detach()
    torch.testing.assert_close(layer(x, bits).double(), expected, **CLOSE)


def test_a_layer_norm_over_positions_counts_kept_positions():
    layer = mw.nn.MaskedLayerNorm((5, 2), elementwise_affine=False)
    x, bits = torch.randn(3, 5, 2), torch.rand(3, 5) < 0.6
    for row, kept, out in zip(x, bits, layer(x, bits), strict=True):
        values = row[kept]
        torch.testing.assert_close(
            out[kept], (values - values.mean()) / (values.var(correction=0) + layer.eps).sqrt(), **CLOSE
        )
        assert torch.equal(out[~kept], torch.zeros(int((~kept).sum()), 2))


BITS = torch.ones(8, 16, dtype=torch.bool)
ERRORS = [
    (lambda: mw.nn.MaskedBatchNorm1d(4)(torch.ones(8, 4, 16), BITS.T), ShapeError, r"\(8, 16\).*Hint: mask\.T\."),
    (lambda: mw.nn.MaskedBatchNorm1d(16)(torch.ones(8, 16, 4), BITS), ShapeError, r"input\.movedim\(-1, 1\)"),
    (lambda: mw.nn.MaskedBatchNorm1d(4)(torch.ones(8, 5, 16), BITS), ShapeError, r"4 channels.*MaskedBatchNorm1d\(5\)"),
    (lambda: mw.nn.MaskedBatchNorm1d(4)(torch.ones(8, 4, 16), BITS[0, 0]), ShapeError, r"one bool for each position"),
    (lambda: mw.nn.MaskedBatchNorm1d(4)(torch.ones(8, 4, 16), BITS.float()), DtypeError, r"from_attention_mask"),
    (lambda: mw.nn.MaskedBatchNorm1d(4)(torch.ones(8, 4, 16), [True]), DtypeError, r"Mask\(torch\.as_tensor"),
    (
        lambda: mw.nn.MaskedBatchNorm1d(4)(torch.ones(8, 4, 16), BITS.to("meta")),
        DeviceError,
        r"mask\.to\(input\.device\)",
    ),
    (lambda: mw.nn.MaskedInstanceNorm1d(3)(torch.ones(8, 4, 16), ~BITS), ShapeError, r"MaskedInstanceNorm1d\(4\)"),
    (lambda: mw.nn.MaskedLayerNorm(4)(torch.ones(8, 16, 4), BITS.T), ShapeError, r"Hint: mask\.T\."),
    (lambda: mw.nn.MaskedLayerNorm(4)(torch.ones(8, 16, 5), BITS), ShapeError, r"end in normalized_shape \(4,\)"),
    (
        lambda: mw.nn.MaskedLayerNorm(4)(torch.ones(8, 16, 4), BITS[:, 0, None, None, None]),
        ShapeError,
        r"input\[mask\]",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_arguments_get_an_error_that_teaches(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert str(caught.value).startswith("Masked")


def test_the_input_dims_are_refused_with_those_that_fit():
    with pytest.raises(
        ValueError, match=r"`input` must be \(N, C\) or \(N, C, L\), got \(2, 3, 4, 5\). Hint: input.flatten"
    ):
        mw.nn.MaskedBatchNorm1d(3)(torch.ones(2, 3, 4, 5), torch.ones(2, 4, 5, dtype=torch.bool))


# -- masks as intervals ------------------------------------------------------------------------------------------------
LENGTHS = torch.tensor([3, 0, 37, 20, 11, 36])
PADDED = {
    "lengths": mw.Mask.from_lengths(LENGTHS, 37),
    "left lengths": mw.Mask.from_lengths(LENGTHS, 37, side="left"),
    "bounds outside of the row": mw.Mask.from_lengths(LENGTHS + 2, 40)[:, 3:],
    "one row for all": mw.Mask.from_lengths([20], 37),
    "whole rows": mw.Mask.from_lengths([3], 6)[0][:, None],
    "none": mw.Mask.none((6, 37)),
    "bits": mw.Mask(torch.rand(6, 37, generator=torch.Generator().manual_seed(0)) < 0.4),
}
AFFINE = {
    "batch": lambda: mw.nn.MaskedBatchNorm1d(9),
    "batch without parameters": lambda: mw.nn.MaskedBatchNorm1d(9, affine=False),
    "instance": lambda: mw.nn.MaskedInstanceNorm1d(9, affine=True, track_running_stats=True),
}
# The kernel rounds its result once, as plain torch does; gradients of weights are sums of a hundred values.
TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-10, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def normalized(layer, x, mask, grad):
    """The output, the gradients of the input and of the parameters, and the running statistics."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = layer(x, mask)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad), *layer.buffers()]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("mask", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("name", AFFINE)
def test_the_kernel_of_kept_runs_gives_what_plain_torch_gives_in_float64(name, mask, training, is_transposed, dtype):
    torch.manual_seed(0)
    layer = AFFINE[name]().double().train(training)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2.0)
    kept = mask.to_bool().expand(6, 37)[:, None].expand(6, 9, 37)
    x = torch.where(kept, torch.randn(6, 9, 37) * 2 + 3, torch.nan).to(dtype)
    if is_transposed:
        x = x.mT.contiguous().mT
    grad = torch.where(kept, torch.randn(6, 9, 37), torch.nan).to(dtype)
    own = copy.deepcopy(layer).to(torch.promote_types(dtype, torch.float32))
    got = normalized(own, x, mask, grad)
    with mw.force("plain"):
        expected = normalized(layer, x.double(), mask, grad.double())
    for a, b in zip(got, expected, strict=True):
        size = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double() / size, b.double() / size, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for each in got[:2]:
        assert not torch.where(kept, 0.0, each).any()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_intervals_have_second_derivatives(training):
    layer = mw.nn.MaskedBatchNorm1d(2, track_running_stats=False).double().train(training)
    given = mw.nn.MaskedBatchNorm1d(2).double().eval()
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    for each in (layer, given):

        def call(x, weight, bias, each=each):
            parameters = {"weight": weight, "bias": bias}
            return torch.func.functional_call(each, parameters, (x, mw.Mask.from_lengths([2, 0, 5])))

        assert torch.autograd.gradcheck(call, (x, each.weight, each.bias))
        assert torch.autograd.gradgradcheck(call, (x, each.weight, each.bias))


def test_parameters_have_gradients_where_the_input_requires_none():
    layer, mask = mw.nn.MaskedBatchNorm1d(3), mw.Mask.from_lengths([2, 4])
    x = torch.randn(2, 3, 4)
    layer(x, mask).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((3,), 6.0))


@pytest.mark.parametrize("mask", PADDED.values(), ids=PADDED)
def test_layer_norm_of_intervals_is_torchs_to_the_last_bit(mask):
    layer, torchs = mw.nn.MaskedLayerNorm(9), nn.LayerNorm(9)
    kept = mask.to_bool().expand(6, 37)[..., None]
    x = torch.where(kept, torch.randn(6, 37, 9), torch.nan).requires_grad_()
    plain = torch.where(kept, x.detach(), 0.0).requires_grad_()
    out, expected = layer(x, mask), torch.where(kept, torchs(plain), 0.0)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    (got,), (want,) = torch.autograd.grad(out, x, grad), torch.autograd.grad(expected, plain, grad)
    torch.testing.assert_close(got, want)
    assert not torch.where(kept, 0.0, got).any()


# -- groups and volumes ------------------------------------------------------------------------------------------------
def group_norm(layer, x, kept):
    """The loop in float64: x is (N, C, *places), kept of x's shape."""
    out, size = torch.zeros_like(x, dtype=torch.float64), layer.num_channels // layer.num_groups
    for n, g in itertools.product(range(x.shape[0]), range(layer.num_groups)):
        place = (n, slice(g * size, (g + 1) * size))
        at = kept[place]
        if at.any():
            values = x[place].double()
            normal = (values - values[at].mean()) / (values[at].var(correction=0) + layer.eps).sqrt()
            for each in range(size if layer.affine else 0):
                c = g * size + each
                normal[each] = normal[each] * layer.weight[c].item() + layer.bias[c].item()
            out[place] = torch.where(at, normal, 0.0)
    return out


GROUPS = {
    "a mask of places": ((4, 6, 8), (4, 8)),
    "a mask by channel": ((4, 6, 8), (4, 6, 8)),
    "a mask of rows": ((4, 6, 8), (4, 1)),
    "no places": ((9, 6), (9,)),
    "channels of rows": ((9, 6), (9, 6)),
    "images": ((4, 6, 3, 5), (4, 3, 5)),
    "volumes": ((2, 6, 3, 2, 4), (2, 3, 2, 4)),
}


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "no parameters"])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_channels_are_normalized_by_their_own_kept_values(name, groups, affine):
    shape, mask_shape = GROUPS[name]
    torch.manual_seed(0)
    # In float64: a group of one value is divided by eps ** 0.5, which makes a rounding of float32 large.
    layer = mw.nn.MaskedGroupNorm(groups, 6, affine=affine).double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter)
    x, bits = torch.randn(shape).double() * 2 + 3, torch.rand(mask_shape) < 0.6
    bits[1] = False
    kept = (bits if bits.dim() == x.dim() else bits.unsqueeze(1)).expand(shape)
    torch.testing.assert_close(layer(x, bits), group_norm(layer, x, kept), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mask", PADDED.values(), ids=PADDED)
def test_groups_of_intervals_have_the_values_and_gradients_of_plain_torch_in_float64(mask, dtype):
    torch.manual_seed(0)
    layer = mw.nn.MaskedGroupNorm(3, 9).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    kept = mask.to_bool().expand(6, 37)[:, None].expand(6, 9, 37)
    x = torch.where(kept, torch.randn(6, 9, 37) * 2 + 3, torch.nan).to(dtype)
    grad = torch.where(kept, torch.randn(6, 9, 37), torch.nan).to(dtype)
    got = normalized(copy.deepcopy(layer).to(torch.promote_types(dtype, torch.float32)), x, mask, grad)
    with mw.force("plain"):
        expected = normalized(layer, x.double(), mask, grad.double())
    for a, b in zip(got, expected, strict=True):
        size = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double() / size, b.double() / size, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for each in got[:2]:
        assert not torch.where(kept, 0.0, each).any()


def test_groups_have_second_derivatives():
    layer = mw.nn.MaskedGroupNorm(2, 4).double()
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)

    def call(x, weight, bias):
        parameters = {"weight": weight, "bias": bias}
        return torch.func.functional_call(layer, parameters, (x, mw.Mask.from_lengths([2, 0, 5])))

    assert torch.autograd.gradcheck(call, (x, layer.weight, layer.bias))
    assert torch.autograd.gradgradcheck(call, (x, layer.weight, layer.bias))


def test_under_autocast_groups_give_what_torchs_layer_gives_of_kept_values():
    layer = mw.nn.MaskedGroupNorm(2, 4)
    x, bits = torch.randn(3, 4, 8, dtype=torch.bfloat16), torch.ones(3, 8, dtype=torch.bool)
    bits[:, 5:] = False
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, bits)
    expected = nn.functional.group_norm(x[..., :5].float(), 2, layer.weight, layer.bias)
    # One rounding to bfloat16.
    torch.testing.assert_close(out[..., :5].float(), expected, rtol=2**-8, atol=2**-8)
    assert not out[..., 5:].any()


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_slice_that_keeps_one_element_is_exactly_zero(dtype):
    x = (torch.randn(6, 3, 40) / 2 + 100).to(dtype)
    layer = mw.nn.MaskedInstanceNorm1d(3).to(dtype)
    lengths = mw.Mask.from_lengths(torch.tensor([40, 1, 1, 1, 17, 1]), 40)
    for mask in (lengths, lengths[...].to_bool()):
        leaf = x.clone().requires_grad_()
        weights = torch.linspace(0.5, 2.0, x.numel()).reshape(x.shape)
        (gradient,) = torch.autograd.grad((layer(leaf, mask) * weights).sum(), leaf)
        # A large mean must not cancel against its own product with a slope, nor be rounded to halves in between.
        assert torch.equal(gradient[[1, 2, 3, 5]], torch.zeros(4, 3, 40, dtype=dtype))


# -- plans and reports -------------------------------------------------------------------------------------------------
PLANNED = {
    "batch": lambda: mw.nn.MaskedBatchNorm1d(8, empty=2.0),
    "instance": lambda: mw.nn.MaskedInstanceNorm1d(8, track_running_stats=True),
    "group": lambda: mw.nn.MaskedGroupNorm(2, 8),
}


def test_explain_lists_what_norms_read_and_compute():
    x, mask = torch.randn(4, 8, 256), mw.Mask.from_lengths([64] * 4, 256)
    layer = mw.nn.MaskedBatchNorm1d(8)
    with torch.no_grad(), mw.explain() as log:
        layer(x, mask)
        layer.eval()(x, mask)
        layer(x, mask.to_bool())
    quarter, everything = (2048, 8192, 6144), (8192, 32768, 0)
    assert [(call.op, call.route, (call.computed, call.read_bytes, call.skipped)) for call in log] == [
        ("moments", "bare", quarter),
        ("affine_norm", "bare", quarter),
        ("affine_norm", "bare", quarter),
        ("affine_norm", "bare", everything),
    ]


@pytest.mark.parametrize("name", PLANNED)
def test_a_norm_is_planned_without_being_run(name):
    layer, x, mask = PLANNED[name](), torch.randn(4, 8, 32), mw.Mask.from_lengths([5, 32, 0, 1])
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    plan = mw.plan(layer, x, mask)
    # The parameters of a batch norm require grad; a group's are those of its channels, applied after it.
    assert (plan.op, plan.route) == ("affine_norm", "fused" if name == "batch" else "bare")
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize(("route", "expected"), [("plain", "plain"), ("kernel", "fused")])
def test_the_route_of_a_norm_can_be_forced(route, expected):
    layer, x, mask = mw.nn.MaskedBatchNorm1d(8), torch.randn(4, 8, 32), mw.Mask.from_lengths([5, 32, 0, 1])
    with mw.force(route), mw.explain() as log:
        out = layer(x, mask)
    assert [(call.op, call.route) for call in log] == [
        ("moments", "plain" if route == "plain" else "bare"),
        ("affine_norm", expected),
    ]
    kept = mask.to_bool()[:, None].expand(4, 8, 32)
    torch.testing.assert_close(out.double(), batch_norm(x.double(), kept, layer.eps)[0], **CLOSE)


# -- slices that are read twice ----------------------------------------------------------------------------------------
@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e17, 1e-17])
@pytest.mark.parametrize("length", [70, 300, 140_000])
def test_moments_far_from_zero_and_beyond_the_squares_of_float32_are_those_of_float64(length, scale, dtype):
    # Sums of squares leave the range of float32, variances do not. 3 x 140,000 are more than is read twice.
    x = ((torch.randn(3, 2, length, dtype=torch.float64) + 1000) * scale).to(dtype)
    lengths = torch.tensor([length, length // 3, 1])
    masks = (
        mw.Mask.from_lengths(lengths, length),
        torch.rand(3, length) < 0.5,
        (torch.arange(length) % 130 > 66)[None],
    )
    for mask in masks:
        bits = (mask.to_bool() if isinstance(mask, mw.Mask) else mask).expand(3, length)
        layer = mw.nn.MaskedBatchNorm1d(2, momentum=1.0, affine=False, eps=0.0, dtype=dtype)
        layer(torch.where(bits[:, None], x, torch.nan), mask)
        kept = x.double().movedim(1, -1)[bits]
        torch.testing.assert_close(layer.running_mean.double(), kept.mean(0), rtol=1e-6, atol=0.0)
        # The values themselves are rounded: by 6e-5 of a deviation of 1 at 1000.
        expected = kept.var(0).to(dtype).double()
        torch.testing.assert_close(layer.running_var.double(), expected, rtol=2e-5, atol=0.0)


@pytest.mark.kernel
def test_a_result_in_zero_pages_has_zeros_where_it_is_dropped_and_values_where_it_is_kept():
    # More than malloc keeps: 40 MB. Tests fill fresh memory with NaN.
    mask = mw.Mask.from_lengths(torch.arange(80) % 7 * 20, 256)
    kept, x = mask.to_bool()[:, None].expand(80, 512, 256), torch.randn(80, 512, 256)
    layer = mw.nn.MaskedBatchNorm1d(512).eval()
    out = layer(x, mask)
    torch.testing.assert_close(out, torch.where(kept, x * (1 + layer.eps) ** -0.5, 0.0))
    assert not out[~kept].any()
    positions = mw.Mask.from_lengths(torch.arange(80) % 7 * 20, 512)
    for rows in (positions, mw.Mask(positions.to_bool())):
        unpacked = mw.pack(x, rows).unpack()
        assert torch.equal(unpacked, torch.where(positions.to_bool()[..., None], x, 0.0))
