"""The laws, for every layer: nothing leaks, torch's numbers where all is kept, graphs, copies, half precision."""

import copy
import pickle

import pytest
import torch

import maskwise as mw
from tests.nn.layers import LAYERS, NORMS, state, step

every_layer = pytest.mark.parametrize("layer", LAYERS, ids=str)
every_norm = pytest.mark.parametrize("layer", NORMS, ids=str)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def assert_same_bits(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@every_layer
@both_modes
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_poison_under_the_mask_changes_no_bit_of_output_gradients_or_running_statistics(layer, training, poison):
    x, bits = layer.inputs()
    found = []
    for value in (0.0, poison):
        under = torch.where(layer.to_input(bits), x, value)
        found.append(step(layer.make().train(training), under, bits))
    assert_same_bits(*found)


@every_norm
@both_modes
def test_poison_that_comes_back_from_above_reaches_no_gradient_either(layer, training):
    x, bits = layer.inputs()
    found = []
    for value in (0.0, float("nan")):
        module, leaf = layer.make().train(training), x.clone().requires_grad_()
        above = torch.where(layer.to_input(bits), torch.linspace(0.5, 2.0, x.numel()).reshape(x.shape), value)
        found.append(torch.autograd.grad(module(leaf, bits), [leaf, *module.parameters()], above))
    assert_same_bits(*found)


@every_layer
@both_modes
def test_dropped_positions_are_zero_and_have_no_gradient(layer, training):
    x, bits = layer.inputs()
    out, gradient, *_ = step(layer.make().train(training), torch.where(layer.to_input(bits), x, torch.nan), bits)
    dropped = ~layer.to_input(bits).expand(x.shape)
    assert torch.equal(gradient[dropped], torch.zeros(int(dropped.sum())))
    if layer.same_layout:
        assert torch.equal(out[dropped], torch.zeros(int(dropped.sum())))
        assert out[~dropped].isfinite().all()


@every_norm
@both_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_full_mask_and_no_mask_give_the_numbers_of_torch_exactly(layer, training, dtype):
    x, bits = layer.inputs(dtype)
    theirs = layer.torchs().to(dtype).train(training)
    theirs.load_state_dict(layer.make().to(dtype).state_dict())
    expected = None
    for mask in (torch.ones_like(bits), mw.Mask.full(bits.shape), mw.Mask(torch.ones_like(bits)), None):
        ours = layer.make().to(dtype).train(training)
        found = step(ours, x, mask)
        if expected is None:
            leaf = x.clone().requires_grad_()
            out = theirs(leaf)
            weights = torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape).to(dtype)
            gradients = torch.autograd.grad((out * weights).sum(), [leaf, *theirs.parameters()])
            expected = [out.detach(), *gradients, *(buffer.clone() for buffer in theirs.buffers())]
        assert_same_bits(found, expected)


@every_norm
def test_state_dicts_and_copies_are_those_of_torch_both_ways(layer):
    ours, theirs = layer.make(), layer.torchs()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    again = layer.ours()
    again.load_state_dict(theirs.state_dict())
    x, bits = layer.inputs()
    expected = step(layer.make(), x, bits)
    for other in (again, copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert state(other).keys() == state(ours).keys()
        assert_same_bits(step(other, x, bits), expected)
    assert isinstance(ours, type(theirs))


@every_layer
@both_modes
def test_it_compiles_into_one_graph_with_the_eager_results(layer, training):
    torch._dynamo.reset()
    x, bits = layer.inputs()
    # Each kind of mask once: compiling is most of what these tests cost.
    mask = mw.Mask(bits) if training else bits
    expected = step(layer.make().train(training), x, mask)
    module = layer.make().train(training)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = x.clone().requires_grad_()
    out = compiled(x, mask)
    weights = torch.linspace(0.5, 2.0, out.numel()).reshape(out.shape)
    wanted = [x, *module.parameters()]
    gradients = torch.autograd.grad((out * weights).sum(), wanted)
    # The compiled graph may fuse a multiply with an add.
    for a, b in zip([out.detach(), *gradients, *module.buffers()], expected, strict=True):
        torch.testing.assert_close(a, b)


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_float32_rounded_once(layer, dtype):
    x, bits = layer.inputs(dtype)
    if layer.label.startswith("AttentionPool"):
        # Scores and averages are matrix products in half precision, so they round on the way as torch's do.
        rtol, atol = 4 * torch.finfo(dtype).eps, 8 * torch.finfo(dtype).eps
    else:
        rtol, atol = torch.finfo(dtype).eps, 1e-3 * torch.finfo(dtype).eps
    low = layer.make().to(dtype)
    high = copy.deepcopy(low).float()
    out = low(x, bits)
    assert out.dtype is dtype
    torch.testing.assert_close(out.float(), high(x.float(), bits), rtol=rtol, atol=atol)


@every_layer
def test_gradients_are_those_of_finite_differences(layer):
    x, bits = layer.inputs(torch.float64)
    module = layer.make().double()
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())

    def call(x, *values):
        fresh = {name: buffer.clone() for name, buffer in buffers.items()}
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(module, {**named, **fresh}, (x, bits))

    leaves = [x.requires_grad_(), *(p.detach().clone().requires_grad_() for p in parameters.values())]
    assert torch.autograd.gradcheck(call, leaves)


@every_layer
def test_vmap_over_whole_batches_equals_a_loop(layer):
    x, bits = layer.inputs()
    module = layer.make().eval()
    xs, masks = torch.stack([x, x.flip(0)]), torch.stack([bits, bits.flip(0)])
    mapped = torch.func.vmap(lambda x, m: module(x, m))(xs, masks)
    looped = torch.stack([module(x, m) for x, m in zip(xs, masks, strict=True)])
    # The transform runs the plain operations, which add in another order than the kernels.
    torch.testing.assert_close(mapped, looped)
