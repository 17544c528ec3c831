"""What a user may write, with every public name in it: `mypy --strict` and pyright must find nothing wrong with it.

It is also run, so that it shows calls that work. `assert_type` says what a type checker must make of a result.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import assert_type

import maskwise as mw
from maskwise import Mask, MaskwiseError, Packed, data, errors
from maskwise.nn import gates, schedule


def masks() -> Mask:
    """Every constructor, converter, view and fact."""
    made = [
        Mask(torch.ones(2, 3, dtype=torch.bool)),
        Mask.from_lengths([2, 4, 3], max_len=5, side="left"),
        Mask.from_lengths(torch.tensor([2, 4])),
        Mask.from_indices([2, 5, 7], size=10),
        Mask.from_indices([[0, 1]], size=(2, 3)),
        Mask.from_indices([[0, 2], [1]], size=3),
        Mask.from_indices(torch.ones(2, 3).nonzero(as_tuple=True), size=(2, 3)),
        Mask.random((2, 3), 0.5, generator=torch.Generator()),
        Mask.from_values(torch.arange(4), [0, 3]),
        Mask.from_values(torch.arange(4), 2),
        Mask.from_segments(torch.tensor([0, 0, 1, -1])),
        Mask.from_function(lambda q, k: k <= q, (4, 4)),
        Mask.causal(4),
        Mask.window(6, left=2, right=1),
        Mask.full((2, 3)),
        Mask.none((2, 3)),
        Mask.from_key_padding(torch.zeros(2, 3, dtype=torch.bool)),
        Mask.from_attention_mask(torch.ones(2, 3)),
        Mask.from_additive(torch.zeros(2, 3)),
        Mask.from_cu_seqlens(torch.tensor([0, 2, 5])),
        Mask.from_numpy(np.array([True, False])),
    ]
    mask = made[1]
    assert_type(mask, Mask)
    assert_type(mask.to_bool(), Tensor)
    assert_type(mask.to_key_padding(), Tensor)
    assert_type(mask.to_attention_mask(torch.int64), Tensor)
    assert_type(mask.to_additive(torch.float32), Tensor)
    assert_type(mask.to_cu_seqlens(), tuple[Tensor, int])
    array: np.ndarray[Any, Any] = mask.to_numpy()
    hidden = mask.to_masked_array(array)
    blocks = Mask.from_block_mask(Mask.causal(128).to_block_mask())
    other = torch.ones(3, 5, dtype=torch.bool)
    combined = (mask & other) | (other & mask) ^ ~mask - other
    assert_type(combined, Mask)
    assert_type(mask[..., None], Mask)
    assert_type(mask[0], Mask)
    views = (
        mask.unsqueeze(0).squeeze(0).expand(2, 3, 5).expand_as(torch.ones(2, 3, 5)),
        mask.permute(1, 0).transpose(0, 1).movedim(0, 1).reshape(15).view(3, 5).flatten(),
        mask.T.mT.to("cpu").cpu().clone().contiguous(),
        Mask.cat([mask, mask], dim=0),
        Mask.stack([mask, mask]),
        mask.logical_not(),
    )
    assert_type(mask.count(), int)
    assert_type(mask.count(-1), Tensor)
    assert_type(mask.count(dim=0, keepdim=True), Tensor)
    assert_type(mask.density, float)
    assert_type(mask.lengths, Tensor)
    assert_type(mask.cu_seqlens, Tensor)
    assert_type(mask.indices(), Tensor)
    assert_type(mask.equal(mask), bool)
    assert_type(mask.equals(mask), bool)
    assert_type(mask == mask.clone(), Mask)
    assert_type(mask != other, Mask)
    assert_type(mask.sum(), Tensor)
    assert_type(mask.any(-1), Tensor)
    assert_type(mask.all(dim=(0, 1), keepdim=True), Tensor)
    assert_type(mask.float(), Tensor)
    assert mask.tolist() == mask.to_bool().tolist()
    assert_type(mask.shape, torch.Size)
    assert_type(mask.size(), torch.Size)
    assert_type(mask.size(0), int)
    assert_type(mask.device, torch.device)
    assert_type(mask.dtype, torch.dtype)
    facts = (
        mask.ndim,
        mask.dim(),
        mask.numel(),
        mask.is_full,
        mask.is_empty,
        mask.is_prefix,
        mask.facts.count,
        mask.operand,
    )
    print(len(views), facts, hidden.sum(), blocks.density, [row.count() for row in mask])
    return mask


def functions(x: Tensor, mask: Mask) -> None:
    """Every function."""
    for result in (
        mw.sum(x, mask, dim=-1, keepdim=True, dtype=torch.float64, empty=0.0),
        mw.prod(x, mask),
        mw.mean(x, mask.to_bool(), (0, 1)),
        mw.var(x, mask, dim=0, correction=0),
        mw.std(x, mask),
        mw.norm(x, mask, 2, dim=-1),
        mw.amax(x, mask),
        mw.amin(x, mask, dim=-1),
        mw.argmax(x, mask),
        mw.argmin(x, mask, dim=-1),
        mw.logsumexp(x, mask, dim=-1),
        mw.any(x > 0, mask),
        mw.all(x > 0, mask, dim=-1),
        mw.quantile(x, mask, 0.5, dim=-1),
        mw.argsort(x, mask),
        mw.softmax(x, mask, dim=-1),
        mw.log_softmax(x, mask, dim=-1),
        mw.softmin(x, mask, dim=-1),
        mw.normalize(x, mask, dim=-1),
        mw.standardize(x, mask),
        mw.cumsum(x, mask, dim=-1),
        mw.cumprod(x, mask, dim=-1),
        mw.logcumsumexp(x, mask, dim=-1),
        mw.fill(x, mask, -1.0),
        mw.where(mask, x, 0.0),
        mw.where(mask.to_bool(), 1, x),
        mw.mul(x, mask),
        mw.max(x, mask),
        mw.max(x, mask, dim=-1).values,
        mw.min(x, mask, -1, True).indices,
        mw.loss(F.mse_loss, x, torch.zeros_like(x), mask, reduction="sequence"),
        mw.linear(x, torch.randn(3, x.shape[-1]), torch.ones(3, x.shape[-1], dtype=torch.bool)),
        mw.linear_cross_entropy(x, torch.randn(3, x.shape[-1]), torch.zeros(len(x)).long(), None, softcap=30.0),
    ):
        assert_type(result, Tensor)
    middle = mw.median(x, mask)
    values, indices = mw.sort(x, mask, descending=True)
    best = mw.topk(x, mask, 2)
    running, positions = mw.cummax(x, mask, dim=-1)
    lowest = mw.cummin(x, mask, dim=-1)
    for tensor in (middle, values, indices, best.values, best.indices, running, positions, lowest.values):
        assert_type(tensor, Tensor)
    assert_type(mw.count(mask, dim=-1), Tensor)


def selection(x: Tensor, mask: Mask) -> None:
    """What computes only what is kept."""
    done = mw.apply(torch.exp, x, mask=mask, other=x)
    mw.apply_(torch.neg, x.clone(), mask=mask)
    packed = mw.pack(x, mask)
    assert_type(packed, Packed)
    assert_type(packed.values, Tensor)
    assert_type(packed.unpack(fill=-1.0), Tensor)
    assert_type((2 * packed + packed - 1) / 2, Packed)
    assert_type(packed.map(torch.exp), Packed)
    assert_type(packed.lengths, Tensor)
    assert_type(packed.cu_seqlens, Tensor)
    assert_type(packed.sequence_ids, Tensor)
    assert_type(packed.position_ids, Tensor)
    reduced = (
        packed.sum(),
        packed.mean(),
        packed.amax(),
        packed.amin(),
        packed.logsumexp(),
        packed.first(),
        packed.last(),
    )
    assert_type(packed.softmax(), Packed)
    assert_type(Packed.from_list([x[0], x[1, :2]]), Packed)
    assert_type(Packed.from_sparse(packed.to_sparse_coo()), Packed)
    assert_type(Packed.from_nested(packed.to_nested()), Packed)
    sequence = mw.pack(x[..., None], mask).to_packed_sequence()
    assert_type(Packed.from_packed_sequence(sequence), Packed)
    q = torch.randn(3, 2, 5, 4)
    assert_type(mw.attention(q, q, q, mask, is_causal=True), Tensor)
    assert_type(mw.attention(q, q, q, mask, query_mask=mask), Tensor)
    assert_type(mw.attention(q, q, q, mask, bias=torch.zeros(2, 5, 5)), Tensor)
    alibi, table = mw.AlibiBias(torch.ones(2)), mw.RelativeBias(torch.ones(8, 2))
    assert_type(mw.attention(q, q, q, mask, bias=alibi, softcap=30.0, sinks=torch.zeros(2)), Tensor)
    assert_type(table.to_tensor(5, 5), Tensor)
    assert_type(mw.attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.bool)), Tensor)
    rows = mw.pack(q.transpose(1, 2), mask)
    assert_type(mw.attention(rows, rows, rows), Packed)
    sampler = mw.TokenBudgetSampler([3, 6, 4], budget=9, method="bucket")
    sampler.set_epoch(1)
    batches: list[list[int]] = list(sampler)
    waste: data.Waste = sampler.waste
    again: data.TokenBudgetSampler = sampler
    with mw.accumulate([mask, mask], group=None, average="ranks") as window:
        part = mw.loss(F.mse_loss, x, x, mask, denominator=window)
        assert_type(part + window.scale(x.sum(), kind="token") + window.scale(x.sum(), kind=8), Tensor)
    total: mw.distributed.Result = window.result()
    opened: mw.distributed.Window = window
    assert_type(opened.count("sequence") + total.count + total.sum + total.mean + opened.value(), Tensor)
    assert_type(mw.loss(F.mse_loss, x, x, mask, "sequence", denominator=torch.tensor(3)), Tensor)
    for each, micro_batches in mw.distributed.Windows([x, x], 2, lambda batch: batch > 0):
        assert_type(micro_batches, list[Tensor])
        print(each.factor, each.micro_batches)
    print(mw.distributed.Windows([x], 1, len).sampler)
    compute = mw.distributed.trainer_loss(F.cross_entropy, shift=True)
    assert_type(compute({"logits": torch.zeros(1, 2, 4)}, torch.tensor([[1, 2]]), torch.tensor(1)), Tensor)
    print(Windowed().micro_step(x, window) if opened is not window else Windowed().training_step.__name__)
    print(done.shape, len(reduced), batches, waste.padding, waste.unused, len(again))


class Windowed(mw.distributed.LightningMixin):
    """A module for Lightning, without Lightning."""

    max_norm = 1.0

    def micro_step(self, batch: Tensor, window: mw.distributed.Window) -> Tensor:
        """The sum of squares."""
        return window.scale(batch.square().sum())


class Positive(gates.Gate):
    """A gate of one's own."""

    def bits(self, weight: Tensor) -> Tensor:
        """Keep what is positive."""
        return weight > 0


