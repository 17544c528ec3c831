"""Batch norm across ranks: exactly one process on the gathered batch, gradients included."""

import copy
import pickle

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

import maskwise as mw
from maskwise.errors import ArgumentError, DtypeError
from tests.ranks import ranks  # noqa: F401, a fixture

SYNCED = {1: mw.nn.SyncMaskedBatchNorm1d, 2: mw.nn.SyncMaskedBatchNorm2d, 3: mw.nn.SyncMaskedBatchNorm3d}
ALONE = {1: mw.nn.MaskedBatchNorm1d, 2: mw.nn.MaskedBatchNorm2d, 3: mw.nn.MaskedBatchNorm3d}
# Sums of a few hundred float64 numbers of about 1, in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

# What each of the three ranks keeps: lengths of its rows. Places are padded to another size on each.
SPLITS = {
    "ragged": [[3, 5], [1, 2, 4], [7]],
    "a rank keeps nothing": [[3, 5], [0, 0], [7, 1, 1]],
    "a rank has no rows": [[3, 5], [], [7]],
    "one value in all": [[0], [1], []],
    "nothing at all": [[0, 0], [0], []],
}


def batches(split, dims=1, dtype=torch.float64):
    """One (x, mask) for each rank: x (N, 4, L, 1...), of which NaN is dropped."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for rank, lengths in enumerate(split):
        longest = max([*lengths, 1]) + rank
        shape = (len(lengths), 4, longest, *[1] * (dims - 1))
        x = torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).add(rank + 1).to(dtype)
        mask = torch.arange(longest) < torch.tensor(lengths, dtype=torch.int64).reshape(-1, 1)
        mask = mask.reshape(mask.shape + (1,) * (dims - 1))
        found.append((torch.where(mask[:, None], x, torch.nan), mask))
    return found


def gathered(found):
    """The batch of all ranks, padded to the longest, and where each rank's rows are in it."""
    longest = max(x.shape[2] for x, _ in found)

    def padded(t, dim, value):
        sizes = list(t.shape)
        sizes[dim] = longest - sizes[dim]
        return torch.cat([t, t.new_full(sizes, value)], dim)

    x = torch.cat([padded(x, 2, torch.nan) for x, _ in found])
    mask = torch.cat([padded(mask, 1, False) for _, mask in found])
    return x, mask


def trained(layer, x, mask, start=0):
    """One step: output, gradients of input, weight and bias, buffers. The loss weighs rows by their place of all."""
    x = x.detach().clone().requires_grad_()
    out = layer(x, mask)
    rows = torch.arange(start, start + x.shape[0]).reshape(-1, *[1] * (x.dim() - 1))
    places = torch.arange(x.shape[2]).reshape(1, 1, -1, *[1] * (x.dim() - 3))
    ((rows + 1).cos() * (2 * places + 1).sin() * out * out.detach().add(1)).sum().backward()
    own = [] if layer.weight is None else [layer.weight.grad, layer.bias.grad]
    return out.detach(), x.grad, own, list(layer.buffers())


def made(kind, dtype=torch.float64, **options):
    layer = kind(4, **options)
    if layer.weight is not None:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.uniform_(layer.bias)
    return layer.to(dtype)


def one_rank(split, dims, options, dtype=torch.float64, lengths=False):
    rank = distributed.get_rank()
    found = batches(split, dims, dtype)
    x, mask = found[rank]
    if lengths:
        mask = mw.Mask.from_lengths(mask.reshape(mask.shape[:2]).sum(1), max_len=mask.shape[1])
    return trained(made(SYNCED[dims], dtype, **options), x, mask, sum(len(rows) for rows in split[:rank]))


def compare(got, split, dims, options, close):
    found = batches(split, dims)
    torch.manual_seed(0)
    out, grad, own, buffers = trained(made(ALONE[dims], **options), *gathered(found))
    start = 0
    for (out_here, grad_here, _, buffers_here), (x, _) in zip(got, found, strict=True):
        rows = slice(start, start + x.shape[0])
        torch.testing.assert_close(out_here.double(), out[rows, :, : x.shape[2]], **close)
        torch.testing.assert_close(grad_here.double(), grad[rows, :, : x.shape[2]], **close)
        for here, there in zip(buffers_here, buffers, strict=True):
            torch.testing.assert_close(here, there.to(here.dtype), **close)
        start += x.shape[0]
    for parts, one in zip(zip(*(own_here for _, _, own_here, _ in got), strict=True), own, strict=True):
        torch.testing.assert_close(sum(parts).double(), one, **close)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_output_gradients_and_running_statistics_are_those_of_one_process(ranks, split, dims):  # noqa: F811
    compare(ranks.run(one_rank, SPLITS[split], dims, {}), SPLITS[split], dims, {}, EXACT)


