"""Training steps on a batch that is split over ranks and micro-batches: what each rank of the tests runs."""

from __future__ import annotations

import contextlib
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import maskwise as mw

ROWS, LENGTH, WORDS, WIDTH = 9, 7, 11, 5
LENGTHS = [7, 3, 0, 1, 6, 2, 7, 4, 5]
IGNORED = -100


# -- the batch and the model -------------------------------------------------------------------------------------------
def batch():
    """Words, labels and mask; some labels are to be ignored."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(ROWS, LENGTH, generator=generator) < 0.2] = IGNORED
    return words, labels, mw.Mask.from_lengths(LENGTHS, max_len=LENGTH).to_bool()


class Head(nn.Linear):
    """Logits, or with a target the loss on kept rows: inside of forward, where FSDP has gathered the parameters."""

    def forward(self, x, *target, **options):
        if not target:
            return super().forward(x)
        with mw.force("pieces"):
            return mw.linear_cross_entropy(x, self.weight, *target, self.bias, **options)


class Net(nn.Sequential):
    """Layers; the last one takes what else there is."""

    def forward(self, x, *target, **options):
        for layer in self[:-1]:
            x = layer(x)
        return self[-1](x, *target, **options)


def model(dtype):
    generator = torch.Generator().manual_seed(2)
    net = Net(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 8), nn.Tanh(), Head(8, WORDS)).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return net


def objective(kind, net, words, labels, mask, window):
    """The loss of a micro-batch in a window, or of the whole batch without one."""
    if kind == "head":
        return net(words, labels, mask, z_loss=0.1, denominator=window)
    logits = net(words)
    if kind == "sequence":
        return mw.loss(F.cross_entropy, logits, labels, mask, "sequence", denominator=window)
    main = mw.loss(F.cross_entropy, logits, labels, mask, denominator=window)
    if kind == "token":
        return main
    # Auxiliary losses: one on the same count, one with a constant.
    kept = mask & (labels != IGNORED)
    z = mw.sum(logits.logsumexp(-1).square(), kept)
    size = mw.sum(logits.square(), kept[..., None])
    if window is None:
        return main + 0.1 * z / kept.sum() + size / 500
    return main + window.scale(0.1 * z) + window.scale(size, kind=500)


@cache
def expected(kind, dtype):
    """Loss, gradients, their norm, and the gradients after clipping, in one process on the whole batch."""
    words, labels, mask = batch()
    net = model(dtype)
    loss = objective(kind, net, words, labels, mask, None)
    loss.backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    return loss.detach(), gradients, norm, [p.grad for p in net.parameters()]


# -- splits ------------------------------------------------------------------------------------------------------------
def split(how, ranks, micro, seed=0):
    """The rows of each micro-batch of each rank."""
    generator = torch.Generator().manual_seed(seed + 100 * ranks + micro)
    cells = [[[] for _ in range(micro)] for _ in range(ranks)]
    for row in range(ROWS):
        if how == "even":
            place = row % (ranks * micro)
        elif how == "ragged":
            place = int(torch.randint(ranks * micro, (), generator=generator))
        elif how == "one rank":
            # All rows on the last rank.
            place = (ranks - 1) * micro + int(torch.randint(micro, (), generator=generator))
        else:
            # Row 2 keeps nothing: all ranks but the last have micro-batches with rows and without anything kept.
            place = (ranks - 1) * micro + row % micro
        cells[place // micro][place % micro].append(row)
    if how == "dropped":
        for rank in cells[:-1]:
            for part in rank:
                part.append(2)
    return cells


# -- one step ----------------------------------------------------------------------------------------------------------
@cache
def group(ranks):
    """The first ranks. Made by all."""
    return dist.new_group(list(range(ranks)))


@cache
def mesh(ranks):
    return DeviceMesh.from_group(group(ranks), "cpu")


@cache
def hybrid():
    """Shards in pairs, and copies of them in the other dim."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))


@cache
def trained(how, ranks, dtype):
    """A model under DDP, FSDP2 or neither, and its bare parameters."""
    net = model(dtype)
    if how.startswith("DDP"):
        return nn.parallel.DistributedDataParallel(net, process_group=group(ranks)), net
    if "FSDP" in how or how == "HSDP":
        across = hybrid() if how == "HSDP" else mesh(ranks)
        for layer in (net[1], net[3], net):
            fully_shard(layer, mesh=across)
        if how == "FSDP summed":
            for layer in (net, net[1], net[3]):
                layer.set_gradient_divide_factor(1.0)
                # gloo has no reduction that scales.
                layer.set_force_sum_reduction_for_comms(True)
    return net, net


#: How a model is trained, and what gradients are divided by.
ENGINES = {
    "plain": "none",
    "DDP": "ranks",
    "DDP no_sync": "ranks",
    "FSDP": "ranks",
    "FSDP no_sync": "ranks",
    "FSDP summed": "none",
    "HSDP": "ranks",
}