class Largest(gates.Selecting):
    """A gate of one's own that chooses, and holds what it chose."""

    def choose(self, weight: Tensor) -> Tensor:
        """Keep what is above the mean."""
        return weight > weight.mean()


def own_gates() -> None:
    """What gates are made of, for those who write their own."""
    x = torch.randn(4, 8)
    learned: tuple[gates.Sigmoid | gates.HardConcrete, ...] = (gates.Sigmoid(), gates.HardConcrete())
    for soft in learned:
        weight = nn.Linear(8, 4).weight
        soft.bind(weight)
        assert_type(soft.penalty(), Tensor)
        assert_type(soft.opening(weight), Tensor)
        assert_type(soft.random, bool)
    assert_type(Positive().bits(x), Tensor)
    assert_type(Positive().held, Tensor | None)
    assert_type(Positive().right_inverse(x), Tensor)
    largest = Largest()
    largest.select(x)
    largest.hold(x > 0)


def across_ranks(mask: Mask) -> nn.Module:
    """What has statistics, batches or a topology of all ranks."""
    places = torch.ones(3, 5, 5, dtype=torch.bool)
    mw.nn.SyncMaskedBatchNorm1d(8)(torch.randn(3, 8, 5), mask)
    mw.nn.SyncMaskedBatchNorm2d(2, group=None)(torch.randn(3, 2, 5, 5), places)
    mw.nn.SyncMaskedBatchNorm3d(2)(torch.randn(3, 2, 1, 5, 5), places[:, None])
    sampler = mw.TokenBudgetSampler([3, 6, 4], budget=9, num_replicas=2, rank=1)
    sampler.load_state_dict(sampler.state_dict(batches=1))
    assert_type(sampler.waste.imbalance, float)
    assert_type(data.context_shares([8, 4], 2), list[Tensor])
    return mw.nn.convert_sync_masked(nn.Sequential(mw.nn.MaskedBatchNorm1d(8)), group=None)


