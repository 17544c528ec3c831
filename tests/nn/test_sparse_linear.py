"""mw.nn.SparseLinear: values and gradients, every optimizer, copies, files, graphs, and changes of topology."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import maskwise as mw
from benchmarks.ranks import Ranks
from maskwise.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StaleMaskError
from maskwise.plan.dispatch import force

BLOCKS = [(1, 1), (4, 1), (16, 16)]
every_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


def made(block=(1, 1), inputs=37, outputs=22, density=0.4, **kwargs):
    torch.manual_seed(3)
    return mw.nn.SparseLinear(inputs, outputs, density=density, block=block, **kwargs)


@every_block
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("route", ["plain", "kernel"])
def test_output_and_gradients_are_those_of_the_dense_layer(block, bias, route):
    layer = made(block, bias=bias)
    dense = layer.to_linear().double()
    x = torch.randn(3, 5, 37)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    with force(route):
        out = layer(leaf)
    truth = dense(exact)
    above = torch.randn(3, 5, 22)
    out.backward(above)
    truth.backward(above.double())
    # Sums of up to 37 products.
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    expected = layer.layout.gather(dense.weight.grad)
    torch.testing.assert_close(layer.values.grad.double(), expected, rtol=1e-5, atol=1e-5)
    if bias:
        torch.testing.assert_close(layer.bias.grad.double(), dense.bias.grad, rtol=1e-5, atol=1e-5)


def test_from_linear_takes_what_is_not_zero_or_what_a_mask_keeps_and_goes_back():
    linear = nn.Linear(8, 6)
    with torch.no_grad():
        linear.weight[linear.weight.abs() < 0.2] = 0.0
    layer = mw.nn.SparseLinear.from_linear(linear)
    assert torch.equal(layer.to_dense(), linear.weight)
    assert torch.equal(layer.to_linear().weight, linear.weight)
    assert torch.equal(layer.to_linear().bias, linear.bias)
    assert layer.mask.equal(linear.weight != 0)
    assert layer.density == pytest.approx((linear.weight != 0).float().mean().item())
    mask = mw.Mask(torch.rand(6, 8) < 0.5)
    kept = mw.nn.SparseLinear.from_linear(linear, mask)
    assert torch.equal(kept.to_dense(), torch.where(mask.to_bool(), linear.weight, 0.0))


def test_density_is_met_exactly_and_the_values_are_a_parameter_of_one_dim():
    layer = mw.nn.SparseLinear(40, 30, density=0.1)
    assert layer.values.shape == (120,)
    assert layer.density == pytest.approx(0.1)
    assert [name for name, _ in layer.named_parameters()] == ["values", "bias"]
    assert list(layer.state_dict()) == ["values", "bias", "row_starts", "columns"]
    assert repr(layer) == "SparseLinear(in_features=40, out_features=30, bias=True, density=0.1)"


OPTIMIZERS = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
)
# Muon is for matrices, and SparseAdam for sparse gradients, by what they are; ours are dense and of one dim.
REFUSED = {"Muon", "SparseAdam"}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in REFUSED])
def test_every_optimizer_of_torch_trains_it(name):
    torch.manual_seed(0)
    layer = made(inputs=10, outputs=6, density=0.5)
    x = torch.randn(64, 10)
    target = made(inputs=10, outputs=6, density=0.5, bias=False)(x).detach() + 0.3
    # A rate at which each of them moves: those that scale by the gradient's size take small steps by themselves.
    rates = {"SGD": 0.1, "ASGD": 0.1, "Adagrad": 0.1, "Adadelta": 1.0, "LBFGS": 0.5, "Adafactor": 0.05}
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=rates.get(name, 0.02))
    before = layer.columns.clone()

    def loss():
        optimizer.zero_grad()
        value = nn.functional.mse_loss(layer(x), target)
        value.backward()
        return value

    with force("kernel"):
        first = loss().item()
        for _ in range(40):
            optimizer.step(loss)
        assert loss().item() < 0.7 * first
    assert torch.equal(layer.columns, before)


def test_sparse_adam_refuses_it_by_its_own_nature():
    layer = made()
    layer(torch.randn(4, 37)).sum().backward()
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        torch.optim.SparseAdam(layer.parameters()).step()


@every_block
def test_copies_pickles_and_files_give_the_same_bits(block):
    layer = made(block)
    x = torch.randn(7, 37)
    expected = layer(x)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    loaded = made(block)
    loaded.load_state_dict(torch.load(stream, weights_only=True))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x), expected)
        assert other.mask.equal(layer.mask)


@every_block
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_another_topology_is_loaded_with_its_topology(block, assign):
    layer, other = made(block), made(block, density=0.9)
    assert layer.values.numel() != other.values.numel()
    values = layer.values
    layer.load_state_dict(other.state_dict(), assign=assign)
    x = torch.randn(7, 37)
    assert torch.equal(layer(x), other(x))
    assert torch.equal(layer.to_dense(), other.to_dense())
    assert layer.mask.equal(other.mask)
    assert assign or layer.values is values
    layer(x).sum().backward()
    assert layer.values.grad.shape == other.values.shape


def test_a_state_dict_whose_indices_point_nowhere_is_refused():
    layer = made()
    for name, at, value in [("columns", 0, 37), ("columns", 3, -1), ("row_starts", 4, 10_000), ("row_starts", 0, 1)]:
        state = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
        state[name][at] = value
        with pytest.raises(RuntimeError, match=r"columns must|row_starts must"):
            made().load_state_dict(state)
    with pytest.raises(RuntimeError, match="row_starts must have 23 entries"):
        made().load_state_dict(made(outputs=21).state_dict())


def test_it_compiles_into_one_graph_with_the_eager_results():
    torch._dynamo.reset()
    layer = made(density=0.2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 37, requires_grad=True)
    above = torch.randn(9, 22)
    found = torch.autograd.grad(compiled(x), [x, *layer.parameters()], above)
    with force("kernel"):
        expected = torch.autograd.grad(layer(x), [x, *layer.parameters()], above)
    for mine, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize("route", ["plain", "kernel"])
def test_autocast_and_bfloat16_compute_in_the_lower_precision(route):
    layer = made()
    x = torch.randn(9, 37)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16), force(route):
        out = layer(x)
        out.float().sum().backward()
    assert out.dtype is torch.bfloat16
    assert layer.values.grad.dtype is torch.float32
    with force(route):
        low = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert low.dtype is torch.bfloat16
    for rounded in (out, low):
        torch.testing.assert_close(rounded.float(), exact, rtol=0.03, atol=0.05)


def test_the_dense_weight_is_made_again_when_the_values_change():
    layer = made(density=0.9).eval()
    x = torch.randn(4, 37)
    with torch.no_grad(), force("plain"):
        layer(x)
        layer.values.mul_(2.0)
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.to_dense(), layer.bias))
        layer.set_mask(torch.rand(22, 37) < 0.8)
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.to_dense(), layer.bias))


def test_explain_shows_the_route():
    layer = mw.nn.SparseLinear(512, 512, density=0.05)
    full = mw.nn.SparseLinear(512, 512, density=1.0)
    with mw.explain() as log:
        layer(torch.randn(128, 512)), full(torch.randn(128, 512))
    assert [(call.op, call.route) for call in log] == [("SparseLinear", "sparse"), ("SparseLinear", "plain")]
    assert log.calls[0].skipped == 512 * 512 - layer.values.numel()


# -- other weights live -----------------------------------------------------------------------------------------------
def trained(block=(1, 1), optimizer=torch.optim.Adam):
    layer = made(block, inputs=64, outputs=48)
    optimizer = optimizer(layer.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    return layer, optimizer


@every_block
def test_drop_takes_the_smallest_and_carries_values_and_state(block):
    layer, optimizer = trained(block)
    dense = layer.to_dense().detach()
    average = layer.layout.dense(optimizer.state[layer.values]["exp_avg"])
    gradient = layer.layout.dense(layer.values.grad)
    size = block[0] * block[1]
    before = layer.values.numel() // size
    dropped = layer.drop(0.25, optimizer)
    assert dropped == round(0.25 * before)
    assert layer.values.numel() == (before - dropped) * size
    mask = layer.mask.to_bool()
    assert torch.equal(layer.to_dense(), torch.where(mask, dense, 0.0))
    assert torch.equal(layer.layout.dense(optimizer.state[layer.values]["exp_avg"]), torch.where(mask, average, 0.0))
    assert torch.equal(layer.layout.dense(layer.values.grad), torch.where(mask, gradient, 0.0))
    if block == (1, 1):
        assert dense[mask].abs().min() >= dense[~mask & (dense != 0)].abs().max()
    layer(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()


@every_block
def test_regrow_starts_at_zero_where_the_scores_are_largest(block):
    layer, optimizer = trained(block)
    dense, before = layer.to_dense().detach(), layer.mask.to_bool()
    average = layer.layout.dense(optimizer.state[layer.values]["exp_avg"])
    scores = torch.rand(48, 64)
    assert layer.regrow(3, optimizer, scores) == 3
    after = layer.mask.to_bool()
    assert int((after & ~before).sum()) == 3 * block[0] * block[1]
    assert not (before & ~after).any()
    assert torch.equal(layer.to_dense(), dense)
    assert torch.equal(layer.layout.dense(optimizer.state[layer.values]["exp_avg"]), average)
    if block == (1, 1):
        assert scores[after & ~before].min() >= scores[~after].max()
    optimizer.zero_grad()
    layer(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    assert (layer.to_dense()[after & ~before] != 0).any()


def test_regrow_stops_where_there_is_no_room_left():
    layer = made(density=0.9)
    dead = 22 * 37 - layer.values.numel()
    assert layer.regrow(10_000) == dead
    assert layer.density == 1.0
    assert layer.drop(1.0) == 22 * 37
    assert torch.equal(layer(torch.randn(3, 37)), layer.bias.expand(3, 22))
    assert layer.regrow(5) == 5


def test_lbfgs_starts_afresh_after_a_change():
    layer = made()
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=3)
    x = torch.randn(16, 37)

    def loss():
        optimizer.zero_grad()
        value = layer(x).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    layer.drop(0.3, optimizer)
    before = loss().item()
    optimizer.step(loss)
    assert loss().item() < before


def test_errors_name_the_argument_and_what_to_write_instead():
    with pytest.raises(ShapeError, match=r"SparseLinear: `mask` must have the weight's shape .* Hint: mask\.T\."):
        mw.nn.SparseLinear(3, 2, mask=torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(DtypeError, match=r"`mask` must be a Mask or a bool tensor, got torch\.float32"):
        mw.nn.SparseLinear(3, 2, mask=torch.ones(2, 3))
    with pytest.raises(ArgumentError, match="`mask` must be given, or density, got neither"):
        mw.nn.SparseLinear(3, 2)
    with pytest.raises(ArgumentError, match=r"`density` must be between 0 and 1, got 1\.5"):
        mw.nn.SparseLinear(3, 2, density=1.5)
    with pytest.raises(ArgumentError, match="`block` must be one of"):
        mw.nn.SparseLinear(3, 2, density=0.5, block=(3, 3))
    layer = made()
    with pytest.raises(ShapeError, match=r"`input` must end in 37 features, got \(4, 22\)"):
        layer(torch.randn(4, 22))
    with pytest.raises(ArgumentError, match="`optimizer` must train this layer's values"):
        layer.drop(0.1, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(ArgumentError, match="`fraction` must be between 0 and 1"):
        layer.drop(-0.1)
    with pytest.raises(ArgumentError, match="`count` must not be negative"):
        layer.regrow(-1)
    with pytest.raises(ShapeError, match="`scores` must have the weight's shape"):
        layer.regrow(1, scores=torch.ones(37, 22))


@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_an_input_of_another_dtype_is_refused_on_every_route(dtype, density):
    layer = mw.nn.SparseLinear(64, 256, density=density)
    with pytest.raises(DtypeError, match=r"`input` must have the layer's dtype torch.float32, got .* Hint: input.to"):
        layer(torch.ones(512, 64, dtype=dtype))


def test_an_input_on_another_device_is_refused():
    with pytest.raises(DeviceError, match=r"`input` must be on the layer's device cpu, got meta"):
        mw.nn.SparseLinear(4, 2, density=0.5)(torch.ones(1, 4, device="meta"))


def test_only_a_linear_has_a_sparse_form():
    with pytest.raises(DtypeError, match=r"`linear` must be a torch.nn.Linear, got Conv2d"):
        mw.nn.SparseLinear.from_linear(nn.Conv2d(1, 1, 1))


def test_a_report_of_something_else_than_a_module_is_refused():
    with pytest.raises(DtypeError, match=r"report: `model` must be a torch.nn.Module, got str"):
        mw.nn.report("model")


# -- complete copies ---------------------------------------------------------------------------------------------------
def pair(used):
    torch.manual_seed(0)
    mine, other = (mw.nn.SparseLinear(32, 24, density=0.3) for _ in range(2))
    if used:
        # Whatever is cached of the indices is cached.
        with torch.no_grad():
            for route in ("plain", "kernel"):
                with force(route):
                    mine(torch.ones(1, 32))
        mine.to_dense()
    return mine, other


def tensors(layer):
    return [*layer.parameters(), *layer.buffers()]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("route", ["plain", "kernel"])
def test_a_complete_copy_in_place_is_the_other_layer(used, data, route):
    mine, other = pair(used)
    with torch.no_grad():
        # Values that were written after the layer was made are copied like any others.
        other.values.normal_()
        for to, source in zip(tensors(mine), tensors(other), strict=True):
            (to.data if data else to).copy_(source)
    x = torch.randn(5, 32)
    with torch.no_grad(), force(route):
        assert torch.equal(mine(x), other(x))
    assert torch.equal(mine.to_dense(), other.to_dense())
    assert mine.mask.equal(other.mask)
    leaf, exact = (x.clone().requires_grad_() for _ in range(2))
    mine(leaf).sum().backward(), other(exact).sum().backward()
    assert torch.equal(leaf.grad, exact.grad)
    assert torch.equal(mine.values.grad, other.values.grad)


@pytest.mark.parametrize("part", ["indices", "mixed values", "mixed by .data"])
def test_indices_without_their_values_are_refused_however_often_the_buffers_are_read(part):
    mine, other = pair(used=True)
    with torch.no_grad():
        for to, source in zip(mine.buffers(), other.buffers(), strict=True):
            to.data.copy_(source)
        if part != "indices":
            values = mine.values if part == "mixed values" else mine.values.data
            values.lerp_(other.values, 0.9)
    for _ in range(2):
        list(mine.buffers())
        for use in (lambda: mine(torch.ones(1, 32)), mine.to_dense, mine.state_dict, lambda: mine.mask):
            with pytest.raises(StaleMaskError, match="values of other weights"):
                use()


def test_a_copy_of_everything_but_one_tensor_of_indices_is_refused():
    mine, other = pair(used=False)
    names = [name for name, _ in mine.named_buffers()]
    for left_out in ("row_starts", "columns", "_t_order"):
        target = copy.deepcopy(mine)
        with torch.no_grad():
            for to, source in zip(target.parameters(), other.parameters(), strict=True):
                to.copy_(source)
            for name, to, source in zip(names, target.buffers(), other.buffers(), strict=True):
                if name != left_out:
                    to.copy_(source)
        with pytest.raises(StaleMaskError):
            target(torch.ones(1, 32))


def test_a_state_dict_whose_indices_were_averaged_is_refused():
    mine, other = pair(used=False)
    one, two = mine.state_dict(), other.state_dict()
    with pytest.raises(RuntimeError, match=r"row_starts and columns must be integers, got torch\.float32"):
        pair(used=False)[0].load_state_dict({name: 0.9 * one[name] + 0.1 * two[name] for name in one})


def test_buffers_can_be_read_of_a_layer_without_data_and_in_inference():
    layer = made().to("meta")
    assert all(buffer.is_meta for buffer in layer.buffers())
    other = made(density=0.3)
    layer.to_empty(device="cpu").load_state_dict(other.state_dict())
    x = torch.randn(2, 37)
    assert torch.equal(layer(x), other(x))
    with torch.inference_mode():
        inside = made()
        count = len(list(inside.buffers()))
    assert len(list(inside.buffers())) == count == len(list(other.buffers()))


def _trained():
    """Train on every rank; the output, the last weight, and whether a rank of other indices refuses to run."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(mw.nn.SparseLinear(32, 32, density=0.3), nn.ReLU(), mw.nn.SparseLinear(32, 4, density=0.5))
    with torch.no_grad():
        net(torch.ones(1, 32))
        net[0].values.normal_()
    parallel = nn.parallel.DistributedDataParallel(net, broadcast_buffers=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        parallel(torch.full((2, 32), float(rank + step))).square().sum().backward()
        optimizer.step()
    out = parallel(torch.ones(2, 32)).tolist()
    # Rewired in one process alone: the indices of the other come without their values.
    if rank == 1:
        net[0].set_mask(net[0].mask.to_bool().flip(0))
    try:
        parallel(torch.ones(2, 32))
        refused = False
    except StaleMaskError:
        refused = True
    return out, net[2].to_dense().tolist(), refused


def test_data_parallel_training_starts_from_the_first_process_and_stays_the_same_in_both():
    ranks = Ranks(2)
    try:
        (out, weight, refused), (out_1, weight_1, refused_1) = ranks.run(_trained)
    finally:
        ranks.close()
    assert out == out_1
    assert weight == weight_1
    assert (refused, refused_1) == (False, True)