OPTIONS = [
    {"momentum": None, "affine": False},
    {"track_running_stats": False, "eps": 1e-3},
    {"empty": 5.0, "momentum": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("split", ["a rank keeps nothing", "nothing at all"])
def test_every_argument_means_what_it_does_in_one_process(ranks, split, options):  # noqa: F811
    compare(ranks.run(one_rank, SPLITS[split], 1, options), SPLITS[split], 1, options, EXACT)


def test_masks_of_lengths_give_the_same(ranks):  # noqa: F811
    split = SPLITS["ragged"]
    compare(ranks.run(one_rank, split, 1, {}, torch.float64, True), split, 1, {}, EXACT)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=str)
def test_lower_precision_is_rounded_at_the_end(ranks, dtype, close):  # noqa: F811
    # Inputs, outputs and parameters have 24 or 8 bits; statistics have more.
    split = SPLITS["a rank keeps nothing"]
    compare(ranks.run(one_rank, split, 1, {}, dtype), split, 1, {}, {"rtol": close, "atol": close})


def second_gradient(kind, x, mask, start):
    layer, x = made(kind), x.detach().clone().requires_grad_()
    rows = torch.arange(start, start + x.shape[0]).reshape(-1, 1, 1)
    loss = ((rows + 1).cos() * layer(x, mask).pow(3)).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


def second_on_a_rank(split):
    rank = distributed.get_rank()
    return second_gradient(SYNCED[1], *batches(split)[rank], sum(len(rows) for rows in split[:rank]))


def test_a_double_backward_is_that_of_one_process(ranks):  # noqa: F811
    split = SPLITS["a rank keeps nothing"]
    got = ranks.run(second_on_a_rank, split)
    torch.manual_seed(0)
    expected = second_gradient(ALONE[1], *gathered(batches(split)), 0)
    start = 0
    for here in got:
        torch.testing.assert_close(here, expected[start : start + here.shape[0], :, : here.shape[2]], **EXACT)
        start += here.shape[0]


def compiled(split, backend):
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        layer = made(SYNCED[1])
        x, mask = batches(split)[distributed.get_rank()]
        run = torch.compile(layer, backend=backend, fullgraph=True) if compiles else layer
        x = x.clone().requires_grad_()
        out = run(x, mask)
        out.pow(3).sum().backward()
        found.append([out.detach(), x.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()])
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_holds_a_layer_and_its_collectives(ranks, backend):  # noqa: F811
    for eager, graph in ranks.run(compiled, SPLITS["a rank keeps nothing"], backend):
        for one, other in zip(eager, graph, strict=True):
            torch.testing.assert_close(one, other, **EXACT)


def without_a_mask_on_one_rank():
    rank = distributed.get_rank()
    x = torch.arange(6.0).reshape(2, 1, 3) + rank
    mask = None if rank == 1 else torch.ones(2, 3, dtype=torch.bool)
    mesh = DeviceMesh("cpu", list(range(3)))
    return mw.nn.SyncMaskedBatchNorm1d(1, group=mesh)(x, mask).detach()


def test_a_rank_without_a_mask_keeps_everything(ranks):  # noqa: F811
    x = torch.cat([torch.arange(6.0).reshape(2, 1, 3) + rank for rank in range(3)])
    torch.testing.assert_close(torch.cat(ranks.run(without_a_mask_on_one_rank)), nn.BatchNorm1d(1)(x).detach())


def in_two_groups():
    rank = distributed.get_rank()
    groups = [distributed.new_group([0, 1]), distributed.new_group([2])]
    mine = groups[rank // 2]
    model = mw.nn.convert_sync_masked(nn.Sequential(mw.nn.MaskedBatchNorm1d(1)), mine)
    out = model(torch.tensor([[float(rank)], [4.0]]))
    copied = copy.deepcopy(model)
    refused = None
    if rank == 2:
        try:
            mw.nn.convert_sync_masked(model, groups[0])
        except ArgumentError as error:
            refused = str(error)
    return out.detach(), copied[0].group is mine, refused


def test_statistics_are_those_of_a_group_and_others_are_refused(ranks):  # noqa: F811
    (first, *_), (second, *_), (third, *_) = found = ranks.run(in_two_groups)
    expected = nn.BatchNorm1d(1)(torch.tensor([[0.0], [4.0], [1.0], [4.0]])).detach()
    torch.testing.assert_close(torch.cat([first, second]), expected)
    torch.testing.assert_close(third, nn.BatchNorm1d(1)(torch.tensor([[2.0], [4.0]])).detach())
    assert all(is_same for _, is_same, _ in found)
    assert "be a group that this process is in, got one of other ranks. Hint: group=None" in found[2][2]


def data_parallel(split, wrap):
    rank = distributed.get_rank()
    model = nn.Sequential(nn.Conv1d(4, 4, 1), mw.nn.MaskedBatchNorm1d(4)).double()
    mw.nn.convert_sync_masked(model)
    if wrap == "ddp":
        parallel = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        parallel = fully_shard(model)
    x, mask = batches(split)[rank]
    x = torch.where(mask[:, None], x, 0.0)
    # DDP calls the model as a whole; Sequential takes no mask, so that its parts are called by a hook on the last.
    handle = model[1].register_forward_pre_hook(lambda layer, args: (*args, mask))
    loss = parallel(x).pow(3).sum() * distributed.get_world_size()
    loss.backward()
    handle.remove()
    grads = [p.grad.full_tensor() if wrap == "fsdp" else p.grad for p in model.parameters()]
    return [grad.clone() for grad in grads], [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("split", ["ragged", "a rank keeps nothing"])
def test_a_model_in_ddp_and_fsdp_has_the_gradients_of_one_process(ranks, split, wrap):  # noqa: F811
    got = ranks.run(data_parallel, SPLITS[split], wrap)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), mw.nn.MaskedBatchNorm1d(4)).double()
    x, mask = gathered(batches(SPLITS[split]))
    model[1](model[0](torch.where(mask[:, None], x, 0.0)), mask).pow(3).sum().backward()
    for grads, buffers in got:
        for here, parameter in zip(grads, model.parameters(), strict=True):
            # A bias before a norm has a gradient of 0, made of numbers of up to 100.
            torch.testing.assert_close(here, parameter.grad, rtol=1e-12, atol=1e-11)
        for here, buffer in zip(buffers, model.buffers(), strict=True):
            torch.testing.assert_close(here, buffer, **EXACT)


# -- conversion, in one process ----------------------------------------------------------------------------------------
def net():
    return nn.Sequential(
        nn.Conv1d(4, 4, 1), mw.nn.MaskedBatchNorm1d(4, empty=2.0), nn.ModuleDict({"image": mw.nn.MaskedBatchNorm2d(3)})
    )


@pytest.mark.parametrize("convert", [mw.nn.convert_sync_masked, nn.SyncBatchNorm.convert_sync_batchnorm])
def test_conversion_keeps_masks_arguments_parameters_and_buffers(convert):
    model = net().eval()
    tensors = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    state = copy.deepcopy(model.state_dict())
    model = convert(model)
    assert type(model[1]) is mw.nn.SyncMaskedBatchNorm1d
    assert type(model[2]["image"]) is mw.nn.SyncMaskedBatchNorm2d
    assert (model[1].empty, model[1].training) == (2.0, False)
    assert {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())} == tensors
    assert list(model.state_dict()) == list(state)
    assert type(convert(model)[1]) is mw.nn.SyncMaskedBatchNorm1d
    x, bits = torch.randn(2, 4, 3), torch.tensor([[True, False, True], [False, False, True]])
    assert torch.equal(model[1](x, bits), copy.deepcopy(model[1])(x, bits))
    assert torch.equal(model[1](x, bits), pickle.loads(pickle.dumps(model[1]))(x, bits))