def regions() -> None:
    """Convolutions of regions."""
    image, kernel, kept = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3), torch.ones(8, 8, dtype=torch.bool)
    assert_type(mw.conv2d(image, kernel, None, (1, 2), "valid", mask=kept, outputs=None, other=0.0), Tensor)
    assert_type(mw.conv_transpose2d(image, kernel, stride=2, output_padding=1, mask=kept), Tensor)
    assert_type(mw.conv1d(image[0, :, :4], kernel[..., 0], padding="same", mask=kept[0], other=image[0, :, :4]), Tensor)
    assert_type(mw.conv_transpose1d(image[0, :, :4], kernel[..., 0], dilation=[1], mask=kept[0]), Tensor)
    region = mw.nn.RegionConv2d(2, 3, 3, padding=1)
    assert_type(region.outputs(torch.ones(5, 5, dtype=torch.bool)), Mask)
    region(torch.randn(1, 2, 5, 5), torch.ones(5, 5, dtype=torch.bool), other=0.0)
    mw.nn.RegionConv1d(2, 3, 3)(torch.randn(1, 2, 5), outputs=torch.ones(3, dtype=torch.bool))
    pools = (mw.nn.RegionMaxPool2d(2), mw.nn.RegionAvgPool2d(2, stride=1))
    for pool in pools:
        pool(image, kept, outputs=None)
        assert_type(pool.outputs(kept), Mask)
    network = mw.nn.Regions(nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU()))
    network(image, kept)
    assert_type(network.outputs(kept, channels=4), Mask)
    incremental = mw.nn.Incremental(nn.Conv2d(4, 2, 3).eval())
    incremental(image)
    incremental.update(image, kept)
    incremental.update((image,), ((slice(0, 2), slice(3, None)),))
    assert_type(incremental.report.share, float)
    incremental.reset()