def step(engine, ranks, dtype, kind, cells):
    """One step on this rank: the loss as logged, the gradients, their norm, and the gradients after clipping."""
    words, labels, mask = batch()
    net, bare = trained(engine, ranks, dtype)
    net.zero_grad()
    parts = [torch.tensor(rows, dtype=torch.int64) for rows in cells[dist.get_rank()]]
    masks = [(mask & (labels != IGNORED))[rows] for rows in parts]
    with mw.accumulate(masks, group(ranks), ENGINES[engine]) as window:
        for index, rows in enumerate(parts):
            last = index == len(parts) - 1
            if engine == "FSDP no_sync":
                net.set_requires_gradient_sync(last)
            silent = engine == "DDP no_sync" and not last
            with net.no_sync() if silent else contextlib.nullcontext():
                objective(kind, net, words[rows], labels[rows], mask[rows], window).backward()
    if engine == "plain":
        for parameter in bare.parameters():
            dist.all_reduce(parameter.grad, group=group(ranks))
    gradients = [whole(p.grad).clone() for p in bare.parameters()]
    norm = nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
    return window.value(), gradients, whole(norm), [whole(p.grad) for p in bare.parameters()]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_splits(engine, ranks, dtype, cases):
    """How many splits were right on this rank; raise at the first that is not."""
    group(ranks)
    if dist.get_rank() >= ranks:
        return 0
    for kind, how, micro in cases:
        compare(step(engine, ranks, dtype, kind, split(how, ranks, micro)), expected(kind, dtype), (kind, how, micro))
    return len(cases)


def compare(found, wanted, case):
    # float64 to 1e-12, as the law says; in float32 sums of up to 42 tokens come in another order.
    rtol, atol = (0, 1e-12) if wanted[0].dtype is torch.float64 else (2e-5, 1e-6)

    def same(a, b, what):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=rtol, atol=atol, msg=lambda text: f"{what} of {case}: {text}")

    same(found[0], wanted[0], "loss")
    same(found[2], wanted[2], "norm")
    for mine, theirs in zip(found[1] + found[3], wanted[1] + wanted[3], strict=True):
        same(mine, theirs, "gradient")


# -- context parallel --------------------------------------------------------------------------------------------------
def check_columns(ranks):
    """Every rank has a part of each sequence, the last of four of them none; gradients are summed by hand."""
    group(ranks)
    if dist.get_rank() >= ranks:
        return 0
    words, labels, mask = batch()
    cuts = [0, 1, 4, LENGTH, LENGTH] if ranks == 4 else [0, *range(3, 2 + ranks), LENGTH]
    part = slice(cuts[dist.get_rank()], cuts[dist.get_rank() + 1])
    net, kept = model(torch.float64), (mask & (labels != IGNORED))[:, part]
    with mw.accumulate([kept], group(ranks), "none") as window:
        objective("auxiliary", net, words[:, part], labels[:, part], mask[:, part], window).backward()
    gradients = [p.grad for p in net.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient, group=group(ranks))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    wanted = expected("auxiliary", torch.float64)
    compare((window.value(), gradients, norm, []), (*wanted[:3], []), cuts)
    return 1


# -- tensor parallel ---------------------------------------------------------------------------------------------------
def check_tensor_parallel(data_ranks, model_ranks, cases, by_hand):
    """Logits sharded over classes, the batch over the other dim of the mesh; replicas must not be counted."""
    world = data_ranks * model_ranks
    both = _grid(data_ranks, model_ranks)
    if dist.get_rank() >= world:
        return 0
    data, tensor = both["data"], both["tensor"]
    words, labels, mask = batch()
    for kind, how, micro in cases:
        net = model(torch.float64)
        layout = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(net, tensor, {"3": layout})
        parts = [torch.tensor(rows, dtype=torch.int64) for rows in split(how, data_ranks, micro)[data.get_local_rank()]]
        masks = [(mask & (labels != IGNORED))[rows] for rows in parts]
        with loss_parallel(), mw.accumulate(masks, data, "none") as window:
            for rows, kept in zip(parts, masks, strict=True):
                logits = net(words[rows].flatten())
                target, keep = labels[rows].flatten(), kept.flatten()
                if by_hand:
                    ignored = target.where(keep, IGNORED)
                    loss = window.scale(F.cross_entropy(logits, ignored, reduction="sum", ignore_index=IGNORED))
                else:
                    target, keep = (DTensor.from_local(x, tensor, [Replicate()]) for x in (target, keep))
                    loss = mw.loss(F.cross_entropy, logits, target, keep, denominator=window)
                loss.backward()
        gradients = [whole(p.grad).clone() for p in net.parameters()]
        for gradient in gradients:
            dist.all_reduce(gradient, group=data.get_group())
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        wanted = expected(kind, torch.float64)
        compare((window.value(), gradients, norm, []), (*wanted[:3], []), (kind, how, micro))
    return len(cases)


@cache
def _grid(data_ranks, model_ranks):
    # One for the whole world: of four ranks, the last two of a smaller mesh would have none.
    return init_device_mesh("cpu", (data_ranks, model_ranks), mesh_dim_names=("data", "tensor"))