def test_torchs_converter_still_converts_torchs_layers_and_what_others_put_there_stays():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2), mw.nn.MaskedBatchNorm1d(2)))
    assert [type(part) for part in model] == [nn.SyncBatchNorm, mw.nn.SyncMaskedBatchNorm1d]
    theirs = nn.SyncBatchNorm(2)
    model[1] = theirs
    assert model[1] is theirs


def test_a_layer_that_occurs_twice_stays_one():
    norm = mw.nn.MaskedBatchNorm1d(2)
    model = mw.nn.convert_sync_masked(nn.Sequential(norm, nn.Sequential(norm)))
    assert model[0] is model[1][0]
    assert type(mw.nn.convert_sync_masked(norm)) is mw.nn.SyncMaskedBatchNorm1d


def test_a_masked_model_threads_its_mask_through_converted_norms():
    torch.manual_seed(0)
    model = mw.nn.masked(nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.ReLU(), nn.AdaptiveAvgPool1d(1)))
    x, mask = torch.randn(2, 2, 5), mw.Mask.from_lengths([2, 5])
    expected = copy.deepcopy(model)(x, mask)
    assert torch.equal(nn.SyncBatchNorm.convert_sync_batchnorm(model)(x, mask), expected)
    assert type(model[1]) is mw.nn.SyncMaskedBatchNorm1d


class Scaled(mw.nn.MaskedBatchNorm1d):
    def forward(self, input, mask=None):
        return 2 * super().forward(input, mask)


def test_what_cannot_be_converted_is_refused_and_nothing_changes():
    model = nn.Sequential(mw.nn.MaskedBatchNorm1d(2), Scaled(2))
    for convert in (mw.nn.convert_sync_masked, nn.SyncBatchNorm.convert_sync_batchnorm):
        with pytest.raises(ArgumentError, match=r"`model` must have batch norms of MaskedBatchNorm1d, .* got a Scaled"):
            convert(copy.deepcopy(model))
    assert type(model[0]) is mw.nn.MaskedBatchNorm1d
    with pytest.raises(DtypeError, match=r"`model` must be a torch\.nn\.Module, got int"):
        mw.nn.convert_sync_masked(3)
    with pytest.raises(DtypeError, match=r"`group` must be a process group or a device mesh, got str"):
        mw.nn.SyncMaskedBatchNorm1d(2, group="world")