def layers(mask: Mask) -> nn.Module:
    """Every layer and every gate."""
    x = torch.randn(3, 5, 8)
    channels_first = x.transpose(1, 2).contiguous()
    for norm in (mw.nn.MaskedBatchNorm1d(8), mw.nn.MaskedInstanceNorm1d(8), mw.nn.MaskedGroupNorm(2, 8)):
        norm(channels_first, mask)
    mw.nn.MaskedBatchNorm2d(2)(torch.randn(3, 2, 5, 5), torch.ones(3, 5, 5, dtype=torch.bool))
    mw.nn.MaskedBatchNorm3d(2)(torch.randn(3, 2, 1, 5, 5), torch.ones(3, 1, 5, 5, dtype=torch.bool))
    mw.nn.MaskedLayerNorm(8)(x, mask)
    assert_type(mw.nn.masked(nn.Sequential(nn.BatchNorm1d(8), nn.Tanh()), pointwise=nn.Tanh), nn.Sequential)
    for pool in (mw.nn.MaskedMeanPool(), mw.nn.MaskedMaxPool(empty=0.0), mw.nn.MaskedAttentionPool(8, num_heads=2)):
        pool(x, mask)
    for gate in (
        gates.Binary(torch.ones(4, 8, dtype=torch.bool)),
        gates.Threshold(0.1, by="magnitude"),
        gates.TopK(0.5),
        gates.NM(2, 4),
        gates.Block((4, 1), 0.5),
        gates.Sigmoid(),
        gates.HardConcrete(),
    ):
        gated: gates.Gate = gate
        layer = mw.nn.attach(nn.Linear(8, 4), gated)
        assert_type(layer, nn.Linear)
        assert_type(gated.mask(layer.weight), Mask)
        assert_type(mw.nn.detach(layer, keep="masked"), nn.Linear)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    pruned = mw.nn.prune(model, lambda: gates.TopK(0.5, scope="global"), exclude="2")
    mw.nn.prune(nn.Linear(8, 4), 0.9)
    mw.nn.prune(nn.Linear(8, 4), gates.TopK(0.1))
    mw.nn.attach(nn.Linear(8, 4), torch.ones(4, 8, dtype=torch.bool))
    scheduler = schedule.DensityScheduler(model, schedule.cubic(end=0.25, steps=4))
    scheduler.step()
    scheduler.load_state_dict(scheduler.state_dict())
    curves: list[schedule.Schedule] = [schedule.linear(end=0.1, steps=4), schedule.constant(0.5)]
    mw.nn.reselect(model, density=0.5)
    report = mw.nn.report(model)
    sparse = mw.nn.SparseLinear.from_linear(nn.Linear(8, 4), torch.ones(4, 8, dtype=torch.bool))
    assert_type(sparse, mw.nn.SparseLinear)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    for rewire in (mw.nn.RigL(sparse, optimizer, every=2, until=10), mw.nn.SET(sparse, optimizer, every=2, until=10)):
        optimizer.zero_grad()
        sparse(torch.randn(2, 8)).sum().backward()
        rewire.step()
        assert_type(rewire.scores(sparse), Tensor | None)
        if isinstance(rewire, mw.nn.RigL):
            rewire.close()
    sparse.set_mask(torch.ones(4, 8, dtype=torch.bool))
    assert_type(sparse.drop(0.5), int)
    assert_type(sparse.regrow(2, scores=torch.rand(4, 8)), int)
    sparse.reset_parameters()
    assert_type(sparse.to_dense(), Tensor)
    assert_type(sparse.to_linear(), nn.Linear)
    assert_type(sparse.layout.block, tuple[int, int])
    masked = mw.nn.MaskedLinear(8, 4, gate=gates.TopK(0.5))
    assert_type(masked.mask, Mask)
    masked.forget()
    assert_type(masked.to_linear(), nn.Linear)
    images = mw.nn.MaskedConv2d(2, 3, 3, gate=torch.ones(3, 2, 3, 3, dtype=torch.bool))
    images(torch.randn(1, 2, 5, 5))
    images.forget()
    print(report.density, report.to_json()[:1], len(curves), sparse.density, type(pruned).__name__)
    return model


def audits(model: nn.Module) -> None:
    """What a model leaks and wastes."""
    audited = mw.audit(model, torch.randn(4, 8), loss=lambda output, batch: output.square().mean())
    assert_type(audited, mw.models.Audit)
    assert_type(audited.leaks, tuple[mw.models.Leak, ...])
    assert_type(audited.waste, tuple[mw.models.Waste, ...])
    print(audited.ok, audited.wasted, audited.denominator, audited.to_json()[:1])
    better, gained = mw.optimize(model.eval(), torch.randn(4, 8))
    assert_type(gained, mw.models.Optimization)
    print(type(better).__name__, gained.speedup, [step.line for step in gained.steps])
    mw.testing.assert_no_leak(model, torch.randn(4, 5, 8), mask=mw.Mask.from_lengths([5, 2, 3, 1]))
    mw.testing.assert_split_invariant(lambda parts: sum(part.sum() for part in parts), torch.randn(4, 8))
    with mw.FlopCounter() as counter:
        model(torch.randn(4, 8))
    assert_type(counter.dense, int)
    print(audited.tokens_per_second, audited.useful_tokens_per_second, len(list(audited.findings())))
    with tempfile.TemporaryDirectory() as folder:
        print(audited.to_html(f"{folder}/audit.html").name)
    trainer, lightning = mw.models.TrainerAudit(), mw.models.LightningAudit(every=5)
    trainer.on_train_begin(None, None, None, model=model)
    trainer.on_log(None, None, None, logs={})
    trainer.on_train_end(None, None, None)
    lightning.on_train_start(None, model)
    lightning.on_train_batch_end(None, model, None, None, 0)
    lightning.on_train_end(None, model)
    print(trainer.leak, lightning.leak)
    rewrite = mw.models.Rewrite("mw.unpad", "model = mw.unpad(model)", "eval", 2.0, 1.0, 0.0)
    print(rewrite.agrees, rewrite.pays, rewrite.speedup, rewrite.to_dict())
    print(
        [each.rewrite for each in audited.waste],
        [(leak.only_nan, leak.shown_by, leak.summary) for leak in audited.leaks],
    )
    assert_type(audited.denominator, mw.models.Denominator | None)


def models(model: nn.Module) -> None:
    """Whole models."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert_type(mw.unpad(encoder), nn.TransformerEncoderLayer)
    adapted = mw.models.report(encoder)
    assert_type(adapted, mw.models.UnpadReport)
    print(
        adapted.adapted, adapted[""].reason, adapted.to_json(), [each.change for row in adapted for each in row.padded]
    )
    assert_type(mw.models.repad(encoder), nn.TransformerEncoderLayer)
    small, report = mw.compress(model, torch.randn(4, 8))
    assert_type(report, mw.models.CompressionReport)
    assert_type(report.speedup, float)
    print(report.difference, report.after.parameters, [row.name for row in report], report.table().title)
    with tempfile.TemporaryDirectory() as folder:
        mw.models.save_compressed(small, f"{folder}/small.safetensors")
        mw.models.load_compressed(f"{folder}/small.safetensors")
    packing = mw.models.Packing.of(torch.ones(2, 3, dtype=torch.bool))
    attending = mw.models.PackedMask(packing)
    q = torch.randn(packing.tokens, 2, 4)
    print([row.keys for row in packing.rows], packing.columns.shape, packing.is_contiguous, packing.key_rows.shape)
    assert_type(attending.attend(q, q, q), Tensor)
    known = list(mw.models.adapters())

    class Nothing:
        """An adapter that serves nothing."""

        name = "nothing"

        def serves(self, module: nn.Module) -> tuple[bool, str]:
            """Serve no module."""
            return False, ""

        def install(self, module: nn.Module) -> None:
            """Nothing to do."""

        def undo(self, module: nn.Module) -> None:
            """Nothing to undo."""

    adapter: mw.models.Adapter = Nothing()
    mw.models.register(adapter)
    if adapter.serves(small)[0]:
        adapter.install(small)
        adapter.undo(small)
    mw.models.unregister("nothing")
    warned: type[UserWarning] = mw.models.PaddedRunWarning
    raised: tuple[type[MaskwiseError], ...] = (mw.models.CompressionError, mw.models.UnsupportedModelError)
    raised += (mw.models.FoldedLayerError,)
    print(known, type(attending).__name__, warned, raised)


def heads() -> None:
    """The loss heads of models."""
    try:
        assert_type(mw.nn.kept_head(nn.Linear(8, 4)), nn.Linear)
    except errors.ArgumentError as refused:
        print(refused)
    assert_type(mw.nn.full_head(nn.Linear(8, 4)), nn.Linear)


def main() -> None:
    """Touch everything once."""
    x = torch.rand(3, 5)
    mask = masks()
    with mw.explain() as log:
        functions(x, mask)
    with mw.force("dense"):
        plan = mw.plan(mw.softmax, x, mask, dim=-1)
    print(plan.route, plan.reason, plan.microseconds, [refusal.route for refusal in plan.refused])
    print(plan.skips.name, plan.flops)
    try:
        mw.sum(x, torch.ones(7, dtype=torch.bool))
    except errors.ShapeError as error:
        print(error)
    try:
        mw.sum(x, mask, dim=7)
    except (errors.ArgumentError, errors.DtypeError, errors.DeviceError, errors.StaleMaskError):
        raise
    except errors.OutOfRangeError as outside:
        problem: MaskwiseError = outside
        print(problem)
    print(mw.__version__, len(log), log.to_json()[:1], [call.route for call in log][:1], log.table().title)
    selection(x, mask)
    heads()
    own_gates()
    across_ranks(mask)
    regions()
    models(layers(mask))
    audits(layers(mask))


if __name__ == "__main__":
    main()
